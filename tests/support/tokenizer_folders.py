"""Folders that hold nothing but a tokenizer, in every shape that a checkpoint may give it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.vocabularies import LINES, add_byte_bpe, add_sentencepiece

Build = Callable[[Path], None]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Set top-level keys; None takes a key away."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    value.update(changes)
    write_json(path, {key: entry for key, entry in value.items() if entry is not None})


def byte_level(
    model_type: str = "llama",
    post_processor: Mapping[str, Any] | None = None,
    pre_tokenizer: Mapping[str, Any] | None = None,
    added: tuple[Mapping[str, Any], ...] = (),
    **config: Any,
) -> Build:
    """Byte-level BPE in tokenizer.json, the given parts changed; `config` goes to tokenizer_config.json."""

    def build(folder: Path) -> None:
        add_byte_bpe(folder)
        write_json(folder / "config.json", {"model_type": model_type})
        parts = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        if post_processor is not None:
            parts["post_processor"] = post_processor
        if pre_tokenizer is not None:
            parts["pre_tokenizer"] = pre_tokenizer
        parts["added_tokens"] += [token(**entry) | {"id": 384 + i} for i, entry in enumerate(added)]
        write_json(folder / "tokenizer.json", parts)
        edit_json(folder / "tokenizer_config.json", **config)

    return build


def sentencepiece_file(
    model_type: str = "llama", trainer: Mapping[str, Any] | None = None, **config: Any
) -> Build:
    """tokenizer.model alone; `trainer` are options of sentencepiece's trainer."""

    def build(folder: Path) -> None:
        add_sentencepiece(folder)
        write_json(folder / "config.json", {"model_type": model_type})
        if trainer is not None:
            (folder / "tokenizer.model").write_bytes(train_sentencepiece(**trainer))
        edit_json(folder / "tokenizer_config.json", **config)

    return build


def train_sentencepiece(**options: Any) -> bytes:
    """A model over the usual lines; the default is SP's: BPE, byte fallback, text left as it is."""
    import sentencepiece

    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, **(settings | options)
    )
    return model.getvalue()


def token(content: str, special: bool = False, normalized: bool = False, **flags: bool) -> dict[str, Any]:
    """An added token as tokenizer.json and `added_tokens_decoder` describe it."""
    off = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"content": content, "special": special, "normalized": normalized} | off | flags


def also(*steps: Build) -> Build:
    def build(folder: Path) -> None:
        for step in steps:
            step(folder)

    return build


def writing(name: str, value: Mapping[str, Any]) -> Build:
    return lambda folder: write_json(folder / name, value)


def without(name: str) -> Build:
    return lambda folder: (folder / name).unlink()


