"""The process that renders chat templates: jinja2 and the standard library, nothing of ours.

Run as a script by `server.text.template_process`, never imported by the server. A checkpoint's template is
a stranger's program, so it runs here, in a sandbox, with little memory and a second of processor time; the
kernel ends the process where it takes more, and when the server dies.

On standard input and output: 4 bytes of length (big-endian), then that many bytes of JSON.
    first   {"template", "paths", "cpu_seconds", "memory_bytes", "output_chars"} -> {"ok": ""} | {"error"}
    then    {variables of the template}                                          -> {"ok": text} | {"error"}
An error with "exhausted" set means that the process used up its memory and ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

_NO_MEMORY = "it needs more memory than it may have"
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that the kernel sends when the parent is gone


def main() -> None:
    """Serves until the input ends. Only the parent's pipes are open to it."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = receive(source)
    if first is None:
        return
    sys.path.extend(first["paths"])  # where jinja2 lies, appended after the standard library
    _confine(first["memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, first["cpu_seconds"])  # compiling folds constants, so it counts
    try:
        template = _compile(first["template"])
    except MemoryError:
        send(sink, {"error": f"the chat template does not compile: {_NO_MEMORY}"})
        return
    except Exception as error:
        send(sink, {"error": f"the chat template does not compile: {_reason(error)}"})
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    send(sink, {"ok": ""})
    while (variables := receive(source)) is not None:
        answer = _render(template, variables, first["cpu_seconds"], first["output_chars"])
        send(sink, answer)
        if "exhausted" in answer:
            return


def receive(source: BinaryIO) -> dict[str, Any] | None:
    """The next message, None at the end of the input."""
    head = source.read(4)
    if len(head) < 4:
        return None
    message: dict[str, Any] = json.loads(source.read(struct.unpack(">I", head)[0]))
    return message


def send(sink: BinaryIO, message: dict[str, str]) -> None:
    """Writes one message."""
    body = json.dumps(message, ensure_ascii=False).encode()
    sink.write(struct.pack(">I", len(body)) + body)
    sink.flush()


def _confine(memory_bytes: int) -> None:
    """Dies with the parent, stays within its memory, writes no file, opens none beside the usual few."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            sys.exit(0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render(
    template: Any, variables: dict[str, Any], cpu_seconds: float, output_chars: int
) -> dict[str, str]:
    # SIGPROF's default action ends the process, in the middle of a long C call too. Processor time, not
    # wall time: a busy machine must not refuse an honest template.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        text = template.render(**variables)
        text.encode()  # half a surrogate pair is not text
    except MemoryError:
        return {"error": f"the chat template failed: {_NO_MEMORY}", "exhausted": "memory"}
    except RecursionError:
        return {"error": "the chat template recurses without end"}
    except Exception as error:
        return {"error": _reason(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if len(text) > output_chars:
        return {"error": f"the chat template wrote {len(text)} characters; the limit is {output_chars}"}
    return {"ok": text}


def _reason(error: Exception) -> str:
    """The template's own words where it refused; else the kind of error too. At most 500 characters."""
    import jinja2

    text = " ".join(str(error).split())[:500]
    if type(error) is jinja2.TemplateError and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005  the server's own time, as transformers has it


def _compile(source: str) -> Any:
    """The template in transformers' environment: what chat templates are written for."""
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks what the model wrote; here it only prints it."""

        tags = {"generation"}  # noqa: RUF012  jinja2 asks for a plain set

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class SafeNamespace(Namespace):
        """Jinja's namespace without names that reach into Python."""

        def __init__(*args: Any, **names: Any) -> None:  # so that a template may name one `self`
            values = dict(*args[1:], **names)
            for name in values:
                _check(name)
            Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    class SafeDict:
        """`dict(...)` and `dict.fromkeys(...)`, nothing else of the type."""

        def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:
            return dict(*args, **names)

        def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
            return dict.fromkeys(keys, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace of the chat template may not hold {name!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["dict"] = SafeDict()
    environment.globals["namespace"] = SafeNamespace
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


if __name__ == "__main__":
    main()
