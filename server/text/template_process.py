"""The parent's side of the template worker: start it ahead, ask it, end it when it takes too long.

Only the event loop's thread touches it. A worker that was ended, by its limits or by us, is replaced at the
next request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server.text.worker import Worker

_LOG = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """`cpu_seconds` of processor time and `memory_bytes` of address space for one rendering, enforced by the
    kernel inside the worker; `wall_seconds` is the parent's patience beside it, for a machine so busy that
    a second of processor time takes long."""

    cpu_seconds: float = 1.0
    memory_bytes: int = 256 * 2**20
    wall_seconds: float = 10.0
    output_chars: int = 16 * 2**20


class TemplateFailure(Exception):
    """The template did not give a text; the message is for the client."""


class TemplateStopped(TemplateFailure):
    """The template exceeded a limit, and the worker was ended for it."""


class TemplateProcess:
    """One worker for one template; renderings queue up behind each other."""

    def __init__(self, template: str, limits: TemplateLimits) -> None:
        self._template = template
        self._limits = limits
        self._worker = Worker(_WORKER)
        self._lock = asyncio.Lock()
        self._broken: str | None = None  # why it does not compile; a second try would tell the same

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self._worker.pid

    async def start(self) -> None:
        """Starts the worker and compiles the template, so that the first request does not wait for it.
        Raises TemplateFailure if it does not compile."""
        async with self._lock:
            await self._start()

    async def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateFailure with the template's or the limit's words;
        UnicodeEncodeError if a text among `variables` is not valid Unicode."""
        body = json.dumps(variables, ensure_ascii=False).encode()
        async with self._lock:
            await self._start()
            asking = asyncio.ensure_future(self._ask(body))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                # A client that leaves. Its answer comes sooner than another worker would.
                await asyncio.wait({asking})
                raise

    async def close(self) -> None:
        """Ends the worker and waits for its end."""
        async with self._lock:
            await self._worker.end()

    async def _start(self) -> None:
        """Unless it runs already."""
        if self._broken is not None:
            raise TemplateFailure(self._broken)
        if self._worker.runs():
            return
        await self._worker.start()
        first = {
            "template": self._template,
            "paths": [str(_home(name)) for name in ("jinja2", "markupsafe")],
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
            "output_chars": self._limits.output_chars,
        }
        try:
            await self._ask(json.dumps(first).encode())
        except TemplateStopped:
            raise
        except TemplateFailure as failure:
            self._broken = str(failure)
            await self._worker.end()
            raise

    async def _ask(self, body: bytes) -> str:
        """One message there and back; whatever goes wrong ends the worker."""
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                answer = await self._worker.exchange(body)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._worker.end()
            message = self._too_long()
            _LOG.warning("%s", message)
            raise TemplateStopped(message) from None
        except BaseException:
            # Nobody reads the answer, which would be read as the next one's.
            self._worker.drop()
            raise
        if "exhausted" in answer:
            await self._worker.end()
        if "error" in answer:
            raise TemplateFailure(answer["error"])
        return str(answer["ok"])

    def _too_long(self) -> str:
        return (
            f"the chat template was stopped: it took more than {self._limits.cpu_seconds:g} s "
            f"or {self._limits.memory_bytes // 2**20} MiB"
        )


def _home(name: str) -> Path:
    """The folder that holds the package `name`."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the package {name} is not installed")
    return Path(spec.origin).parent.parent
