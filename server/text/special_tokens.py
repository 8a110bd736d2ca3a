"""Which added and special tokens a checkpoint declares, in the four files where it may do so.

The order of authority is transformers' (5.24, `PreTrainedTokenizerBase._from_pretrained`):
`added_tokens_decoder` in tokenizer_config.json describes every added token and makes the older files
silent; without it special_tokens_map.json, added_tokens.json and tokenizer.json's own list are joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from model.errors import ModelError
from server.text.files import read_object

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`named`: role (`bos_token`, ...) to token; `extra`: special without a role; `by_id`: every added
    token whose id the files state."""

    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    by_id: Mapping[int, AddedToken]

    def texts(self) -> dict[str, str]:
        """Role to text: what a chat template sees as `bos_token`, `eos_token`, ..."""
        return {role: token.content for role, token in self.named.items()}


def read_special_tokens(
    folder: Path,
    config: Mapping[str, Any],
    defaults: Mapping[str, str],
    in_file: Mapping[int, AddedToken],
    pieces: tuple[AddedToken, ...] = (),
) -> SpecialTokens:
    """What `folder` declares; `config` is its tokenizer_config.json, `defaults` the roles that the
    tokenizer's class fills by itself, `in_file` the added tokens of tokenizer.json by id, `pieces` what
    sentencepiece's file marks as a token of its own (extra tokens, unless a JSON file lists some)."""
    roles: dict[str, Any] = {**defaults, **_roles(config)}
    source = folder / "tokenizer_config.json"
    extra = _extra(config, "extra_special_tokens", source) or _extra(
        config, "additional_special_tokens", source
    )
    if isinstance(extra, dict):
        roles.update(extra)
        extra = None
    if "added_tokens_decoder" in config:
        by_id = _by_id(config["added_tokens_decoder"], source)
    else:
        source = folder / "special_tokens_map.json"
        shared = read_object(source)
        roles.update(_roles(shared))
        listed = _extra(shared, "extra_special_tokens", source)
        if isinstance(listed, dict):
            roles.update(listed)
        elif listed:
            extra = [*(extra or ()), *(token for token in listed if token not in (extra or ()))]
        elif extra is None:
            extra = _extra(shared, "additional_special_tokens", source)
        special = {_content(value) for value in (*roles.values(), *(extra or ())) if value is not None}
        by_id = {**_added_tokens(folder, special), **in_file}
    known = {token.content: token for token in by_id.values()}
    named = {role: _role_token(value, known, source) for role, value in roles.items() if value is not None}
    order = [*(role for role in _NAMED if role in named), *(role for role in named if role not in _NAMED)]
    return SpecialTokens(
        named={role: named[role] for role in order},
        extra=pieces if extra is None else tuple(_token(value, source) for value in extra),
        by_id=by_id,
    )


def _extra(config: Mapping[str, Any], key: str, source: Path) -> Any:
    """A list of tokens, an object of roles, or None."""
    value = config.get(key)
    if value is not None and not isinstance(value, list | dict):
        raise ModelError(f"{source}: {key} is {value!r}; a list of tokens or an object is expected")
    return value


def _by_id(declared: Any, source: Path) -> dict[int, AddedToken]:
    """`added_tokens_decoder`: ids, spelled as texts, to tokens."""
    if not isinstance(declared, dict) or not all(index.isdecimal() for index in declared):
        raise ModelError(f"{source}: added_tokens_decoder must be an object of ids and tokens")
    return {int(index): _token(value, source) for index, value in declared.items()}


def _roles(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `*_token` entries that hold a token; an explicit null takes a default's role away."""
    return {
        key: value
        for key, value in config.items()
        if (key in _NAMED and (value is None or isinstance(value, str | dict)))
        or (key not in _NAMED and key.endswith("_token") and isinstance(value, str))
    }


def _added_tokens(folder: Path, special: set[str]) -> dict[int, AddedToken]:
    """added_tokens.json maps text to id; a token is special if some other file gives it a role."""
    path = folder / "added_tokens.json"
    tokens: dict[int, AddedToken] = {}
    for text, index in read_object(path).items():
        if not isinstance(index, int):
            raise ModelError(f"{path}: the id of {text!r} is {index!r}, an integer is expected")
        tokens[index] = AddedToken(text, normalized=text not in special, special=text in special)
    return tokens


def _role_token(value: Any, known: Mapping[str, AddedToken], source: Path) -> AddedToken:
    """A token with a role is special, whatever else its declaration says."""
    return as_special(known.get(_content(value)) or _token(value, source))


def as_special(token: AddedToken) -> AddedToken:
    """The same token with the special flag set, so that decoding leaves it out."""
    if token.special:
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _content(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _token(value: Any, source: Path) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, normalized=False, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return AddedToken(**{flag: value[flag] for flag in _FLAGS if flag in value})
    raise ModelError(f"{source}: {value!r} is not a token; a text or an object with `content` is expected")
