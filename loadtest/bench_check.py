"""Whether the answers of a benchmark are the model's: the first 16 ids against transformers, in fp32.

    python -m loadtest.bench_check --model FOLDER --texts NAME=FILE... --json FILE [--check N]

Each file holds, for each workload, prompts and what came back: ids, or the text that a server sent. The
reference answers every prompt once, for all files; texts are compared with what its ids spell. The rule for
bf16 is that of loadtest/equality.py; the error is that of transformers itself in bf16, on the first prompts
of the workload. Where a near tie spells nothing, a text does not show what came next: such an answer is
counted as undecided. Some servers will not draw an end mark while `min_tokens` are wanted, so where the
reference would, an answer without it is as good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.bench_answers import read
from loadtest.command import parser_of, read_json, write_json
from loadtest.equality import first_difference, near_ties

TOKENS = 16  # of each answer
BEST = 8  # ids kept at each place
_BATCH_TOKENS = 8192  # of prompts in one pass
_ERROR_PROMPTS = 2  # of a workload, on which the error is measured
VERDICTS = ("equal", "near_ties", "undecided", "wrong")  # from the best to the worst
_UNFINISHED = "�"  # what a cut character is decoded to


@dataclass(frozen=True, slots=True)
class Truth:
    """The reference's greedy ids after a prompt, and at each place its best ids with their logits."""

    ids: list[int]
    best: list[list[tuple[int, float]]]


@dataclass
class Tally:
    """What the comparisons of one workload came to; `compared` counts ids that were equal."""

    answers: int = 0
    equal: int = 0
    near_ties: int = 0
    undecided: int = 0
    wrong: int = 0
    compared: int = 0
    near_tie: float = 0.0
    examples: list[str] = field(default_factory=list)


