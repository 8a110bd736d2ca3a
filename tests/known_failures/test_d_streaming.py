"""D: ids become text. Whatever a token cuts in halves, the client gets whole, once, and nothing else.

CHAIN says exactly what a script says; each answer is asked for whole and streamed, and the two agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from server.text.tokenizer import Tokenizer
from tests.support import checkpoints
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.scripted import (
    BETA,
    EOS,
    HELLO,
    LLAMA,
    NEWLINE,
    NI_HAO,
    WORLD,
    chat,
    complete,
)
from tests.support.server import Served
from tests.support.standing import Known, known_from_reference
from tests.support.tokenizer_folders import edit_json, sentencepiece_file

Serves = Callable[..., Served]
Chain = Callable[..., Path]

# ---- D1: a character split over tokens ---------------------------------------------------------------------

D1 = ((HELLO, WORLD, *LLAMA, EOS), (NEWLINE, *NI_HAO, EOS))
D1_KNOWN = Known([HELLO], " world🦙", 9)


@pytest.fixture
def split(served: Serves, chain: Chain) -> Served:
    return served(chain(*D1), D1_KNOWN)


@pytest.mark.parametrize(
    ("script", "text"),
    [(D1[0], " world🦙"), (D1[1], "你好")],
    ids=["emoji", "chinese"],
)
def test_d1_characters_split_over_tokens(
    split: Served, chain: Chain, script: tuple[int, ...], text: str
) -> None:
    reference = load_reference_tokenizer(chain(*D1))
    assert reference.decode(script[1:], skip_special_tokens=True) == text
    whole, streamed = complete(split, [script[0]])
    assert whole["text"] == text
    assert not any("\ufffd" in delta for delta in streamed.deltas)
    assert whole["usage"]["completion_tokens"] == len(script) - 1
    assert whole["finish"] == "stop"
    if script[0] == NEWLINE:
        assert chat(split)[0]["text"] == text


@pytest.mark.parametrize("tokens", [3, 2], ids=["two thirds", "one third"])
def test_d1_a_character_cut_off_by_the_limit(split: Served, tokens: int) -> None:
    """Half a character at the end is shown as decoding the ids shows it, and only there."""
    whole, streamed = complete(split, [HELLO], max_tokens=tokens)
    assert whole["text"] == " world\ufffd"
    assert whole["finish"] == "length"
    *before, last = [delta for delta in streamed.deltas if delta]  # tokens that come together are one delta
    assert "".join(before) in ("", " world"), "and no mark before the end"
    assert streamed.text == " world\ufffd" and last.endswith("\ufffd")


def test_d1_a_stop_string_that_is_a_split_character(split: Served) -> None:
    """The stop is found although no token holds it, and none of its bytes shows."""
    whole, streamed = complete(split, [HELLO], stop=["🦙"])
    assert (whole["text"], whole["finish"]) == (" world", "stop")
    assert whole["usage"]["completion_tokens"] == 4
    assert "\ufffd" not in streamed.text
    assert complete(split, [NEWLINE], stop=["好"])[0]["text"] == "你"


def test_d1_bytes_that_never_become_a_character(served: Serves, chain: Chain) -> None:
    """A half character and then a word: one mark, and the word is whole (others lost or doubled it)."""
    script = (NEWLINE, WORLD, LLAMA[0], LLAMA[1], BETA, NI_HAO[0], HELLO, EOS)
    folder = chain(script)
    text = load_reference_tokenizer(folder).decode(script[1:], skip_special_tokens=True)
    assert text == " world\ufffdbeta\ufffdHello"
    server = served(folder, Known([NEWLINE], text, 9))
    whole, streamed = complete(server, [NEWLINE])
    assert whole["text"] == streamed.text == text


def test_d1_choices_do_not_share_half_a_character(split: Served) -> None:
    """Several choices, several prompts: each has its own bytes in waiting."""
    body = {"prompt": [[HELLO], [NEWLINE], [HELLO]], "n": 2, "temperature": 0, "max_tokens": 9}
    reply = split.http.post("/v1/completions", json=body)
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert texts == [" world🦙", " world🦙", "你好", "你好", " world🦙", " world🦙"]


# ---- D3: spaces ------------------------------------------------------------------------------------------

D3_TEXTS = ("I am a cat. It's 3.5 !", "x != y and 'ok' .", "two  spaces , n't 'm do n't ?")


def stream_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.detokenizer()
    return "".join([stream.push(token) for token in ids]) + stream.finish()


@pytest.mark.parametrize("clean_up", [None, True, False])
@pytest.mark.parametrize("kind", ["sp", "smol"])
def test_d3_one_by_one_is_the_full_decode_without_clean_up(
    tmp_path: Path, smol: Path, kind: str, clean_up: bool | None
) -> None:
    if kind == "sp":
        sentencepiece_file()(tmp_path)
    else:
        checkpoints.add_tokenizer(tmp_path, smol)
        (tmp_path / "config.json").write_bytes((smol / "config.json").read_bytes())
    edit_json(tmp_path / "tokenizer_config.json", clean_up_tokenization_spaces=clean_up)
    tokenizer, reference = Tokenizer.from_folder(tmp_path), load_reference_tokenizer(tmp_path)
    for text in D3_TEXTS:
        ids = reference(text).input_ids
        want = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert want == text
        assert stream_of(tokenizer, ids) == tokenizer.decode(ids) == want


def test_d3_one_leading_space_is_dropped_at_most(sp_served: Path) -> None:
    """Sentencepiece drops one in front of the text: not two, and none further on."""
    tokenizer, reference = Tokenizer.from_folder(sp_served), load_reference_tokenizer(sp_served)
    space = reference.convert_tokens_to_ids("▁")
    word, rest = tokenizer.encode_rendered("the"), tokenizer.encode_rendered("the rain")
    for ids, text in (
        ([space, *word], " the"),
        ([space, space, *word], "  the"),
        ([space], ""),
        ([1, space, *rest], " the rain"),
        ([space, 1, *word], " the"),
        ([*word, 2, *word, 0, space, *word], "the the  the"),
        ([], ""),
    ):
        want = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert stream_of(tokenizer, ids) == tokenizer.decode(ids) == want == text, ids


def test_d3_echo_is_the_prompt_byte_for_byte(
    served: Serves, chain: Chain, smol: Path, tmp_path: Path
) -> None:
    """Over HTTP too, whatever the checkpoint asks for; what a stream says is what the whole answer says."""
    scripted = chain((HELLO, WORLD, EOS), max_position=512)
    folder = tmp_path / "cleaning"
    folder.mkdir()
    for path in scripted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    edit_json(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    server = served(folder, Known([HELLO], " world", 4))
    for text in ("x != y and 'ok' .", *D3_TEXTS):
        whole, streamed = complete(server, text, echo=True, max_tokens=1)
        assert whole["text"].startswith(text) and streamed.text.startswith(text)
        reply = server.http.post("/v1/completions", json={"prompt": text, "echo": True, "max_tokens": 0})
        assert reply.json()["choices"][0]["text"] == text


def test_d3_a_completion_continues_its_prompt(sp: Served, sp_served: Path) -> None:
    """The space before the first word belongs to the answer, with echo or without, as text or as ids."""
    tokenizer, reference = load_reference_tokenizer(sp_served), load_reference(sp_served)
    spaced = 0
    for prompt in ("The old clockmaker", "My neighbour's cat", "Every second sailor paints", "at half past"):
        ids = tokenizer(prompt).input_ids
        answer = reference.greedy(ids, 6, eos=[2])
        text = tokenizer.decode([*ids, *answer], skip_special_tokens=True).removeprefix(prompt)
        spaced += text.startswith(" ")
        for given in (prompt, ids):
            assert complete(sp, given, max_tokens=6)[0]["text"] == text
            assert complete(sp, given, max_tokens=6, echo=True)[0]["text"] == prompt + text
    assert spaced
    # After marks alone there is nothing to continue: the text begins where decoding the ids begins it.
    answer = reference.greedy([1], 6, eos=[2])
    assert complete(sp, [1], max_tokens=6)[0]["text"] == tokenizer.decode(
        [1, *answer], skip_special_tokens=True
    )


# ---- D5: byte fallback -----------------------------------------------------------------------------------

D5_TEXTS = ("a\nb", "🦙€", "<0x0A>", "<0x0A>\n<0x41>A", "a ▁", "")


@pytest.fixture
def sp(served: Serves, sp_served: Path) -> Served:
    """SP behind a server; what it says to a plain request is transformers' to say."""
    return served(sp_served, known_from_reference(sp_served, "the rain", 6))


