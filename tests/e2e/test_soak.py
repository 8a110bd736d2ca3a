"""The short form of `make soak`, and that it notices another text, a grown server, a draw that was no tie."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from loadtest.soak import Setup, run
from loadtest.soak_catalogue import KINDS, MODES, Ask, catalogue
from loadtest.soak_client import Heard
from loadtest.soak_judge import Judgement, tie_gap
from loadtest.soak_memory import LIMIT, Sample, growth
from loadtest.tiny import make_tiny


def test_a_short_crowd(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path / "tiny", context=1024))
    setup = Setup(model, kv_memory="512KiB", clients=12, minutes=0.15, threads=1, patience=0.2)
    found = run(setup)
    assert found["problems"] == []
    assert found["passed"] and found["near_ties"] == 0  # on a tiny model there are none
    assert found["catalogue"] == len(KINDS) * len(MODES)
    assert found["answers"] > 50 and found["preemptions"] > 0 and found["live_blocks"] == 0
    assert found["left"]["in mid-stream"] > 0 and found["left"]["while waiting"] > 0
    assert found["scores"] > 0


def test_the_catalogue_asks_for_everything_in_every_mode() -> None:
    asks = catalogue("m")
    assert len({ask.name for ask in asks}) == len(asks) == len(KINDS) * len(MODES)
    assert {ask.body["model"] for ask in asks} == {"m@native", "m@mha", "m@mqa"}
    fields = {name for ask in asks for name in ask.body}
    wanted = {"n", "stop", "seed", "logprobs", "echo", "logit_bias", "response_format", "structured_outputs"}
    wanted |= {"prompt_logprobs", "repetition_penalty", "min_tokens", "include_stop_str_in_output", "min_p"}
    assert wanted <= fields


def heard(text: str = "one two", **more: Any) -> Heard:
    given: dict[str, Any] = {"texts": {0: text}, "reasons": {0: "stop"}, "scores": {0: [-1.0, -2.0]}}
    return Heard(**given | {"prompt_tokens": 3, "completion_tokens": 2} | more)


GREEDY = Ask("greedy", "/v1/completions", {"temperature": 0}, exact=True)
SEEDED = Ask("seed", "/v1/completions", {"temperature": 1}, exact=True)


@pytest.mark.parametrize(
    "other",
    [
        heard("one too"),
        heard(reasons={0: "length"}),
        heard(completion_tokens=3),
        heard(prompt_tokens=4),
        heard(texts={0: "one two", 1: "x"}),
        heard(scores={0: [-1.0]}),
        heard(scores={0: [-1.0, -2.006]}),
    ],
)
def test_an_answer_that_differs_is_seen(other: Heard) -> None:
    judgement = Judgement()
    judgement.take(GREEDY, heard(), heard())
    assert judgement.differing == []
    judgement.take(GREEDY, other, heard())
    assert judgement.differing == [(GREEDY, other)]
    judgement.take(GREEDY, heard(), heard())
    assert len(judgement.differing) == 1 and judgement.answers == 3


def scored(second: dict[str, float], drawn: float) -> dict[str, Any]:
    """A solo answer, `one two`, with the best scores of its second token and the score of what was drawn."""
    logprobs = {
        "tokens": ["one", " two"],
        "token_logprobs": [-0.1, drawn],
        "top_logprobs": [{"one": -0.1, "two": -3.0}, second],
    }
    return {"choices": [{"index": 0, "text": "one two", "logprobs": logprobs}]}


def test_a_greedy_tie_is_the_gap_of_the_two_best_where_texts_part() -> None:
    close = scored({" two": -1.0, " too": -1.0004}, -1.0)
    assert tie_gap(GREEDY, close, heard("one too")) == pytest.approx(0.0004)
    far = scored({" two": -1.0, " too": -1.5}, -1.0)
    assert tie_gap(GREEDY, far, heard("one too")) == pytest.approx(0.5)
    assert tie_gap(GREEDY, close, heard("won")) == pytest.approx(2.9)  # it parted at the first token
    assert tie_gap(GREEDY, close, heard("one two")) is None
    assert (
        tie_gap(Ask("penalties", "/v1/completions", {"temperature": 0}, exact=False), close, heard("x"))
        is None
    )


def test_a_draw_is_never_excused() -> None:
    close = scored({" two": math.log(0.5), " too": math.log(0.4999)}, math.log(0.5))
    assert tie_gap(SEEDED, close, heard("one too")) is None


def test_a_server_that_grows_is_seen() -> None:
    flat = [Sample(number, 10**9 + number % 3) for number in range(0, 4000, 10)]
    assert growth(flat).flat and growth(flat).judged
    leak = [Sample(number, 10**9 + (LIMIT + 1000) * number) for number in range(0, 4000, 10)]
    grown = growth(leak)
    assert grown.slope == pytest.approx(LIMIT + 1000) == pytest.approx(grown.quarters)
    assert not grown.flat


def test_what_grows_while_it_warms_up_does_not_count() -> None:
    sizes = [Sample(number, 10**9 + 10**6 * min(number, 900)) for number in range(0, 4000, 10)]
    assert growth(sizes).slope == 0.0


def test_too_few_requests_say_nothing() -> None:
    grown = growth([Sample(0, 10**9), Sample(50, 2 * 10**9), Sample(100, 3 * 10**9)])
    assert grown.flat and not grown.judged
    with pytest.raises(ValueError, match="less than twice"):
        growth([Sample(0, 1)])
