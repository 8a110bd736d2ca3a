"""What a user may turn of an engine. No torch here: `--help` shows these defaults and must be quick."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("none", "int8", "int4")

SPECULATION = ("ngram", "off")

KERNELS = ("auto", "torch")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`auto` and None are resolved by `build_engine`, once.

    `device`: auto, cpu or cuda. `dtype`: auto, bfloat16, float16 or float32 (weights and cache).
    `kv_memory` in bytes, or `kv_fraction` (0, 1] of what is free; at most one of them.
    `block_size`, `max_model_len`, `max_batch_tokens` in tokens. `attention` are the modes to serve, as
    `model.modes` spells them; the first is the default. `head_map` (aligned, aligned-fixed or mean) makes the
    KV heads of modes with fewer than the checkpoint has. `kernels`: auto takes the operators in C++ where
    there are any for this CPU, torch takes PyTorch's own everywhere. `weights` (none, int8 or int4) says how
    the checkpoint's are quantised when they are loaded. `speculate` (ngram or
    off) says where drafts come from. `debug` recounts the cache after every step.

    `max_batch_tokens` None is 256 on a CPU, where a larger step gains little and holds up whoever decodes
    (SmolLM2-135M on 2 cores with AVX-512: a prompt of 2,048 takes 0.72 s, in steps of 0.09 s), and 2048 on a
    GPU; or `max_num_seqs` if that is more.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_memory: int | None = None
    kv_fraction: float | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batch_tokens: int | None = None
    prefix_cache: bool = True
    attention: tuple[str, ...] = ("native",)
    head_map: str = "aligned"
    kernels: str = "auto"
    weights: str = "none"
    speculate: str = "off"
    debug: bool = False
