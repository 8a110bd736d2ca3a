"""W5, W6: what ends an answer, from three files that disagree; rows of the model that no token has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.text.tokenizer import Tokenizer
from tests.support import checkpoints
from tests.support.checkpoints import edit_config
from tests.support.command import InProcess, check_one_line
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.scripted import EOS, HELLO, NEWLINE, WORLD, chat, complete
from tests.support.server import Served
from tests.support.standing import Known
from tests.support.tokenizer_folders import edit_json, write_json

Serves = Callable[..., Served]
Chain = Callable[..., Path]

# ---- W5: several end marks, from three files

END = 0  # <|endoftext|>: an end mark where a file says so, else one token more
GENERATION = "generation_config.json"
EMPTY: dict[str, Any] = {}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """CHAIN with a small tokenizer: newline, b, <|endoftext|>, w, <|im_end|>, and those ids."""
    folder = checkpoints.add_byte_bpe(tmp_path_factory.mktemp("letters"))
    newline, b, w = Tokenizer.from_folder(folder).encode("\nbw")
    script = [newline, b, END, w, EOS]
    checkpoints.make_chain(folder, script, vocab=checkpoints.BPE_VOCAB, max_position=512)
    return folder, script


@pytest.fixture
def ending(letters: tuple[Path, list[int]], tmp_path: Path) -> Callable[..., Path]:
    """`ending(config, generation, tokenizer)`: a copy whose three files name these end marks; None for
    `generation` is no generation_config.json."""

    def build(config: Any, generation: Any = None, tokenizer: str = "<|im_end|>") -> Path:
        folder = shutil.copytree(letters[0], tmp_path / "ending")
        edit_config(folder, {"eos_token_id": config})
        edit_json(folder / "tokenizer_config.json", eos_token=tokenizer)
        if generation is not None:
            write_json(folder / GENERATION, generation)
        return folder

    return build


SOURCES: dict[str, dict[str, Any]] = {
    "generation_config.json alone": {"config": EOS, "generation": {"eos_token_id": [EOS, END]}},
    "generation_config.json, one id": {"config": EOS, "generation": {"eos_token_id": END}},
    "config.json alone": {"config": [EOS, END]},
    "config.json, others elsewhere": {"config": END, "generation": {"eos_token_id": [EOS]}},
    "the tokenizer alone": {"config": EOS, "tokenizer": "<|endoftext|>"},
    "the tokenizer, a list elsewhere": {
        "config": [EOS, 77], "generation": {"eos_token_id": [88]}, "tokenizer": "<|endoftext|>"
    },
    "ids that no token has": {"config": [-1, 10**6, END], "generation": {"eos_token_id": [-1, 384]}},
    "nothing but config.json": {"config": END, "generation": EMPTY},
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_w5_any_end_mark_of_any_file_ends(
    served: Serves, ending: Callable[..., Path], letters: tuple[Path, list[int]], source: str
) -> None:
    newline, _, _, w, _ = letters[1]
    server = served(ending(**SOURCES[source]), Known([newline], "b", 9))
    for whole, streamed in (complete(server, [newline]), chat(server)):
        assert (whole["text"], whole["finish"]) == ("b", "stop")
        assert whole["usage"]["completion_tokens"] == 2
        assert not any("<|" in delta for delta in streamed.deltas)
    # ignore_eos ignores every one of them, and nothing of them shows.
    whole, _ = complete(server, [newline], ignore_eos=True, max_tokens=4)
    assert (whole["text"], whole["finish"]) == ("bw", "length")
    assert whole["usage"]["completion_tokens"] == 4
    # What the client names ends all the same.
    whole, _ = complete(server, [newline], ignore_eos=True, stop_token_ids=[w])
    assert (whole["text"], whole["finish"], whole["usage"]["completion_tokens"]) == ("b", "stop", 3)


def test_w5_what_no_file_names_does_not_end(
    served: Serves, ending: Callable[..., Path], letters: tuple[Path, list[int]]
) -> None:
    newline = letters[1][0]
    server = served(ending(EOS), Known([newline], "bw", 9))
    whole, _ = complete(server, [newline])
    assert (whole["text"], whole["finish"]) == ("bw", "stop")


def test_w5_end_marks_stay_when_the_sampling_does_not(
    served: Serves, ending: Callable[..., Path], letters: tuple[Path, list[int]]
) -> None:
    """`--generation-config none` is about sampling; the marks of the file end answers as before."""
    newline = letters[1][0]
    sampling = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.1}
    folder = ending(EOS, {"eos_token_id": [EOS, END], **sampling})
    for choice in ("none", "auto"):
        server = served(folder, Known([newline], "b", 9), generation_config=choice)
        assert complete(server, [newline])[0]["text"] == "b"


@pytest.mark.parametrize("wrong", ["2", True, [EOS, "0"], 1.5, {"id": 2}])
@pytest.mark.parametrize("name", ["config.json", GENERATION])
def test_w5_an_end_mark_that_is_no_id(
    ending: Callable[..., Path], here: InProcess, name: str, wrong: Any
) -> None:
    folder = ending(EOS, EMPTY)
    edit_config(folder, {"eos_token_id": wrong}, name=name)
    check_one_line(here("serve", str(folder), "--kv-memory", "8MiB"), name, "eos_token_id")


@pytest.fixture
def rand_with(rand: Path, tmp_path: Path) -> Callable[..., Path]:
    """`rand_with(...)`: RAND with this generation_config.json."""

    def build(**generation: Any) -> Path:
        folder = shutil.copytree(rand, tmp_path / "rand")
        write_json(folder / GENERATION, generation)
        return folder

    return build


PROMPT = [
    40,
    40,
    40,
    700,
    700,
    18637,
    18526,
    4233,
    23480,
    5705,
    47681,
    40,
    40,
    40,
    700,
    700,
]  # it repeats itself


def asked(server: Served, **fields: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **fields}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def greedy(rand: Path, penalty: float = 1.0) -> str:
    """transformers' answer to PROMPT."""
    import torch

    reference = load_reference(rand)
    ids = torch.tensor([PROMPT])
    said = reference.model.generate(
        ids, max_new_tokens=12, do_sample=False, repetition_penalty=penalty, eos_token_id=None, pad_token_id=0
    )
    tokenizer = load_reference_tokenizer(rand)
    return str(tokenizer.decode(said[0, len(PROMPT) :], skip_special_tokens=True))


