"""GGUF files: transformers' own loading of them, the library's values, tokenizers of the source, damaged files."""

import json
import math
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from exports import dequantized, read_tensors
from gguf import GGMLQuantizationType as Kind
from gguf_files import add_tokenizer, blocks_of, gguf_name, write_gguf
from safetensors.torch import load_file
from tiny_models import write_tiny_llama
from transformers import AutoModelForCausalLM

import llmcli
from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.gguf_file import read_gguf
from llmcli.checkpoint.gguf_model import GgufReader, plan_gguf
from llmcli.checkpoint.gguf_tokenizer import tokenizer_files
from llmcli.errors import CheckpointError, LLMCliError, UnsupportedModelError
from llmcli.quantization.rounding import TensorQuality
from llmcli.quantization.schemes import WeightScheme
from llmcli.tokenizer.base import decode
from llmcli.tokenizer.load import load_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 32}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, biased": {**LLAMA, "attention_bias": True},
    "mistral": {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**LLAMA, "head_dim": 128, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
SMALLEST_SCALE = 2.0**-14  # a normal number of fp16
TEXT = "The quick brown fox jumps over the lazy dog."
CODES = {Kind.Q8_0: WeightScheme(8, 32), Kind.Q4_0: WeightScheme(4, 32)}
DEQUANTIZED = [Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


def source_of(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    return write_tiny_llama(folder, **{**SIZES, **FAMILIES[family], **overrides})


def convert(path: Path, folder: Path, **options: Any) -> dict[str, TensorQuality]:
    """The folder of a file, and the errors of layers that have other codes there."""
    small_files = folder.with_name(f"{folder.name}.small")
    small_files.mkdir()
    exporter = Exporter(plan_gguf(path, small_files, **options), folder, path.name, open_reader=GgufReader)
    return exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)


def check_logits(path: Path, folder: Path, tolerance: float) -> None:
    """Our log-probabilities of a text in a folder are transformers' of the file."""
    with llmcli.load(folder, device="cpu", dtype="float32") as model:
        scored = model.logprobs(TEXT)
    ids = torch.tensor([[*scored.prompt_token_ids, *scored.token_ids]])
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        logprobs = theirs(ids).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(scored.logprobs, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0)),
        ("llama, tied", Kind.Q8_0),
        ("mistral", Kind.F16),
        ("qwen2", Kind.Q8_0),
        ("qwen2", Kind.Q4_0),
        ("qwen3", Kind.Q8_0),
        ("qwen3", Kind.F32),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, kind: Kind) -> None:
    path = write_gguf(source_of(tmp_path / "source", family), tmp_path / "model.gguf", kind)
    convert(path, tmp_path / "folder")
    check_logits(path, tmp_path / "folder", 1e-3)


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=str)
def test_dequantized_logits_are_those_of_transformers(tmp_path: Path, kind: Kind) -> None:
    """16 bits keep eleven bits of a weight."""
    path = write_gguf(source_of(tmp_path / "source", "qwen2"), tmp_path / "model.gguf", kind)
    convert(path, tmp_path / "folder", has_codes=False)
    check_logits(path, tmp_path / "folder", 5e-3)


