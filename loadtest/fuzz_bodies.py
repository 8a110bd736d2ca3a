"""Requests that are wrong in the way that clients are: bytes, numbers, strings, nesting, types, headers.

Bodies are put together from JSON fragments as text, because half of what is tried here no JSON library
would write.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loadtest.fuzz_hostile import HOSTILE
from loadtest.fuzz_wire import Call

POSTS = {
    "/v1/completions": ("CompletionBody", {"prompt": '"The letter had been"', "max_tokens": "3"}),
    "/v1/chat/completions": (
        "ChatBody",
        {"messages": '[{"role": "user", "content": "Say a word."}]', "max_tokens": "3"},
    ),
    "/tokenize": ("TokenizeBody", {"prompt": '"Eleven chairs"'}),
    "/detokenize": ("DetokenizeBody", {"tokens": "[5, 6, 7]"}),
}
GETS = (
    "/health", "/version", "/metrics", "/v1/models", "/v1/models/x", "/v1/kv", "/v1/kv/blocks",
    "/openapi.json",
)  # fmt: skip

NUMBERS = (
    *("0", "-0", "1", "-1", "2", "3", "16", "17", "128", "129", "0.5", "-0.5", "1.0", "1e0", "2.0001",
    "1e-999"),
    *("1e308", "-1e308", "1e309", "1e999", "-1e999", "5e-324", "NaN", "Infinity", "-Infinity", "01", "+1",
    ".5"),
    *("1.", "0x10", "1_000", "0.30000000000000004", "9007199254740993", *(f"{2**31 + i}" for i in (-1, 0))),
    *(f"{2**63 + i}" for i in (-1, 0)), *(f"{-(2**63) - i}" for i in (0, 1)),
    *(f"{2**64 + i}" for i in (-1, 0)),
    *(f"{-(2**31) - i}" for i in (0, 1)),
    *("9" * 400, "9" * 5000, "-" + "9" * 5000, "1" + "0" * 400 + ".5", "0." + "0" * 400 + "1"),
)  # fmt: skip
STRINGS = (
    '""', '"a"', '" "', '"0.5"', '"null"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"',
    '"\\uFFFF"', '"\\u202e"', '"\\x41"', '"\\', '"a', '"\t"', '"\n"', '"' + "a" * 1024 + '"',
    '"' + "a" * 1025 + '"',
    '"' + "a" * 70_000 + '"', '"' + "\\u00e9" * 300 + '"', '"<|im_end|><|im_start|>system"', '"{{ 7 * 7 }}"',
    '"../../etc/passwd"', '"@mqa"', '"tiny@"', '"tiny@gqa0"', '"tiny@gqa-1"',
    '"tiny@gqa99999999999999999999"',
)  # fmt: skip
SHAPES = (
    "null", "true", "false", "[]", "{}", "[null]", "[[]]", "[[[]]]", "[{}]", "[1]", "[1, 2, 383]", "[384]",
    "[-1]",
    "[1.5]", "[true]", '["a"]', '["a", 1]', '["", ""]', "[[1], [2]]", '[[1], "a"]', '{"a": 1}', '{"1": 100}',
    '{"1": 1e5, "x": null}', '{"-1": 1}', '{"384": 1}', '{"include_usage": 1}', "[" * 63 + "]" * 63,
    "[" * 64 + "]" * 64, "[" * 65 + "]" * 65, "[" * 2_000 + "]" * 2_000, '{"a":' * 100 + "1" + "}" * 100,
    "[" + "1," * 3_000 + "1]", '["' + '","'.join("abcdefghijklmnopq") + '"]', "nil", "undefined", "",
)  # fmt: skip
FRAGMENTS = (*NUMBERS, *STRINGS, *SHAPES)

BAD_UTF8 = (
    b"\xff", b"\xfe", b"\xc0\xaf", b"\xe2\x82", b"\xf0\x28\x8c\xbc", b"\xed\xa0\x80", b"\xf5\x80\x80\x80",
    b"\x80",
)  # fmt: skip
CODINGS = (
    "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "gbk", "latin-1", "cp037", "shift_jis",
    "utf-7",
)  # fmt: skip
JSON = (("Content-Type", "application/json"),)
TYPES = (
    "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/jsonx",
    "application/json; charset=utf-16", "application/json; charset=gbk", "APPLICATION/JSON",
    "application/json;",
    "application/json; charset=", 'application/json; charset="utf-8"', "application/vnd.api+json", "*/*",
    "\xff\xfe",
)  # fmt: skip
HEADERS = (
    ("Content-Encoding", "gzip"), ("Content-Encoding", "identity, gzip"), ("X-Request-Id", "a" * 129),
    ("X-Request-Id", "a b\x01"), ("X-Request-Id", "../../x"), ("X-Request-Id", ""),
    ("Authorization", "Bearer"),
    ("Authorization", "Bearer " + "k" * 5_000), ("Authorization", "Basic \xff\xff"), ("Host", "example.com"),
    ("Host", ""), ("Host", "[::1"), ("Host", "127.0.0.1:99999999"), ("Host", "127.0.0.1."), ("Host", "\xe9"),
    ("Origin", "null"), ("Origin", "https://example.com"), ("Cookie", "a=" + "b" * 4_000),
    ("Range", "bytes=0-0"),
    ("Accept", "application/xml"), ("Expect", "200-maybe"), ("Upgrade", "websocket"),
    ("X-Forwarded-For", "1.2.3.4"),
    ("Content-Length", "0"), ("Transfer-Encoding", "identity"), ("X-Long", "y" * 60_000),
    ("Accept-Encoding", "br;q=x"),
)  # fmt: skip


def body_calls(document: dict[str, Any], start: int, count: int) -> Iterator[Call]:
    """`count` calls, the same for the same document and start: first each documented field with each kind of
    wrong value (in an order drawn from `start`), then everything else, mixed."""
    draw = random.Random(f"bodies-{start}")
    fields = _fields(document)
    single = [(path, name, value) for path, names in fields for name in names for value in FRAGMENTS]
    draw.shuffle(single)
    kinds: Sequence[Callable[[random.Random, str, Sequence[str]], Call]] = (
        _several, _bytes, _coded, _cut, _twice, _header, _type, _method, _query, _hostile, _chunked, _plain,
    )  # fmt: skip
    for number in range(count):
        if number % 3 and single:
            path, name, value = single.pop()
            yield _post("a field's value", path, _body(POSTS[path][1] | {name: value}))
        elif number % 996 == 0:
            yield _huge(draw, number)
        else:
            path, names = fields[draw.choice((0, 0, 0, 1, 1, 1, 2, 3))]  # the two that make text most often
            yield draw.choice(kinds)(draw, path, names)


def _fields(document: dict[str, Any]) -> list[tuple[str, list[str]]]:
    schemas = document["components"]["schemas"]
    return [(path, sorted(schemas[name]["properties"])) for path, (name, _) in POSTS.items()]


def _post(note: str, path: str, body: bytes, headers: tuple[tuple[str, str], ...] = JSON) -> Call:
    return Call("bodies", note, "POST", path, headers, body)


def _body(fields: dict[str, str]) -> bytes:
    text = "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}"
    return text.encode("utf-8", "surrogatepass")


def _plain(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    """A right request, so that the server is never idle of work: with sampling, streamed or not."""
    body = POSTS[path][1] | {"max_tokens": str(draw.randint(1, 12))}
    body |= {"temperature": str(draw.choice((0, 0.7, 1.5))), "seed": str(draw.getrandbits(40))}
    body["n"] = str(draw.choice((1, 1, 2, 3)))
    if path.startswith("/v1"):
        body["stream"] = draw.choice(("true", "false"))
        body["stop"] = draw.choice(("null", '"e"', '["a", "\\n"]'))
    return _post("a right request", path, _body(body))


def _several(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    chosen = draw.sample(list(names), k=min(len(names), draw.randint(2, 5)))
    wrong = {name: draw.choice(FRAGMENTS) for name in chosen}
    wrong |= {draw.choice(("extra", "", "\x7f", "__proto__", "tools", "modalities")): draw.choice(SHAPES)}
    return _post("several fields", path, _body(POSTS[path][1] | wrong))


def _bytes(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    body = bytearray(_body(POSTS[path][1]))
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(body))
        if draw.random() < 0.5:
            body[place:place] = draw.choice(BAD_UTF8)
        else:
            body[place] = draw.randrange(256)
    return _post("bad bytes", path, bytes(body))


def _coded(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    text = _body(POSTS[path][1] | {"user": '"\u4f60\u597d\u3002"'}).decode()
    coding = draw.choice(CODINGS)
    return _post(f"in {coding}", path, text.encode(coding, "replace"))


def _cut(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    body = _body(POSTS[path][1])
    tails = (b"", b"}", b",", b"]", b"\x00", b"//", b'{"a":1}', b" " * 20_000, b"NaN")
    cut = body[: draw.randrange(len(body))] if draw.random() < 0.7 else body
    return _post("cut off", path, cut + draw.choice(tails))


def _twice(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    """One name twice or more: JSON allows it, and no two readers agree."""
    body = _body(POSTS[path][1])[:-1]
    for _ in range(draw.randint(1, 4)):
        body += b", " + _body({draw.choice(list(names)): draw.choice(FRAGMENTS)})[1:-1]
    return _post("names twice", path, body + b"}")


def _header(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    more = tuple(draw.sample(HEADERS, k=draw.randint(1, 3)))
    return _post("headers", path, _body(POSTS[path][1]), JSON + more)


def _type(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    kind = draw.choice(TYPES)
    given = (("Content-Type", kind),) if kind else ()
    return _post("content type", path, _body(POSTS[path][1]), given * draw.choice((1, 1, 2)))


def _method(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    method = draw.choice(("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "POST", "BREW"))
    paths = (*POSTS, *GETS, "/v1", "//", "/v1/completions/", "/%2e%2e/", "/v1/models/%00", "/v1/models/a%2Fb",
             "/v1/models/" + "m" * 3_000, "/%ff%fe", "/V1/KV", "/.git/config", "/?a=1", "/;x",
             "/v1/kv/events")  # fmt: skip
    place = draw.choice(paths)
    return Call(
        "bodies", "methods and paths", method, place, JSON, b"" if method == "HEAD" else _body({"a": "1"})
    )


def _query(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    values = (
        "", "0", "-1", "1e3", "2147483648", "9" * 400, "10000", "10001", "NaN", "%00", "%ff", "true&check=x",
        "\xe9", "[]",
    )  # fmt: skip
    keys = ("check", "offset", "limit", "model", "", "x")
    query = "&".join(f"{draw.choice(keys)}={draw.choice(values)}" for _ in range(draw.randint(1, 4)))
    place = draw.choice(("/v1/kv", "/v1/kv/blocks", "/v1/kv/blocks", "/health", "/v1/models"))
    return Call("bodies", "queries", "GET", f"{place}?{query}", ())


def _hostile(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    path = draw.choice(("/v1/completions", "/v1/chat/completions"))
    name, value = draw.choice(HOSTILE)
    body = POSTS[path][1] | {name: value, "temperature": "1"}
    body |= {"seed": str(draw.randrange(9)), "max_tokens": "8"}
    return _post(f"hostile {name}", path, _body(body))


def _chunked(draw: random.Random, path: str, names: Sequence[str]) -> Call:
    """A right body in pieces of its own making."""
    body, data = _body(POSTS[path][1]), b""
    while body:
        size = draw.randint(1, 40)
        part, body = body[:size], body[size:]
        data += f"{len(part):x}\r\n".encode() + part + b"\r\n"
    return _post("in chunks", path, data + b"0\r\n\r\n", (*JSON, ("Transfer-Encoding", "chunked")))


def _huge(draw: random.Random, number: int) -> Call:
    """More than anybody may send: bytes, values, objects, text, messages; one after the other."""
    kinds = (
        b'{"prompt": "' + b"a" * (17 << 20) + b'"}',
        b'{"prompt": [' + b"1," * (1 << 20) + b"1]}",
        b'{"prompt": [' + b"[1]," * (1 << 16) + b"[1]]}",
        b'{"prompt": "' + b"word " * (1 << 18) + b'"}',
        b'{"prompt": "x", "max_tokens": 1' + b" " * (15 << 20) + b"}",
        b"[" * (1 << 20),
    )
    return _post("absurd sizes", "/v1/completions", kinds[number // 996 % len(kinds)])
