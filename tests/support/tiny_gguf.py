"""A GGUF file of the default model's make, small enough to write in a moment."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2


def tokens_of_bytes() -> list[str]:
    """Three special tokens, then one token for each byte, spelled as GPT-2 does, then two merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(rest))]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġa", "ab"]


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str | None = None
) -> Path:
    """A tiny GGUF of SmolLM2's make: Q8_0 matrices, F32 norms, a byte-level vocabulary, tied."""
    vocabulary = tokens_of_bytes()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (len(vocabulary), HIDDEN), "output_norm": (HIDDEN,)}
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        shapes |= {at + name: (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {at + name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {at + name: (kv, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {
            at + "ffn_gate": (INNER, HIDDEN),
            at + "ffn_up": (INNER, HIDDEN),
            at + "ffn_down": (HIDDEN, INNER),
        }
    if extra is not None:
        shapes[extra] = (HIDDEN,)
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
