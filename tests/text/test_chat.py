"""Rendered chats against transformers' apply_chat_template; refusals are RequestErrors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from model.errors import ModelError
from server.text.chat import ChatTemplate
from server.text.errors import RequestError
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level, edit_json
from tests.support.vocabularies import CHATML

MESSAGES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "<b>&'\"\n你好 🦙"}],
    [
        {"role": "user", "content": "One?", "name": "ann"},
        {"role": "assistant", "content": "Two.", "reasoning": "1 + 1", "name": None},
        {"role": "user", "content": ""},
    ],
)

EACH = "{% for m in messages %}"

TEMPLATES = {
    "chatml": CHATML,
    "marks": "{{ bos_token }}" + EACH + "{{ m.content }}{{ eos_token }}{% endfor %}{{ unk_token }}",
    "blocks": EACH
    + "\n  {% if m.role == 'user' %}\n  u: {{ m.content | trim }}\n  {% endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}"
    "|{{ {'é': 1} | tojson(ensure_ascii=true) }}",
    "loops": EACH + "{% if loop.index0 == 1 %}{% break %}{% endif %}{% if not m.content %}"
    "{% continue %}{% endif %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, self=3) %}"
    + EACH
    + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.self }}",
    "nulls": EACH + "{{ m.name is defined }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "variables": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"
    "{{ pad_token }}{{ sep_token is defined }}",
    "date": "{{ strftime_now('%Y') }}",
    "generation": EACH + "{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{{ x is defined }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['k'], 2) }}",
}


def folder_with(folder: Path, template: Any) -> Path:
    byte_level(chat_template=template)(folder)
    return folder


async def render(folder: Path, messages: Sequence[dict[str, Any]]) -> str:
    chat = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder).special)
    try:
        return await chat.render(messages)
    finally:
        await chat.close()


async def refusal(folder: Path, messages: Sequence[Any] = MESSAGES[0]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await render(folder, messages)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", TEMPLATES)
async def test_renders_as_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATES[name])
    reference = AutoTokenizer.from_pretrained(folder)
    special = Tokenizer.from_folder(folder).special
    chat = ChatTemplate.from_folder(folder, special)
    for messages in MESSAGES:
        want = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert await chat.render(messages) == want
    await chat.close()


async def test_chat_ids_have_the_bos_once(tmp_path: Path) -> None:
    post = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    byte_level(post_processor=post, chat_template=TEMPLATES["marks"])(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode_rendered(await render(tmp_path, MESSAGES[0]))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert ids == reference.apply_chat_template(MESSAGES[0], add_generation_prompt=True, return_dict=False)
    assert ids.count(1) == 1 and tokenizer.encode("Hello").count(1) == 1


async def test_text_parts_are_joined_by_a_newline(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CHATML)

    async def prompt(content: Any) -> str:
        return await render(folder, [{"role": "user", "content": content}])

    def part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    assert await prompt([part("Hello")]) == await prompt("Hello")
    assert await prompt([part("a"), part("b"), part("")]) == await prompt("a\nb\n")


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        (["hi"], "messages[0]", "an object"),
        ([{"content": "x"}], "messages[0].role", "non-empty string"),
        ([{"role": "", "content": "x"}], "messages[0].role", "non-empty string"),
        ([{"role": 5, "content": "x"}], "messages[0].role", "non-empty string"),
        ([{"role": "user"}], "messages[0].content", "a string or"),
        ([{"role": "user", "content": None}], "messages[0].content", "a string or"),
        ([{"role": "user", "content": 7}], "messages[0].content", "a string or"),
        ([{"role": "user", "content": []}], "messages[0].content", "non-empty list"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content", "[0]: a part like"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "[0]: a part like"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content", "a part like"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content",
            "'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "x" * 10**5}]}],
            "messages[0].content",
            "xxx'... (100000 characters)",
        ),
        (
            [{"role": "user", "content": [{"type": {"a": 1}}]}],
            "messages[0].content",
            "this is an object with 1 entry",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls", "not supported"),
        ([{"role": "user", "content": "\ud800"}], "messages", "surrogate"),
    ],
)
async def test_malformed_messages_are_refused(tmp_path: Path, messages: Any, param: str, says: str) -> None:
    error = await refusal(folder_with(tmp_path, CHATML), messages)
    assert error.param == param
    assert says in error.message


async def test_the_templates_own_refusal_is_the_message(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    folder = folder_with(tmp_path, template)
    user = {"role": "user", "content": "a"}
    error = await refusal(folder, [{"role": "system", "content": "s"}, user])
    assert error.message.endswith("System role not supported") and error.code == "chat_template_error"
    assert (await refusal(folder, [user, user])).message.endswith("Roles must alternate")
    assert (await refusal(folder, [{"role": "foo", "content": ""}])).message.endswith("Roles must alternate")


async def test_a_base_model_says_that_it_cannot_chat(tmp_path: Path) -> None:
    error = await refusal(folder_with(tmp_path, None))
    assert error.code == "chat_template_missing"
    assert "no chat template" in error.message and "/v1/completions" in error.message


async def test_where_the_template_may_be(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from the list"}]
    folder = folder_with(tmp_path, named)
    assert await render(folder, MESSAGES[0]) == "from the list"
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    error = await refusal(folder)
    assert "rag" in error.message and "`default`" in error.message
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert await render(folder, MESSAGES[0]) == "from the file"
    reference = AutoTokenizer.from_pretrained(folder)
    assert reference.apply_chat_template(MESSAGES[0], tokenize=False) == "from the file"


def test_a_template_of_the_wrong_shape_is_a_start_up_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CHATML)
    for wrong in (5, [{"name": "default"}], [{"name": "default", "template": 1}], "chat"[:0] or ["x"]):
        edit_json(folder / "tokenizer_config.json", chat_template=wrong)
        with pytest.raises(ModelError, match="chat_template must be"):
            ChatTemplate.from_folder(folder, {})


async def test_the_worker_is_there_before_the_first_chat(tmp_path: Path) -> None:
    chat = ChatTemplate.from_folder(folder_with(tmp_path, CHATML), {})
    assert await chat.start() is None
    worker = chat.worker_pid
    await chat.render(MESSAGES[0])
    assert chat.worker_pid == worker is not None
    await chat.close()
    assert chat.worker_pid is None


async def test_a_broken_template_leaves_the_rest_alone(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "{% if %}")
    chat = ChatTemplate.from_folder(folder, {})
    assert "does not compile" in str(await chat.start())
    with pytest.raises(RequestError, match="does not compile"):
        await chat.render(MESSAGES[0])
    await chat.close()


@pytest.mark.model
async def test_the_default_model(smol: Path) -> None:
    reference = AutoTokenizer.from_pretrained(smol)
    for messages in MESSAGES:
        want = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert await render(smol, messages) == want
