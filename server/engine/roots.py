"""The root of the prefix index: whoever differs in any of these may never share a cached block."""

from __future__ import annotations

import hashlib


def cache_root(*, fingerprint: str, variant: str, kv_dtype: str, key_id: str, cache_salt: str) -> bytes:
    """32 bytes that a request's block hashes are chained from.

    `fingerprint` names the checkpoint's content, `variant` the canonical attention mode with its head map
    and calibration, `kv_dtype` the dtype of the cache, `key_id` the API key (empty without keys),
    `cache_salt` the body's field (empty without one). SHA-256 (FIPS 180-4) over the parts, each prefixed by
    its length in bytes as 8 big-endian bytes, so that no two different tuples read as the same message.
    """
    digest = hashlib.sha256(b"headroom cache root v1")
    for part in (fingerprint, variant, kv_dtype, key_id, cache_salt):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
