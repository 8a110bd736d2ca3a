"""`headroom generate`: one prompt, one continuation on standard output."""

from __future__ import annotations

import sys

from server.app import Loaded
from server.commands.session import Reply, Session
from server.config import SamplingChoice


def generate(loaded: Loaded, prompt: str, choice: SamplingChoice) -> int:
    """Print the continuation of `prompt` as it comes, then a line about it on standard error."""
    reply = Reply()
    with Session(loaded) as session:
        session.complete(prompt, choice, reply)
        print(flush=True)
        print(session.summary(reply), file=sys.stderr)
    return 0
