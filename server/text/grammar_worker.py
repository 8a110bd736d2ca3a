"""The process that tries out grammars: llguidance and the standard library, little of ours.

Run as a script by `server.text.grammar_process`, never imported by the server. A grammar is a stranger's
program, so each is compiled in a fork of its own, with little memory and a second of processor time; the
kernel ends the fork where it takes more. Its first steps are walked too, as much of the work is done there.

On standard input and output: 4 bytes of length (big-endian), then that many bytes of JSON.
    first   {"paths", "pieces", "cpu_seconds", "memory_bytes"} -> {"ok": ""}
    then    {"kind", "source"}                                 -> {"ok": grammar, "bytes": n} | {"error"}
`pieces` has each token's bytes as Latin-1, or null; `bytes` is about what the compiled grammar takes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import struct
import sys
from random import Random
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that the kernel sends when the parent is gone
_WALKS, _STEPS = 4, 128  # ways through the grammar that are tried, and tokens of each


def main() -> None:
    """Serves until the input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = receive(source)
    if first is None:
        return
    sys.path.extend(first["paths"])
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from server.text.grammar_build import make_tokenizer

    pieces = [None if piece is None else piece.encode("latin-1") for piece in first["pieces"]]
    tokenizer = make_tokenizer(pieces)
    send(sink, {"ok": ""})
    limits = (first["cpu_seconds"], first["memory_bytes"])
    while (ask := receive(source)) is not None:
        send(sink, _in_a_fork(tokenizer, ask, *limits))


def receive(source: BinaryIO) -> dict[str, Any] | None:
    """The next message, None at the end of the input."""
    head = source.read(4)
    if len(head) < 4:
        return None
    message: dict[str, Any] = json.loads(source.read(struct.unpack(">I", head)[0]))
    return message


def send(sink: BinaryIO, message: dict[str, Any]) -> None:
    """Writes one message."""
    body = json.dumps(message).encode()
    sink.write(struct.pack(">I", len(body)) + body)
    sink.flush()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(0)


def _in_a_fork(tokenizer: Any, ask: dict[str, Any], cpu_seconds: float, memory_bytes: int) -> dict[str, Any]:
    """What the fork says, or that it was ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            _die_with_parent()
            held = _pages(0)
            resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))
            # SIGPROF's default action ends the process, in the middle of a long call of the library too.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            with open(write, "wb") as sink:
                send(sink, _try_out(tokenizer, ask))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as source:
        answer = receive(source)
    os.waitpid(child, 0)
    return answer or {
        "error": f"it takes more than {cpu_seconds:g} s or {memory_bytes // 2**20} MiB to compile"
    }


def _try_out(tokenizer: Any, ask: dict[str, Any]) -> dict[str, Any]:
    from server.text.grammar_build import GrammarError, make_matcher, shortened, to_lark

    try:
        lark = to_lark(ask["kind"], ask["source"])
        before = _pages(1)
        matcher = make_matcher(tokenizer, lark)
        for seed in range(_WALKS):
            _walk(tokenizer, matcher.deep_copy(), Random(seed))
    except GrammarError as error:
        text = str(error)
        if ask["kind"] != "grammar":  # a place in our wrapping says nothing to anybody
            text = re.sub(r"^(at )?\d+\(\d+\): ", "", text)
        return {"error": shortened(text)}
    except MemoryError:
        return {}
    return {"ok": lark, "bytes": max(0, _pages(1) - before)}


def _walk(tokenizer: Any, matcher: Any, random: Random) -> None:
    """A text that the grammar allows, or its beginning; what fails on the way is told as GrammarError."""
    from server.text.grammar_build import GrammarError, reason

    for step in range(_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(reason(matcher))
        allowed = int.from_bytes(mask, "little")
        end = 1 << (tokenizer.vocab_size - 1)
        if allowed & ~end == 0:
            if not matcher.is_accepting():
                raise GrammarError("no text fits it" if step == 0 else "it leads where nothing can follow")
            if step == 0:
                raise GrammarError("only the empty text fits it")
            return
        if not matcher.consume_token(_some(allowed & ~end, random)):
            raise GrammarError(reason(matcher))


def _some(bits: int, random: Random) -> int:
    """The place of one of the set bits: the first from a random place on."""
    start = random.randrange(bits.bit_length())
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


def _pages(field: int) -> int:
    """Bytes of this process: 0 its address space, 1 what of it is in memory."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[field]) * resource.getpagesize()
    except OSError:  # not Linux
        return 2**33 if field == 0 else 0


if __name__ == "__main__":
    main()