@pytest.mark.parametrize("text", D5_TEXTS)
def test_d5_ids_are_the_librarys_and_echo_is_the_input(sp: Served, sp_served: Path, text: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(sp_served / "tokenizer.model"))
    ids = sp.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert ids == [1, *library.encode(text)] == load_reference_tokenizer(sp_served)(text).input_ids
    for tokens in (0, 1):
        for stream in (False, True):
            body = {"prompt": text, "echo": True, "max_tokens": tokens, "temperature": 0, "stream": stream}
            if not stream:
                reply = sp.http.post("/v1/completions", json=body)
                said = reply.json()["choices"][0]["text"]
            else:
                said = complete(sp, text, echo=True, max_tokens=tokens)[1].text
            assert said[: len(text)] == text
            assert tokens or said == text


def test_d5_streamed_bytes_join_into_one_character(tmp_path: Path, served: Serves) -> None:
    """▁ <0xF0> <0x9F> <0xA6> <0x99>, token by token, is one 🦙 in one delta; <0x0A> is a newline."""
    byte = [value + 3 for value in range(256)]
    letter = 300
    folder = checkpoints.make_chain(
        tmp_path,
        (letter, *(byte[value] for value in "🦙".encode()), letter + 1, byte[0x0A], EOS),
        vocab=checkpoints.SP_VOCAB,
        max_position=256,
    )
    checkpoints.add_sentencepiece(folder)
    reference = load_reference_tokenizer(folder)
    script = [*(byte[value] for value in "🦙".encode()), letter + 1, byte[0x0A]]
    text = reference.decode([letter, *script]).removeprefix(reference.decode([letter]))
    assert text.startswith("🦙") and text.endswith("\n")
    server = served(folder, Known([letter], text, 9))
    whole, streamed = complete(server, [letter])
    assert whole["text"] == text
    assert next(delta for delta in streamed.deltas if delta).startswith("🦙")
    assert complete(server, [letter], stop=["\n"])[0]["text"] == text[:-1]


