"""One key's cache never answers another's: the root of the prefix index."""

from __future__ import annotations

import hashlib

from server.engine.roots import cache_root

BASE = {"fingerprint": "f" * 64, "variant": "native", "kv_dtype": "float32", "key_id": "", "cache_salt": ""}


def test_it_is_a_fixed_function_of_its_parts() -> None:
    message = b"headroom cache root v1" + b"".join(
        len(part).to_bytes(8, "big") + part for part in (b"f" * 64, b"native", b"float32", b"", b"")
    )
    assert cache_root(**BASE) == hashlib.sha256(message).digest()


def test_every_part_counts_and_parts_do_not_run_together() -> None:
    variations = [BASE]
    variations += [BASE | {name: BASE[name] + "x"} for name in BASE]
    variations += [
        BASE | {"key_id": "a", "cache_salt": "bc"},
        BASE | {"key_id": "ab", "cache_salt": "c"},
        BASE | {"key_id": "abc"},
        BASE | {"cache_salt": "abc"},
        BASE | {"cache_salt": "\ud800"},  # a lone surrogate, which JSON may bring
    ]
    roots = {cache_root(**parts) for parts in variations}
    assert len(roots) == len(variations) and all(len(root) == 32 for root in roots)
