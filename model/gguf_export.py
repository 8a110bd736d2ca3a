"""A GGUF file of the llama architecture, written again as an ordinary Hugging Face folder in bf16.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The de-quantised values are what any GGUF
reader gets; rounding to bf16 is the only loss added here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file

from model.errors import ModelError
from model.gguf_tokenizer import write_tokenizer
from model.progress import Progress

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def export_gguf(
    gguf: Path, folder: Path, progress: Progress, sampling: Mapping[str, float] | None = None
) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16), the tokenizer, the chat template.

    `folder` exists and is empty; `sampling` goes into generation_config.json. Raises ModelError for another
    architecture or a tensor without a known name.
    """
    reader = GGUFReader(gguf)
    architecture = _get(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"{gguf.name}: architecture {architecture} cannot be converted, only llama")
    config = _config(reader)
    write_tokenizer(lambda key: _get(reader, key), config["max_position_embeddings"], folder)
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if sampling:
        generation |= {"do_sample": True, **sampling}
    _write_json(folder / "generation_config.json", generation)

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: dict[str, torch.Tensor] = {}
    progress.start("converting to bf16 safetensors", len(reader.tensors))
    for done, source in enumerate(reader.tensors, start=1):
        name, values = _hf_name(source.name), _values(source)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, kv_heads)
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
        progress.update(done)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # safetensors makes its file private; give it the rights that the user's umask gave the others.
    weights.chmod((folder / "config.json").stat().st_mode)


def _config(reader: GGUFReader) -> dict[str, Any]:
    """The `config.json` of a LlamaForCausalLM."""
    hidden = _get(reader, "llama.embedding_length")
    heads = _get(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _get(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _get(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": _get(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _get(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _get(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _get(reader, "llama.block_count"),
        "num_key_value_heads": _get(reader, "llama.attention.head_count_kv"),
        "pad_token_id": _get(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": _decimal(_get(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _decimal(_get(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "vocab_size": _get(reader, "llama.vocab_size"),
    }


def _get(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _decimal(value: float) -> float:
    """The short decimal that a float32 of the file stands for: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelError(f"the GGUF file holds a tensor {name} that has no place in a llama checkpoint")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _values(tensor: ReaderTensor) -> NDArray[np.float32]:
    """De-quantised values: matrices `[out, in]` (GGUF lists the sizes in reverse), norms `[n]`."""
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    # A float32 tensor is a read-only view of the mapped file, which torch does not take: "W" copies that one.
    return np.require(values.reshape(shape), dtype=np.float32, requirements=["C", "W"])


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k from llama.cpp's order to Hugging Face's, head by head.

    llama.cpp rotates neighbours (2i, 2i + 1), Hugging Face halves (i, i + D/2), so llama.cpp's converter
    interleaves the two halves of each head's rows; this takes them apart again.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
