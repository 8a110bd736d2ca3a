"""The oracle: Hugging Face transformers on the same folder.

A model is loaded once and shared by the tests that use it; a few are kept. Plain on purpose, not fast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@functools.lru_cache(maxsize=4)
def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    """The reference model of `folder`, run in `dtype`, on the CPU."""
    return Reference(_load(folder.resolve(), dtype))


@functools.lru_cache(maxsize=4)
def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_reference_tokenizer(folder: Path) -> Any:
    """transformers' own tokenizer of `folder`."""
    return _load_tokenizer(folder.resolve())


class Reference:
    """What transformers says about token ids; logits come back in fp32."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """`[T, V]` fp32: the logits after each of `ids`, in one forward pass."""
        out = self.model(torch.tensor([list(ids)]), use_cache=False).logits
        return out[0].to(torch.float32)

    @torch.inference_mode()
    def last_logits(self, ids: Sequence[int]) -> Tensor:
        """`[V]` fp32: the logits after the last of `ids`, projected to the vocabulary alone."""
        out = self.model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=1).logits
        return out[0, -1].to(torch.float32)

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], tokens: int, eos: Sequence[int] = ()) -> list[int]:
        """Up to `tokens` greedy ids after `ids`, an eos that ends them included; ties to the lowest id."""
        from transformers import DynamicCache

        output: list[int] = []
        step, cache = torch.tensor([list(ids)]), DynamicCache(config=self.model.config)
        while len(output) < tokens:
            out = self.model(step, cache=cache, use_cache=True, logits_to_keep=1)
            output.append(int(out.logits[0, -1].to(torch.float32).argmax()))
            if output[-1] in eos:
                break
            step = torch.tensor([[output[-1]]])
        return output

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], tokens: int, **settings: Any) -> list[int]:
        """transformers' own greedy `generate` with these settings: `tokens` ids, as no eos ends it."""
        text = torch.tensor([list(ids)])
        out = self.model.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=tokens,
            eos_token_id=None, pad_token_id=0, **settings,
        )  # fmt: skip
        return [int(token) for token in out[0, len(ids) :]]

    @torch.inference_mode()
    def greedy_along(self, ids: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The greedy id after `ids + answer[:i]`, for each `i` below `len(answer)`, in one forward pass.

        Up to the first id where the two differ this is what `greedy(ids, len(answer))` gives, at a fraction
        of its cost: the proof that an answer is greedy.
        """
        text = torch.tensor([[*ids, *answer[:-1]]])
        out = self.model(text, use_cache=False, logits_to_keep=len(answer)).logits[0]
        return [int(token) for token in out.to(torch.float32).argmax(-1)]

    @torch.inference_mode()
    def perplexity(self, ids: Sequence[int]) -> float:
        """exp of the mean negative log likelihood of `ids[1:]`; logits are made 250 rows at a time."""
        hidden = self.model.base_model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        losses = [
            token_losses(head(hidden[i : i + 250]), ids[i + 1 : i + 251]) for i in range(0, len(ids) - 1, 250)
        ]
        return float(torch.cat(losses).mean().exp())


def token_losses(logits: Tensor, targets: Sequence[int]) -> Tensor:
    """`[T]` fp64: the negative log likelihood of each target under `logits` `[T or more, V]`."""
    wanted = torch.tensor(list(targets))
    rows = logits[: len(wanted)].to(torch.float32)
    return torch.nn.functional.cross_entropy(rows, wanted, reduction="none").to(torch.float64)
