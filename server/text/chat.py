"""Messages to the text that the model was trained on, by the checkpoint's own template.

Equal to transformers' `apply_chat_template(messages, add_generation_prompt=True, tokenize=False)`; the
template itself runs in `server.text.template_worker`. A content that is a list of text parts is joined with
newlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.errors import ModelError
from server.text.errors import RequestError, shown
from server.text.files import read_object, read_text
from server.text.template_process import TemplateFailure, TemplateLimits, TemplateProcess

PART_SEPARATOR = "\n"
"""What stands between two text parts of one message."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message may carry its reasoning; templates read the first, some the second."""


class ChatTemplate:
    """A checkpoint's chat template, or the reason why there is none."""

    def __init__(
        self, template: str | None, special: Mapping[str, str], limits: TemplateLimits, missing: str = ""
    ) -> None:
        """`special`: role (`bos_token`, ...) to text; `missing` says why `template` is None."""
        self._process = TemplateProcess(template, limits) if template is not None else None
        self._special = dict(special)
        self._missing = missing

    @classmethod
    def from_folder(
        cls, folder: Path, special: Mapping[str, str], limits: TemplateLimits | None = None
    ) -> ChatTemplate:
        """chat_template.jinja wins over tokenizer_config.json; of several named ones, `default` is taken.
        Raises ModelError for a file that cannot be read; a folder without a template is no error."""
        templates = _templates(folder)
        default = templates.get("default")
        if default is not None:
            missing = ""
        elif templates:
            missing = f"its templates ({', '.join(sorted(templates))}) lack one named `default`"
        else:
            missing = "its checkpoint has no chat template (it may be a base model)"
        return cls(default, special, limits or TemplateLimits(), missing)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None while none runs."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> str | None:
        """Starts the worker, so that the first chat does not wait for it. Returns why chat will be
        refused (no template, or one that does not compile), None if it is ready."""
        if self._process is None:
            return self._missing
        try:
            await self._process.start()
        except TemplateFailure as failure:
            return str(failure)
        return None

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, to be encoded without adding special tokens. Raises RequestError (400): malformed
        messages, no template, the template's own refusal, a template that exceeds its limits."""
        if self._process is None:
            raise RequestError(
                f"This model cannot chat: {self._missing}. Use /v1/completions.",
                "messages",
                "chat_template_missing",
            )
        variables = {
            **self._special,
            "messages": normalize(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return await self._process.render(variables)
        except UnicodeEncodeError:
            raise RequestError(
                "messages: a text holds half of a surrogate pair, which is not valid Unicode.",
                "messages",
                "invalid_unicode",
            ) from None
        except TemplateFailure as failure:
            raise RequestError(
                f"The chat template refused these messages: {failure}", "messages", "chat_template_error"
            ) from None

    async def close(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            await self._process.close()


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text contents, no nulls, reasoning under its usual names.
    Raises RequestError naming the message."""
    if not messages:
        raise RequestError("messages: at least one message is needed.", "messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: an object with `role` and `content` is expected.", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: a non-empty string is expected.", f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise RequestError(f"{where}.{name}: tool calls are not supported.", f"{where}.{name}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(f"{where}.content", message.get("content"))
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise RequestError(f"{where}: a string or a non-empty list of text parts is expected.", where)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is not None and kind != "text":
            raise RequestError(
                f"{where}[{index}]: only text parts are supported, this is {shown(kind)}.", where
            )
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind is None or not isinstance(text, str):
            raise RequestError(
                f'{where}[{index}]: a part like {{"type": "text", "text": "..."}} is expected.', where
            )
        texts.append(text)
    return PART_SEPARATOR.join(texts)


def _templates(folder: Path) -> dict[str, str]:
    """Name to template. Files beside the weights win over tokenizer_config.json, all together."""
    texts = {path.stem: read_text(path) for path in sorted((folder / "chat_templates").glob("*.jinja"))}
    texts["default"] = texts.get("default") or read_text(folder / "chat_template.jinja")
    files = {name: text for name, text in texts.items() if text is not None}
    if files:
        return files
    path = folder / "tokenizer_config.json"
    declared = read_object(path).get("chat_template")
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    try:
        named = {str(entry["name"]): entry["template"] for entry in declared}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(template, str) for template in named.values()):
        raise ModelError(f"{path}: chat_template must be a string or a list of {{name, template}} objects")
    return named
