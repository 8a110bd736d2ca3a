"""`headroom chat`: a conversation in the terminal, or one line after another from a pipe."""

from __future__ import annotations

import contextlib
import sys

from server.app import Loaded
from server.commands.session import Reply, Session
from server.config import SamplingChoice
from server.text.errors import GenerationError, RequestError

_HELP = """\
Write, and the model answers. Ctrl-C stops an answer, Ctrl-D quits.
  /help    this text
  /reset   forget the conversation
  /quit    leave"""


def chat(loaded: Loaded, system: str | None, choice: SamplingChoice) -> int:
    """Talk until /quit or the end of input."""
    with Session(loaded) as session:
        talk = _Talk(session, system, choice)
        if talk.at_terminal:
            print(f"{session.name} listens. /help lists what you can type, Ctrl-D quits.")
        while (line := talk.read()) is not None:
            if not talk.take(line):
                break
    return 0


class _Talk:
    """The conversation so far."""

    def __init__(self, session: Session, system: str | None, choice: SamplingChoice) -> None:
        self.at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._session = session
        self._choice = choice
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        if self.at_terminal:
            from rich.console import Console

            self._dim = Console(highlight=False, markup=False)  # knows terminals that cannot
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() then edits lines and remembers them)

    def read(self) -> str | None:
        """The next line, None at the end of input."""
        if not self.at_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        while True:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit leaves)")

    def take(self, line: str) -> bool:
        """Do what `line` says; False to leave."""
        match line.strip():
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                print(_HELP)
            case "/reset":
                self._messages = list(self._opening)
                print("The conversation is forgotten.")
            case word if word.startswith("/") and " " not in word:
                print(f"There is no {word}; /help lists what there is.")
            case _:
                self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        reply = Reply()
        self._messages.append({"role": "user", "content": line})
        try:
            self._session.answer(self._messages, self._choice, reply)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except (RequestError, GenerationError) as error:
            self._messages.pop()
            self._complain(error)
            return
        self._messages.append({"role": "assistant", "content": reply.text})
        print(flush=True)
        if self.at_terminal and reply.done is not None:
            self._dim.print(self._session.summary(reply), style="dim", soft_wrap=True)

    def _complain(self, error: RequestError | GenerationError) -> None:
        hint = " /reset begins anew." if getattr(error, "code", None) == "context_length_exceeded" else ""
        print(f"{error}{hint}", file=sys.stderr)
