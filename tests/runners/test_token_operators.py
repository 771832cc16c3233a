"""The small operators in our own C++: against float64, and bit for bit against themselves."""

import ctypes
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import VARIANTS
from quantized import SIZES, export
from row_steps import PROMPT, relative_error, single_steps, start
from tiny_models import write_tiny_llama
from torch import Tensor

from llmcli.checkpoint.model import open_model
from llmcli.config.llama import LlamaConfig
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.host.cache import RowCache
from llmcli.runners.torch import codes_product, token_operators
from llmcli.runners.torch.codes_product import CAPABILITIES
from llmcli.runners.torch.load import load
from llmcli.runners.torch.operators import empty_cache
from llmcli.runners.torch.token_operators import TokenOperators, TokenPlace

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(token_operators.token_operators() is None, reason="no C++ compiler for this processor")
FORMS = list(CAPABILITIES)[list(CAPABILITIES).index(codes_product.instructions() or "avx2") :]
EPS = 1e-5
STEP = 2.0**-24  # half of float32's last place, of 1


@pytest.fixture(params=FORMS)
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TokenOperators:
    """With each set of instructions that this processor has."""
    return of_form(request.param, monkeypatch)


def of_form(form: str, monkeypatch: pytest.MonkeyPatch) -> TokenOperators:
    monkeypatch.setattr(codes_product, "instructions", lambda: form)
    found = token_operators.token_operators()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache_of(num_kv_heads: int, head_dim: int, num_pages: int, pages: list[int]) -> RowCache:
    """A cache of two layers, with NaN where nothing is written."""
    sizes = {
        "hidden_size": num_kv_heads * head_dim,
        "intermediate_size": 64,
        "vocab_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
    }
    cache = empty_cache(LlamaConfig.from_dict({"model_type": "llama", **sizes}, "a test"), num_pages, "bfloat16")
    for array in cache.arrays:
        array.fill_(math.nan)
    return cache.row(pages)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def exact_rotation(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + head_dim / 2) as complex numbers."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("size", [1, 15, 16, 40, 172, 2048])
def test_rms_norm(size: int, operators: TokenOperators) -> None:
    for num_rows in (1, 3, 70):
        x, weight = random(num_rows, size) * 3, random(size, seed=1)
        found = operators.rms_norm(x, weight, EPS).double()
        expected = exact_norm(x, weight)
        # Squares, their sum over at most size / 16 + 4 additions of a lane, root, quotient and two products.
        assert ((found - expected).abs() <= (size / 16 + 10) * STEP * expected.abs()).all()


