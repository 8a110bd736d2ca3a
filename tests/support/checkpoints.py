"""Tiny checkpoints with the right file format: built in a second, saved by transformers, loaded by us.

Three fixtures have names, after the case collection that uses them:

* **RAND**: every output depends on the whole prompt, and no two best logits are close: ids must match.
* **CHAIN**: the greedy next token depends on the last token alone, so a test can script the output.
* **SP** (`add_sentencepiece`): a sentencepiece tokenizer with byte fallback that leaves white space alone, as
  Llama's does.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.vocabularies import BPE_VOCAB, SP_VOCAB, add_byte_bpe, add_sentencepiece

__all__ = [
    "BPE_VOCAB",
    "ROPE_KINDS",
    "SMOL_VOCAB",
    "SP_VOCAB",
    "add_byte_bpe",
    "add_sentencepiece",
    "add_tokenizer",
    "edit_config",
    "make_chain",
    "make_checkpoint",
    "make_rand",
    "read_config",
]

EOS, BOS = 2, 1
SMOL_VOCAB = 49152

# Parameters for each RoPE kind; small original contexts, so that 500 positions use the scaled part.
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
}


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    heads: int = 4,
    kv_heads: int | None = 2,
    head_dim: int | None = None,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 128,
    rope: str | Mapping[str, Any] | None = None,
    window: int | None = None,
    shards: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    std: float = 0.2,
    old_rope_keys: bool = False,
    **config: Any,
) -> Path:
    """Write a random checkpoint of `family` (llama, mistral, qwen2, qwen3) to `folder` and return it.

    `kv_heads` None is MHA, spelled null where the family allows it. `rope` is a name of ROPE_KINDS or the
    parameters themselves; `old_rope_keys` writes them as `rope_theta` / `rope_scaling`, as checkpoints before
    transformers 5 do. `window` switches sliding windows on (tokens). `shards` splits the tensors over several
    files with an index. `config` goes to the transformers config as it is. Norms and biases are random too,
    so that a loader that drops one is caught. Weights are N(0, std), the same for the same seed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    if head_dim is not None:
        settings["head_dim"] = head_dim
    elif family == "qwen3":
        settings["head_dim"] = hidden // heads  # its default is a fixed 128
    settings |= _window_settings(family, window)
    if rope is not None:
        settings["rope_parameters"] = dict(ROPE_KINDS[rope] if isinstance(rope, str) else rope)
    settings |= config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    _randomise(model, seed, std)
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    model.to(dtype).save_pretrained(folder, max_shard_size=max(size // 3, 1024) if shards else "50GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if kv_heads is None and family != "mistral":
        edit_config(folder, {"num_key_value_heads": None})  # transformers would spell it out
    if old_rope_keys:
        _write_old_rope_keys(folder)
    return folder


def _window_settings(family: str, window: int | None) -> dict[str, Any]:
    if family == "mistral":
        return {"sliding_window": window}
    if family in ("qwen2", "qwen3") and window is not None:
        return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    if window is not None:
        raise ValueError(f"{family} has no sliding window")
    return {}


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(1 + noise / 2 if name.endswith("norm.weight") else noise)


def _write_old_rope_keys(folder: Path) -> None:
    """Spell the RoPE of `config.json` as transformers 4 did: `rope_theta` and `rope_scaling`."""
    config = read_config(folder)
    rope = dict(config.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    scaling = None if rope.get("rope_type") == "default" else rope
    edit_config(folder, {"rope_theta": theta, "rope_scaling": scaling}, drop=("rope_parameters",))


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    loaded = json.loads((folder / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def edit_config(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    name: str = "config.json",
) -> None:
    """Change and drop top-level keys of a JSON file of the checkpoint, which need not exist yet."""
    config = read_config(folder, name) if (folder / name).exists() else {}
    config.update(changes or {})
    for key in drop:
        config.pop(key, None)
    (folder / name).write_text(json.dumps(config, indent=2), encoding="utf-8")


def make_rand(folder: Path, vocab: int = SMOL_VOCAB, **config: Any) -> Path:
    """RAND: Llama, 2 layers, hidden 64, 4 heads, 2 KV heads, 256 positions, weights N(0, 0.3), norms 1."""
    make_checkpoint(folder, vocab=vocab, std=0.3, **({"max_position_embeddings": 256} | config))
    _edit_tensors(folder, lambda name, t: torch.ones_like(t) if name.endswith("norm.weight") else t)
    return folder


def make_chain(
    folder: Path,
    *scripts: Sequence[int],
    vocab: int = SMOL_VOCAB,
    eos: int | Sequence[int] = EOS,
    max_position: int = 8192,
    seed: int = 0,
) -> Path:
    """CHAIN: greedy decoding follows `scripts`: after token `s[i]` comes `s[i + 1]`, whatever came before.

    The layer adds nothing to the residual stream (o_proj and down_proj are zero), embeddings are random
    +-1, and lm_head row `b` is the sum of the embeddings of the tokens that `b` follows. The margin is
    over 100 nats. A token may be followed by one token only (two followers: ValueError); a loop is
    written by naming a token twice: [5, 6, 5] never ends.
    """
    follows: dict[int, int] = {}
    for script in scripts:
        for before, after in itertools.pairwise(script):
            if follows.setdefault(before, after) != after:
                raise ValueError(f"CHAIN: token {before} is followed by both {follows[before]} and {after}")
    eos_id = list(eos) if isinstance(eos, Sequence) else eos
    make_checkpoint(
        folder, heads=4, kv_heads=2, layers=1, hidden=128, vocab=vocab, seed=seed,
        eos_token_id=eos_id, max_position_embeddings=max_position,
    )  # fmt: skip
    signs = torch.randint(0, 2, (vocab, 128), generator=torch.Generator().manual_seed(seed))
    embed = signs.to(torch.float32) * 2 - 1
    head = torch.zeros(vocab, 128)
    for before, after in follows.items():
        head[after] += embed[before]

    def scripted(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "model.embed_tokens.weight":
            return embed
        if name == "lm_head.weight":
            return head
        if name.endswith("norm.weight"):
            return torch.ones_like(tensor)
        return torch.zeros_like(tensor) if "o_proj" in name or "down_proj" in name else tensor

    _edit_tensors(folder, scripted)
    return folder


def _edit_tensors(folder: Path, edit: Any) -> None:
    """Rewrite `model.safetensors` with `edit(name, tensor)` in place of each tensor."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {name: edit(name, tensor).clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def add_tokenizer(folder: Path, source: Path) -> Path:
    """Copy the tokenizer files and chat template of `source` (say the default model) into `folder`."""
    for pattern in ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        for path in source.glob(pattern):
            shutil.copy(path, folder / path.name)
    return folder
