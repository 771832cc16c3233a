"""Replays: launches for some arrays, repeated for others with their addresses."""

import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driverless_card import DriverlessCard

from llmcli.errors import DeviceError
from llmcli.kernels.attention_decode import PARTIAL_EXTRA, LaneInputs, append_tokens, attention_decode, grid_heads
from llmcli.kernels.attention_prefill import PromptInputs, attention_prefill
from llmcli.kernels.attention_rings import attention_rows, attention_span
from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, gather_columns
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.gemv import NextRows, RowNorm, gemv, gemv_float, norm_sums
from llmcli.kernels.launches import Offset, addresses_of
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout
from llmcli.kernels.replay import Replay, base_addresses, likeness
from llmcli.kernels.stage_wide import image_bytes, stage_wide
from llmcli.kernels.tiles import TiledMatrix, tile_layout

F32, F16, I32, U8 = np.float32, np.float16, np.int32, np.uint8


class Array:
    """An array as launchers see it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = F32, ptr: int = 4096, strides: Any = None):
        self.dtype, self.shape, self.data = np.dtype(dtype), shape, SimpleNamespace(ptr=ptr)
        host = np.broadcast_to(np.zeros(1, dtype), shape)
        self.nbytes = host.size * host.itemsize
        self.strides = strides or np.empty(shape, dtype).strides

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "Array":
        begin, end, _ = rows.indices(self.shape[0])
        ptr = self.data.ptr + begin * self.strides[0]
        return Array((end - begin, *self.shape[1:]), self.dtype, ptr, self.strides)


def launch_two(card: Device, own: Any, shared: Any) -> None:
    card.launch("a", "a<1>", grid=(1,), block=32, arguments=(Offset(own, 8), np.int32(7), shared, None))
    card.launch("b", "b<2>", grid=(1,), block=32, arguments=(shared, own))


def test_a_replay_launches_the_same_with_the_addresses_of_other_arrays() -> None:
    card, own, shared = DriverlessCard(), Array((4,), ptr=4096), Array((4,), ptr=8192)
    replay = card.record(lambda: launch_two(card, own, shared), [None, own])
    assert card.launches == [[4104, 7, 8192, 0], [8192, 4096]]
    replay.start(base_addresses([None, Array((4,), ptr=1 << 40)]))
    assert card.launches[2:] == [[(1 << 40) + 8, 7, 8192, 0], [8192, 1 << 40]]
    assert [starter.label for starter, _ in card.noted] == [("a", "a<1>"), ("b", "b<2>")] * 2


def test_an_address_belongs_to_the_array_it_is_in() -> None:
    card, first, second = DriverlessCard(), Array((4,), ptr=4096), Array((4,), ptr=4112)

    def run() -> None:
        for offset in (0, 12, 16, 28, 32):
            card.launch("a", "a<1>", grid=(1,), block=32, arguments=(Offset(first, offset),))

    card.record(run, [second, first]).start([1 << 20, 1 << 30])
    assert card.launches[5:] == [[1 << 30], [(1 << 30) + 12], [1 << 20], [(1 << 20) + 12], [4128]]


def test_only_what_is_recorded_is_replayed() -> None:
    card, own, shared = DriverlessCard(), Array((4,)), Array((4,))
    launch_two(card, own, shared)
    replay = card.record(lambda: card.launch("c", "c<3>", grid=(1,), block=32, arguments=()), [own])
    launch_two(card, own, shared)
    card.noted = []
    replay.start([64])
    assert [starter.label for starter, _ in card.noted] == [("c", "c<3>")]


def test_after_a_failure_nothing_is_recorded() -> None:
    def fail() -> None:
        raise DeviceError("the card failed")

    card = DriverlessCard()
    with pytest.raises(DeviceError):
        card.record(fail, [])
    assert card._started is None


def test_no_array_is_held() -> None:
    card = DriverlessCard()

    def record() -> tuple[Replay, Any]:
        own = Array((4,))
        return card.record(lambda: launch_two(card, own, Array((4,), ptr=8192)), [own]), weakref.ref(own)

    replay, alive = record()
    gc.collect()
    assert alive() is None
    replay.start([64])
    assert card.launches[2:] == [[72, 7, 8192, 0], [8192, 64]]


@pytest.mark.parametrize(
    "other",
    [Array((5,)), Array((4, 1)), Array((4,), I32), Array((4,), strides=(8,)), Array((4,), ptr=4096 + 8), None],
    ids=["size", "axes", "type", "strides", "alignment", "absent"],
)
def test_likeness_is_all_but_the_address(other: Any) -> None:
    assert likeness([Array((4,)), None]) == likeness([Array((4,), ptr=1 << 40), None])
    assert likeness([Array((4,))]) != likeness([other])


LAYOUT = QkvLayout(4, 2, 64)
LAYOUT_OF_CODES = tile_layout("int8", 64, 256, 128, "float16", is_symmetric=False)
DOWN = tile_layout("int8", 64, 32, None, "float32")
CACHE = (7, 2, PAGE_TOKENS, 64)

Give = Callable[..., Any]  # the next array of a shape and type


def matrix(give: Give) -> TiledMatrix:
    layout = LAYOUT_OF_CODES
    shape = (layout.num_tiles, layout.num_groups, 16)
    return TiledMatrix(
        layout,
        give(layout.num_tiles, layout.num_units, 1024, dtype=U8),
        give(*shape, dtype=F16),
        give(*shape, dtype=U8),
    )


def floats(give: Give) -> TiledMatrix:
    layout = tile_layout("float32", 64, 256)
    return TiledMatrix(layout, give(layout.num_tiles, layout.num_units, 1024, dtype=U8), None, None)


def wide(give: Give) -> dict[str, Any]:
    return {"matrix": matrix(give), "image": give(image_bytes(256, 9), dtype=U8), "row_scales": give(9)}


def prompt(give: Give) -> PromptInputs:
    cache = LayerCache(give(*CACHE, dtype=F16), give(*CACHE, dtype=F16))
    qkv, pages = give(5, LAYOUT.width), give(7, dtype=I32)
    return PromptInputs(qkv=qkv, layout=LAYOUT, cache=cache, pages=pages, start=20, window=None)


def lanes(give: Give, has_q_norm: bool = True) -> LaneInputs:
    return LaneInputs(
        qkv=give(2, LAYOUT.width),
        layout=LAYOUT,
        q_norm=give(64) if has_q_norm else None,
        k_norm=give(64),
        eps=1e-5,
        cos_sin=give(100, 32, 2),
        rows=give(2, dtype=I32),
        positions=give(2, dtype=I32),
        page_table=give(3, 7, dtype=I32),
        cache=LayerCache(give(*CACHE, dtype=U8), give(*CACHE, dtype=U8), give(*CACHE[:3]), give(*CACHE[:3])),
        window=20,
    )


LAUNCHERS: dict[str, Callable[[Any, Give], None]] = {
    "gather_columns": lambda card, give: gather_columns(
        card, x=give(5, 64, dtype=F16), order=give(64, dtype=I32), out=give(5, 64, dtype=F16)
    ),
    "attention_prefill": lambda card, give: attention_prefill(card, prompt(give), give(5, LAYOUT.q_size)),
    "append_tokens": lambda card, give: append_tokens(card, lanes(give, has_q_norm=False)),
    "attention_decode": lambda card, give: attention_decode(
        card,
        lanes(give),
        is_cached=False,
        partials=give(2, 4, 3, 64 + PARTIAL_EXTRA),
        counters=give(2, grid_heads(LAYOUT, 1), dtype=np.uint32),
        out=give(2, LAYOUT.q_size),
    ),
    "attention_rows": lambda card, give: attention_rows(
        card,
        lanes(give),
        partials=give(5, LAYOUT.group_size, 3, 64 + PARTIAL_EXTRA),
        counters=give(5, dtype=np.uint32),
        out=give(2, LAYOUT.q_size),
    ),
    "attention_span": lambda card, give: attention_span(
        card,
        lanes(give),
        num_spans=1,
        partials=give(2, 4, 3, 64 + PARTIAL_EXTRA),
        counters=give(2, LAYOUT.num_attention_heads, dtype=np.uint32),
        out=give(2, LAYOUT.q_size),
    ),
    "stage_wide": lambda card, give: stage_wide(
        card,
        x=give(9, 256),
        unit_inputs=64,
        out=give(image_bytes(256, 9), dtype=U8),
        row_scales=give(9),
        norm_weight=give(256),
        eps=1e-5,
        parts=give(2, 9, 256),
    ),
    "add_parts": lambda card, give: add_parts(card, parts=give(2, 9, 64), out=give(9, 64)),
    "gemm_wide": lambda card, give: gemm_wide(
        card, **wide(give), out=give(9, 64), bias=give(64), epilogue="add", others=give(1, 9, 64)
    ),
    "gemm_wide_swiglu": lambda card, give: gemm_wide_swiglu(
        card, **wide(give), down=DOWN, out=give(image_bytes(32, 9), dtype=U8), bias=give(64)
    ),
    "gemv": lambda card, give: gemv(
        card, matrix=matrix(give), x=give(9, 256, dtype=F16), row_scales=give(9), out=give(9, 64), bias=give(64)
    ),
    "gemv that is led and leads": lambda card, give: gemv(
        card,
        matrix=matrix(give),
        x=give(9, 256, dtype=F16),
        out=give(9, 64),
        norm=RowNorm(give(9, norm_sums(256)), give(9, 256), give(256), 1e-5),
        epilogue="add",
        next_rows=NextRows(give(64), give(9, 64, dtype=F16), give(9, norm_sums(64))),
    ),
    "gemv_float": lambda card, give: gemv_float(
        card, matrix=floats(give), x=give(9, 256), out=give(9, 64), norm_weight=give(256), bias=give(64)
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_give_addresses_as_arrays(name: str) -> None:
    """Launches for some arrays are right for others: no launch keeps an address as a number."""

    def arrays_from(ptr: int) -> tuple[Give, list[Array]]:
        given: list[Array] = []

        def give(*shape: int, dtype: Any = F32) -> Array:
            given.append(Array(shape, dtype, ptr + len(given) * 0x100000))
            return given[-1]

        return give, given

    card, other = DriverlessCard(), DriverlessCard()
    give, given = arrays_from(0x7000_0000_0000)
    replay = card.record(lambda: LAUNCHERS[name](card, give), given)
    launched = len(card.launches)
    give, others = arrays_from(0x7100_0000_0000)
    LAUNCHERS[name](other, give)
    replay.start(base_addresses(others))
    assert card.launches[launched:] == other.launches
    seen = {value & ~0xFFFFF for values in other.launches for value in values}
    assert seen >= {array.data.ptr for array in others}


def test_products_of_the_library_are_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, Any]] = []

    class NotingLibrary:
        """Every function succeeds."""

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: called.append((name, arguments)) or 0

    monkeypatch.setattr(Cublas, "functions", NotingLibrary())
    card = DriverlessCard()
    library = Cublas(card)

    def arrays(ptr: int) -> Sequence[Any]:
        return Array((5, 64), F16, ptr), Array((32, 64), F16, 2 * ptr), Array((5, 32), F32, 4 * ptr)

    x, weight, out = arrays(4096)
    replay = card.record(lambda: library.matmul(x=x, weight=weight, out=out), (x, weight))
    replay.start(base_addresses(arrays(1 << 20)[:2]))
    assert [name for name, _ in called[:2]] == ["cublasCreate_v2", "cublasSetStream_v2"]
    for name, (_, *operations), ptr in zip(*zip(*called[2:], strict=True), (4096, 1 << 20), strict=True):
        values = [getattr(one, "value", one) for one in operations]
        assert name == "cublasGemmEx"
        assert values[:5] == [1, 0, 32, 5, 64]
        assert values[6:12] == [2 * ptr, 2, 64, ptr, 2, 64]
        assert values[13:] == [4 * 4096, 0, 32, 68, -1]
        assert [operations[place]._obj.value for place in (5, 12)] == [1, 0]
    assert {starter.label for starter, _ in card.noted} == {None}
    with pytest.raises(ValueError, match=r"out is \[4, 32\], expected \[5, 32\]"):
        library.matmul(x=x, weight=weight, out=out[:4])


def test_addresses_of_arguments_leave_out_what_is_none() -> None:
    assert addresses_of((Array((4,)), None, np.int32(3), Offset(Array((4,), ptr=64), 4))) == [4096, 68]
    assert base_addresses([Array((4,)), None]) == [4096, 0]