def test_w5_recommended_sampling_holds_where_a_request_says_nothing(
    served: Serves, rand: Path, rand_known: Known, rand_with: Callable[..., Path]
) -> None:
    """One rule: a request's own word, then the file's, then OpenAI's default; `none` leaves the file out."""
    folder = rand_with(do_sample=False, temperature=None, top_p=None)
    server = served(folder, rand_known, generation_config="auto")
    plain = greedy(rand)
    assert asked(server) == plain
    assert asked(server, temperature=2.0, seed=1) != plain
    server = served(folder, rand_known, generation_config="none")
    assert asked(server, seed=1) != plain, "temperature 1 of another seed"
    assert asked(server, temperature=0) == plain


def test_w5_each_recommendation_is_the_field_of_its_name(
    served: Serves, rand_known: Known, rand_with: Callable[..., Path]
) -> None:
    """Saying nothing draws as saying the file's numbers does; with `none`, as OpenAI's defaults do."""
    recommended = {"temperature": 1.9, "top_p": 0.6, "top_k": 30, "min_p": 0.001}
    folder = rand_with(do_sample=True, **recommended)
    auto = served(folder, rand_known, generation_config="auto")
    off = served(folder, rand_known, generation_config="none")
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    wild = {**plain, "temperature": 1.9}
    for seed in (1, 2, 3):
        assert asked(auto, seed=seed) == asked(off, seed=seed, **recommended)
        assert asked(off, seed=seed) == asked(auto, seed=seed, **plain)
        assert asked(auto, seed=seed) != asked(auto, seed=seed, **wild), "top_p, top_k and min_p cut"