def test_d5_a_vocabulary_without_byte_fallback_leaves_such_pieces_as_text(tmp_path: Path) -> None:
    """`<0x41>` is six characters there, also where the vocabulary holds a piece of that spelling."""
    trainer = {"byte_fallback": False, "vocab_size": 200, "user_defined_symbols": ["<0x41>"]}
    sentencepiece_file(tokenizer_class=None, trainer=trainer)(tmp_path)
    tokenizer, reference = Tokenizer.from_folder(tmp_path), load_reference_tokenizer(tmp_path)
    ids = tokenizer.encode_rendered("a<0x41>a")
    assert ids == reference("a<0x41>a", add_special_tokens=False).input_ids
    assert "<0x41>" in [tokenizer.piece(token) for token in ids]
    assert stream_of(tokenizer, ids) == tokenizer.decode(ids) == reference.decode(ids)
    assert "<0x41>" in tokenizer.decode(ids)


# ---- the fixture itself


def test_chain_follows_its_script_in_transformers_too(tmp_path: Path) -> None:
    """The fixture itself: the reference says the same, by a wide margin."""
    folder = checkpoints.make_chain(tmp_path, (5, 6, 7, 8, 2), vocab=64)
    reference = load_reference(folder)
    assert reference.greedy([5], 9, eos=[2]) == [6, 7, 8, 2]
    best = reference.last_logits([9, 9, 9, 5]).topk(2).values
    assert float(best[0] - best[1]) > 50