class Oracle:
    """transformers on the same folder, in fp32 and in bf16."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        quiet: Any = logging.disable_progress_bar
        quiet()
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model, self._rough = (
            load(folder, dtype=dtype, local_files_only=True).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.ends: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            if (folder / name).exists():
                ends = read_json(folder / name).get("eos_token_id")
                self.ends |= set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def decode(self, ids: Sequence[int]) -> str:
        """What a server sends for `ids`, without a character that is not whole yet."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).rstrip(_UNFINISHED)

    @torch.inference_mode()
    def truths(self, prompts: Sequence[Sequence[int]], banned: Sequence[int] = ()) -> list[Truth]:
        """The greedy answers to prompts of one length; a head that all share is read once."""
        from transformers import DynamicCache

        length, found = len(prompts[0]), list[Truth]()
        shared = next(
            (i for i in range(length - 1) if len({prompt[i] for prompt in prompts}) > 1), length - 1
        )
        shared = shared if len(prompts) > 1 else 0
        size = max(1, _BATCH_TOKENS // (length - shared))
        for start in range(0, len(prompts), size):
            some, cache = prompts[start : start + size], DynamicCache(config=self._model.config)
            if shared:
                self._model(torch.tensor([prompts[0][:shared]]), cache=cache, logits_to_keep=1)
                cache.batch_repeat_interleave(len(some))
            found += self._answer(torch.tensor([list(prompt[shared:]) for prompt in some]), cache, banned)
        return found

    def _answer(self, step: Tensor, cache: Any, banned: Sequence[int]) -> Iterator[Truth]:
        found: list[Truth] = [Truth([], []) for _ in step]
        for _ in range(TOKENS):
            out = self._model(step, cache=cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[:, -1].to(torch.float32)
            logits[:, list(banned)] = float("-inf")
            best = logits.topk(min(BEST, logits.shape[-1]))
            step = best.indices[:, :1]
            for truth, ids, values in zip(found, best.indices.tolist(), best.values.tolist(), strict=True):
                truth.ids.append(ids[0])
                truth.best.append(list(zip(ids, values, strict=True)))
        return iter(found)

    @torch.inference_mode()
    def error(self, ids: Sequence[int]) -> float:
        """max|bf16 - fp32| over the logits of the last 16 places of `ids`."""
        exact, rough = (
            model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=TOKENS).logits.to(torch.float64)
            for model in (self._model, self._rough)
        )
        return float((exact - rough).abs().max())


def judge(
    said: dict[str, Any], truths: Sequence[Truth], near_tie: float, decode: Callable[[Sequence[int]], str]
) -> tuple[str, int]:
    """How one answer compares with the best of `truths` (one of VERDICTS), and how many ids agree."""
    count = min(TOKENS, said["tokens"])
    found = [
        _judge_ids(said["ids"][:count], truth.ids[:count], truth, near_tie)
        if said["text"] is None
        else _judge_text(said["text"], said["tokens"] == count, truth, near_tie, decode, count)
        for truth in truths
    ]
    return max(found, key=lambda each: (-VERDICTS.index(each[0]), each[1]))


def _judge_ids(ids: Sequence[int], wanted: Sequence[int], truth: Truth, near_tie: float) -> tuple[str, int]:
    place = first_difference(ids, wanted)
    if place is None:
        return "equal", len(wanted)
    return ("near_ties" if ids[place] in near_ties(truth.best[place], near_tie) else "wrong"), place


def _judge_text(
    text: str,
    whole: bool,
    truth: Truth,
    near_tie: float,
    decode: Callable[[Sequence[int]], str],
    count: int,
) -> tuple[str, int]:
    """A text is what the first `count` ids spell and what follows them (nothing if the answer is `whole`), or
    those up to a near tie and another id after them. That other id must spell more than the reference's own
    ids do: one that spells less, or a beginning of what they spell, explains nothing. One that spells nothing
    leaves open what came after it, so nothing is decided.
    """
    ids = truth.ids[:count]

    def agrees(some: Sequence[int]) -> bool:
        spelt = decode(some)
        if whole and len(some) == count:
            return text.rstrip(_UNFINISHED) == spelt
        return text.startswith(spelt)

    agreed = next((n for n in range(count) if not agrees(ids[: n + 1])), count)
    if agreed == count:
        return "equal", agreed
    known, open_at = decode(ids[:agreed]), None
    for place in range(agreed, -1, -1):  # an id that spells nothing, or a beginning, is missed later
        silent = decode(ids[:place]) == known
        for other in near_ties(truth.best[place], near_tie):
            tried = [*ids[:place], other]
            if len(decode(tried)) > len(known) and agrees(tried):
                return "near_ties", place
            if silent and decode(tried) == known:
                open_at = place
    return ("wrong", agreed) if open_at is None else ("undecided", open_at)


def check(
    oracle: Oracle, files: dict[str, dict[str, Any]], most: int | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each file and workload a Tally, as a dict. What the reference says of a prompt is shared."""
    tallies: dict[str, dict[str, Tally]] = {name: {} for name in files}
    for work in sorted({work for file in files.values() for work in file}):
        having = {name: file[work][:most] for name, file in files.items() if work in file}
        for prompts, names in _by_prompts(having):
            truths, near_tie = _reference(oracle, prompts)
            for name in names:
                tallies[name][work] = _tally(having[name], truths, near_tie, oracle.decode)
    return {name: {work: vars(tally) for work, tally in works.items()} for name, works in tallies.items()}


def _by_prompts(having: Mapping[str, Sequence[dict[str, Any]]]) -> list[tuple[list[list[int]], list[str]]]:
    """The different lists of prompts, each with the names of the files that have it."""
    made: dict[str, tuple[list[list[int]], list[str]]] = {}
    for name, said in having.items():
        prompts = [each["prompt"] for each in said]
        made.setdefault(str(prompts), (prompts, []))[1].append(name)
    return list(made.values())


def _reference(oracle: Oracle, prompts: Sequence[Sequence[int]]) -> tuple[list[list[Truth]], float]:
    """What may answer each prompt, and how near a near tie is."""
    truths = [[truth] for truth in oracle.truths(prompts)]
    ended = [i for i, (truth,) in enumerate(truths) if oracle.ends & set(truth.ids)]
    if ended:
        others = oracle.truths([prompts[i] for i in ended], tuple(oracle.ends))
        for i, other in zip(ended, others, strict=True):
            truths[i].append(other)
    few = list(zip(prompts, truths, strict=True))[:_ERROR_PROMPTS]
    return truths, 2 * max(oracle.error([*prompt, *truth[0].ids[:-1]]) for prompt, truth in few)


def _tally(
    said: Sequence[dict[str, Any]],
    truths: Sequence[Sequence[Truth]],
    near_tie: float,
    decode: Callable[[Sequence[int]], str],
) -> Tally:
    tally = Tally(near_tie=near_tie)
    for number, (each, truth) in enumerate(zip(said, truths, strict=False)):
        verdict, agreed = judge(each, truth, near_tie, decode)
        tally.answers += 1
        tally.compared += agreed
        setattr(tally, verdict, getattr(tally, verdict) + 1)
        if verdict == "wrong" and len(tally.examples) < 3:
            heard = each["ids"][:TOKENS] if each["text"] is None else each["text"][:80]
            wanted = truth[0].ids if each["text"] is None else decode(truth[0].ids)
            tally.examples.append(f"answer {number} after {agreed} ids: {heard!r}, not {wanted!r}")
    return tally


def main() -> int:
    """Check files of answers, write what was found; the exit code."""
    parser = parser_of("bench_check", __doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--check", type=int, metavar="N", help="so many prompts of a workload (default: all)")
    options = parser.parse_args()
    named = dict(each.split("=", 1) for each in options.texts)
    files = {name: read(Path(path)) for name, path in named.items()}
    found = check(Oracle(options.model), files, options.check)
    write_json(options.json, found)
    for name, works in found.items():
        for work, tally in works.items():
            counts = ", ".join(f"{tally[kind]} {kind.replace('_', ' ')}" for kind in VERDICTS)
            print(f"{name} {work}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