def test_w5_recommended_penalties_are_transformers(
    served: Serves, rand: Path, rand_with: Callable[..., Path]
) -> None:
    """They hold for greedy answers too, and equal those that a request names itself."""
    folder = rand_with(do_sample=False, repetition_penalty=1.8)
    penalised = greedy(rand, 1.8)
    assert penalised != greedy(rand)
    known = Known(PROMPT, penalised, 12)
    server = served(folder, known, generation_config="auto")
    assert asked(server) == asked(server, temperature=0) == penalised
    assert asked(server, repetition_penalty=1.0) == greedy(rand)


def test_w5_recommendations_that_ask_for_nothing_or_too_much(
    served: Serves, rand_known: Known, rand_with: Callable[..., Path], here: InProcess
) -> None:
    """top_k -1 is what a request may say for all; a temperature that none may have is told at the start."""
    folder = rand_with(top_k=-1, top_p=1.0, temperature=1.0, max_length=20, max_new_tokens=5, do_sample=True)
    server = served(folder, rand_known)
    assert len(asked(server, temperature=0)) > 0
    write_json(folder / GENERATION, {"temperature": 7.5})
    check_one_line(here("serve", str(folder), "--kv-memory", "8MiB"), "temperature is 7.5", GENERATION)


# ---- W6: rows beyond the tokenizer

ROWS, UNNAMED = 49280, 49200


@pytest.fixture
def padded(served: Serves, chain: Chain) -> Served:
    return served(chain((NEWLINE, HELLO, UNNAMED, WORLD, EOS), vocab=ROWS), Known([HELLO], " world", 9))


def test_w6_a_row_that_no_token_has_is_no_text_and_counts(padded: Served, smol: Path) -> None:
    tokenizer = load_reference_tokenizer(smol)
    assert tokenizer.decode([UNNAMED, WORLD]) == " world"
    for (whole, streamed), said, tokens in (
        (complete(padded, [HELLO]), " world", 3),
        (chat(padded), "Hello world", 4),
        (complete(padded, [HELLO], max_tokens=1), "", 1),
        (complete(padded, [HELLO, UNNAMED], echo=True, max_tokens=2), "Hello world", 2),
    ):
        assert whole["text"] == streamed.text == said
        assert whole["usage"]["completion_tokens"] == tokens
    reply = padded.http.post("/detokenize", json={"tokens": [HELLO, UNNAMED, WORLD]})
    assert reply.json()["prompt"] == "Hello world"


def test_w6_such_a_row_has_scores_and_takes_a_bias(padded: Served) -> None:
    body = {"prompt": [HELLO], "temperature": 0, "max_tokens": 9, "logprobs": 5}
    for stream in (False, True):
        reply = padded.http.post("/v1/completions", json=body | {"stream": stream})
        assert reply.status_code == 200, reply.text
    choice = padded.http.post("/v1/completions", json=body).json()["choices"][0]
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == 3
    assert all(-1e-3 < score <= 0 for score in scores["token_logprobs"])
    chatted = {"messages": [{"role": "user", "content": "Say it."}], "temperature": 0, "max_tokens": 9}
    reply = padded.http.post("/v1/chat/completions", json={**chatted, "logprobs": True, "top_logprobs": 5})
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and content[1]["bytes"] == []
    # Lifted by 100 nats where 128 are between, it does not come; pushed down where it leads, another does.
    biased = {"prompt": [WORLD], "temperature": 0, "max_tokens": 1, "logit_bias": {str(UNNAMED): 100}}
    assert padded.http.post("/v1/completions", json=biased).status_code == 200
    whole, _ = complete(padded, [HELLO], logit_bias={str(UNNAMED): -100}, max_tokens=1, logprobs=1)
    assert whole["usage"]["completion_tokens"] == 1
    for row, status in ((ROWS - 1, 200), (ROWS, 400)):
        reply = padded.http.post("/v1/completions", json={**body, "logit_bias": {str(row): 1}})
        assert reply.status_code == status, reply.text
        reply = padded.http.post("/v1/completions", json={**body, "stop_token_ids": [row]})
        assert reply.status_code == status, reply.text
    whole, _ = complete(padded, [HELLO], stop_token_ids=[UNNAMED])
    assert (whole["text"], whole["finish"], whole["usage"]["completion_tokens"]) == ("", "stop", 1)
