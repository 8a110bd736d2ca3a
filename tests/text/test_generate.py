"""Token events to deltas, with a service that plays them: stops, halves of characters, ends, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from server.engine.request import FinishReason, KVPeak, Request, SamplingParams, TokenEvent
from server.text.detokenizer import ByteLevelDetokenizer
from server.text.echo import Echo, echo_of_text
from server.text.ends import Ends
from server.text.errors import GenerationError
from server.text.generate import ChoiceDelta, Done, Generation, generate
from server.text.prepare import Prepared
from server.text.scores import Scores
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level, sentencepiece_file

LENGTH, STOP, ERROR, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR, FinishReason.ABORT


class Script:
    """A service that plays hand-overs: each a list of (choice, token, finish), or of whole events."""

    def __init__(
        self, *hand_overs: Sequence[tuple[int, int | None, FinishReason | None] | TokenEvent]
    ) -> None:
        self._hand_overs = [list(events) for events in hand_overs]
        self._blocks = 0
        self.aborted: list[int | None] = []
        self.closed = False

    async def submit(self, request: Request) -> Script:
        return self

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        assert reason is (FinishReason.ABORT if index is None else STOP)  # of one, because of its text
        assert request_id == "r"
        self.aborted.append(index)

    async def __anext__(self) -> list[TokenEvent]:
        await asyncio.sleep(0)
        if not self._hand_overs:
            raise StopAsyncIteration
        events = self._hand_overs.pop(0)
        return [event if isinstance(event, TokenEvent) else self._event(*event) for event in events]

    async def aclose(self) -> None:
        self.closed = True

    def _event(self, index: int, token: int | None, finish: FinishReason | None) -> TokenEvent:
        self._blocks += 1  # the peak as of this event, so that a test sees which one was last counted
        kv = KVPeak(blocks=self._blocks, exclusive=1, tokens=2, cached_tokens=32)
        return TokenEvent("r", index, token, finish, kv, "out of memory" if finish is ERROR else None)


def prepared(
    n: int = 1,
    prompts: int = 1,
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    include: bool = False,
    shown_ids: Sequence[int] = (),
    scores: Scores | None = None,
    echo: tuple[Echo, ...] = (),
    empty: bool = False,
) -> Prepared:
    ids = ((5, 6, 7),) * prompts
    scores = scores or Scores()
    request = Request(
        "r", "native", ids, n, 100, SamplingParams(), b"\0" * 32,
        logprobs=scores.output, prompt_logprobs=scores.of_prompt(bool(echo)),
    )  # fmt: skip
    return Prepared(
        request_id="r",
        model="tiny",
        variant="native",
        prompts=ids,
        n=n,
        prompt_tokens=3 * prompts,
        request=None if empty else request,
        ends=Ends(tuple(stops), min_tokens=min_tokens, include=include, shown_ids=frozenset(shown_ids)),
        scores=scores,
        echo=echo,
    )


def script(ids: Sequence[int], finish: FinishReason | None = LENGTH) -> Script:
    """One choice, one token a hand-over, `finish` with the last."""
    return Script(*([(0, token, finish if i == len(ids) - 1 else None)] for i, token in enumerate(ids)))


async def play(service: Script, asked: Prepared, tokenizer: Tokenizer) -> tuple[list[ChoiceDelta], Done]:
    items = [item async for item in await generate(service, asked, tokenizer)]
    *deltas, done = items
    assert isinstance(done, Done)
    assert all(isinstance(delta, ChoiceDelta) for delta in deltas)
    assert service.closed or asked.request is None
    return [delta for delta in deltas if isinstance(delta, ChoiceDelta)], done


def text(deltas: list[ChoiceDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("generate")
    byte_level()(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def sp(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("generate-sp")
    sentencepiece_file()(folder)
    return Tokenizer.from_folder(folder)


async def test_deltas_join_to_the_full_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" world🦙你好")
    deltas, done = await play(script([*ids, 2], STOP), prepared(), tokenizer)
    assert text(deltas) == " world🦙你好" == tokenizer.decode([*ids, 2])
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert [delta.finish_reason for delta in deltas] == [None] * len(ids) + [STOP]
    assert [token for delta in deltas for token in delta.tokens] == [*ids, 2]
    assert done == Done(3, len(ids) + 1, 32, KVPeak(len(ids) + 1, 1, 2, 32))


async def test_what_is_held_at_the_end_is_flushed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦙")[:-1]
    deltas, _ = await play(script(ids), prepared(), tokenizer)
    assert text(deltas) == tokenizer.decode(ids) == "a\ufffd"
    assert deltas[-1].finish_reason is LENGTH


async def test_special_tokens_have_no_text_but_count(tokenizer: Tokenizer) -> None:
    rain = tokenizer.encode("rain")
    deltas, done = await play(script([*rain, 1, *rain, 2], STOP), prepared(stops=["<|im_end|>"]), tokenizer)
    assert text(deltas) == "rainrain"
    assert done.completion_tokens == 2 * len(rain) + 2


async def test_a_stop_id_that_is_a_word_has_no_text(tokenizer: Tokenizer) -> None:
    rain, hill = tokenizer.encode("rain"), tokenizer.encode("hill")
    deltas, done = await play(script([*rain, hill[0]], STOP), prepared(), tokenizer)
    assert text(deltas) == "rain" and done.completion_tokens == len(rain) + 1


@pytest.mark.parametrize(
    ("stops", "want"),
    [
        (["lan"], "seven small "),
        (["n sm"], "seve"),
        (["small lanterns", "even"], "s"),
        (["seven"], ""),
        (["never"], "seven small lanterns"),
    ],
)
async def test_stop_strings_over_several_tokens(tokenizer: Tokenizer, stops: list[str], want: str) -> None:
    # One character a token, so that every stop is cut into pieces.
    ids = [token for char in "seven small lanterns" for token in tokenizer.encode(char)]
    service = script(ids)
    deltas, done = await play(service, prepared(stops=stops), tokenizer)
    assert text(deltas) == want
    hit = stops != ["never"]
    assert deltas[-1].finish_reason is (STOP if hit else LENGTH)
    used = min("seven small lanterns".index(stop) + len(stop) for stop in stops) if hit else len(ids)
    assert done.completion_tokens == used == sum(len(delta.tokens) for delta in deltas)
    assert done.kv.blocks == used  # as of the token that completed the stop
    assert service.aborted == ([0] if hit else [])


async def test_tokens_drawn_after_the_stop_do_not_count(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    service = Script([(0, a, None), (0, b, None), (0, a, None)], [(0, None, ABORT)])
    deltas, done = await play(service, prepared(stops=["b"]), tokenizer)
    assert deltas == [ChoiceDelta(0, "a", (a, b), STOP)]
    assert done.completion_tokens == 2 and done.kv.blocks == 2


async def test_a_stop_in_the_last_token_is_a_stop_and_aborts_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a") + tokenizer.encode("b")
    service = script(ids)
    deltas, _ = await play(service, prepared(stops=["b"]), tokenizer)
    assert text(deltas) == "a" and deltas[-1].finish_reason is STOP and service.aborted == []


@pytest.mark.parametrize(
    ("stops", "min_tokens", "want", "used"),
    [
        (["lan"], 0, "seven small lan", 15),
        (["n sm"], 0, "seven sm", 8),
        (["small lanterns", "even"], 0, "seven", 5),
        (["e"], 3, "seve", 4),  # the first e comes too early
        (["e"], 2, "se", 2),
        (["never"], 0, "seven small lanterns", 20),
    ],
)
async def test_stop_strings_that_belong_to_the_answer(
    tokenizer: Tokenizer, stops: list[str], min_tokens: int, want: str, used: int
) -> None:
    """The text ends with the string, nothing is held back, and usage ends where it does without it."""
    ids = [token for char in "seven small lanterns" for token in tokenizer.encode(char)]
    asked = prepared(stops=stops, min_tokens=min_tokens, include=True)
    deltas, done = await play(script(ids), asked, tokenizer)
    assert [delta.text for delta in deltas] == list(want)
    assert done.completion_tokens == used
    assert deltas[-1].finish_reason is (LENGTH if stops == ["never"] else STOP)


async def test_a_stop_id_that_belongs_to_the_answer(tokenizer: Tokenizer, sp: Tokenizer) -> None:
    rain, hill = tokenizer.encode("rain"), tokenizer.encode("hill")
    deltas, done = await play(script([*rain, hill[0]], STOP), prepared(shown_ids=[hill[0], 2]), tokenizer)
    assert text(deltas) == "rain" + tokenizer.decode(hill[:1]) and done.completion_tokens == len(rain) + 1
    deltas, _ = await play(script([*rain, 2], STOP), prepared(shown_ids=[2]), tokenizer)
    assert text(deltas) == "rain"  # a special token has no text to show
    llama = [byte + 3 for byte in "🦙".encode()]
    deltas, _ = await play(script(llama, STOP), prepared(shown_ids=llama), sp)
    assert text(deltas) == "🦙"


async def test_a_half_stop_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a") + tokenizer.encode("b")
    deltas, _ = await play(script(ids), prepared(stops=["abc"]), tokenizer)
    assert [delta.text for delta in deltas] == ["", "ab"]


async def test_stops_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for min_tokens, want, count in ((0, "", 1), (1, "", 1), (2, "ab", 3), (4, "aba", 4), (5, "abaa", 4)):
        deltas, done = await play(
            script([a, b, a, a]), prepared(stops=["a"], min_tokens=min_tokens), tokenizer
        )
        assert (text(deltas), done.completion_tokens) == (want, count)


async def test_a_stop_inside_a_run_of_byte_tokens(sp: Tokenizer) -> None:
    ids = [*(byte + 3 for byte in "🦙€".encode()), *sp.encode("rain")[1:]]
    deltas, _ = await play(script(ids), prepared(stops=["€"]), sp)
    assert text(deltas) == "🦙" and deltas[-1].finish_reason is STOP
    deltas, _ = await play(script(ids[:7]), prepared(stops=["€"]), sp)  # the run ends with the answer
    assert text(deltas) == "🦙" and deltas[-1].finish_reason is STOP


async def test_choices_are_told_apart_and_merged_by_hand_over(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    service = Script(
        [(0, a, None), (3, b, None), (0, b, None)],
        [(1, a, LENGTH), (2, None, ABORT)],
        [(0, a, LENGTH), (3, 2, STOP)],
    )
    deltas, done = await play(service, prepared(n=2, prompts=2), tokenizer)
    assert deltas == [
        ChoiceDelta(0, "ab", (a, b)),
        ChoiceDelta(3, "b", (b,)),
        ChoiceDelta(1, "a", (a,), LENGTH),
        ChoiceDelta(2, "", (), ABORT),
        ChoiceDelta(0, "a", (a,), LENGTH),
        ChoiceDelta(3, "", (2,), STOP),
    ]
    assert (done.prompt_tokens, done.completion_tokens) == (6, 6)


async def test_one_choices_stop_leaves_the_others(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    service = Script([(0, a, None), (1, b, None)], [(0, None, ABORT), (1, b, None)], [(1, b, LENGTH)])
    deltas, done = await play(service, prepared(n=2, stops=["a"]), tokenizer)
    assert service.aborted == [0]
    assert text(deltas, 0) == "" and text(deltas, 1) == "bbb"
    assert done.completion_tokens == 4


async def test_echo_comes_first_and_is_no_place_for_stops(tokenizer: Tokenizer, sp: Tokenizer) -> None:
    rain, hello = tokenizer.encode("rain"), echo_of_text("Hello ", tokenizer)
    deltas, done = await play(script(rain), prepared(stops=["Hello"], echo=(hello,)), tokenizer)
    assert text(deltas) == "Hello rain" and deltas[0] == ChoiceDelta(0, "Hello ", ())
    assert done.completion_tokens == len(rain)
    deltas, _ = await play(
        script(sp.encode("rain")[1:]), prepared(echo=(echo_of_text("before the", sp),)), sp
    )
    assert text(deltas) == "before the rain"


async def test_nothing_to_generate(tokenizer: Tokenizer) -> None:
    service = Script()
    deltas, done = await play(service, prepared(n=2, empty=True), tokenizer)
    assert deltas == [ChoiceDelta(0, "", (), LENGTH), ChoiceDelta(1, "", (), LENGTH)]
    assert done == Done(3, 0, 0, KVPeak(0, 0, 0, 0))
    deltas, _ = await play(service, prepared(echo=(echo_of_text("Hello", tokenizer),), empty=True), tokenizer)
    assert deltas == [ChoiceDelta(0, "Hello", (), LENGTH)]


async def test_an_engine_error_surfaces_and_ends_the_rest(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    service = Script([(0, a, None), (1, a, None)], [(0, None, ERROR)])
    generation = await generate(service, prepared(n=2), tokenizer)
    assert [await anext(generation), await anext(generation)] == [
        ChoiceDelta(0, "a", (a,)),
        ChoiceDelta(1, "a", (a,)),
    ]
    with pytest.raises(GenerationError, match="out of memory"):
        await anext(generation)
    assert service.aborted == [None] and service.closed
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_what_came_together_with_an_error_is_not_lost(tokenizer: Tokenizer) -> None:
    """A reader that is slow gets tokens and the error in one hand-over: the text first, then the error."""
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    service = Script([(0, a, None), (1, a, None), (0, b, None), (0, None, ERROR), (1, b, None)])
    generation = await generate(service, prepared(n=2), tokenizer)
    assert [await anext(generation), await anext(generation)] == [
        ChoiceDelta(0, "ab", (a, b)),
        ChoiceDelta(1, "ab", (a, b)),
    ]
    assert service.aborted == [None] and service.closed
    with pytest.raises(GenerationError, match="out of memory"):
        await anext(generation)
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_a_detokenizer_that_fails_costs_nothing_that_came_before(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast engine hands over several tokens at once: those before the failure are told."""
    push = ByteLevelDetokenizer.push

    def failing(self: ByteLevelDetokenizer, token: int) -> str:
        if token == ids[2]:
            raise RuntimeError("broken")
        return push(self, token)

    ids = [tokenizer.encode(letter)[0] for letter in "abcd"]
    monkeypatch.setattr(ByteLevelDetokenizer, "push", failing)
    service = Script([(0, token, None) for token in ids])
    generation = await generate(service, prepared(), tokenizer)
    told = await anext(generation)
    assert isinstance(told, ChoiceDelta) and told.finish_reason is None
    assert told.text == "ab"
    with pytest.raises(RuntimeError, match="broken"):
        await anext(generation)
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    assert service.aborted == [None] and service.closed


async def test_a_stream_that_breaks_off_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(GenerationError, match="before it was complete"):
        await play(Script([(0, 5, None)]), prepared(), tokenizer)


async def test_leaving_aborts_once_and_only_what_runs(tokenizer: Tokenizer) -> None:
    service = script([5, 6, 7])
    generation = await generate(service, prepared(), tokenizer)
    await anext(generation)
    await generation.aclose()
    await generation.aclose()
    assert service.aborted == [None] and service.closed
    unread = script([5])
    await (await generate(unread, prepared(), tokenizer)).aclose()  # never iterated
    assert unread.aborted == [None] and unread.closed
    finished = script([5])
    generation = await generate(finished, prepared(), tokenizer)
    assert isinstance(generation, Generation) and [item async for item in generation]
    await generation.aclose()
    assert finished.aborted == []