def matrices(source: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(source / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.weight") or "lm_head" in name}


def values_of(path: Path, name: str, heads: int) -> np.ndarray:
    """A tensor of a file by the library's reader and values, its heads as Hugging Face has them."""
    (tensor,) = (one for one in gguf.GGUFReader(path).tensors if one.name == gguf_name(name))
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if not heads:
        return values
    return values.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def heads_of(name: str) -> int:
    return {"q_proj": 8, "k_proj": 2}.get(name.split(".")[-2], 0)


@pytest.mark.parametrize("kind", CODES, ids=str)
def test_codes_stay_as_they_are(tmp_path: Path, kind: Kind) -> None:
    source = source_of(tmp_path / "source")
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    convert(path, tmp_path / "folder")
    tensors = read_tensors(tmp_path / "folder")
    for name in matrices(source):
        found = dequantized(tensors, name.removesuffix(".weight"), CODES[kind]).numpy()
        np.testing.assert_array_equal(found, values_of(path, name, heads_of(name)))


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=str)
def test_other_blocks_become_the_nearest_int8(tmp_path: Path, kind: Kind) -> None:
    source = source_of(tmp_path / "source")
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    qualities = convert(path, tmp_path / "folder")
    tensors = read_tensors(tmp_path / "folder")
    for name in matrices(source):
        module = name.removesuffix(".weight")
        found = dequantized(tensors, module, WeightScheme(8, 32)).numpy()
        expected = values_of(path, name, heads_of(name))
        steps = np.repeat(tensors[f"{module}.weight_scale"].float().numpy(), 32, axis=1)
        largest = np.abs(expected.reshape(len(expected), -1, 32)).max(axis=2)
        assert (np.abs(found - expected) <= 0.5001 * steps).all(), name
        norm = np.linalg.norm(expected)
        assert qualities[module].relative_rms_error == pytest.approx(np.linalg.norm(found - expected) / norm, rel=1e-3)
        assert (steps[:, ::32] <= np.maximum(largest / 127 * 1.002, SMALLEST_SCALE))[largest > 0].all(), name
    assert "## Quantization error" in (tmp_path / "folder" / "README.md").read_text()


def test_a_file_of_several_types(tmp_path: Path) -> None:
    """As Q4_0 files are: some matrices in more bits."""
    source = source_of(tmp_path / "source")
    path = write_gguf(source, tmp_path / "model.gguf", Kind.Q4_0, kinds={"down": Kind.Q8_0, "lm_head": Kind.Q6_K})
    convert(path, tmp_path / "folder")
    tensors = read_tensors(tmp_path / "folder")
    for module, scheme in (
        ("model.layers.1.mlp.down_proj", WeightScheme(8, 32)),
        ("model.layers.1.mlp.up_proj", WeightScheme(4, 32)),
    ):
        found = dequantized(tensors, module, scheme).numpy()
        np.testing.assert_array_equal(found, values_of(path, f"{module}.weight", 0))
    with llmcli.load(tmp_path / "folder", device="cpu") as model:
        assert model.generate("Once", max_new_tokens=4, seed=1).token_ids


def test_biases_of_interleaved_heads(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama, biased")
    convert(write_gguf(source, tmp_path / "model.gguf", Kind.F32), tmp_path / "folder")
    found, stored = read_tensors(tmp_path / "folder"), load_file(source / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.bias"
        torch.testing.assert_close(found[key], stored[key], rtol=0, atol=0)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    write_gguf(source, tmp_path / "model.gguf", Kind.Q8_0, split_tensors=8)
    first, second, third = sorted(tmp_path.glob("model-*.gguf"))
    convert(first, tmp_path / "folder")
    write_gguf(source, tmp_path / "whole.gguf", Kind.Q8_0)
    convert(tmp_path / "whole.gguf", tmp_path / "expected")
    found, expected = read_tensors(tmp_path / "folder"), read_tensors(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(CheckpointError, match="give the first one"):
        read_gguf(second)
    third.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of the model's 3 files, {third.name} first"):
        read_gguf(first)


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1 (`Llama3RoPE`)."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("wrong", [False, True])
def test_factors_of_llama3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    factors = llama3_factors(32, 500000.0, 8.0)
    if wrong:
        factors[3] *= 1.5
    write_header = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "write_header_to_file",
        lambda writer: (writer.add_tensor("rope_freqs.weight", factors), write_header(writer)),
    )
    path = write_gguf(source_of(tmp_path / "source", rope_theta=500000.0), tmp_path / "model.gguf")
    if wrong:
        with pytest.raises(UnsupportedModelError, match="other factors"):
            convert(path, tmp_path / "folder")
        return
    convert(path, tmp_path / "folder")
    scaling = json.loads((tmp_path / "folder" / "config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == 8.0


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general__architecture": ("gemma2", gguf.GGUFValueType.STRING)}, "architecture gemma2 is not supported"),
        ({"llama__expert_count": (8, gguf.GGUFValueType.UINT32)}, "experts"),
        ({"tokenizer__ggml__pre": ("bloom", gguf.GGUFValueType.STRING)}, "tokenizer.ggml.pre is bloom"),
        ({"llama__rope__scaling__type": ("longrope", gguf.GGUFValueType.STRING)}, "longrope is not supported"),
    ],
)
def test_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The writer refuses a key that it has; the last one counts here.
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", _replace_value)
    path = write_gguf(source_of(tmp_path / "source"), tmp_path / "model.gguf", **metadata)
    with pytest.raises(UnsupportedModelError, match=reason):
        convert(path, tmp_path / "folder")


def _replace_value(writer: gguf.GGUFWriter, key: str, value: Any, kind: Any, sub_type: Any = None) -> None:
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=kind, sub_type=sub_type)


def test_types_that_are_not_dequantized_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "source")
    monkeypatch.setattr("gguf_files.blocks_of", _any_blocks)
    path = write_gguf(source, tmp_path / "model.gguf", kinds={"down": Kind.IQ4_XS})
    with pytest.raises(UnsupportedModelError, match="has the type IQ4_XS, expected one of F32, F16, BF16, Q8_0"):
        convert(path, tmp_path / "folder")


def _any_blocks(values: np.ndarray, kind: Kind, seed: int = 0) -> np.ndarray:
    if kind != Kind.IQ4_XS:
        return blocks_of(values, kind, seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((len(values), values.shape[1] // block * size), np.uint8)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(source_of(folder / "source", num_hidden_layers=1), folder / "model.gguf").read_bytes()


def test_damaged_headers_end_in_an_error(tmp_path: Path, small_file: bytes, request: pytest.FixtureRequest) -> None:
    """Bytes of the header are changed, cut, or repeated; the numbers that count things most often."""
    generator = random.Random(0)
    header_bytes = small_file.index(b"blk.0.ffn_up.weight") + 100
    path, small_files = tmp_path / "model.gguf", tmp_path / "small"
    small_files.mkdir()
    refused = 0
    for _ in range(request.config.getoption("--fuzz") or 300):
        data = bytearray(small_file)
        for _ in range(generator.randint(1, 4)):
            place = generator.choice((generator.randrange(24), generator.randrange(header_bytes)))
            change = generator.choice(("byte", "large", "cut", "repeat"))
            if change == "byte":
                data[place] = generator.randrange(256)
            elif change == "large":
                data[place : place + 8] = generator.choice((2**63 - 1, 2**32, 2**20, 0)).to_bytes(8, "little")
            elif change == "cut":
                del data[place : place + generator.randint(1, 40)]
            else:
                data[place:place] = data[place : place + generator.randint(1, 40)]
        path.write_bytes(data)
        try:
            plan_gguf(path, small_files)
        except LLMCliError:
            refused += 1
    assert refused > 0


def texts(count: int) -> list[str]:
    generator = random.Random(0)
    words = (
        "the",
        "Hello",
        " ",
        "  ",
        "\n",
        "\t",
        "1234",
        "12",
        "é",
        "中文",
        "🙂",
        "don't",
        "'LL",
        "_x",
        "ﬁ",
        "(",
        "...",
    )
    drawn = ["".join(generator.choices(words, k=generator.randint(1, 12))) for _ in range(count // 2)]
    points = [(32, 127), (160, 1500), (0x4E00, 0x4E80), (0x1F600, 0x1F640)]
    for _ in range(count - len(drawn)):
        low, high = generator.choice(points)
        drawn.append("".join(chr(generator.randrange(low, high)) for _ in range(generator.randint(1, 20))))
    return drawn


def check_tokenizers(found: Path, source: Path, count: int) -> None:
    ours, theirs = load_tokenizer(found), load_tokenizer(source)
    for text in texts(count):
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == theirs.encode(text, add_special_tokens=False), text
        assert decode(ours, token_ids, at_start=True) == decode(theirs, token_ids, at_start=True), text
    assert ours.bos_token_id == theirs.bos_token_id or theirs.bos_token_id is None


@pytest.mark.parametrize(
    ("name", "pre", "bos", "eos"), [("llama3", "llama-bpe", 128000, 128001), ("qwen2", "qwen2", 151643, 151645)]
)
def test_byte_level_tokenizers(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, pre: str, bos: int, eos: int
) -> None:
    source = SHARED / "tokenizers" / name
    if not source.is_dir():
        pytest.skip(f"needs the tokenizer {name} in ../shared, which is not part of the project")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_tokenizer(writer, source, {"vocab_size": 0, "bos_token_id": bos, "eos_token_id": eos}, pre)
    writer.kv_data[0]["tokenizer.ggml.add_bos_token"].value = name == "llama3"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for file, content in tokenizer_files(read_gguf(tmp_path / "model.gguf").metadata, name).items():
        (tmp_path / file).write_bytes(content)
    if name == "qwen2":  # the published one has it, the copy in ../shared does not
        content = json.loads((source / "tokenizer.json").read_text())
        source = tmp_path / "normalized"
        source.mkdir()
        (source / "tokenizer.json").write_text(json.dumps({**content, "normalizer": {"type": "NFC"}}))
    check_tokenizers(tmp_path, source, 20_000 if request.config.getoption("--all") else 1_000)


def test_sentencepiece_tokenizers(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = SHARED / "tokenizers" / "llama2"
    if not source.is_dir():
        pytest.skip("needs the tokenizer llama2 in ../shared, which is not part of the project")
    processor = sentencepiece.SentencePieceProcessor(str(source / "tokenizer.model"))
    ids = range(processor.get_piece_size())
    kinds = [
        6 if processor.is_byte(i) else 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 1
        for i in ids
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    for file, content in tokenizer_files(metadata, "llama2").items():
        (tmp_path / file).write_bytes(content)
    check_tokenizers(tmp_path, source, 20_000 if request.config.getoption("--all") else 1_000)


def test_a_missing_file_and_another_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf(tmp_path / "none.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_gguf(tmp_path / "other.gguf")
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        read_gguf(tmp_path / "old.gguf")