def _as_tokenizer_json(folder: Path) -> None:
    """Replace tokenizer.model by the tokenizer.json that transformers saves for it."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").unlink()


_BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
}
_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
_LLAMA_MARKS = {str(i): token(text, special=True) for i, text in enumerate(("<unk>", "<s>", "</s>"))}

FOLDERS: Mapping[str, Build] = {
    "bytes-plain": byte_level(),
    "bytes-bos": byte_level(post_processor=_BOS),
    "bytes-bos-flag-ignored": byte_level(add_bos_token=True, add_eos_token=True),
    "bytes-digits": byte_level(pre_tokenizer=_DIGITS, clean_up_tokenization_spaces=True),
    "bytes-no-config": also(byte_level(), without("tokenizer_config.json")),
    "bytes-gpt2": byte_level(pre_tokenizer=_DIGITS, tokenizer_class="GPT2Tokenizer"),
    "bytes-qwen2": byte_level("qwen2", tokenizer_class="Qwen2Tokenizer", pre_tokenizer=_DIGITS),
    "bytes-qwen3-undeclared": byte_level("qwen3", tokenizer_class=None),
    "bytes-llama3": byte_level(tokenizer_class="LlamaTokenizerFast", post_processor=_BOS),
    "bytes-added": byte_level(
        added=({"content": "<tool>"}, {"content": "naïve"}, {"content": "WORD", "single_word": True}),
        extra_special_tokens=["<extra>", "harbour"],
    ),
    "bytes-swallowing": byte_level(
        added=({"content": "<pad>", "lstrip": True, "rstrip": True, "special": True},)
    ),
    "bytes-declared": byte_level(
        tokenizer_class="GPT2TokenizerFast",
        added_tokens_decoder={"0": token("<|endoftext|>", special=True), "400": token("<late>")},
        eos_token={"__type": "AddedToken", **token("<|im_end|>")},
        image_token="<image>",
    ),
    "bytes-older-files": also(
        byte_level(),
        writing("special_tokens_map.json", {"sep_token": "<sep>", "eos_token": token("<|endoftext|>")}),
        writing("added_tokens.json", {"<sep>": 384, "<later>": 385}),
    ),
    "bytes-older-extras": also(
        byte_level(),
        writing(
            "special_tokens_map.json", {"additional_special_tokens": ["<x>", "harbour"], "cls_token": "<cls>"}
        ),
    ),
    "bytes-named-extras": byte_level(extra_special_tokens={"boi_token": "<boi>", "old": "rain"}),
    "sp-llama": sentencepiece_file(),
    "sp-no-bos": sentencepiece_file(add_bos_token=None, add_eos_token=None),
    "sp-bos-eos": sentencepiece_file(add_eos_token=True),
    "sp-legacy": sentencepiece_file(legacy=True),
    "sp-no-prefix": sentencepiece_file(add_prefix_space=False),
    "sp-declared": sentencepiece_file(added_tokens_decoder={**_LLAMA_MARKS, "400": token("<tool>")}),
    "sp-older-files": also(
        sentencepiece_file(),
        writing("added_tokens.json", {"[PAD]": 400, "<sep>": 401}),
        writing("special_tokens_map.json", {"pad_token": "[PAD]", "eos_token": "</s>"}),
    ),
    "sp-as-json": also(sentencepiece_file(), _as_tokenizer_json),
    "sp-as-json-mistral": also(
        sentencepiece_file(), _as_tokenizer_json, writing("config.json", {"model_type": "mistral"})
    ),
    "sp-own-symbols": sentencepiece_file(
        trainer={"user_defined_symbols": ["<tool>", "harbour"], "control_symbols": ["<ctl>"]}
    ),
    "sp-plain": sentencepiece_file(tokenizer_class=None),
    "sp-plain-mistral": sentencepiece_file("mistral"),
    "sp-plain-not-legacy": sentencepiece_file(tokenizer_class=None, legacy=False),
    "sp-plain-declared": sentencepiece_file(tokenizer_class=None, added_tokens_decoder=_LLAMA_MARKS),
    "sp-plain-own-symbols": sentencepiece_file(
        tokenizer_class=None,
        trainer={"user_defined_symbols": ["<tool>", "harbour"], "control_symbols": ["<ctl>"]},
    ),
    "sp-plain-no-fallback": sentencepiece_file(
        tokenizer_class=None, trainer={"byte_fallback": False, "vocab_size": 200}
    ),
    "sp-plain-normalised": sentencepiece_file(
        tokenizer_class=None,
        trainer={"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    ),
    "sp-plain-older-files": also(
        sentencepiece_file(
            tokenizer_class=None,
            trainer={"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": False},
        ),
        writing(
            "added_tokens.json", {"ﬁn": 400, "ﬁnal": 401}
        ),  # matched after the text is normalised, or not
        writing("special_tokens_map.json", {"pad_token": "ﬁnal"}),
    ),
    "sp-plain-no-dummy": sentencepiece_file(tokenizer_class=None, trainer={"add_dummy_prefix": False}),
    "sp-plain-unigram": sentencepiece_file(
        tokenizer_class=None, trainer={"model_type": "unigram", "vocab_size": 320}
    ),
}
"""Every shape that must load: byte-level BPE in tokenizer.json, sentencepiece in tokenizer.model."""
