"""What a checkpoint's `config.json` says, checked, with every default resolved.

Defaults are those of Hugging Face transformers for the same family, so that a folder means here
what it means there; an unsupported or contradictory value is a ModelError, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model.errors import ModelError
from model.fields import Fields
from model.rope import RopeConfig

_MOST_LAYERS = 65_536  # a window is kept for each
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Family:
    """How one `model_type` differs from the others; "config" means that a key of the file decides."""

    max_position: int
    qkv_bias: Literal["config"] | bool = False
    o_bias: Literal["config"] | bool = False
    mlp_bias: Literal["config"] | bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # where the file has no such key; None = hidden_size / heads
    windows: Literal["none", "all", "switched"] = "none"
    bos: int | None = None
    eos: int | None = None


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(max_position=2048, qkv_bias="config", o_bias="config", mlp_bias="config", bos=1, eos=2),
    "mistral": _Family(max_position=131_072, windows="all", bos=1, eos=2),
    "qwen2": _Family(max_position=32_768, qkv_bias=True, windows="switched"),
    "qwen3": _Family(
        max_position=32_768,
        qkv_bias="config",
        o_bias="config",
        qk_norm=True,
        head_dim=128,
        windows="switched",
    ),
}
SUPPORTED = "llama (Llama 2, Llama 3.x, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5), qwen3"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of a decoder; `windows[l]` is layer l's sliding window in tokens, None = all."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    torch_dtype: torch.dtype | None

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """The config of a checkpoint folder. Raises ModelError if it cannot be read or served."""
        return ModelConfig.from_dict(read_json_object(folder / "config.json"), str(folder / "config.json"))

    @staticmethod
    def from_dict(values: Mapping[str, object], where: str = "config.json") -> ModelConfig:
        """The config of a parsed `config.json`; `where` begins every error message."""
        fields = Fields(values, where)
        family = _family(fields)
        _refuse_unsupported(fields)
        traits = FAMILIES[family]
        hidden, layers = (
            fields.integer("hidden_size"),
            fields.integer("num_hidden_layers", maximum=_MOST_LAYERS),
        )
        heads = fields.integer("num_attention_heads")
        vocab = fields.integer("vocab_size")
        max_position = fields.integer("max_position_embeddings", traits.max_position)
        return ModelConfig(
            family=family,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(fields, heads),
            head_dim=_head_dim(fields, traits, hidden, heads),
            vocab_size=vocab,
            max_position_embeddings=max_position,
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_config(values, max_position, where),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=_bias(fields, "attention_bias", traits.qkv_bias),
            o_bias=_bias(fields, "attention_bias", traits.o_bias),
            mlp_bias=_bias(fields, "mlp_bias", traits.mlp_bias),
            qk_norm=traits.qk_norm,
            windows=_windows(fields, traits, layers),
            eos_token_ids=_eos(fields, traits, vocab),
            bos_token_id=_bos(fields, traits),
            torch_dtype=_dtype(fields),
        )


def read_json_object(path: Path) -> Mapping[str, object]:
    """A JSON file that holds an object. Raises ModelError with the path and what is wrong."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a checkpoint folder needs a {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds a JSON {type(values).__name__}, not an object")
    return values


def _family(fields: Fields) -> str:
    family = fields.raw("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        named = "model_type is missing" if family is None else f"model_type {family!r} is not supported"
        raise fields.fail(f"{named}; supported are {SUPPORTED}")
    return family


def _refuse_unsupported(fields: Fields) -> None:
    """What would change the arithmetic and is not built here."""
    quantization = fields.raw("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        named = f" ({method})" if method else ""
        raise fields.fail(
            f"quantization_config{named} is not supported; supported are unquantised float32, bfloat16 and "
            f"float16 weights of the families {SUPPORTED}"
        )
    if fields.raw("per_layer_config"):
        raise fields.fail("per_layer_config is not supported; every layer must have the same shape")
    activation = fields.raw("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise fields.fail(f"hidden_act is {activation!r}; supported is silu")


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail(
            f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads}), "
            "so that every KV head is read by the same number of query heads"
        )
    return kv_heads


def _head_dim(fields: Fields, traits: _Family, hidden: int, heads: int) -> int:
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None and not fields.has("head_dim"):
        head_dim = traits.head_dim
    if head_dim is None:
        if hidden % heads:
            raise fields.fail(
                f"head_dim is not given, and hidden_size ({hidden}) is not a multiple of "
                f"num_attention_heads ({heads})"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.fail(f"head_dim is {head_dim}; RoPE turns pairs, so it must be even")
    return head_dim


def _bias(fields: Fields, key: str, trait: Literal["config"] | bool) -> bool:
    return fields.flag(key, False) if trait == "config" else trait


def _windows(fields: Fields, traits: _Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's window: Mistral's is on unless `layer_types` chooses, Qwen's has to be switched on."""
    if traits.windows == "none":
        return (None,) * layers
    window = fields.optional_integer("sliding_window")
    if window is None and not fields.has("sliding_window"):
        window = 4096
    if traits.windows == "switched" and not fields.flag("use_sliding_window", False):
        window = None
    kinds = fields.raw("layer_types")
    if kinds is None:
        if traits.windows == "all":
            return (window,) * layers
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise fields.fail(f"layer_types is {kinds!r}; supported in it are {', '.join(known)}")
    if len(kinds) != layers:
        raise fields.fail(f"layer_types is {len(kinds)} long; it must be num_hidden_layers ({layers})")
    if window is None and "sliding_attention" in kinds:
        raise fields.fail("layer_types asks for sliding_attention, but no sliding window is switched on")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos(fields: Fields, traits: _Family, vocab: int) -> frozenset[int]:
    """End-of-sequence ids; ids that no logit can name (some files say -1) are dropped."""
    value = fields.raw("eos_token_id") if fields.has("eos_token_id") else traits.eos
    ids: list[int] = []
    for token in value if isinstance(value, list) else () if value is None else (value,):
        if isinstance(token, bool) or not isinstance(token, int):
            raise fields.fail(f"eos_token_id is {value!r}; it must be a token id or a list of them")
        ids.append(token)
    return frozenset(token for token in ids if 0 <= token < vocab)


def _bos(fields: Fields, traits: _Family) -> int | None:
    value = fields.raw("bos_token_id") if fields.has("bos_token_id") else traits.bos
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise fields.fail(f"bos_token_id is {value!r}; it must be a token id")
    return value


def _dtype(fields: Fields) -> torch.dtype | None:
    """The dtype the file recommends: `dtype` (transformers 5) before `torch_dtype`."""
    key = "torch_dtype" if fields.raw("dtype") is None else "dtype"
    value = fields.raw(key)
    if value is None:
        return None
    dtype = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if dtype is None:
        raise fields.fail(f"{key} is {value!r}; supported are {', '.join(_DTYPES)}")
    return dtype
