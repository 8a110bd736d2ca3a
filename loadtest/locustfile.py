"""Chat and completion users for locust, measured as a reader of the stream would see it.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -t 60s

Run it from the repository's root; `make load` does, with a server of its own.

Each stream makes one request row (time to `[DONE]`) and three rows of its own: TTFT (ms to the first
non-empty text), ITL (ms between texts) and `output rate` (tokens a second, in the ms columns). A stream
that errs, or ends without a finish reason or `[DONE]`, is a failure. A 429 is neither success nor failure of
a stream: it has its own row.

Users ask again as soon as they have an answer; with `--rate` all of them together offer so many requests a
second. How many were asked and how busy this process was (it has one core) is kept beside the times: a client
that is saturated measures itself.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import gevent
from locust import FastHttpUser, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.env import Environment

from loadtest.prompts import SYSTEM, Ask, Prompts
from loadtest.stream import StreamError, StreamTimes, read_stream


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Options beside locust's own."""
    parser.add_argument("--model", default="smollm2-135m", help="the model to ask for")
    parser.add_argument("--seed", type=int, default=1, help="prompts and sampling are drawn from it")
    parser.add_argument("--samples", default="", help="write every measured value to this JSON file")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second of all users; 0: no limit")


class Samples:
    """Every value as measured (locust itself rounds what it keeps), and what went wrong how often."""

    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        self.failures: Counter[str] = Counter()
        self.refused = 0
        self.asked = 0
        self.cpu: list[float] = []  # share of one core that this process took, second by second
        self.users = count()

    def watch_cpu(self) -> None:
        """Adds to `cpu` once a second, for as long as the greenlet that runs it."""
        wall, used = time.perf_counter(), time.process_time()
        while True:
            gevent.sleep(1.0)
            now, spent = time.perf_counter(), time.process_time()
            self.cpu.append((spent - used) / (now - wall))
            wall, used = now, spent

    def save(self, path: str) -> None:
        """Write everything to one JSON file."""
        Path(path).write_text(json.dumps({key: vars(self)[key] for key in vars(self) if key != "users"}))


@events.init.add_listener
def keep_samples(environment: Environment, **_: Any) -> None:
    """One collection of samples per locust process, saved when it quits."""
    environment.samples = Samples()
    environment.events.test_start.add_listener(lambda **_: gevent.spawn(environment.samples.watch_cpu))

    def save(**_: Any) -> None:
        if environment.parsed_options.samples:
            environment.samples.save(environment.parsed_options.samples)

    environment.events.quitting.add_listener(save)


class StreamUser(FastHttpUser):
    """Sends one streaming request and reports what it saw; subclasses say what to ask."""

    abstract = True
    wait_time = constant(0)  # a closed loop: the next question follows the last answer
    network_timeout = 300.0  # seconds between two bytes; a deep queue may keep a user waiting
    connection_timeout = 10.0

    def on_start(self) -> None:
        """Called by locust once for each user: its own model name and supply of prompts."""
        # Otherwise an error's connection is closed before its message can be read; `ask` judges the status.
        self.client.client.valid_response_codes = frozenset(range(200, 600))
        options = self.environment.parsed_options
        self.model: str = options.model
        number = next(self.environment.samples.users)
        self.prompts = Prompts(options.seed, number)
        users = options.num_users or 1
        self.interval = users / options.rate if options.rate > 0 else 0.0  # seconds between two questions
        self.turn = time.perf_counter() + self.interval * (number % users) / users

    def ask(self, path: str, name: str, body: dict[str, Any], ask: Ask) -> str | None:
        """POST and read the stream. Returns its text, None where there was none."""
        body = body | {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": ask.max_tokens, "temperature": 0.8, "seed": ask.seed,
        }  # fmt: skip
        self._wait_for_turn()
        self.environment.samples.asked += 1
        started = time.perf_counter()
        plain = {"Accept-Encoding": "identity"}
        with self.client.post(
            path, name=name, json=body, headers=plain, stream=True, catch_response=True
        ) as response:
            if response.status_code == 200:
                return self._read(response, name, started)
            if response.status_code == 429:
                response.request_meta["name"] = f"{name} refused: 429"
                response.success()
                self.environment.samples.refused += 1
            else:
                self._fail(response, _refusal(response))
        gevent.sleep(1.0)  # do not hammer a server that refuses
        return None

    def _wait_for_turn(self) -> None:
        """With a rate, questions are due at even times; a late one is asked at once, and not made up."""
        now = time.perf_counter()
        if self.interval and self.turn > now:
            gevent.sleep(self.turn - now)
        self.turn = max(self.turn, now) + self.interval

    def _read(self, response: Any, name: str, started: float) -> str | None:
        meta = response.request_meta
        try:
            times = read_stream(_lines(response), time.perf_counter, started)
        except (StreamError, *FAILURE_EXCEPTIONS) as error:
            response.release()
            meta["response_time"] = (time.perf_counter() - started) * 1000.0
            self._fail(response, f"{type(error).__name__}: {error}")
            return None
        meta["response_time"] = times.total
        meta["response_length"] = sum(len(text.encode()) for text in times.text)
        response.success()
        self._report(name, times)
        return "".join(times.text)

    def _fail(self, response: Any, message: str) -> None:
        self.environment.samples.failures[message] += 1
        response.failure(message)

    def _report(self, name: str, times: StreamTimes) -> None:
        self._fire(name, "total", "", times.total)
        if times.ttft is not None:
            self._fire(name, "ttft", "TTFT", times.ttft)
        for gap in times.gaps:
            self._fire(name, "itl", "ITL", gap)
        if times.rate is not None:
            self._fire(name, "rate", "output rate", times.rate)
        self.environment.samples.values["output_tokens"].append(times.output_tokens)

    def _fire(self, name: str, sample: str, row: str, value: float) -> None:
        """Keep a value, and show it as a locust row of its own where `row` names one."""
        self.environment.samples.values[sample].append(value)
        if row:
            self.environment.events.request.fire(
                request_type=row, name=name, response_time=value, response_length=0, exception=None,
                context={},
            )  # fmt: skip


class ChatUser(StreamUser):
    """Holds conversations of one to three questions, each sent with what was said before."""

    weight = 3

    @task
    def converse(self) -> None:
        """One conversation; given up at the first answer that fails."""
        messages = [{"role": "system", "content": SYSTEM}]
        for _ in range(self.prompts.turns()):
            ask = self.prompts.chat()
            messages.append({"role": "user", "content": ask.text})
            answer = self.ask("/v1/chat/completions", "chat", {"messages": messages}, ask)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})


class CompletionUser(StreamUser):
    """Sends texts of any length to be gone on with."""

    weight = 1

    @task
    def complete(self) -> None:
        """One text, gone on with."""
        ask = self.prompts.completion()
        self.ask("/v1/completions", "completion", {"prompt": ask.text}, ask)


def _refusal(response: Any) -> str:
    """What the server or the network said instead of a stream."""
    if response.status_code == 0:
        return f"no answer: {response.error}"
    try:
        said = json.loads(response.stream.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, *FAILURE_EXCEPTIONS):
        said = "no error message"
    return f"HTTP {response.status_code}: {said}"


def _lines(response: Any) -> Iterator[bytes]:
    """Lines as they arrive.

    FastResponse.iter_content and iter_lines wait for a whole chunk of bytes, which would hold back
    a stream of small events; the socket's own readline does not.
    """
    while line := response.stream.readline(b"\n"):
        yield line
