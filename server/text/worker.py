"""A process of our own that can be killed: what strangers wrote runs there, never in the server.

Messages are 4 bytes of length (big-endian), then that many bytes of JSON, one there and one back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)


class Worker:
    """The process that runs `script`, one at a time. Only the event loop's thread touches it."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: Process | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    def runs(self) -> bool:
        """Whether there is one to ask. One that another loop started is not."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # pipes belong to the loop that opened them
            self.drop()
            self._loop = loop
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts one, in the place of any before it."""
        await self.end()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", str(self._script)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal is the server's to handle
        )

    async def exchange(self, body: bytes) -> dict[str, Any]:
        """Its answer to one message. Raises IncompleteReadError or ConnectionError if it ends first.

        Whoever is cancelled here must `end` or `drop` it: its answer would be read as the next one's.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(struct.pack(">I", len(body)))
        process.stdin.write(body)
        await process.stdin.drain()
        head = await process.stdout.readexactly(4)
        answer: dict[str, Any] = json.loads(await process.stdout.readexactly(struct.unpack(">I", head)[0]))
        return answer

    async def end(self) -> None:
        """Kills it, and waits for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        code = await process.wait()
        _LOG.debug("worker %d (%s) ended (%d)", process.pid, self._script.stem, code)

    def drop(self) -> None:
        """Kills it without waiting; the loop reaps it."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
