"""The bytes and floating-point operations of a workload, by arithmetic from `config.json`.

With L layers, hidden size H, inner size F, Hq query and Hkv KV heads of D numbers, V rows of vocabulary and w
bytes a number:

    body                L · (H · (Hq + 2 Hkv) · D  +  Hq · D · H  +  3 · H · F)        numbers
    head                V · H                     (a tied model's embedding: held, and read, once)
    weights read        w · (body + head)         a step, however many tokens are in it
    cache of a token    2 · L · Hkv · D · w       bytes; attention reads it of every token before, once for
                                                  each step of a sequence (a chunk of a prompt, or one token)
    matrix work         2 · body a token that is computed, 2 · head a token that is drawn
    attention           4 · L · Hq · D            operations for each pair of a token and one that it sees

Norms, RoPE, softmax, activations and what is written are left out: they are less than a hundredth. A prompt
that is read in chunks reads the cache of its earlier chunks again with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.bench_work import Work


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one model costs; numbers as in the page above."""

    body: int  # weights used by every token
    head: int  # weights used by every drawn token
    weight_bytes: int  # read a step
    token_bytes: int  # of cache
    pair_flops: int  # attention, for each token and each that it sees


@dataclass(frozen=True, slots=True)
class Cost:
    """What a workload comes to."""

    bytes: int
    flops: int


def model_cost(config: Mapping[str, Any], itemsize: int = 2) -> ModelCost:
    """From the fields of a `config.json`; weights and cache of `itemsize` bytes a number."""
    layers, hidden, inner = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    body = layers * (hidden * (heads + 2 * kv_heads) * size + heads * size * hidden + 3 * hidden * inner)
    head = config["vocab_size"] * hidden
    return ModelCost(
        body=body,
        head=head,
        weight_bytes=itemsize * (body + head),
        token_bytes=2 * layers * kv_heads * size * itemsize,
        pair_flops=4 * layers * heads * size,
    )


def work_cost(model: ModelCost, work: Work, steps: int, chunk: int) -> Cost:
    """A workload run in `steps` steps, its prompts in chunks of up to `chunk` tokens; a shared prefix is in
    the cache already."""
    start, last = work.shared, work.prompt + work.output - 1  # the last token drawn is never computed
    seen = sum(range(start + 1, last + 1))
    read = sum(min(place, work.prompt) for place in range(start + chunk, work.prompt + chunk, chunk))
    read += sum(range(work.prompt + 1, last + 1))
    flops = 2 * model.body * (last - start) + 2 * model.head * work.output + model.pair_flops * seen
    return Cost(
        bytes=steps * model.weight_bytes + work.requests * read * model.token_bytes,
        flops=work.requests * flops,
    )


def longer_context(model: ModelCost, sequences: int, short: int, long: int) -> Cost:
    """What a decode step of `sequences` costs more when each has `long` tokens before it and not `short`."""
    more = sequences * (long - short)
    return Cost(bytes=more * model.token_bytes, flops=more * model.pair_flops)
