"""Limits and types of everything a client may turn, and the words of the refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from server.text.asks import SamplingAsk
from server.text.defaults import SamplingDefaults, sampling_defaults
from server.text.ends import Ends
from server.text.errors import RequestError
from server.text.params import Terms, terms

ROWS = 49_152
EOS = frozenset({0, 2})
OPENAIS = SamplingDefaults()


def check(prompts: int = 1, salt: Any = None, defaults: SamplingDefaults = OPENAIS, **fields: Any) -> Terms:
    return terms(
        SamplingAsk(**fields), salt, prompts=prompts, eos_ids=EOS, vocab_rows=ROWS, defaults=defaults
    )


def test_the_defaults_are_openais() -> None:
    found = check()
    assert (found.n, found.ends, found.cache_salt) == (1, Ends(ids=EOS), "")
    params = found.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.logit_bias == ()
    assert 0 <= params.seed < 2**64
    assert len({check().sampling.seed for _ in range(8)}) == 8  # drawn anew for each request


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 10**40, 1.0, True, "1"])
def test_a_priority_is_a_32_bit_integer(value: Any) -> None:
    with pytest.raises(RequestError, match="priority: must be an integer from -2147483648 to 2147483647"):
        check(priority=value)


@pytest.mark.parametrize(
    ("fields", "name", "want"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"temperature": 5e-324}, "temperature", 5e-324),
        ({"temperature": 2}, "temperature", 2.0),
        ({"top_p": 1}, "top_p", 1.0),
        ({"top_p": 1e-10}, "top_p", 1e-10),
        ({"top_p": 0}, "temperature", 0.0),
        ({"top_p": 0}, "top_p", 1.0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 1}, "top_k", 1),
        ({"top_k": ROWS}, "top_k", 0),
        ({"top_k": 10**40}, "top_k", 0),
        ({"min_p": 1}, "min_p", 1.0),
        ({"repetition_penalty": 0.01}, "repetition_penalty", 0.01),
        ({"repetition_penalty": 10}, "repetition_penalty", 10.0),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"presence_penalty": 2}, "presence_penalty", 2.0),
        ({"frequency_penalty": -2.0}, "frequency_penalty", -2.0),
        ({"frequency_penalty": 1e-300}, "frequency_penalty", 1e-300),
        ({"seed": 7}, "seed", 7),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": -(2**63)}, "seed", 2**63),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
    ],
)
def test_what_is_within_the_limits(fields: dict[str, Any], name: str, want: float) -> None:
    assert getattr(check(**fields).sampling, name) == want


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": value} for value in (-1, 2.01, 1e9, math.nan, math.inf, "0.5", True, [1], 10**400)),
        *({"top_p": value} for value in (-1, 1.5, math.nan, -math.inf, False, "1")),
        *({"top_k": value} for value in (-2, 1.0, True, "5", -(10**5000))),
        *({"min_p": value} for value in (-0.1, 1.1, math.nan)),
        *({"seed": value} for value in (2**64, -(2**63) - 1, 1.5, "7", True, 10**5000)),
        *({"repetition_penalty": value} for value in (0, -0.0, -1, 0.009, 10.1, 1e-300, math.nan, "1", True)),
        *({"presence_penalty": value} for value in (-2.01, 2.01, math.nan, -math.inf, "1", False)),
        *({"frequency_penalty": value} for value in (-2.01, 2.01, 1e400, [], {})),
        *(
            {"logit_bias": value}
            for value in (
                {str(ROWS): 5},
                {"-1": 100},
                {"abc": 1},
                {"": 1},
                {"+5": 1},
                {" 5": 1},
                {"5 ": 1},
                {"05": 1},
                {"5.0": 1},
                {"1e1": 1},
                {"1_0": 1},
                {"\u0665": 1},  # an Arabic five
                {"9" * 30: 1},
                {"\ud800": 1},
                {5: 1},
                {"5": "x"},
                {"5": None},
                {"5": True},
                {"5": [1]},
                {"5": 100.5},
                {"5": -101},
                {"5": 1e9},
                {"5": math.nan},
                {"5": math.inf},
                {"5": 10**400},
                {str(i): 1 for i in range(1025)},
                [[5, 1]],
                "5",
                7,
            )
        ),
        *({"include_stop_str_in_output": value} for value in (1, "true", 0.0)),
        *({"n": value} for value in (0, -1, 129, 10**6, 1.0, True)),
        *({"min_tokens": value} for value in (-1, 1.5, True)),
        *({"ignore_eos": value} for value in (1, "true")),
        *(
            {"stop": value}
            for value in ("", [""], ["x", ""], [1], 5, {}, [None], ["x"] * 17, "x" * 1025, "\ud800")
        ),
        *(
            {"stop_token_ids": value}
            for value in ([-1], [ROWS], [999_999], [1.0], [True], 5, "1", [1] * 1025)
        ),
    ],
)
def test_nonsense_is_refused_by_name_with_the_value(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        check(**fields)
    ((name, _),) = fields.items()
    error = caught.value
    assert error.status == 400
    assert error.param is not None and error.param.startswith(name)
    assert error.message.startswith(error.param.split("[")[0]) and len(error.message) < 300


def test_a_refusal_names_limit_and_value() -> None:
    with pytest.raises(RequestError, match=r"^temperature: must be a number from 0 to 2, got 3\.$"):
        check(temperature=3)
    with pytest.raises(RequestError, match=r"^stop: at most 16 stop strings are allowed, got 100000\.$"):
        check(stop=["a"] * 100_000)
    with pytest.raises(RequestError, match=r"^seed: .*, got a number of more than 30 digits\.$"):
        check(seed=10**5000)
    with pytest.raises(RequestError, match=r"^top_p: .*, got 'x+'\.\.\. \(5000 characters\)\.$"):
        check(top_p="x" * 5000)


def test_biases() -> None:
    assert check(logit_bias={}).sampling.logit_bias == ()
    found = check(logit_bias={"7": -100, str(ROWS - 1): 100, "0": 0.5, "9": 0}).sampling
    assert found.logit_bias == ((0, 0.5), (7, -100.0), (ROWS - 1, 100.0))
    assert len(check(logit_bias={str(i): 1 for i in range(1024)}).sampling.logit_bias) == 1024


def test_a_refused_bias_names_the_id_and_the_limit() -> None:
    with pytest.raises(RequestError, match=r"^logit_bias: each key .* from 0 to 49151, got '49152'\.$"):
        check(logit_bias={"49152": 5})
    with pytest.raises(RequestError, match=r"^logit_bias\[5\]: must be .* from -100 to 100, got null"):
        check(logit_bias={"5": None})


def test_choices_are_limited_over_all_prompts() -> None:
    assert check(prompts=64, n=2).n == 2
    with pytest.raises(RequestError, match=r"65 prompts times n=2 make 130 choices; the limit is 128"):
        check(prompts=65, n=2)


def test_stops() -> None:
    assert check(stop=None).ends.strings == check(stop=[]).ends.strings == ()
    assert check(stop="END").ends.strings == ("END",)
    assert check(stop=["a", "b"]).ends.strings == ("a", "b")
    assert check(stop="x" * 1024).ends.strings == ("x" * 1024,)
    assert check(stop_token_ids=[5, 0]).ends.ids == {0, 2, 5}
    assert check(stop_token_ids=[ROWS - 1], ignore_eos=True).ends.ids == {ROWS - 1}
    assert check(ignore_eos=True).ends.ids == frozenset()
    assert check(ignore_eos=False).ends.ids == EOS


def test_what_is_shown_of_a_stop() -> None:
    """The client's own ids are, if he says so; the checkpoint's end marks never."""
    assert check(stop_token_ids=[5]).ends.shown_ids == frozenset()
    found = check(stop_token_ids=[5, 2], stop="x", include_stop_str_in_output=True).ends
    assert (found.include, found.shown_ids, found.ids) == (True, {5}, {0, 2, 5})
    found = check(stop_token_ids=[5, 2], ignore_eos=True, include_stop_str_in_output=True).ends
    assert (found.shown_ids, found.ids) == ({5}, {2, 5})


def test_some_token_must_be_left_to_begin_with() -> None:
    """A small vocabulary can be barred whole by `min_tokens`: the model would have nothing to draw from."""

    def small(rows: int, **fields: Any) -> Terms:
        ask = SamplingAsk(stop_token_ids=[0, 1, 2, 3], **fields)
        return terms(ask, None, prompts=1, eos_ids=EOS, vocab_rows=rows, defaults=OPENAIS)

    with pytest.raises(RequestError, match=r"^min_tokens: must be 0 where each of the 4 tokens .*, got 1\.$"):
        small(4, min_tokens=1)
    assert small(5, min_tokens=1).ends.min_tokens == 1
    assert small(4, min_tokens=0).ends.ids == small(4).ends.ids == {0, 1, 2, 3}


def test_cache_salt() -> None:
    assert check(salt="x" * 128).cache_salt == "x" * 128
    for wrong in ("x" * 129, 5, "\udc00"):
        with pytest.raises(RequestError, match="cache_salt"):
            check(salt=wrong)


def test_the_checkpoints_recommendation_holds_where_the_client_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path) == SamplingDefaults()  # no file
    path.write_text('{"do_sample": true, "temperature": 0.2, "top_p": 0.9, "top_k": 50, "eos_token_id": 2}')
    found = sampling_defaults(tmp_path)
    assert found == SamplingDefaults(temperature=0.2, top_p=0.9, top_k=50, min_p=0.0)
    quiet = check(defaults=found).sampling
    assert (quiet.temperature, quiet.top_p, quiet.top_k) == (0.2, 0.9, 50)
    said = check(defaults=found, temperature=1, top_p=1, top_k=-1).sampling
    assert (said.temperature, said.top_p, said.top_k) == (1.0, 1.0, 0)
    path.write_text('{"do_sample": false, "temperature": 0.7, "repetition_penalty": 1.3}')
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.0, repetition_penalty=1.3)
    repeats = sampling_defaults(tmp_path)
    assert check(defaults=repeats).sampling.repetition_penalty == 1.3
    assert check(defaults=repeats, repetition_penalty=1).sampling.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_k", 1.5), ("min_p", True)),
        *(("repetition_penalty", 0), ("repetition_penalty", "1"), ("repetition_penalty", 11)),
    ],
)
def test_a_recommendation_out_of_range_is_a_start_up_error(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=f"generation_config.json: {key} is "):
        sampling_defaults(tmp_path)
