"""A calibration: everything that an aligned head map fits to a checkpoint, and the store of those made."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.publish import locked, publish_file

logger = logging.getLogger(__name__)

HEAD_MAPS = ("aligned", "aligned-fixed", "mean")

_FORMAT = "headroom-calibration"
# Raised when the file's form changes, so that files of an older version are fitted again. What changes the
# fit belongs to the caller's key.
_VERSION = "1"


@dataclass(frozen=True, slots=True)
class LayerFit:
    """One layer's fit: K KV heads, each shared by a group of h = Hkv / K native ones; S = D / 2 slots.

    A slot is a pair of columns (s, s + S) of the reduced head, read as one complex number. It turns under
    RoPE with the frequency of the native pair that it was made from.
    """

    frequency: Tensor  # [K, S] int64: the native pair (i, i + S) that a slot is made from
    key: Tensor  # [Hkv, S] complex64: slot s of the shared key is sum over h of key[h, s] * k_h[frequency[s]]
    query: Tensor  # [Hkv, S] complex64: a reader of native head h uses q[frequency[s]] * query[h, s]
    v_in: Tensor  # [K, D, h * D] fp32: shared value = v_in @ the group's values, one after the other
    o: Tensor  # [hidden, Hq * D] fp32: the map's own output projection
    o_bias: Tensor | None  # [hidden] fp32


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a head map of `kind` with `kv_heads` KV heads is made from; make it with `Calibration.of`."""

    kind: str  # aligned or aligned-fixed
    kv_heads: int
    layers: tuple[LayerFit, ...]
    digest: str  # of all of the above

    @staticmethod
    def of(kind: str, kv_heads: int, layers: Iterable[LayerFit]) -> Calibration:
        """The calibration with its digest, which changes with any value in it."""
        layers = tuple(layers)
        return Calibration(kind, kv_heads, layers, _digest(kind, kv_heads, layers))


def layer_tensors(layer: LayerFit) -> dict[str, Tensor]:
    """A layer's tensors by field name, in one order, real and on the CPU: complex ones as `[..., 2]` fp32."""
    named = {
        "frequency": layer.frequency,
        "key": torch.view_as_real(layer.key.resolve_conj()),
        "query": torch.view_as_real(layer.query.resolve_conj()),
        "v_in": layer.v_in,
        "o": layer.o,
    }
    if layer.o_bias is not None:
        named["o_bias"] = layer.o_bias
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}


def _digest(kind: str, kv_heads: int, layers: tuple[LayerFit, ...]) -> str:
    """SHA-256 over kind, heads, and every tensor's place, name, shape, dtype and bytes; hexadecimal."""
    digest = hashlib.sha256(f"{kind} {kv_heads} {len(layers)}".encode())
    for index, layer in enumerate(layers):
        for name, tensor in layer_tensors(layer).items():
            digest.update(f"\n{index} {name} {list(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_or_fit(folder: Path, key: str, fit: Callable[[], Calibration]) -> Calibration:
    """The calibration of `key` in `folder`, from its file, or made by `fit` and kept for the next time.

    `key` says everything that the result depends on: the checkpoint, mode, kind, text and method.
    A file that is broken, of another version or of another key is fitted again. Of several processes that
    want the same one, one fits and the others wait for it. A folder that cannot be written costs a warning
    and the next start another fit, nothing more. Raises what `fit` raises.
    """
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    with ExitStack() as held:
        found = _read(path, key, logging.DEBUG)
        if found is not None:
            return found
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(path.with_name(f".{path.name}.lock"), _waiting))
        except OSError as error:
            _not_kept(path, error)
            return fit()
        found = _read(path, key, logging.WARNING)  # another process may have made it meanwhile
        if found is not None:
            return found
        made = fit()
        try:
            publish_file(path, lambda fresh: _write(fresh, key, made))
        except (OSError, SafetensorError) as error:
            _not_kept(path, error)
        return made


def _waiting() -> None:
    logger.warning("waiting for another process that makes the same calibration")


def _not_kept(path: Path, error: Exception) -> None:
    logger.warning("the calibration cannot be kept in %s (%s); the next start makes it again", path, error)


def _stamp(key: str) -> dict[str, str]:
    """The metadata by which a file is known to be the wanted one."""
    return {"format": _FORMAT, "version": _VERSION, "key": key}


def _write(path: Path, key: str, calibration: Calibration) -> None:
    """One file: every tensor as `LAYER.NAME`, the rest as metadata."""
    tensors = {
        f"{index}.{name}": tensor
        for index, layer in enumerate(calibration.layers)
        for name, tensor in layer_tensors(layer).items()
    }
    about = _stamp(key) | {
        "kind": calibration.kind,
        "kv_heads": str(calibration.kv_heads),
        "layers": str(len(calibration.layers)),
        "digest": calibration.digest,
    }
    save_file(tensors, path, metadata=about)


def _read(path: Path, key: str, level: int) -> Calibration | None:
    """The calibration in `path`, copied out of it and checked against its digest; None if there is none.

    Why a file that is there cannot be used is logged at `level`.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if any(about.get(name) != value for name, value in _stamp(key).items()):
                raise ValueError("another version or another checkpoint wrote it")
            # Copies: a file that is mapped may shrink under its reader.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        layers = [_layer(tensors, index) for index in range(int(about["layers"]))]
        found = Calibration.of(about["kind"], int(about["kv_heads"]), layers)
        if found.digest != about["digest"]:
            raise ValueError("its values do not have the digest that was written with them")
    except (OSError, SafetensorError, LookupError, ValueError, RuntimeError) as error:
        logger.log(level, "%s cannot be used (%s); the calibration is made again", path, error)
        return None
    return found


def _layer(tensors: Mapping[str, Tensor], index: int) -> LayerFit:
    """The inverse of `layer_tensors`. Raises KeyError, RuntimeError."""
    return LayerFit(
        frequency=tensors[f"{index}.frequency"],
        key=torch.view_as_complex(tensors[f"{index}.key"]),
        query=torch.view_as_complex(tensors[f"{index}.query"]),
        v_in=tensors[f"{index}.v_in"],
        o=tensors[f"{index}.o"],
        o_bias=tensors.get(f"{index}.o_bias"),
    )
