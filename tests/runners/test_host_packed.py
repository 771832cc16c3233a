"""Runners of packed weights in bfloat16: by our own products, and by torch's operators without a compiler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits_conformance import BitsConformance
from conformance import RunnerConformance
from prompt_cuts import span_ends
from quantized import SCHEMES, SIZES, export
from row_steps import GREEDY, PROMPT, go_on, same
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.base import Runner, Span
from llmcli.runners.host.device import chunk_end, chunks, span_end
from llmcli.runners.torch import codes_product, int4_tiles, packed_linear
from llmcli.runners.torch.load import load
from llmcli.runners.torch.weights import PackedWeight


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that cannot compile our products."""
    monkeypatch.setattr(codes_product, "is_available", lambda on_compile=None: False)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    return write_tiny_llama(folder, dtype=torch.bfloat16, with_tokenizer=False, **SIZES)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("multiplies_bfloat16", [True, False])
@pytest.mark.parametrize("output_size", [80, 96, 320])  # a tile has 64 rows of int4 codes, 32 of int8 codes
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_by_torch_are_those_of_the_codes(
    name: str, num_tokens: int, output_size: int, multiplies_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's packed operators, and widened blocks, against float64 products of the codes, scales and zero points."""
    monkeypatch.setattr(packed_linear, "multiplies_bfloat16", lambda: multiplies_bfloat16)
    monkeypatch.setattr(packed_linear, "WIDENED_INT8_ELEMENTS", 256 * 48)
    monkeypatch.setattr(int4_tiles, "BLOCK_ELEMENTS", 256 * 128)
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(0)
    shape, num_groups = (output_size, 256), scheme.num_groups(256)
    code_bytes = 256 * scheme.num_bits // 8
    codes = torch.randint(0, 256, (shape[0], code_bytes), dtype=torch.uint8, generator=generator)
    scales = torch.rand(shape[0], num_groups, generator=generator).to(torch.bfloat16)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=generator)
    weight = PackedWeight(scheme, shape, codes, scales, None if scheme.is_symmetric else zeros)
    product = packed_linear.choose_product(weight, torch.bfloat16)
    assert not isinstance(product, packed_linear.WideningProduct)
    x = torch.randn(num_tokens, 256, generator=generator).to(torch.bfloat16).float()
    exact = weight.widened(slice(None)).double()
    expected, magnitude = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    # Results, and zero points times scales or else widened weights, are rounded to bfloat16: 2^-8 of the sum of
    # magnitudes.
    assert ((product(x) - expected).abs() <= 2**-8 * magnitude).all()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("shape", [(96, 40), (90, 256)])
def test_bfloat16_of_shapes_the_operators_refuse(shape: tuple[int, int]) -> None:
    scheme = WeightScheme(4, None)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    weight = PackedWeight(scheme, shape, codes, torch.ones(shape[0], 1), None)
    product = packed_linear.choose_product(weight, torch.bfloat16)
    assert isinstance(product, packed_linear.WideningProduct)
    x = torch.randn(3, shape[1])
    expected = x.to(torch.bfloat16).double() @ weight.widened(slice(None)).double().T
    assert ((product(x) - expected).abs() <= 2**-7 * expected.abs() + 0.5).all()


def test_widening_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 256, (50, 64), dtype=torch.uint8)
    weight = PackedWeight(WeightScheme(8, 32), (50, 64), codes, torch.rand(50, 2), None)
    x = torch.randn(7, 64)
    exact = weight.widened(slice(None)).double()
    expected, magnitude = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    for elements in (1, 64 * 7, 64 * 50):
        monkeypatch.setattr(packed_linear, "BLOCK_ELEMENTS", elements)
        error = (packed_linear.WideningProduct(weight, torch.float32)(x) - expected).abs()
        assert (error <= 64 * 2**-24 * magnitude).all()


class TestQuantizedRunner(BitsConformance):
    """In float32."""

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        packed = export(folder, folder.parent / f"{folder.name}-int8", ExportOptions(WeightScheme(8, None)))
        return load(open_model(packed), max_seq_len=max_seq_len, num_rows=num_rows)


class Bfloat16Runner(BitsConformance):
    """By our own products where they can be compiled. One scheme has the whole contract, the others that of bits."""

    tolerance = 3e-2  # bfloat16 rounds by 2^-9, at some twenty places of a layer

    scheme: WeightScheme

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        destination = folder.parent / f"{folder.name}-{cls.__name__}"
        if not destination.exists():
            try:
                export(folder, destination, ExportOptions(cls.scheme))
            except Exception:
                destination = folder  # a damaged source is loaded as it is
        return load(open_model(destination), max_seq_len=max_seq_len, num_rows=num_rows, dtype="bfloat16")


class TestBfloat16Int8Channel(Bfloat16Runner):
    scheme = WeightScheme(8, None)


class TestBfloat16Int8Groups(Bfloat16Runner):
    scheme = WeightScheme(8, 32)


class TestBfloat16Int4Groups(Bfloat16Runner, RunnerConformance):
    scheme = WeightScheme(4, 32)


