"""Small tokenizers for tiny checkpoints: byte-level BPE like SmolLM2's, sentencepiece like Llama 2's."""

from __future__ import annotations

import io
import json
from pathlib import Path

BPE_VOCAB = 384
SP_VOCAB = 400
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; <|im_end|> is the eos

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Original lines, written for this file: enough words for a few hundred merges.
LINES = tuple(
    f"{subject} {verb} {thing} {place}."
    for subject in ("The old clockmaker", "A patient gardener", "My neighbour's cat", "Every second sailor")
    for verb in ("carries", "mends", "forgets", "paints", "counts")
    for thing in ("seven small lanterns", "the broken letters", "a box of winter apples")
    for place in ("before the rain", "by the harbour wall", "on the quiet hill", "at half past nine")
)


def add_byte_bpe(folder: Path, vocab: int = BPE_VOCAB, chat_template: str | None = CHATML) -> Path:
    """Train and write a byte-level BPE `tokenizer.json`; every text can be encoded, no BOS is added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "unk_token": SPECIALS[0],
        "pad_token": SPECIALS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder


def add_sentencepiece(folder: Path, vocab: int = SP_VOCAB, chat_template: str | None = None) -> Path:
    """SP: train and write `tokenizer.model` (BPE, byte fallback, text left as it is) in Llama 2's shape.

    Ids: 0 <unk>, 1 <s>, 2 </s>, 3..258 the bytes. A BOS is added, an EOS is not.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings: dict[str, object] = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder
