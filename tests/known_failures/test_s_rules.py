"""S7, S8, S9: ids outside the vocabulary, penalties over the right tokens, what may end an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import all_at_once, choice_of, decode, greedy_text, text_of, texts_together
from tests.support.reference import Reference, load_reference, load_reference_tokenizer
from tests.support.refusals import CHATS, check_error, refused
from tests.support.scripted import BETA, EOS, GAMMA, HELLO, WORLD, Serve, complete
from tests.support.server import Served, inside
from tests.support.standing import Known

C = "/v1/completions"
PROMPT = [11, *range(700, 706)]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
NEIGHBOUR: dict[str, Any] = {"prompt": [12, *range(800, 812)], "temperature": 0, "max_tokens": 60}
ROWS = 49152

# ---- S7: ids outside the vocabulary ----------------------------------------------------------------------

BAD_BIASES: list[Any] = [
    {"49152": 5}, {"49153": -100}, {"-1": 100}, {"-49152": 1}, {"abc": 1}, {"": 1}, {"5": "x"}, {"5": 1e9},
    {"5": None}, {"5": True}, {"5": [1]}, {"5": {}}, {"5": 100.01}, {"5": -100.01}, {"5": 1, "49152": 1},
    {"+5": 1}, {" 5": 1}, {"05": 1}, {"5.0": 1}, {"1e2": 1}, {"0x5": 1}, {"9" * 40: 1}, {str(2**64): 1},
    [5, 1], [], "5", 5, True, {str(i): 1 for i in range(1025)},
]  # fmt: skip
BAD_IDS: list[Any] = [
    [999999],
    [-1],
    [ROWS],
    [-ROWS],
    [5, -1],
    [2**64],
    [1.0],
    ["5"],
    [None],
    [[5]],
    5,
    "5",
    {},
]


def test_s7_bad_ids_are_refused_and_hurt_nobody(rand_served: Served, rand: Path) -> None:
    right = greedy_text(rand, NEIGHBOUR["prompt"], 60)

    def refuse() -> None:
        for bias in BAD_BIASES:
            for path in (C, CHATS):
                error = refused(rand_served, path, {"logit_bias": bias})
                assert error["param"].startswith("logit_bias"), (bias, error)
        for ids in BAD_IDS:
            for fields in ({}, {"min_tokens": 3}):
                error = refused(rand_served, C, {"stop_token_ids": ids, **fields})
                assert error["param"].startswith("stop_token_ids"), (ids, error)

    def neighbours() -> list[str]:
        return [text_of(rand_served, **NEIGHBOUR) for _ in range(5)]

    _, texts = all_at_once([refuse, neighbours])
    assert texts == [right] * 5


def test_s7_the_first_and_the_last_id_are_good(rand_served: Served, rand: Path) -> None:
    """A bias of 100 forces a token, one of -100 bars it; the last row is the vocabulary's, not id -1's."""
    right = greedy_text(rand, NEIGHBOUR["prompt"], 60)
    for token in (0, 5, ROWS - 1):
        forced = {**GREEDY, "logit_bias": {str(token): 100}, "max_tokens": 3}
        text, beside = texts_together(rand_served, [forced, NEIGHBOUR])
        assert (text, beside) == (decode(rand, [token] * 3), right)
    answer = load_reference(rand).greedy(PROMPT, 12)
    barred = choice_of(rand_served, **GREEDY, logit_bias={str(answer[0]): -100}, logprobs=0)
    assert not barred["text"].startswith(decode(rand, answer[:1]))
    assert text_of(rand_served, **GREEDY, logit_bias={}) == decode(rand, answer)
    assert text_of(rand_served, **GREEDY, logit_bias={str(i): 0 for i in range(1024)}) == decode(rand, answer)
    stopped = choice_of(rand_served, **GREEDY, stop_token_ids=[answer[4], ROWS - 1, 0])
    assert (stopped["text"], stopped["finish_reason"]) == (decode(rand, answer[:4]), "stop")


# ---- S8: penalties over the wrong tokens -----------------------------------------------------------------


def penalised(
    reference: Reference, ids: Sequence[int], tokens: int, presence: float = 0, frequency: float = 0,
    repetition: float = 1, bias: dict[int, float] | None = None,
) -> list[int]:  # fmt: skip
    """The definition, a forward pass a token: bias, then repetition, then counts of the output alone."""
    answer: list[int] = []
    for _ in range(tokens):
        logits = reference.last_logits([*ids, *answer]).clone()
        for token, value in (bias or {}).items():
            logits[token] += value
        for token in {*ids, *answer}:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        for token, count in Counter(answer).items():
            logits[token] -= presence + frequency * count
        answer.append(int(logits.argmax()))
    return answer


def test_s8_presence_and_frequency_see_the_output_only(rand_served: Served, rand: Path) -> None:
    """A prompt of one word, four times: the first token is as ever, then it falls, by count."""
    reference, prompt = load_reference(rand), [4000] * 4
    raw = reference.last_logits(prompt)
    bias = {4000: round(60 - float(raw[4000]), 3), 77: round(59 - float(raw[77]), 3)}  # at first, 60 and 59
    plain = {**GREEDY, "prompt": prompt, "logit_bias": {str(k): v for k, v in bias.items()}}
    settings: list[dict[str, float]] = [
        {}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.3},
        {"presence_penalty": -2}, {"frequency_penalty": -0.5},
        {"presence_penalty": 1, "frequency_penalty": 1},
    ]  # fmt: skip
    expected = [
        decode(
            rand,
            penalised(
                reference, prompt, 12, s.get("presence_penalty", 0), s.get("frequency_penalty", 0),
                s.get("repetition_penalty", 1), bias,
            ),
        )
        for s in settings
    ]  # fmt: skip
    assert len(set(expected)) >= 4 and all(text.startswith(decode(rand, [4000])) for text in expected[:3])
    assert [text_of(rand_served, **plain, **s) for s in settings] == expected
    assert texts_together(rand_served, [{**plain, **s} for s in settings]) == expected
    first = [text_of(rand_served, **{**plain, **s, "max_tokens": 1}) for s in settings[:3]]
    assert len(set(first)) == 1


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_s8_repetition_sees_prompt_and_output(rand_served: Served, rand: Path, penalty: float) -> None:
    """transformers' own `generate`, token for token, alone and in company."""
    reference = load_reference(rand)
    prompts = [[4000] * 4, PROMPT, [4000, 4001] * 10]
    expected = [decode(rand, reference.generate(p, 30, repetition_penalty=penalty)) for p in prompts]
    bodies = [
        {"prompt": p, "temperature": 0, "max_tokens": 30, "repetition_penalty": penalty} for p in prompts
    ]
    assert [text_of(rand_served, **body) for body in bodies] == expected
    assert texts_together(rand_served, [*bodies, GREEDY]) == [*expected, greedy_text(rand, PROMPT, 12)]


@pytest.mark.model
def test_s8_on_the_default_model(smol: Path) -> None:
    """The published input: four times Paris, all penalties in one batch with one request that has none."""
    reference, tokenizer = load_reference(smol), load_reference_tokenizer(smol)
    ids = tokenizer("Paris Paris Paris Paris").input_ids
    settings: list[dict[str, float]] = [
        {}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    expected = [
        reference.greedy(ids, 20), penalised(reference, ids, 20, presence=2),
        penalised(reference, ids, 20, frequency=2), reference.generate(ids, 30, repetition_penalty=1.3),
    ]  # fmt: skip
    assert len({answer[0] for answer in expected[:3]}) == 1 and len(set(map(tuple, expected))) == 4
    with inside(smol, kv_memory=32 << 20, max_model_len=256) as server:
        plain = {"prompt": "Paris Paris Paris Paris", "temperature": 0, "repetition_penalty": 1}
        lengths = [len(answer) for answer in expected]
        bodies = [{**plain, **s, "max_tokens": n} for s, n in zip(settings, lengths, strict=True)]
        texts = texts_together(server, bodies)
    assert texts == [tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_s8_out_of_range(rand_served: Served, name: str) -> None:
    for value in (-2.01, 2.01, 1e9, "1", True, [1]):
        for path in (C, CHATS):
            assert refused(rand_served, path, {name: value})["param"] == name
    for value in (-2, 2, 0, None, 1e-300):
        text_of(rand_served, **{**GREEDY, "max_tokens": 2, name: value})


# ---- S9: min_tokens, end marks and stops -----------------------------------------------------------------

S9 = (HELLO, EOS)


def barred(
    reference: Reference, ids: Sequence[int], tokens: int, eos: Sequence[int], least: int
) -> list[int]:
    """Greedy, where no end mark can be drawn before `least` tokens."""
    answer: list[int] = []
    while len(answer) < tokens:
        logits = reference.last_logits([*ids, *answer]).clone()
        if len(answer) < least:
            logits[list(eos)] = float("-inf")
        answer.append(int(logits.argmax()))
        if answer[-1] in eos:
            break
    return answer


def test_s9_no_end_mark_before_min_tokens(served: Callable[..., Served], chain: Callable[..., Path]) -> None:
    """A script that would end at once, by either of two end marks: neither comes before its time."""
    eos = (EOS, 0)
    for mark in eos:
        folder = chain((HELLO, mark), (WORLD, BETA, mark), eos=list(eos))
        server = served(folder, Known([WORLD], decode(folder, [BETA]), 4))
        reference = load_reference(folder)
        for least in (0, 1, 4, 8):
            body = {"prompt": [HELLO], "temperature": 0, "max_tokens": 8, "min_tokens": least, "logprobs": 0}
            answer = barred(reference, [HELLO], 8, eos, least)
            reply = server.http.post(C, json=body).json()
            assert reply["usage"]["completion_tokens"] == len(answer) >= max(1, least)
            (choice,) = reply["choices"]
            assert choice["text"] == decode(folder, answer)
            assert choice["finish_reason"] == ("stop" if answer[-1] in eos else "length")
            drawn = choice["logprobs"]["tokens"][:least]
            assert not {"<|im_end|>", "<|endoftext|>"} & set(drawn)


SCRIPT = (HELLO, WORLD, BETA, GAMMA, 33203, 23960, 57, 58, EOS)  # world, beta, gamma, DEF, GH, I, J


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("fields", "before", "stop", "tokens"),
    [
        ({"stop": "beta"}, " world", "beta", 2),
        ({"stop": "beta", "min_tokens": 2}, " world", "beta", 2),
        ({"stop": "beta", "min_tokens": 3}, " worldbeta gammaDEFGHIJ", "", 8),  # it came too early
        ({"stop": ["beta", "EFGHI"], "min_tokens": 3}, " worldbeta gammaD", "EFGHI", 6),
        ({"stop": ["a gam"], "min_tokens": 3}, " worldbeta gammaDEFGHIJ", "", 8),  # it began too early
        ({"stop_token_ids": [BETA]}, " world", "beta", 2),
        ({"stop_token_ids": [BETA, GAMMA], "min_tokens": 1, "stop": "mma"}, " world", "beta", 2),
    ],
)  # fmt: skip
def test_s9_stops_and_min_tokens(
    serve: Serve, fields: dict[str, Any], before: str, stop: str, tokens: int, include: bool
) -> None:
    """A stop string is looked for in the text of token `min_tokens` and after it. What is shown of a stop is
    the client's to say, and changes neither usage nor reason."""
    server = serve(SCRIPT)
    whole, streamed = complete(server, [HELLO], **fields, include_stop_str_in_output=include)
    assert whole["text"] == before + (stop if include else "")
    assert (whole["finish"], whole["usage"]["completion_tokens"]) == ("stop", tokens)
    assert include or not stop or all(stop not in delta for delta in streamed.deltas)


def test_s9_stop_ids_cannot_be_drawn_before_min_tokens(serve: Serve, smol: Path) -> None:
    server = serve(SCRIPT)
    body = {"prompt": [HELLO], "temperature": 0, "max_tokens": 4, "stop_token_ids": [WORLD], "logprobs": 0}
    tokens = server.http.post(C, json={**body, "min_tokens": 2}).json()["choices"][0]["logprobs"]["tokens"]
    assert " world" not in tokens[:2]
    tokens = server.http.post(C, json=body).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == [" world"]


def test_s9_end_marks_are_never_shown(serve: Serve) -> None:
    """Not even where the client names them and asks for stops to be shown."""
    server = serve(SCRIPT)
    for fields in ({}, {"stop_token_ids": [EOS]}, {"stop_token_ids": [EOS], "ignore_eos": True}):
        whole, _ = complete(server, [GAMMA], **fields, include_stop_str_in_output=True)
        assert (whole["text"], whole["finish"]) == ("DEFGHIJ", "stop")


def test_s9_more_than_there_may_be(serve: Serve) -> None:
    server = serve(SCRIPT)
    for path, fields in (
        (C, {"max_tokens": 4}),
        (CHATS, {"max_tokens": 4}),
        (CHATS, {"max_completion_tokens": 4}),
    ):
        for value in (5, 10**18):
            assert refused(server, path, {**fields, "min_tokens": value})["param"] == "min_tokens"
        assert server.http.post(path, json={**_good(path), **fields, "min_tokens": 4}).status_code == 200
    for value in (-1, 1.0, "4", True):
        check = server.http.post(C, json={**_good(C), "min_tokens": value})
        assert check_error(check)["param"] == "min_tokens"


def _good(path: str) -> dict[str, Any]:
    what = {"prompt": [HELLO]} if path == C else {"messages": [{"role": "user", "content": "Say it."}]}
    return {**what, "temperature": 0}