class Bfloat16RunnerByTorch(Bfloat16Runner):
    """Tokens one by one go through torch's operators, a prompt's chunks through widened weights."""

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codes_product, "is_available", lambda on_compile=None: False)
            return super().load(folder, max_seq_len=max_seq_len, num_rows=num_rows)


class TestBfloat16Int8ChannelByTorch(Bfloat16RunnerByTorch):
    scheme = WeightScheme(8, None)


class TestBfloat16Int8GroupsByTorch(Bfloat16RunnerByTorch, RunnerConformance):
    scheme = WeightScheme(8, 32)


class TestBfloat16Int4GroupsByTorch(Bfloat16RunnerByTorch):
    scheme = WeightScheme(4, 32)


def test_our_own_products_leave_prompts_as_they_are_cut_elsewhere(original: Path, tmp_path: Path) -> None:
    if not codes_product.is_available():
        pytest.skip("no C++ compiler for this processor")
    folder = export(original, tmp_path / "int8", ExportOptions(WeightScheme(8, 128)))
    runner = load(open_model(folder), max_seq_len=400, dtype="bfloat16")
    assert span_ends(runner)[:5] == [16, 32, 48, 64, 128]
    assert list(runner.arithmetic.cpu_sources) == ["codes_product", "token_operators"]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("multiplies_bfloat16", "ends"), [(True, [128, 256, 300]), (False, [16, 32, 48, 64, 128])])
def test_chunks_are_longer_where_each_widens_the_weights(
    multiplies_bfloat16: bool, ends: list[int], original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(original, tmp_path / "int8", ExportOptions(WeightScheme(8, 128)))
    monkeypatch.setattr("llmcli.runners.torch.precision.multiplies_bfloat16", lambda: multiplies_bfloat16)
    runner = load(open_model(folder), max_seq_len=400, dtype="bfloat16")
    assert span_ends(runner)[: len(ends)] == ends
    assert span_ends(load(open_model(folder), max_seq_len=400))[:5] == [16, 32, 48, 64, 128]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("num_tokens", [300, 520])  # the last chunk is short: 44 tokens; 8, which no form widens
@pytest.mark.parametrize("scheme", [WeightScheme(8, 32), WeightScheme(4, 128)], ids=str)
def test_a_span_of_several_chunks_has_their_bits_and_widens_once(
    scheme: WeightScheme, num_tokens: int, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(original, tmp_path / "export", ExportOptions(scheme))
    monkeypatch.setattr("llmcli.runners.torch.precision.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(packed_linear, "multiplies_bfloat16", lambda: True)
    num_widened, scaled = 0, int4_tiles._scaled

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_widened
        num_widened += 1
        return scaled(*arguments)

    monkeypatch.setattr(int4_tiles, "_scaled", counted)
    prompt, found = [*PROMPT, *PROMPT][:num_tokens], {}
    for most in (1, 10**9):
        runner = load(open_model(folder), max_seq_len=600, dtype="bfloat16")
        num_widened, row, logits, ends = 0, runner.open(prompt, GREEDY), [], [0]
        while ends[-1] < num_tokens:
            ends.append(runner.span_end(row, most))
            choose = "last" if ends[-1] == num_tokens else "none"
            logits.append(runner.queue([Span(row, tuple(prompt[ends[-2] : ends[-1]]), choose)]).logits(0))
        found[most] = np.concatenate(logits), go_on(runner, row, 8), ends[1:], num_widened
    (alone, tokens, chunk_ends, times), (together, same_tokens, span_ends, fewer_times) = found.values()
    assert same(alone, together)
    assert tokens == same_tokens
    assert (chunk_ends, span_ends) == {
        300: ([128, 256, 300], [300]),
        520: ([128, 256, 512, 520], [512, 520]),
    }[num_tokens]
    num_long = 3 if num_tokens == 520 or scheme.num_bits == 8 else 2  # int4 is widened for no 44 tokens
    assert times == num_long * fewer_times > 0


@pytest.mark.parametrize(
    ("position", "most", "prompt_len", "end"),
    [
        (0, 1, 2000, 128), (0, 255, 2000, 128), (0, 256, 2000, 256), (0, 10**9, 2000, 512), (0, 10**9, 300, 300),
        (128, 512, 2000, 512), (256, 512, 2000, 768), (512, 511, 2000, 768), (1792, 512, 2000, 2000),
        (512, 300, 800, 800), (512, 270, 800, 768), (100, 1000, 2000, 512),
    ],
)  # fmt: skip
def test_spans_end_with_whole_chunks(position: int, most: int, prompt_len: int, end: int) -> None:
    """At least one chunk, and never more than requested; repeated, it is the same."""
    assert span_end(position, most, prompt_len, widens_prompts=True) == end
    assert span_end(position, end - position, prompt_len, widens_prompts=True) == end
    sizes = chunks(position, end, widens_prompts=True)
    assert sum(sizes) == end - position
    assert all(
        chunk_end(position + sum(sizes[:index]), True) == position + sum(sizes[: index + 1])
        for index in range(len(sizes) - 1)
    )
