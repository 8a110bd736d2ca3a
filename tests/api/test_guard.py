"""Who may pass the door: hosts, keys, origins; and that every refusal has the one error shape."""

from __future__ import annotations

import hmac
import json
from pathlib import Path

import pytest

from server.api.guard import key_id
from tests.api.test_bodies import GOOD, check_error
from tests.support.api import serving

PATHS = [
    "/v1/models",
    "/v1/models/tiny",
    "/v1/kv",
    "/v1/kv/blocks",
    "/version",
    "/metrics",
    "/openapi.json",
    "/nothing",
]


@pytest.mark.parametrize(
    ("bound", "allowed", "good", "bad"),
    [
        (
            "127.0.0.1",
            (),
            [
                "127.0.0.1",
                "127.0.0.1:8000",
                "localhost",
                "LOCALHOST:1",
                "localhost.",
                "[::1]:8000",
                "127.0.0.2",
            ],
            [
                "evil.example",
                "evil.example:8000",
                "localhost.evil.example",
                "192.168.1.5",
                "",
                "127.0.0.1.evil.example",
            ],
        ),
        ("0.0.0.0", (), ["192.168.1.5:8000", "[2001:db8::1]", "localhost"], ["evil.example", "box"]),
        ("::", ("box", "Box.Example"), ["box:8000", "box.example", "10.0.0.1"], ["evil.example"]),
        ("192.168.1.5", (), ["192.168.1.5:80", "localhost", "127.0.0.1"], ["192.168.1.6", "evil.example"]),
        ("127.0.0.1", ("*",), ["evil.example", "anything:1"], []),
    ],
)
async def test_hosts(
    words: Path, bound: str, allowed: tuple[str, ...], good: list[str], bad: list[str]
) -> None:
    async with serving(words, host=bound, allowed_hosts=allowed) as api:
        for host in good:
            assert (await api.http.get("/version", headers={"host": host})).status_code == 200, host
        for host in bad:
            for path in ("/version", "/health", "/nothing"):
                error = check_error(await api.http.get(path, headers={"host": host}), 403)
                assert error["code"] == "host_not_allowed"
                assert "evil" not in error["message"]


async def test_keys(words: Path) -> None:
    async with serving(words, api_keys=("k-one", "k-zwö")) as api:
        for key in ("k-one", "k-zwö"):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
            assert (await api.http.post("/v1/completions", json=GOOD, headers=headers)).status_code == 200
        assert (await api.http.get("/health")).status_code == 200
        wrong: list[dict[str, bytes]] = [{}]
        wrong += [{"authorization": v} for v in (b"", b"Bearer", b"Bearer k-on", b"Bearer k-one2", b"k-one")]
        wrong += [
            {"authorization": b"Basic k-one"},
            {"authorization": b"Bearer \xff\xfe"},
            {"x-api-key": b"k-one"},
        ]
        for headers in wrong:
            for path in PATHS:
                reply = await api.http.get(path, headers=headers)
                assert check_error(reply, 401)["code"] == "invalid_api_key", (path, headers)
                assert reply.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                check_error(await api.http.post(path, json=GOOD, headers=headers), 401)
        assert len(api.service.requests) == 2


async def test_every_key_is_compared_whatever_comes(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time of an answer tells neither which key was right nor how much of one: digests of one
    length, each compared in constant time, and all of them each time."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr("server.api.guard.hmac.compare_digest", counted)
    async with serving(words, api_keys=("k-one", "k-two", "k-three")) as api:
        for value in (
            "Bearer k-one",
            "Bearer k-three",
            "Bearer k-four",
            "Basic k-one",
            "",
            "x" * 5000,
        ):
            compared.clear()
            await api.http.get("/version", headers={"authorization": value})
            assert compared == [(32, 32)] * 3, value


def test_a_key_id_tells_nothing() -> None:
    assert key_id("secret") == key_id("secret") != key_id("secret2")
    assert "secret" not in key_id("secret")


async def test_origins(words: Path) -> None:
    page, other = "https://page.example", "https://other.example"
    ask = {
        "origin": page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    async with serving(words) as api:  # off
        reply = await api.http.options("/v1/completions", headers=ask)
        check_error(reply, 405)
        reply = await api.http.post("/v1/completions", json=GOOD, headers={"origin": page})
        assert "access-control-allow-origin" not in reply.headers
    async with serving(words, cors_origins=(page,), api_keys=("k",)) as api:
        reply = await api.http.options("/v1/completions", headers=ask)
        assert reply.status_code == 204
        assert reply.headers["access-control-allow-origin"] == page
        assert "content-type" in reply.headers["access-control-allow-headers"]
        assert "authorization" in reply.headers["access-control-allow-headers"]
        assert "x-stainless-lang" in reply.headers["access-control-allow-headers"], "as OpenAI's client asks"
        odd = {**ask, "access-control-request-headers": "x-a;b"}
        reply = await api.http.options("/v1/completions", headers=odd)
        assert reply.headers["access-control-allow-headers"] == "authorization, content-type, x-request-id"
        reply = await api.http.options("/v1/completions", headers={**ask, "origin": other})
        assert "access-control-allow-origin" not in reply.headers
        key = {"authorization": "Bearer k"}
        reply = await api.http.post("/v1/completions", json=GOOD, headers={"origin": page, **key})
        assert reply.headers["access-control-allow-origin"] == page
        assert "Origin" in reply.headers["vary"]
        reply = await api.http.post("/v1/completions", json=GOOD, headers={"origin": page})
        check_error(reply, 401)
        assert reply.headers["access-control-allow-origin"] == page  # the page may read why
        reply = await api.http.get("/version", headers={"origin": other, **key})
        assert "access-control-allow-origin" not in reply.headers


async def test_paths_and_methods(words: Path) -> None:
    async with serving(words) as api:
        for path in ("/nothing", "/v1", "/v1/completions/", "/v1/completions/x", "/docs", "/redoc", "/%ff"):
            assert check_error(await api.http.get(path), 404)["code"] == "not_found", path
        for method, path in [
            ("GET", "/v1/completions"),
            ("DELETE", "/v1/models"),
            ("PUT", "/health"),
            ("POST", "/metrics"),
        ]:
            reply = await api.http.request(method, path)
            assert check_error(reply, 405)["code"] == "method_not_allowed"
            assert reply.headers["allow"]
        error = check_error(await api.http.get("/v1/models/no/such"), 404)
        assert error["code"] == "model_not_found"


async def test_a_bug_is_a_500_in_the_same_shape(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(words) as api:

        def broken() -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(api.service, "stats", broken)
        error = check_error(await api.http.get("/metrics"), 500)
        assert error["code"] == "internal_error"
        assert "secret" not in json.dumps(error)
        assert (await api.http.get("/version")).status_code == 200
