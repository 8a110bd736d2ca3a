"""A checkpoint so small that thousands of requests take minutes: random weights, a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loadtest.prompts import FILLER

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 64, 4, 2, 16, 128
VOCAB = 384
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; the last ends an answer
SPREAD = 0.3  # of the weights: wide enough that every answer depends on its whole prompt

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(folder: Path, context: int = 512) -> Path:
    """Write a Llama of 2 layers, 4 query and 2 KV heads to `folder`, always the same; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def _weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator(device="cpu").manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=draw, device="cpu", dtype=torch.float32) * SPREAD

    def norm() -> torch.Tensor:
        return torch.ones((HIDDEN,), device="cpu", dtype=torch.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        tensors |= {
            f"{place}.input_layernorm.weight": norm(),
            f"{place}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{place}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{place}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{place}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{place}.post_attention_layernorm.weight": norm(),
            f"{place}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{place}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{place}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return tensors | {"model.norm.weight": norm()}


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(FILLER, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
