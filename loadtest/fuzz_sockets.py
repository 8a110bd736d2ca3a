"""Broken HTTP, as bytes on a connection of its own: what scanners, proxies and half-dead clients send."""

from __future__ import annotations

import random
from collections.abc import Iterator

from loadtest.fuzz_wire import Attack

_HOST = b"Host: 127.0.0.1\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\n" + _HOST + b"Content-Type: application/json\r\n"
_BODY = b'{"prompt": "The letter", "max_tokens": 2}'
_GET = b"GET /health HTTP/1.1\r\n" + _HOST

_LENGTH = b"Content-Length: 41\r\n\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"

ATTACKS = (
    Attack("nothing at all", b"", half_close=True),
    Attack("empty lines", b"\r\n" * 200, half_close=True),
    Attack("a TLS hello", bytes.fromhex("16030100a5010000a10303") + bytes(range(160)), half_close=True),
    Attack("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", half_close=True),
    Attack("HTTP/0.9", b"GET /health\r\n\r\n", half_close=True),
    Attack("HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n"),
    Attack("HTTP/3.7", b"GET /health HTTP/3.7\r\n" + _HOST + b"\r\n", half_close=True),
    Attack("no host", b"GET /health HTTP/1.1\r\n\r\n", half_close=True),
    Attack("two hosts", _GET + b"Host: example.com\r\n\r\n"),
    Attack("a method in lower case", b"get /health HTTP/1.1\r\n" + _HOST + b"\r\n", half_close=True),
    Attack("an absolute target", b"GET http://127.0.0.1/health HTTP/1.1\r\n" + _HOST + b"\r\n"),
    Attack("an authority target", b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n" + _HOST + b"\r\n", half_close=True),
    Attack("an asterisk", b"OPTIONS * HTTP/1.1\r\n" + _HOST + b"\r\n", half_close=True),
    Attack("a bare fragment", b"GET #x HTTP/1.1\r\n" + _HOST + b"\r\n", half_close=True),
    Attack("a target of bytes", b"GET /\xff\xfe\x00 HTTP/1.1\r\n" + _HOST + b"\r\n", half_close=True),
    Attack("a target of 100 kB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + _HOST + b"\r\n",
    half_close=True),
    Attack("a header of 100 kB", _GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", half_close=True),
    Attack("5,000 headers", _GET + b"X: y\r\n" * 5_000 + b"\r\n", half_close=True),
    Attack("a header without colon", _GET + b"nonsense\r\n\r\n", half_close=True),
    Attack("a header without name", _GET + b": x\r\n\r\n", half_close=True),
    Attack("a null byte in a header", _GET + b"X: a\x00b\r\n\r\n", half_close=True),
    Attack("a folded header", _GET + b"X: a\r\n b\r\n\r\n", half_close=True),
    Attack("a bare line feed", b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n", half_close=True),
    Attack("a bare carriage return", _GET + b"X: a\rY: b\r\n\r\n", half_close=True),
    Attack("a space before the colon", _GET + b"X : a\r\n\r\n", half_close=True),
    Attack("a websocket", _GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
           b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"),
    Attack("an upgrade to h2c",
    _GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"),
    Attack("a negative length", _POST + b"Content-Length: -1\r\n\r\n" + _BODY, half_close=True),
    Attack("a length in words", _POST + b"Content-Length: forty\r\n\r\n" + _BODY, half_close=True),
    Attack("a length of 30 digits", _POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + _BODY,
    half_close=True),
    Attack("two lengths", _POST + b"Content-Length: 5\r\nContent-Length: 41\r\n\r\n" + _BODY,
    half_close=True),
    Attack("a length and chunks",
    _POST + b"Content-Length: 41\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", half_close=True),
    Attack("a body shorter than its length", _POST + b"Content-Length: 400\r\n\r\n" + _BODY, half_close=True),
    Attack("a body longer than its length", _POST + _LENGTH + _BODY + b"GARBAGE" * 50, half_close=True),
    Attack("a bad chunk size", _POST + _CHUNKED + b"zz\r\n" + _BODY, half_close=True),
    Attack("a chunk of 2^64", _POST + _CHUNKED + b"f" * 16 + b"\r\n" + _BODY, half_close=True),
    Attack("a negative chunk", _POST + _CHUNKED + b"-5\r\n" + _BODY, half_close=True),
    Attack("chunks that stop", _POST + _CHUNKED + b"5\r\n{\"pro", half_close=True),
    Attack("an unknown coding", _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    half_close=True),
    Attack("an expectation", _POST + b"Expect: 100-continue\r\nContent-Length: 41\r\n\r\n" + _BODY),
    Attack("ten requests at once", (_GET + b"\r\n") * 9 + _GET + b"Connection: close\r\n\r\n"),
    Attack("answers that nobody awaits", (_POST + _LENGTH + _BODY) * 5, reset=True),
    Attack("a reset in the head", _POST, reset=True),
    Attack("a reset in the body", _POST + b"Content-Length: 41\r\n\r\n{", reset=True),
)  # fmt: skip


def socket_attacks(start: int, count: int) -> Iterator[Attack]:
    """`count` attacks, the same for the same `start`: each of the list, then cuts and flips of them."""
    draw = random.Random(f"sockets-{start}")
    for number in range(count):
        attack = ATTACKS[number % len(ATTACKS)]
        if number < len(ATTACKS) or not attack.data:
            yield attack
            continue
        data = bytearray(
            attack.data[: draw.randint(1, len(attack.data))] if draw.random() < 0.5 else attack.data
        )
        for _ in range(draw.randint(0, 3)):
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
        yield Attack(f"{attack.note}, spoilt", bytes(data), half_close=True, reset=draw.random() < 0.2)
