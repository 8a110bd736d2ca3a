"""Every shape of tokenizer folder against transformers' AutoTokenizer, and sentencepiece itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.errors import ModelError
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import FOLDERS, byte_level, edit_json, sentencepiece_file

TEXTS = (
    "",
    " ",
    "I am a cat. It's 3.5 !",
    "  two  spaces ",
    "a\nb\r\n\tc\n\n\n",
    "🦙€",
    "<0x0A>",
    "\u2581x \u2581",
    "hi <s> you</s> x<unk>",
    "你好 日本 é e\u0301 \u212b ﬁ",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<tool> naïve WORD SWORD harbour<sep>  <later><pad> x <late>12345 [PAD]<ctl> <x><cls><image><boi>",
    "The old clockmaker carries seven small lanterns before the rain.\n\n 1234",
    "fin ﬁn final ﬁnal",
    "nul\x00 and \x7f \x04",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Tokenizer, Any]]:
    """Ours and transformers' tokenizer of a named folder, built once."""

    @cache
    def build(name: str) -> tuple[Tokenizer, Any]:
        folder = tmp_path_factory.mktemp(name)
        FOLDERS[name](folder)
        return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)

    return build


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_marks_equal_transformers(name: str, built: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, reference = built(name)
    assert ours.vocab_size == len(reference)
    assert ours.special == reference.special_tokens_map
    assert ours.eos_ids == ({reference.eos_token_id} if reference.eos_token is not None else set())
    for text in TEXTS:
        assert ours.encode(text) == reference(text).input_ids, text
        assert ours.encode_rendered(text) == reference(text, add_special_tokens=False).input_ids, text


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=40))
@pytest.mark.parametrize(
    "name", ["bytes-qwen2", "sp-llama", "sp-legacy", "sp-plain-normalised", "bytes-added"]
)
def test_any_text_gets_transformers_ids(
    name: str, built: Callable[[str], tuple[Tokenizer, Any]], text: str
) -> None:
    ours, reference = built(name)
    assert ours.encode(text) == reference(text).input_ids


@pytest.mark.parametrize("name", FOLDERS)
def test_decode_equals_transformers_without_clean_up(
    name: str, built: Callable[[str], tuple[Tokenizer, Any]]
) -> None:
    ours, reference = built(name)
    for text in TEXTS:
        ids = ours.encode(text)
        for skip in (True, False):
            want = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == want


def test_bos_is_added_once_and_only_where_the_checkpoint_says_so(
    built: Callable[[str], tuple[Tokenizer, Any]],
) -> None:
    bos, _ = built("bytes-bos")
    assert bos.encode("Hello")[:1] == [1] and 1 not in bos.encode("Hello")[1:]
    assert bos.encode_rendered("<|im_start|>Hello").count(1) == 1
    assert bos.encode("") == [1]
    assert built("bytes-plain")[0].encode("Hello") == bos.encode("Hello")[1:]
    # A post-processor in tokenizer.json decides alone; the flags act on tokenizer.model.
    assert built("bytes-bos-flag-ignored")[0].encode("Hello") == built("bytes-plain")[0].encode("Hello")
    assert built("sp-bos-eos")[0].encode("x")[-1] == 2
    assert built("sp-no-bos")[0].encode("") == []


def test_sentencepiece_ids_are_sentencepieces_own(tmp_path: Path) -> None:
    sentencepiece_file()(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.from_folder(tmp_path)
    for text in ("a\nb", "🦙€", "<0x0A>", "I am a cat. It's 3.5 !", "my neighbour's cat forgets"):
        ids = ours.encode(text)
        assert ids == [1, *library.encode(text)]
        assert ours.decode(ids) == text
    # 🦙 is a space and its four bytes; the six characters <0x0A> are not a newline.
    assert [ours.piece(i) for i in ours.encode("🦙")[1:]] == [
        "\u2581",
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
        "<0x99>",
    ]
    assert ours.piece(ours.encode("\n")[-1]) == "<0x0A>"


def test_without_byte_fallback_such_pieces_are_text(built: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, _ = built("sp-plain-no-fallback")
    stream = ours.detokenizer()
    ids = ours.encode_rendered("<0x41>")
    assert "".join(stream.push(token) for token in ids) + stream.finish() == ours.decode(ids) != "A"


def test_ids_beyond_the_vocabulary_decode_to_nothing(built: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, _ = built("bytes-plain")
    hello = ours.encode("Hello")
    assert ours.decode([49_200, *hello, 2**40, -1]) == "Hello"
    assert ours.piece(49_200) is None and ours.piece(-1) is None


def spoil_tokens(name: str, key: str, value: Any, folder: Path) -> None:
    edit_json(folder / name, **{key: value})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json and no tokenizer.model"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: not a tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff{"), "tokenizer.json: not a tokenizer"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text("{"),
            "tokenizer_config.json: not valid JSON",
        ),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "a JSON object is expected"),
        (lambda folder: (folder / "tokenizer_config.json").write_bytes(b"\xff"), "cannot be read as UTF-8"),
        (
            lambda folder: edit_json(
                folder / "tokenizer.json",
                decoder={"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
            ),
            "decoder CTC is not supported",
        ),
        (lambda folder: edit_json(folder / "tokenizer_config.json", eos_token={"a": 1}), "is not a token"),
        (lambda folder: edit_json(folder / "added_tokens.json", **{"<x>": "7"}), "an integer is expected"),
        *(
            (partial(spoil_tokens, name, key, value), f"{name}: {key} is .*a list of tokens or an object")
            for name in ("tokenizer_config.json", "special_tokens_map.json")
            for key in ("extra_special_tokens", "additional_special_tokens")
            for value in (7, True, "<x>")
        ),
        *(
            (
                partial(spoil_tokens, "tokenizer_config.json", "added_tokens_decoder", value),
                "tokenizer_config.json: added_tokens_decoder must be an object of ids and tokens",
            )
            for value in ([], "x", 0, {"a": "<x>"}, {"-1": "<x>"})
        ),
    ],
)
def test_an_unreadable_tokenizer_is_one_line_that_names_the_file(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    byte_level()(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_no_special_tokens_at_all(tmp_path: Path) -> None:
    byte_level()(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key in ("extra_special_tokens", "additional_special_tokens"):
            for nothing in ([], {}):
                spoil_tokens(name, key, nothing, tmp_path)
                assert Tokenizer.from_folder(tmp_path).special["eos_token"]


@pytest.mark.parametrize("size", [0, 1, 100, 3000])
def test_a_cut_sentencepiece_file_is_one_line(tmp_path: Path, size: int) -> None:
    sentencepiece_file()(tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="not a sentencepiece model") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.model
def test_the_default_model(smol: Path) -> None:
    ours, reference = Tokenizer.from_folder(smol), AutoTokenizer.from_pretrained(smol)
    assert ours.encode("Hello world🦙") == [19556, 905, 10813, 116, 243]
    assert ours.eos_ids == {2}
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == reference(text).input_ids
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert len(ids) >= ours.min_tokens(text.encode())
