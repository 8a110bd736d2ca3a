"""A checkpoint folder's tokenizer as one `tokenizers.Tokenizer`, the same that transformers 5.24 would make.

transformers 5 picks a class from `tokenizer_class` and the model's family. The plain class takes
tokenizer.json as it is; `LlamaTokenizer`, `Qwen2Tokenizer` and `GPT2Tokenizer` keep only its vocabulary,
merges and post-processor and bring their own normaliser, pre-tokeniser and decoder. Both are reproduced
here, because a prompt cut differently is a prompt that the reference never saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from model.errors import ModelError
from server.text.files import read_object
from server.text.sentencepiece_backend import SPACE, from_sentencepiece, llama_model, own_tokens
from server.text.sentencepiece_model import read_sentencepiece
from server.text.special_tokens import SpecialTokens, as_special, read_special_tokens

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's published pre-tokenisation pattern."""

_DEFAULT_ROLES: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "qwen2": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "gpt2": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}


@dataclass(frozen=True, slots=True)
class Backend:
    """The library's tokenizer, and the tokens with a role (`bos_token`, ...)."""

    tokenizer: Tokenizer
    special: SpecialTokens


def load_backend(folder: Path) -> Backend:
    """Raises ModelError, one line, if the folder has no tokenizer or one that cannot be read."""
    config = read_object(folder / "tokenizer_config.json")
    kind = _kind(folder, config)
    json_path, model_path = folder / "tokenizer.json", folder / "tokenizer.model"
    if json_path.is_file():
        tokenizer = _from_json(json_path)
        special = read_special_tokens(
            folder, config, _DEFAULT_ROLES[kind], tokenizer.get_added_tokens_decoder()
        )
        # transformers ignores the two flags beside a tokenizer.json: its post-processor decides.
        add_bos = add_eos = False
        rewrite = tokenizer.post_processor is None
        if kind != "plain":
            tokenizer = _rebuilt(tokenizer, kind, config)
    elif model_path.is_file():
        tokenizer, special = _from_model(folder, model_path, kind, config)
        add_bos, add_eos = bool(config.get("add_bos_token")), bool(config.get("add_eos_token"))
        rewrite = True
    else:
        raise ModelError(f"{folder}: no tokenizer.json and no tokenizer.model; the checkpoint is incomplete")
    _add_tokens(tokenizer, special)
    if kind == "qwen2":
        tokenizer.add_tokens([*special.named.values(), *special.extra])
    if rewrite:
        tokenizer.post_processor = _post_processor(tokenizer, special, add_bos, add_eos)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Backend(tokenizer, special)


def _kind(folder: Path, config: Mapping[str, Any]) -> str:
    """Which of transformers' classes AutoTokenizer would take: plain, llama, qwen2 or gpt2."""
    model = read_object(folder / "config.json")
    family = model.get("model_type")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = declared.removesuffix("Fast") if isinstance(declared, str) else None
    if family == "mistral":  # the declared class is not believed
        return "plain"
    if family == "qwen2" or (family == "qwen3" and name is None):
        return "qwen2"
    if name == "LlamaTokenizer":  # Llama 3 files declare it, yet they are byte-level
        return "plain" if _is_byte_level(folder / "tokenizer.json") else "llama"
    return {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt2"}.get(name or "", "plain")


def _is_byte_level(path: Path) -> bool:
    return path.is_file() and b'"ByteLevel"' in path.read_bytes()


def _from_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a tokenizer ({error}); fetch the file again") from None


def _from_model(
    folder: Path, path: Path, kind: str, config: Mapping[str, Any]
) -> tuple[Tokenizer, SpecialTokens]:
    """The tokenizer of a folder that has only sentencepiece's file."""
    model = read_sentencepiece(path)
    if kind == "llama":
        special = read_special_tokens(folder, config, _DEFAULT_ROLES[kind], {}, own_tokens(model))
        return _rebuilt(Tokenizer(llama_model(model)), kind, config), special
    roles = (("bos_token", model.bos_id), ("eos_token", model.eos_id), ("unk_token", model.unk_id))
    defaults = {role: piece for role, index in roles if (piece := model.piece(index)) is not None}
    # What the user defined is not added here: the pipeline keeps those pieces whole.
    control = tuple(token for token in own_tokens(model) if token.special)
    special = read_special_tokens(folder, config, defaults, {}, control)
    tokenizer, by_id = from_sentencepiece(model, dict(special.by_id), bool(config.get("legacy", True)))
    return tokenizer, replace(special, by_id=by_id)


def _rebuilt(loaded: Tokenizer, kind: str, config: Mapping[str, Any]) -> Tokenizer:
    """The same vocabulary, merges and post-processor in the class's own pipeline."""
    model = loaded.model
    if not isinstance(model, BPE):
        return loaded
    model.unk_token, model.dropout, model.ignore_merges = None, None, False
    model.fuse_unk = model.byte_fallback = kind == "llama"
    tokenizer = Tokenizer(model)
    if loaded.post_processor is not None:
        tokenizer.post_processor = loaded.post_processor
    prefix = config.get("add_prefix_space")
    if kind == "llama":
        _llama_pipeline(tokenizer, prefix is None or bool(prefix), bool(config.get("legacy", False)))
        return tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
        return tokenizer
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def _llama_pipeline(tokenizer: Tokenizer, prefix_space: bool, legacy: bool) -> None:
    """Spaces become ▁, one is put in front (legacy: in front of every piece between added tokens)."""
    scheme = ("always" if legacy else "first") if prefix_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, special: SpecialTokens) -> None:
    """Declared tokens that the tokenizer lacks, in the order of their ids, then roles, then extras."""
    present = tokenizer.get_added_tokens_decoder().values()
    same = {repr(token) for token in present}
    new = [token for _, token in sorted(special.by_id.items()) if repr(token) not in same]
    texts = {token.content for token in (*present, *new)}
    for token in (*special.named.values(), *special.extra):
        if token.content not in texts:
            texts.add(token.content)
            new.append(token)
    roles = {token.content for token in special.named.values()}
    tokenizer.add_tokens([as_special(token) if token.content in roles else token for token in new])


def _post_processor(tokenizer: Tokenizer, special: SpecialTokens, add_bos: bool, add_eos: bool) -> Any:
    """`<s> text </s>`, each mark only if asked for and if the checkpoint has such a token."""
    before, after, marks = "", "", []
    for wanted, role in ((add_bos, "bos_token"), (add_eos, "eos_token")):
        if not wanted or role not in special.named:
            continue
        text = special.named[role].content
        marks.append((text, tokenizer.token_to_id(text)))
        if role == "bos_token":
            before = f"{text}:0 "
        else:
            after = f" {text}:0"
    return processors.TemplateProcessing(single=f"{before}$A:0{after}", special_tokens=marks)
