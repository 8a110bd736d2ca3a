"""Joins the rooms: a model folder becomes an engine with words, and that an HTTP application."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cache.accounts import Peak
from cache.report import usage
from model.config import ModelConfig
from model.fetch import ALIASES
from model.modes import Heads, Mode, spellings
from model.progress import Progress, Silent
from server import __version__
from server.config import ModelOptions, ServeOptions
from server.engine.build import build_engine
from server.engine.engine import Engine
from server.engine.facts import EngineFacts, VariantFacts
from server.engine.kernels import native_source
from server.engine.request import KVPeak
from server.text.calibration import calibration_source
from server.text.chat import ChatTemplate
from server.text.defaults import SamplingDefaults, sampling_defaults
from server.text.eos import eos_ids
from server.text.grammar_matcher import GrammarSource
from server.text.served import ServedModel, ServedVariant
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.api.state import ModelCard
    from server.engine.service import EngineService
    from server.text.prepare import Preparer


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run: its engine, its words, and what is known about both."""

    name: str
    engine: Engine
    facts: EngineFacts
    served: ServedModel
    tokenizer: Tokenizer
    chat: ChatTemplate
    grammars: GrammarSource
    created: int  # seconds since 1970


def load(
    options: ModelOptions,
    folder: Path,
    meanwhile: Callable[[], object] | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load the model in `folder`. Raises ModelError or ConfigError, one line each.

    `meanwhile` runs on another thread while the weights are read: imports, mostly. `progress` is told of a
    head map that has to be fitted, and of kernels that have to be compiled.
    """
    shown = progress or Silent()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with ThreadPoolExecutor(1, "words") as pool:
        words = pool.submit(_load_words, folder, meanwhile)
        source = calibration_source(folder, options.cache_dir, shown, lambda: words.result()[0])
        native = native_source(options.cache_dir, shown, options.compiler)
        rows = ModelConfig.from_folder(folder).vocab_size
        grammars = GrammarSource(lambda: words.result()[0], rows)
        engine, facts = build_engine(
            options.engine, folder, calibration=source, matchers=grammars, native=native
        )
        tokenizer, chat = words.result()
    name = options.served_name or model_name(options.model, folder)
    defaults = sampling_defaults(folder) if options.generation_config == "auto" else SamplingDefaults()
    served = _served(name, facts, tokenizer, folder, defaults)
    return Loaded(name, engine, facts, served, tokenizer, chat, grammars, int(time.time()))


def create_app(loaded: Loaded, service: EngineService, preparer: Preparer, options: ServeOptions) -> ASGIApp:
    """The HTTP application over a loaded model and its service."""
    from server.api.application import create_api
    from server.api.state import ApiSettings, ApiState
    from server.metrics import Metrics

    settings = ApiSettings(
        host=options.host,
        allowed_hosts=options.allowed_hosts,
        api_keys=options.api_keys,
        cors_origins=options.cors_origins,
        request_seconds=options.request_timeout,
    )
    return create_api(
        ApiState(
            version=__version__,
            served=loaded.served,
            cards=tuple(_card(loaded, variant) for variant in loaded.facts.variants),
            backend=loaded.facts.attention_backend,
            backend_reason=loaded.facts.attention_reason,
            service=service,
            preparer=preparer,
            tokenizer=loaded.tokenizer,
            kv_usage=lambda variant, peak: kv_usage(loaded, variant, peak),
            metrics=Metrics(),
            settings=settings,
        )
    )


def kv_usage(loaded: Loaded, variant: str, peak: KVPeak) -> Mapping[str, Any]:
    """`usage.kv_cache` of a request of `variant` that held `peak`."""
    facts = loaded.facts
    kv_heads = next(known.kv_heads for known in facts.variants if known.name == variant)
    held = Peak(peak.blocks, peak.exclusive, peak.tokens, peak.cached_tokens)
    return usage(held, facts.layout, kv_heads, facts.q_heads).to_dict()


def model_name(model: str, folder: Path) -> str:
    """What clients call a model: its alias, its hub id, or its folder's name."""
    if model in ALIASES or not Path(model).expanduser().is_dir():
        return model
    return folder.resolve().name


def served_names(name: str, facts: EngineFacts) -> dict[str, str]:
    """Every accepted `model` value and its canonical variant: first those that are listed, the default
    before all, then aliases."""
    heads = Heads(facts.q_heads, facts.kv_heads)
    names = {_listed(name, variant): variant.name for variant in facts.variants}
    for variant in facts.variants:
        for spelling in spellings(Mode(variant.name, variant.kv_heads, variant.lossy), heads):
            names.setdefault(f"{name}@{spelling}", variant.name)
    names.setdefault(name, facts.variants[0].name)
    return names


def _listed(name: str, variant: VariantFacts) -> str:
    return name if variant.name == "native" else f"{name}@{variant.name}"


def _card(loaded: Loaded, variant: VariantFacts) -> ModelCard:
    from server.api.state import ModelCard

    return ModelCard(
        id=_listed(loaded.name, variant),
        variant=variant.name,
        created=loaded.created,
        max_model_len=variant.max_len,
        kv_heads=variant.kv_heads,
        group=variant.group,
        bytes_per_token=variant.bytes_per_token,
        lossy=variant.lossy,
        head_map=variant.head_map,
    )


def _load_words(folder: Path, meanwhile: Callable[[], object] | None) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = Tokenizer.from_folder(folder)
    chat = ChatTemplate.from_folder(folder, tokenizer.special)
    if meanwhile is not None:
        meanwhile()
    return tokenizer, chat


def _served(
    name: str, facts: EngineFacts, tokenizer: Tokenizer, folder: Path, defaults: SamplingDefaults
) -> ServedModel:
    return ServedModel(
        names=served_names(name, facts),
        variants={v.name: ServedVariant(v.name, v.max_len, v.identity) for v in facts.variants},
        vocab_rows=facts.vocab_rows,
        eos_ids=eos_ids(folder, facts.eos_ids, tokenizer, facts.vocab_rows),
        fingerprint=facts.fingerprint,
        kv_dtype=facts.kv_dtype,
        defaults=defaults,
    )
