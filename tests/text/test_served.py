"""Model names to attention modes."""

from __future__ import annotations

import pytest

from server.text.defaults import SamplingDefaults
from server.text.errors import RequestError
from server.text.served import ServedModel, ServedVariant


def test_names_resolve_and_are_echoed_as_asked() -> None:
    variants = {name: ServedVariant(name, 100) for name in ("native", "mqa")}
    names = {"tiny": "native", "tiny@native": "native", "tiny@mqa": "mqa", "tiny@gqa1": "mqa"}
    served = ServedModel(names, variants, 400, frozenset({2}), "f", "float32", SamplingDefaults())
    assert served.resolve(None) == ("tiny", variants["native"])
    assert served.resolve("tiny@gqa1") == ("tiny@gqa1", variants["mqa"])
    for wrong in ("gpt-4", "", "tiny@MQA", "x" * 10_000):
        with pytest.raises(RequestError, match="tiny@mqa") as caught:
            served.resolve(wrong)
        error = caught.value
        assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
        assert len(error.message) < 400
