"""The facts about what is served that a request is checked against; built once at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.text.defaults import SamplingDefaults
from server.text.errors import RequestError


@dataclass(frozen=True, slots=True)
class ServedVariant:
    """One attention mode: its canonical name (`native`, `mha`, `gqaK`, `mqa`), the longest
    prompt + output it can hold in tokens (the smaller of the context and its pool), and whatever makes its
    cache differ from another's beside the name (head map, calibration)."""

    name: str
    max_len: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names` maps every accepted `model` value to a canonical variant; the first name of each is the one
    that is listed, and the first of all what a request without `model` gets. `vocab_rows` is the number of
    embedding rows, `eos_ids` the union from config, generation config and tokenizer (see `server.text.eos`),
    `defaults` what a request that names no sampling gets."""

    names: Mapping[str, str]
    variants: Mapping[str, ServedVariant]
    vocab_rows: int
    eos_ids: frozenset[int]
    fingerprint: str
    kv_dtype: str
    defaults: SamplingDefaults

    def resolve(self, model: str | None) -> tuple[str, ServedVariant]:
        """The name to echo and its variant; RequestError 404 `model_not_found` lists what is served."""
        name = next(iter(self.names)) if model is None else model
        if name not in self.names:
            raise RequestError(self._not_served(name), "model", "model_not_found", 404)
        return name, self.variants[self.names[name]]

    def _not_served(self, name: str) -> str:
        """What was asked for and what is listed, one name for each variant."""
        listed: dict[str, str] = {}
        for known, variant in self.names.items():
            listed.setdefault(variant, known)
        shown = name if len(name) <= 200 else name[:200] + "..."
        model, _, mode = name.rpartition("@")
        what = "attention mode" if mode and model in self.names else "model"
        return f"The {what} `{shown}` is not served here. Served: {', '.join(listed.values())}."
