"""T: a conversation becomes the prompt that the checkpoint was trained on, or a 400 that says why not."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jinja2.exceptions import TemplateError

from tests.support.reference import load_reference_tokenizer
from tests.support.server import Served
from tests.support.standing import Known, known_from_reference
from tests.support.tokenizer_folders import edit_json
from tests.support.vocabularies import CHATML

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]

Serves = Callable[..., Served]
Folder = Callable[..., Path]
Message = dict[str, Any]


@pytest.fixture(scope="module")
def templated(tiny_served: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """`templated(template)`: the tiny checkpoint with another `chat_template` (None: with none)."""

    def build(template: Any) -> Path:
        folder = shutil.copytree(tiny_served, tmp_path_factory.mktemp("template") / "model")
        edit_json(folder / "tokenizer_config.json", chat_template=template)
        return folder

    return build


@pytest.fixture(scope="module")
def known(tiny_served: Path) -> Known:
    return known_from_reference(tiny_served, "The old clockmaker", 6)


def switch(templates: dict[str, str]) -> str:
    """One template of many: the role of the first message says which."""
    cases = (f"{{% if messages[0].role == '{role}' %}}{one}{{% endif %}}" for role, one in templates.items())
    return "".join(cases)


def said(server: Served, messages: Any, status: int, stream: bool = False, **fields: Any) -> Any:
    """The JSON of a chat's answer; an error is JSON in OpenAI's shape, streamed or not."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "stream": stream} | fields
    reply = server.http.post(CHAT, json=body)
    assert reply.status_code == status, reply.text
    if status == 200 and stream:
        return reply.text
    assert reply.headers["content-type"] == "application/json"
    if status == 200:
        return reply.json()
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def ids_of(server: Served, messages: Any) -> list[int]:
    """The prompt of a chat, as /tokenize tells it."""
    reply = server.http.post("/tokenize", json={"messages": messages})
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["tokens"]
    return ids


# ---- T1: the template refuses ------------------------------------------------------------------------------

STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)

T1: dict[str, tuple[list[Message], str]] = {
    "system": ([{"role": "system", "content": "Be brief."}, *HELLO], "System role not supported"),
    "two user turns": ([*HELLO, *HELLO], "Conversation roles must alternate user/assistant/"),
    "role foo": ([{"role": "foo", "content": "x"}], "Unexpected message role."),
    "role developer": ([{"role": "developer", "content": "x"}, *HELLO], "Unexpected message role."),
    "role tool": ([*HELLO, {"role": "tool", "content": "x"}], "Unexpected message role."),
    "an assistant first": ([{"role": "assistant", "content": "x"}], "Conversation roles must alternate"),
}


@pytest.fixture(scope="module")
def strict(templated: Folder) -> Path:
    return templated(STRICT)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", T1)
def test_t1_a_refusal_of_the_template_is_a_400_in_its_words(
    served: Serves, strict: Path, known: Known, case: str, stream: bool
) -> None:
    messages, words = T1[case]
    with pytest.raises(TemplateError, match=words[:20]):
        load_reference_tokenizer(strict).apply_chat_template(messages, tokenize=False)
    server = served(strict, known)
    error = said(server, messages, 400, stream)
    assert words in error["message"]
    assert (error["param"], error["code"]) == ("messages", "chat_template_error")
    said(server, HELLO, 200, stream)  # and the template is as good as before


FAULTY = {
    "a name that is not there": ("{{ messages[0].name.first }}", "UndefinedError"),
    "a division": ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
    "text and number": ("{{ messages[0].content + 1 }}", "TypeError"),
    "a call of nothing": ("{{ messages[0].content.nothing() }}", "UndefinedError"),
    "an index": ("{{ messages[7].role }}", "UndefinedError"),
}


def test_t1_a_template_that_fails_is_a_400_too(served: Serves, templated: Folder, known: Known) -> None:
    """Not only what it raises itself."""
    server = served(templated(switch({case: one for case, (one, _) in FAULTY.items()})), known)
    for case, (_, words) in FAULTY.items():
        for stream in (False, True):
            error = said(server, [{"role": case, "content": "Hello"}], 400, stream)
            assert error["code"] == "chat_template_error"
            assert words in error["message"], error


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{{ m.content }", "{{ messages | nothing }}"],
    ids=["syntax", "a filter"],
)
def test_t1_a_template_that_does_not_compile(
    served: Serves, templated: Folder, known: Known, template: str
) -> None:
    """The server starts, and completions do not care."""
    error = said(served(templated(template), known), HELLO, 400)
    assert error["code"] == "chat_template_error"
    assert "does not compile" in error["message"]


def test_t1_a_template_that_writes_nothing(served: Serves, templated: Folder, known: Known) -> None:
    """No token at all is no prompt."""
    error = said(served(templated("{# nothing #}"), known), HELLO, 400)
    assert "at least one token" in error["message"]


