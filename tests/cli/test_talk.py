"""`headroom generate` and `headroom chat`, from pipes and from a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support import checkpoints
from tests.support.command import ROOT, InProcess, check_one_line, headroom

FLAGS = ["--dtype", "float32", "--kv-memory", "16MiB", "--device", "cpu"]
NEWLINE = 198


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Path:
    """Says " world beta" after Hello, and to every chat "Hello world", and then ends."""
    folder = tmp_path_factory.mktemp("talk")
    checkpoints.make_chain(folder, [NEWLINE, 19556, 905, 17565, 2])
    return checkpoints.add_tokenizer(folder, smol)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Path:
    """Says "Hello world" for ever to every chat."""
    folder = checkpoints.make_chain(tmp_path_factory.mktemp("talk-loop"), [NEWLINE, 19556, 905, 19556])
    return checkpoints.add_tokenizer(folder, smol)


def test_generate(chain: Path) -> None:
    done = headroom("generate", str(chain), "Hello", *FLAGS)
    assert (done.returncode, done.stdout) == (0, " worldbeta\n"), done.stderr
    assert done.stderr.startswith("3 tokens in ")
    assert "KV cache" in done.stderr
    assert "as MHA" in done.stderr


def test_generate_here(here: InProcess, chain: Path) -> None:
    done = here("generate", str(chain), "-", "--max-tokens", "1", *FLAGS, stdin="Hello")
    assert done.stdout == " world\n"
    check_one_line(here("generate", str(chain), "", *FLAGS), "prompt")
    check_one_line(here("generate", str(chain), "Hello", "--max-tokens", "999999", *FLAGS), "999999")


def test_an_answer_that_fails_is_one_line(here: InProcess, chain: Path, tmp_path: Path) -> None:
    """Weights that are not numbers: found when the first token is drawn."""
    folder = shutil.copytree(chain, tmp_path / "broken")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["lm_head.weight"][5, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_one_line(here("generate", str(folder), "Hello", *FLAGS), "logits are not finite")


def test_generate_in_another_mode(here: InProcess, chain: Path) -> None:
    """The first mode named answers; 4 query and 2 KV heads. What attention says means nothing to a chain."""
    done = here("generate", str(chain), "Hello", *FLAGS, "--attention", "mqa,native", "--head-map", "mean")
    assert (done.returncode, done.stdout) == (0, " worldbeta\n"), done.stderr
    warning, summary = done.stderr.splitlines()
    assert warning.startswith("warning: mqa is lossy: 1 KV head for the checkpoint's 2 (head map mean)")
    assert "KV cache 4.00 KiB, as MHA 16.0 KiB" in summary  # one block: 2 * 16 * 32 * 4 bytes
    check_one_line(here("generate", str(chain), "Hello", *FLAGS, "--attention", "gqa3"), "gqa3")


def test_chat_from_a_pipe(chain: Path) -> None:
    lines = "What?\n\n/reset\n/nonsense\nAgain!\n/quit\nnot read\n"
    done = headroom("chat", str(chain), "--temperature", "0", *FLAGS, stdin=lines)
    assert done.returncode == 0, done.stderr
    answer = "Hello worldbeta\n"
    forgotten = "The conversation is forgotten.\nThere is no /nonsense; /help lists what there is.\n"
    assert done.stdout == answer + forgotten + answer
    assert done.stderr == ""


def test_chat_here(here: InProcess, chain: Path, sp_served: Path) -> None:
    done = here("chat", str(chain), *FLAGS, stdin="/help")  # and the end of input is the end
    assert done.returncode == 0
    assert "/reset" in done.stdout
    done = here("chat", str(sp_served), *FLAGS, stdin="hi\n")
    assert "cannot chat" in done.stderr


class Terminal:
    """A command that believes it talks to a person."""

    def __init__(self, *words: str, term: str = "dumb") -> None:
        self.master, slave = pty.openpty()
        self.said = ""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": term}
        command = [sys.executable, "-m", "server.cli", *words]
        # A session of its own, with the terminal as its controlling one, so that typing ^C means SIGINT.
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=env, start_new_session=True
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, part: str, seconds: float = 60.0) -> str:
        """Read until `part` is said; all that was said before it."""
        deadline = time.monotonic() + seconds
        while part not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other end has closed
                    assert part in self.said, self.said
        before, _, self.said = self.said.partition(part)
        return before

    def interrupt(self, part: str) -> None:
        """Press Ctrl-C until `part` is said: readline loses a signal that comes after it has printed the
        prompt and before it waits, a moment that a test meets and a person does not."""
        for _ in range(10):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.until(part, seconds=2.0)
                return
        raise AssertionError(self.said)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(loop: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", str(loop), "--temperature", "0", *FLAGS)
    yield terminal
    terminal.close()


def test_chat_at_a_terminal(terminal: Terminal) -> None:
    """Ctrl-C ends an answer and not the program, Ctrl-D ends the program."""
    terminal.until("listens. /help")
    terminal.until("> ")
    terminal.type("Hi\n")
    terminal.until("Hello world")
    terminal.interrupt("[stopped]")
    terminal.until("> ")
    terminal.interrupt("(Ctrl-D or /quit leaves)")
    terminal.until("> ")
    terminal.type("/reset\n")
    terminal.until("forgotten")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_the_line_below_an_answer_is_dim_where_it_can_be(chain: Path, term: str) -> None:
    terminal = Terminal("chat", str(chain), "--temperature", "0", *FLAGS, term=term)
    try:
        terminal.until("> ")
        terminal.type("Hi\n")
        terminal.until("beta")
        assert ("\x1b[2m4 tokens in " in terminal.until("as MHA")) == (term == "xterm")
    finally:
        terminal.close()
