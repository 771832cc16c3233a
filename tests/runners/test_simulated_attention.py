"""The stand-ins behave as the runner expects: a lane's bits are its own, and a span has those of single steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from simulated_attention import append_tokens, attention_decode, attention_prefill  # noqa: E402
from simulated_kernels import allocate, embedding, on_host, product  # noqa: E402

from llmcli.kernels.attention_decode import LaneInputs  # noqa: E402
from llmcli.kernels.attention_prefill import PromptInputs  # noqa: E402
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout  # noqa: E402
from llmcli.lab.matrices import StoredMatrix, tiles_of  # noqa: E402

LAYOUT = QkvLayout(4, 2, 8)
TABLE = np.array([[5, 0, 3], [1, 6, 2]], np.int32)


def on_card(values: np.ndarray) -> Any:
    array = cupy.ndarray(values.shape, values.dtype, allocate(values.nbytes))
    on_host(array)[...] = values
    return array


class Layer:
    """Two rows of 20 tokens in pages, of codes."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.qkv = generator.normal(size=(28, LAYOUT.width)).astype(np.float32)
        self.angles = on_card(generator.normal(size=(3 * PAGE_TOKENS, 4, 2)).astype(np.float32))
        shape = (7, 2, PAGE_TOKENS, 8)
        self.cache = {name: on_card(np.zeros(shape, np.uint8)) for name in ("keys", "values")}
        self.cache |= {name: on_card(np.zeros(shape[:3], np.float32)) for name in ("key_scales", "value_scales")}
        self.norms = {name: on_card(np.linspace(0.5, 2, 8).astype(np.float32)) for name in ("q_norm", "k_norm")}
        for row in (0, 1):
            lanes = self.lanes(self.qkv[:20] * (row + 1), [row] * 20, list(range(20)))
            append_tokens(None, replace(lanes, q_norm=None, k_norm=None, cos_sin=None))

    def lanes(self, qkv: np.ndarray, rows: list[int], positions: list[int]) -> LaneInputs:
        return LaneInputs(
            qkv=on_card(qkv),
            layout=LAYOUT,
            **self.norms,
            eps=1e-5,
            cos_sin=self.angles,
            rows=on_card(np.array(rows, np.int32)),
            positions=on_card(np.array(positions, np.int32)),
            page_table=on_card(TABLE),
            cache=LayerCache(**self.cache),
            window=18,
        )

    def decode(self, tokens: list[int], rows: list[int], positions: list[int], is_cached: bool) -> np.ndarray:
        out = on_card(np.full((len(tokens), LAYOUT.q_size), np.nan, np.float32))
        lanes = self.lanes(self.qkv[tokens], rows, positions)
        if is_cached:
            append_tokens(None, lanes)
        counters = on_card(np.zeros(1, np.uint32))
        attention_decode(None, lanes, is_cached=is_cached, partials=None, counters=counters, out=out)
        return on_host(out).copy()


def test_a_span_has_the_bits_of_single_steps() -> None:
    together, apart = Layer(), Layer()
    lanes = [(20 + index, 1, 20 + index) for index in range(8)] + [(3, 0, 20)]
    out = together.decode(*(list(part) for part in zip(*lanes, strict=True)), is_cached=True)
    for index, (token, row, position) in enumerate(lanes):
        assert apart.decode([token], [row], [position], is_cached=False).tobytes() == out[index].tobytes()
    for name, array in together.cache.items():
        assert on_host(array).tobytes() == on_host(apart.cache[name]).tobytes()


def test_unused_lanes_are_left_alone() -> None:
    together, alone = Layer(), Layer()
    out = together.decode([5, 6, 7], [-1, 1, -1], [2**30, 20, 2**30], is_cached=False)
    assert np.isnan(out[[0, 2]]).all()
    assert out[1].tobytes() == alone.decode([6], [1], [20], is_cached=False).tobytes()
    ids, table = (
        on_card(np.array([2, 1], np.int32)),
        tiles_of(StoredMatrix("float32", np.arange(9, dtype=np.float32).reshape(3, 3))),
    )
    table = replace(table, tiles=on_card(table.tiles))
    vectors = on_card(np.zeros((3, 3), np.float32))
    embedding(None, table=table, token_ids=ids, rows=on_card(np.array([1, -1, 0], np.int32)), out=vectors)
    assert on_host(vectors).tolist() == [[3, 4, 5], [0, 0, 0], [6, 7, 8]]


def test_decode_and_prefill_see_the_same() -> None:
    layer = Layer()
    stepped = layer.decode([20], [0], [20], is_cached=False)
    lanes, out = layer.lanes(layer.qkv[20:21], [0], [20]), on_card(np.empty((1, LAYOUT.q_size), np.float32))
    append_tokens(None, lanes, norms_queries=True, rotates_queries=True)
    inputs = PromptInputs(qkv=lanes.qkv, layout=LAYOUT, cache=lanes.cache, pages=on_card(TABLE[0]), start=20, window=18)
    attention_prefill(None, inputs, out)
    np.testing.assert_allclose(on_host(out), stepped, rtol=1e-6)


def test_a_products_rows_are_their_own() -> None:
    generator = np.random.default_rng(1)
    x, weights = (generator.normal(size=shape).astype(np.float32) for shape in ((40, 300), (70, 300)))
    whole = product(x, weights)
    for count in (1, 2, 7, 16):
        assert product(x[:count], weights).tobytes() == whole[:count].tobytes()
