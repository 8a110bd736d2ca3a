"""The pages say nothing that is not there: links, file names, make targets and flags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:server|model|cache|loadtest|tests|docs)/[\w/.-]+)`")
TARGET = re.compile(r"^\s*make ([a-z-]+)|`make ([a-z-]+)`", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


@page
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(path.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        other = path if not target else path.parent / target
        assert other.exists(), link
        if anchor:
            assert anchor in _anchors(other), link


@page
def test_files_named_are_there(path: Path) -> None:
    missing = [name for name in FILE.findall(path.read_text()) if not (ROOT / name).exists()]
    assert not missing


@page
def test_make_targets_are_there(path: Path) -> None:
    named = {first or second for first, second in TARGET.findall(path.read_text())}
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= there


def test_the_readme_names_no_flag_that_the_server_lacks() -> None:
    """Every flag on a line that runs or describes `headroom` is in some command's help."""
    commands = ("serve", "generate", "chat", "fetch", "plan", "convert", "compare")
    text = "".join([_help(), *(_help(command) for command in commands)])
    known = set(FLAG.findall(text))
    for path in PAGES:
        lines = [line for line in path.read_text().splitlines() if "headroom" in line or "`--" in line]
        used = {
            flag
            for line in lines
            if "pip" not in line and "docker" not in line
            for flag in FLAG.findall(line)
        }
        assert used <= known, f"{path.name}: {sorted(used - known)}"


def test_the_api_page_has_every_error_code() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    sources = [*(ROOT / "server" / "api").glob("*.py"), *(ROOT / "server" / "text").glob("*.py")]
    codes = {code for path in sources for code in re.findall(r'code="([a-z_]+)"', path.read_text())}
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in text} == set()


def test_the_api_page_has_every_field_and_route() -> None:
    from server.api.wire import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

    text = (ROOT / "docs" / "api.md").read_text()
    fields = {
        name
        for body in (ChatBody, CompletionBody, DetokenizeBody, TokenizeBody)
        for name in body.model_fields
    }
    sources = (ROOT / "server" / "api").glob("*.py")
    routes = {
        route for path in sources for route in re.findall(r'@router\.\w+\(\s*"([^"{]+)', path.read_text())
    }
    assert "/v1/kv" in routes
    assert {name for name in fields if name not in text} == set()
    assert {route for route in routes if route.rstrip("/") not in text} == set()


def _help(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
