"""What /metrics counts of real answers."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import Served, inside


def ends(server: Served) -> dict[str, float]:
    """Choices by the reason why they ended."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        sample.labels["finished_reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "headroom:request_success_total"
    }


def test_a_stop_string_is_a_stop_and_no_abort(tiny_served: Path) -> None:
    """The engine learns of it from outside, as of a client that leaves, which does count as an abort."""
    with inside(tiny_served) as server:
        body = {"prompt": "ab", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        text = server.http.post("/v1/completions", json={**body, "max_tokens": 20}).json()["choices"][0][
            "text"
        ]
        before = ends(server)
        for n in (1, 3):
            reply = server.http.post("/v1/completions", json={**body, "stop": text[4], "n": n}).json()
            assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
        server.wait_idle(10)
        after = ends(server)
        assert {name: after[name] - before.get(name, 0) for name in after} == {
            name: 4.0 if name == "stop" else 0.0 for name in after
        }
