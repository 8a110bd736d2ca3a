"""The parent's side of the template worker: start it ahead, ask it, end it when it takes too long.

Only the event loop's thread touches it. A worker that was ended, by its limits or by us, is replaced at the
next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
        self._process: Process | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._broken: str | None = None  # why it does not compile; a second try would tell the same

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts the worker and compiles the template, so that the first request does not wait for it.
        Raises TemplateFailure if it does not compile."""
        async with self._lock:
            await self._started()

    async def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateFailure with the template's or the limit's words;
        UnicodeEncodeError if a text among `variables` is not valid Unicode."""
        body = json.dumps(variables, ensure_ascii=False).encode()
        async with self._lock:
            asking = asyncio.ensure_future(self._ask(await self._started(), body))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                # A client that leaves. Its answer comes sooner than another worker would.
                await asyncio.wait({asking})
                raise

    async def close(self) -> None:
        """Ends the worker and waits for its end."""
        async with self._lock:
            await self._end()

    async def _started(self) -> Process:
        if self._broken is not None:
            raise TemplateFailure(self._broken)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # pipes belong to the loop that opened them
            self._drop()
            self._loop = loop
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._end()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", str(_WORKER)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal is the server's to handle
        )
        first = {
            "template": self._template,
            "paths": [str(_home(name)) for name in ("jinja2", "markupsafe")],
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
            "output_chars": self._limits.output_chars,
        }
        process = self._process
        try:
            await self._ask(process, json.dumps(first).encode())
        except TemplateStopped:
            raise
        except TemplateFailure as failure:
            self._broken = str(failure)
            await self._end()
            raise
        return process

    async def _ask(self, process: Process, body: bytes) -> str:
        """One message there and back; whatever goes wrong ends the worker."""
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                answer = await _exchange(process, body)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._end()
            message = self._too_long()
            _LOG.warning("%s", message)
            raise TemplateStopped(message) from None
        except BaseException:
            # Nobody reads the answer, which would be read as the next one's.
            self._drop()
            raise
        if "exhausted" in answer:
            await self._end()
        if "error" in answer:
            raise TemplateFailure(answer["error"])
        return answer["ok"]

    def _too_long(self) -> str:
        return (
            f"the chat template was stopped: it took more than {self._limits.cpu_seconds:g} s "
            f"or {self._limits.memory_bytes // 2**20} MiB"
        )

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
        _LOG.debug("template worker %d ended (%d)", process.pid, code)

    def _drop(self) -> None:
        """Kills without waiting; the loop reaps it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _exchange(process: Process, body: bytes) -> dict[str, str]:
    assert process.stdin is not None and process.stdout is not None  # both were asked for
    process.stdin.write(struct.pack(">I", len(body)))
    process.stdin.write(body)
    await process.stdin.drain()
    head = await process.stdout.readexactly(4)
    answer: dict[str, str] = json.loads(await process.stdout.readexactly(struct.unpack(">I", head)[0]))
    return answer


def _home(name: str) -> Path:
    """The folder that holds the package `name`."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the package {name} is not installed")
    return Path(spec.origin).parent.parent