@pytest.mark.parametrize("size", [1, 17, 64, 172])
def test_swiglu(size: int, operators: TokenOperators) -> None:
    gate, up = random(5, size) * 8, random(5, size, seed=1)
    gate[0, 0], gate[1, 0], gate[2, 0] = 200.0, -200.0, 0.0
    found = operators.swiglu(gate, up).double()
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert ((found - expected).abs() <= 8 * STEP * expected.abs() + 1e-35).all()
    wide = random(40, 4096)
    assert torch.equal(operators.swiglu(wide, wide)[7:8], operators.swiglu(wide[7:8], wide[7:8]))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (8, 2, 64), (6, 1, 48)])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, is_normed: bool, is_rotated: bool, operators: TokenOperators
) -> None:
    """Token after token, against all of them in float64, with the keys and values that bfloat16 holds."""
    num_tokens, window = 50, 20
    pages = [5, 2, 3, 0]
    rows = [cache_of(num_kv_heads, head_dim, 6, pages) for _ in range(2)]  # all tokens are seen, or a window
    query, key, value = (random(num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    weights = random(head_dim, seed=3), random(head_dim, seed=4)
    angles = torch.arange(num_tokens)[:, None].double() * random(head_dim // 2, seed=5).double()
    exact_query, exact_key = query, key
    if is_normed:
        exact_query, exact_key = exact_norm(query, weights[0]), exact_norm(key, weights[1])
    if is_rotated:
        exact_query, exact_key = (exact_rotation(of, angles[:, None]) for of in (exact_query, exact_key))
    for position in range(num_tokens):
        turn = (angles[position].cos().float(), angles[position].sin().float()) if is_rotated else None
        for row, begin in zip(rows, (0, max(0, position + 1 - window)), strict=True):
            new = (of[position : position + 1].clone() for of in (query, key, value))
            place = TokenPlace(row, 1, begin, position)
            found = operators.attend_token(*new, (*weights, EPS) if is_normed else None, turn, place)
            keys, values = (of.double() for of in row.seen(1, begin, position + 1))
            stored = exact_key[begin : position + 1].transpose(0, 1).double()
            assert ((keys - stored).abs() <= 2.0**-8 * stored.abs() + 1e-5).all()
            assert torch.equal(values[:, -1], value[position].bfloat16().double())
            shared = exact_query[position].double().view(num_kv_heads, -1, head_dim)
            expected = ((shared @ keys.transpose(1, 2)) / math.sqrt(head_dim)).softmax(-1) @ values
            assert torch.allclose(found.double(), expected.reshape(1, -1), rtol=0, atol=2e-5), (position, begin)
    keys, _ = rows[0].seen(0, 0, num_tokens)
    assert keys.isnan().all()  # the other layer
    assert row.layer(1)[0][:, [1, 4]].isnan().all()  # the pages of others


def test_bits_do_not_depend_on_pages_threads_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens = 700  # long enough that threads share the heads
    key, value = random(num_tokens, 4, 64), random(num_tokens, 4, 64, seed=1)
    query, x = random(1, 8, 64, seed=2), random(300, 500, seed=3)
    straight = list(range(44))
    found = []
    for form in FORMS:
        operators = of_form(form, monkeypatch)
        for num_threads, pages in ((1, straight), (2, straight[::-1]), (3, straight)):
            torch.set_num_threads(num_threads)
            row = cache_of(4, 64, 44, pages)
            row.append(0, 0, key, value)
            place = TokenPlace(row, 0, 100, num_tokens - 1)
            attended = operators.attend_token(query.clone(), key[-1:].clone(), value[-1:], None, None, place)
            found.append((attended, operators.rms_norm(x, x[0], EPS), operators.swiglu(x, x * 0.5)))
    assert all(torch.equal(*pair) for others in found[1:] for pair in zip(others, found[0], strict=True))


def test_what_is_not_a_number_shows(operators: TokenOperators) -> None:
    x = random(3, 64)
    x[1, 5] = math.nan
    assert operators.rms_norm(x, torch.ones(64), EPS).isnan().any(1).tolist() == [False, True, False]
    assert operators.swiglu(x, torch.ones(3, 64)).isnan().sum() == 1
    row = cache_of(1, 16, 1, [0])
    key = random(1, 1, 16)
    key[0, 0, 3] = math.nan
    found = operators.attend_token(random(1, 1, 16), key, random(1, 1, 16), None, None, TokenPlace(row, 0, 0, 0))
    assert found.isnan().all()
    assert row.seen(0, 0, 1)[0].isnan().sum() == 1


def test_keys_and_values_are_rounded_as_torch_rounds(operators: TokenOperators) -> None:
    row = cache_of(1, 64, 1, [0])
    ties = (0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF)
    bits = torch.tensor([*ties, 0x7F7FFFFF, 0x00000001, -0x80000000, 0x7F800000])
    value = bits.repeat(8).to(torch.int32).view(torch.float32).view(1, 1, 64)
    operators.attend_token(random(1, 1, 64), random(1, 1, 64), value, None, None, TokenPlace(row, 0, 0, 0))
    stored = row.seen(0, 0, 1)[1]
    assert torch.equal(stored.view(torch.int16), value.view(1, 1, 64).bfloat16().view(torch.int16))


@pytest.mark.parametrize(
    "name", ["grouped", "biases", "yarn rotary", "qwen2 with windows", "qwen3 with layer types", "smollm3 with windows"]
)
def test_tokens_of_every_trait_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    """Against a quantized model in float32, in plain torch, to bfloat16's precision of keys and values."""
    source = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **(VARIANTS[name] | SIZES | {"head_dim": 32}))
    model = open_model(export(source, tmp_path / "int8", ExportOptions(WeightScheme(8, 32))))
    found, expected = (
        single_steps(runner, start(runner, PROMPT[:5], None), PROMPT[5:60])
        for runner in (load(model, max_seq_len=80, dtype=dtype) for dtype in ("bfloat16", "float32"))
    )
    assert 0 < relative_error(found, expected) < 0.02


def test_the_structure_is_that_of_the_source() -> None:
    """Four pointers, a float and four numbers, in their order."""
    source = (ROOT / "kernels" / "cpu" / "token_operators.cpp").read_text()
    body = re.sub(r"//.*", "", source.split("struct TokenAttention {")[1].split("}")[0])
    fields = [name for name, _ in token_operators._TokenAttention._fields_]
    assert re.findall(r"(\w+)[;,]", body) == fields
    assert ctypes.sizeof(token_operators._TokenAttention) == 4 * 8 + 5 * 4 + 4
