"""Our own products of packed weights on the CPU: against float64, and bit for bit against themselves."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packed_sizes import random_weight

from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.torch import codes_product
from llmcli.runners.torch.codes_product import CAPABILITIES, CodesProduct
from llmcli.runners.torch.packed_linear import WideningProduct, choose_product
from llmcli.runners.torch.weights import PackedWeight

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not codes_product.is_available(), reason="no C++ compiler for this processor")

SCHEMES = [
    WeightScheme(8, None),
    WeightScheme(8, 128),
    WeightScheme(8, 32, is_symmetric=False),
    WeightScheme(8, 16),
    WeightScheme(4, None, is_symmetric=False),
    WeightScheme(4, 128),
    WeightScheme(4, 96),
    WeightScheme(4, 64, is_symmetric=False),
    WeightScheme(4, 256),
]
FORMS = list(CAPABILITIES)[list(CAPABILITIES).index(codes_product.instructions() or "avx2") :]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each set of instructions that this processor has."""
    monkeypatch.setattr(codes_product, "instructions", lambda: request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize("shape", [(64, 768), (200, 768), (1, 3840)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_are_those_of_the_codes(scheme: WeightScheme, shape: tuple[int, int], form: str) -> None:
    """Within 16 bits of an activation: 2^-16 of the largest of its chunk, in each input."""
    weight = random_weight(scheme, shape, generator())
    product = CodesProduct(weight)
    exact = weight.widened(slice(None)).double()
    for num_tokens in (1, 2, 3, 4, 6, 7, 12, 13, 29):
        x = torch.randn(num_tokens, shape[1], generator=generator())
        largest = x.abs().unflatten(1, (-1, 16)).amax(2).max().item()  # of any chunk
        error = (product(x).double() - x.double() @ exact.T).abs()
        bound = 2.0**-16 * largest * exact.abs().sum(1) + 2.0**-20 * (x.double().abs() @ exact.abs().T)
        assert (error <= bound).all(), num_tokens


@pytest.mark.parametrize("scheme", [WeightScheme(8, 128), WeightScheme(4, None, is_symmetric=False)], ids=str)
def test_parts_are_multiplied_together_with_the_bits_of_each(scheme: WeightScheme, form: str) -> None:
    product = choose_product(random_weight(scheme, (200, 768), generator()), torch.bfloat16)
    assert isinstance(product, CodesProduct)
    for sizes in ((1,), (1,) * 8, (3, 1, 16), (130, 2)):
        parts = [torch.randn(size, 768, generator=generator()) + place for place, size in enumerate(sizes)]
        assert torch.equal(product(torch.cat(parts), sizes), torch.cat([product(part) for part in parts]))


@pytest.mark.parametrize("num_bits", [8, 4])
def test_integers_are_multiplied_exactly(num_bits: int, form: str) -> None:
    """Activations that are integers with a largest of 32767 lose nothing, nor do codes: every place is its own."""
    scheme = WeightScheme(num_bits, 128)
    weight = random_weight(scheme, (80, 256), generator())
    weight = PackedWeight(scheme, weight.shape, weight.codes, torch.ones(80, 2), None)
    x = torch.randint(-99, 100, (9, 256), generator=generator()).float()
    x[:, ::128] = 32767.0
    assert torch.equal(CodesProduct(weight)(x), (x.double() @ weight.widened(slice(None)).double().T).float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_token_has_the_same_bits_among_others_with_any_threads_and_instructions(
    scheme: WeightScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beyond a panel and inputs beyond one, too: sums continue from what was stored."""
    weight = random_weight(scheme, (340, 5376), generator())
    x = torch.randn(51, 5376, generator=generator())
    torch.set_num_threads(1)
    found = CodesProduct(weight)(x)
    assert torch.equal(torch.cat([CodesProduct(weight)(token[None]) for token in x]), found)
    for form in FORMS:
        monkeypatch.setattr(codes_product, "instructions", lambda form=form: form)
        product = CodesProduct(weight)
        for num_threads, num_tokens in ((1, 50), (2, 51), (3, 7), (2, 1)):
            torch.set_num_threads(num_threads)
            assert torch.equal(product(x[:num_tokens]), found[:num_tokens]), (form, num_threads, num_tokens)


def test_what_is_not_a_number_stays_with_its_token(form: str) -> None:
    weight = random_weight(WeightScheme(8, 32), (70, 96), generator())
    product = CodesProduct(weight)
    x = torch.randn(5, 96, generator=generator())
    clean = product(x)
    x[1, 3], x[2, 40], x[4, 95] = float("nan"), float("inf"), float("-inf")
    found = product(x)
    assert torch.isnan(found[[1, 2, 4]]).all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


def test_activations_of_any_size(form: str) -> None:
    weight = random_weight(WeightScheme(4, 32), (64, 64), generator())
    exact = weight.widened(slice(None)).double()
    x = torch.randn(2, 64, generator=generator())
    for scale in (1e-25, 1e-10, 1e30):
        expected = (x * scale).double() @ exact.T
        assert torch.allclose(CodesProduct(weight)(x * scale).double(), expected, rtol=1e-3, atol=1e-3 * scale)
    assert torch.equal(CodesProduct(weight)(torch.zeros(2, 64)), torch.zeros(2, 64))
    assert torch.equal(CodesProduct(weight)(x * 1e-35), torch.zeros(2, 64))  # negligible next to any other number


def test_no_byte_of_an_input_is_read_beyond_its_end() -> None:
    """In a process of its own, which such a read would end."""
    program = """
import torch
from packed_sizes import GuardedMemory, random_weight
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.torch.codes_product import CodesProduct
memory, generator = GuardedMemory(), torch.Generator().manual_seed(0)
for input_size in (1, 15, 16, 17, 127, 128, 129, 172, 300):
    for bits in (8, 4):
        weight = random_weight(WeightScheme(bits, None), (5, input_size), generator)
        for num_tokens in (1, 2, 13):
            x = torch.randn(num_tokens, input_size, generator=generator)
            y = CodesProduct(weight)(memory.copy_of(x))
            expected = x.double() @ weight.widened(slice(None)).double().T
            assert torch.allclose(y.double(), expected, rtol=1e-3, atol=2e-2), (input_size, bits, num_tokens)
print("read")
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "runners")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout == "read\n", result.stderr


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = random_weight(WeightScheme(8, 24), (64, 48), generator())
    assert isinstance(choose_product(odd, torch.bfloat16), WideningProduct)
    even = random_weight(WeightScheme(8, 48), (64, 48), generator())
    assert isinstance(choose_product(even, torch.bfloat16), CodesProduct)
    assert isinstance(choose_product(even, torch.float32), WideningProduct)  # the reference
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "fma3": True, "bmi2": True, "f16c": True})
    assert codes_product.instructions() == "avx2"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sse4_2": True})
    assert not CodesProduct.takes(even)
    every = {one: True for names in CAPABILITIES.values() for one in names}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**every, "amx_bf16": True})
    assert not CodesProduct.takes(even)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: every)
    monkeypatch.setattr(codes_product.platform, "machine", lambda: "aarch64")
    assert not CodesProduct.takes(even)


def test_the_weight_is_not_changed() -> None:
    """Its codes may belong to a mapped file."""
    weight = random_weight(WeightScheme(8, 128), (64, 128), generator())  # no row and no input to add
    before = weight.codes.clone()
    CodesProduct(weight)
    assert torch.equal(weight.codes, before)


def test_the_structure_is_that_of_the_source() -> None:
    """Three pointers and seven numbers, in their order."""
    source = (ROOT / "kernels" / "cpu" / "codes_product.cpp").read_text()
    body = source.split("struct CodesMatrix {")[1].split("}")[0]
    fields = [name for name, _ in codes_product._Matrix._fields_]
    assert re.findall(r"(\w+)[;,]", body) == fields
    assert ctypes.sizeof(codes_product._Matrix) == 3 * 8 + 7 * 4 + 4
