"""Hostile templates: they end, in time and memory, and the server goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from server.text import template_worker
from server.text.template_process import TemplateFailure, TemplateLimits, TemplateProcess

HELLO = "hello {{ name }}"
SPIN = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"


async def fails(template: str, limits: TemplateLimits) -> str:
    process = TemplateProcess(template, limits)
    try:
        with pytest.raises(TemplateFailure) as caught:
            await process.render({"messages": [{"content": "x"}]})
        return str(caught.value)
    finally:
        await process.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ namespace(_Namespace__attrs=1) }}", "may not hold"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "may not hold"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for m in messages %}" + SPIN + "{% endfor %}", "1 s"),
        ("{{ messages[0].content * 10**10 }}", "memory"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ 10 ** (10 ** 9) }}", "1 s"),
        ("{{ ('a' * 10**6) ~ ('a' * 2**24) }}", "characters; the limit is"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages.nothing.more }}", "UndefinedError"),
        ("{{ '\\ud800' }}", "surrogates"),
    ],
)
async def test_hostile_templates_are_refused(template: str, says: str) -> None:
    # Were the kernel's limits not there, patience would be longer than the test may take.
    assert says in await fails(template, TemplateLimits(wall_seconds=600))


async def test_the_loop_goes_on_and_the_worker_comes_back() -> None:
    template = "{% if spin %}" + SPIN + "{% endif %}ok"
    process = TemplateProcess(template, TemplateLimits(cpu_seconds=0.5, wall_seconds=600))
    await process.start()
    first = process.pid
    spinning = asyncio.create_task(process.render({"spin": True}))
    waiting = asyncio.create_task(process.render({"spin": False}))
    started = last = time.perf_counter()
    longest = 0.0
    while not spinning.done():
        await asyncio.sleep(0.01)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    with pytest.raises(TemplateFailure, match=r"0\.5 s"):
        await spinning
    assert await waiting == "ok"
    assert longest < (last - started) / 2
    assert process.pid != first
    await process.close()
    assert process.pid is None


async def test_patience_ends_even_where_the_kernel_has_not_ended_it() -> None:
    process = TemplateProcess(HELLO, TemplateLimits(wall_seconds=0.5))
    await process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TemplateFailure, match="stopped"):
        await process.render({"name": "you"})
    assert await process.render({"name": "you"}) == "hello you"
    await process.close()


async def test_a_killed_worker_is_replaced() -> None:
    process = TemplateProcess(HELLO, TemplateLimits())
    await process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    assert await process.render({"name": "again"}) == "hello again"
    await process.close()


async def test_a_client_that_leaves_does_not_spoil_the_next_answer() -> None:
    process = TemplateProcess(
        "{% for i in range(n) %}{% for j in range(1000) %}{% endfor %}{% endfor %}{{ n }}", TemplateLimits()
    )
    await process.start()
    worker = process.pid
    leaving = asyncio.create_task(process.render({"n": 5000}))
    await asyncio.sleep(0.05)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await process.render({"n": 1}) == "1"
    assert process.pid == worker, "nobody has to wait for another"
    await process.close()


async def test_large_messages_pass() -> None:
    text = "🦙 é\n" * 1_000_000
    process = TemplateProcess("{{ text }}", TemplateLimits())
    assert await process.render({"text": text}) == text
    await process.close()


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, os, signal
            from server.text.template_process import TemplateLimits, TemplateProcess

            async def main():
                spin = "{% for i in range(n) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
                process = TemplateProcess(spin, TemplateLimits(cpu_seconds=60, wall_seconds=60))
                await process.start()
                asyncio.create_task(process.render({"n": 99999}))
                await asyncio.sleep(0.2)
                print(process.pid, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

            asyncio.run(main())
            """
        ),
        encoding="utf-8",
    )
    root = str(Path(template_worker.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
        timeout=60,
    )
    worker = int(done.stdout)
    deadline = time.monotonic() + 5
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_the_worker_imports_nothing_of_ours() -> None:
    code = f"import runpy, sys; runpy.run_path({template_worker.__file__!r}); print(sorted(sys.modules))"
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for name in ("server", "torch", "numpy", "tokenizers", "fastapi"):
        assert f"'{name}'" not in listed