# ---- T2: content in parts ----------------------------------------------------------------------------------


def part(text: Any) -> Message:
    return {"type": "text", "text": text}


@pytest.fixture
def chatty(served: Serves, tiny_served: Path, known: Known) -> Served:
    return served(tiny_served, known)


@pytest.mark.parametrize(
    ("parts", "same"),
    [
        ([part("Hello")], "Hello"),
        ([part("Hello"), part("harbour")], "Hello\nharbour"),
        ([part(""), part("a"), part("")], "\na\n"),
        ([part("a\nb"), part(" c ")], "a\nb\n c "),
        ([{**part("Hello"), "cache_control": {"type": "ephemeral"}}], "Hello"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_t2_text_parts_are_the_text_joined_by_newlines(
    chatty: Served, role: str, parts: list[Message], same: str
) -> None:
    answers = []
    for content in (parts, same):
        messages = [{"role": role, "content": content}, *HELLO]
        answers.append(said(chatty, messages, 200))
        assert said(chatty, messages, 200, stream=True).endswith("data: [DONE]\n\n")
    ours, plain = answers
    assert ours["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert ours["choices"] == plain["choices"]
    ids = ids_of(chatty, [{"role": role, "content": parts}])
    assert ids == ids_of(chatty, [{"role": role, "content": same}])


NO_TEXT: list[Any] = [
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
    [part("What is this?"), {"type": "image_url", "image_url": {"url": "x"}}],
    [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
    [{"type": "file", "file": {"file_id": "x"}}],
    [{"type": "refusal", "refusal": "no"}],
    [{"type": "input_text", "text": "x"}],
    [],
    [{"type": "text"}],
    [part(None)],
    [part(1)],
    [part(["x"])],
    [{"text": "x"}],
    [None],
    ["Hello"],
    [["Hello"]],
    {},
    part("Hello"),
    None,
    5,
    True,
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_t2_what_is_no_text_is_refused(chatty: Served, stream: bool) -> None:
    for content in NO_TEXT:
        error = said(chatty, [{"role": "user", "content": content}], 400, stream)
        assert error["param"] == "messages[0].content", (content, error)
        assert len(error["message"]) < 300
    for messages in ([], [{}], [{"role": "user"}], [{"content": "x"}], "Hello", [None], [[]], {}, None):
        error = said(chatty, messages, 400, stream)
        assert str(error["param"]).startswith("messages"), (messages, error)


# ---- T4: BOS once, EOS never -------------------------------------------------------------------------------

MARKED = "{{ bos_token }}" + CHATML


def with_bos(folder: Path) -> Path:
    """A post-processor that adds <|endoftext|> in front, as Llama 3's tokenizer.json has it."""
    marks = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    bos, text = (
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    pair = [bos, text, {"Sequence": {"id": "B", "type_id": 1}}]
    edit_json(
        folder / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": pair,
            "special_tokens": marks,
        },
    )
    edit_json(folder / "tokenizer_config.json", bos_token="<|endoftext|>")
    return folder


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_t4_one_bos_and_no_eos(
    served: Serves, templated: Folder, sp_served: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "tokenizer.json":
        folder, bos, eos = with_bos(templated(MARKED)), 0, 2
    else:
        folder, bos, eos = shutil.copytree(sp_served, tmp_path / "sp"), 1, 2
        edit_json(folder / "tokenizer_config.json", chat_template=MARKED, add_eos_token=None)
    reference = load_reference_tokenizer(folder)
    server = served(folder, known_from_reference(folder, "the rain", 6))

    chat = reference.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert ids_of(server, HELLO) == chat and chat.count(bos) == 1
    assert said(server, HELLO, 200)["usage"]["prompt_tokens"] == len(chat)

    text = "by the harbour wall"
    ids = reference(text).input_ids
    assert ids[0] == bos and ids.count(bos) == 1 and eos not in ids
    for prompt, tokens in (
        (text, len(ids)),
        (ids, len(ids)),
        (ids[1:], len(ids) - 1),
        ([bos, *ids], len(ids) + 1),
    ):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
        reply = server.http.post("/v1/completions", json=body).json()
        assert reply["usage"]["prompt_tokens"] == tokens
        if prompt is text:
            from_text = reply["choices"]
        elif prompt is ids:
            assert reply["choices"] == from_text
    # A prompt that names the mark itself gets it twice, as from the tokenizer: no guess is made.
    marked = reference.bos_token + text
    reply = server.http.post("/tokenize", json={"prompt": marked}).json()["tokens"]
    assert reply == reference(marked).input_ids and reply.count(bos) == 2
    bare = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert bare == ids[1:]


# ---- T5: where the template is -----------------------------------------------------------------------------

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "LIST" + CHATML}]


def place(folder: Path, file: str | None = None, key: Any = None) -> Path:
    edit_json(folder / "tokenizer_config.json", chat_template=key)
    if file is not None:
        (folder / "chat_template.jinja").write_text(file, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "where",
    [
        {"file": "FILE" + CHATML},
        {"key": NAMED},
        {"file": "FILE" + CHATML, "key": "KEY" + CHATML},
        {"key": CHATML},
    ],
    ids=["the file alone", "a list of named ones", "file and key", "the key alone"],
)
def test_t5_the_template_is_the_one_transformers_takes(
    served: Serves, templated: Folder, known: Known, where: dict[str, Any]
) -> None:
    folder = place(templated(None), **where)
    server = served(folder, known)
    reference = load_reference_tokenizer(folder)
    for messages in (HELLO, [{"role": "system", "content": "Be brief."}, *HELLO]):
        want = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids_of(server, messages) == want
        assert said(server, messages, 200)["usage"]["prompt_tokens"] == len(want)


@pytest.mark.parametrize(
    "key", [None, [], [{"name": "tool_use", "template": "x"}]], ids=["none", "empty", "named"]
)
def test_t5_a_model_without_a_template_cannot_chat_and_says_so(
    served: Serves, templated: Folder, known: Known, key: Any
) -> None:
    """It starts, completions work, and no template is made up."""
    server = served(place(templated(None), key=key), known)
    for stream in (False, True):
        error = said(server, HELLO, 400, stream)
        assert error["code"] == "chat_template_missing"
        assert "/v1/completions" in error["message"]
    reply = server.http.post("/tokenize", json={"messages": HELLO})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "chat_template_missing")


# ---- T6: hostile templates ---------------------------------------------------------------------------------

HOSTILE = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "a large range": "{% for i in range(10**9) %}{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a huge text": "{{ 'a'*10**10 }}",
    "a changed list": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.fixture(scope="module")
def hostile(templated: Folder) -> Path:
    return templated(switch(HOSTILE))


@pytest.fixture
def polled() -> Iterator[Callable[[Served], list[float]]]:
    """Asks /health again and again until the test ends; the list holds how long each answer took."""
    done = threading.Event()
    threads: list[threading.Thread] = []

    def begin(server: Served) -> list[float]:
        took: list[float] = []

        def poll() -> None:
            with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as http:
                while not done.is_set():
                    started = time.perf_counter()
                    assert http.get("/health").status_code == 200
                    took.append(time.perf_counter() - started)
                    done.wait(0.05)

        threads.append(threading.Thread(target=poll))
        threads[-1].start()
        return took

    yield begin
    done.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("case", HOSTILE)
def test_t6_a_hostile_template_runs_nothing_and_holds_up_nobody(
    served: Serves, hostile: Path, known: Known, polled: Callable[[Served], list[float]], case: str
) -> None:
    server = served(hostile, known)
    took = polled(server)
    begin = time.perf_counter()
    error = said(server, [{"role": case, "content": "Hello"}], 400, stream=True)
    assert error["code"] == "chat_template_error"
    assert "class '" not in error["message"] and "root:" not in error["message"]
    assert len(took) >= int((time.perf_counter() - begin) / 0.5), "health waited for the template"
    assert max(took, default=0) < 1


VEILED = (
    "{{ ''|attr('__class__') }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}']|map('format', messages)|join }}",
    "{{ messages|map(attribute='__class__')|join }}",
    "{{ (messages|groupby('__class__'))|length }}",
)


def test_t6_what_the_sandbox_hides_is_hidden_by_every_way(
    served: Serves, templated: Folder, known: Known
) -> None:
    """Ways round the attribute lookup, one of them fixed in jinja 3.1.5: an error, or nothing to be seen."""
    server = served(templated("safe" + switch({f"r{i}": way for i, way in enumerate(VEILED)})), known)
    for index, way in enumerate(VEILED):
        messages = [{"role": f"r{index}", "content": "x"}]
        reply = server.http.post("/tokenize", json={"messages": messages})
        if reply.status_code == 200:
            text = server.http.post("/detokenize", json={"tokens": reply.json()["tokens"]}).json()["prompt"]
            assert text in ("safe", "safe1", "safe{0.__class__}"), (way, text)
        else:
            assert reply.json()["error"]["code"] == "chat_template_error", (way, reply.text)


def test_t6_a_request_brings_no_template(chatty: Served) -> None:
    """Off, not ignored: a client that sends one would get another answer than it asked for."""
    for field, value in (("chat_template", "{{ ''.__class__ }}"), ("chat_template_kwargs", {"a": 1})):
        error = said(chatty, HELLO, 400, **{field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    said(chatty, HELLO, 200, chat_template=None, chat_template_kwargs={})
