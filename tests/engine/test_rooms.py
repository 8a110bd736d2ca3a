"""The engine without the web: it can be imported where no web framework is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_THE_WEB = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "starlette", "uvicorn", "pydantic"):
            raise ImportError("not installed: " + name)
sys.meta_path.insert(0, Block())
import server.engine.engine, server.engine.service, server.engine.build, server.engine.roots
"""


def test_the_engine_needs_no_web_framework() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_WEB], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
