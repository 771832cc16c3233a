"""Planned launches: checked once for arrays that are alike, and always with the addresses of the call."""

import ctypes
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcli.kernels import planned
from llmcli.kernels.attention_prefill import attention_prefill
from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.driver import LaunchDriver
from llmcli.kernels.gemm_packed import gemm_packed
from llmcli.kernels.head_norm import head_norm
from llmcli.kernels.kv_append import kv_append
from llmcli.kernels.launches import Launch, Offset
from llmcli.kernels.planned import PlannedLaunches
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.residual_add import residual_add
from llmcli.kernels.rms_norm import rms_norm
from llmcli.kernels.rotary import rotary
from llmcli.kernels.round_rows import round_rows
from llmcli.kernels.scale_bias import scale_bias
from llmcli.kernels.swiglu import swiglu
from llmcli.kernels.tiles import TiledMatrix, tile_layout

F32, F16, I32, U8 = np.float32, np.float16, np.int32, np.uint8


class Array:
    """An array as launchers see it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = F32, ptr: int = 4096, strides: Any = None):
        self.dtype, self.shape, self.data = np.dtype(dtype), shape, SimpleNamespace(ptr=ptr)
        self.strides = strides or np.broadcast_to(np.zeros(1, dtype), shape).copy().strides


class Library:
    """Notes the first 8 bytes of every argument: the whole of an address or a scalar."""

    def __init__(self) -> None:
        self.launches: list[list[int]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        self.launches.append([ctypes.c_uint64.from_address(address).value for address in parameters])
        return 0


class Card:
    num_multiprocessors, shared_bytes_per_block, can_cluster = 132, 227 * 1024, True

    def __init__(self) -> None:
        self.library = Library()
        self.driver = LaunchDriver(self.shared_bytes_per_block, self.library)
        self.planned = PlannedLaunches()
        self.num_plans = 0

    def bind(self, launch: Launch) -> Any:
        self.num_plans += 1
        return self.driver.bind(launch, 0x1234, 0x1000, True)

    def launch_planned(self, plan: Any, arrays: tuple[Any, ...], *options: Any) -> None:
        self.planned.start(self, self.bind, plan, arrays, options)

    @property
    def last(self) -> list[int]:
        return self.library.launches[-1]


def plan(card: Card, x: Any, y: Any, option: int) -> Launch:
    if x.shape[0] > 8:
        raise ValueError(f"too long: {x.shape}")
    arguments = (None if y is None else Offset(y, 32), np.int32(option), x, None)
    return Launch("kernel", "kernel<1>", (1,), 32, arguments)


def test_arrays_that_are_alike_are_planned_once() -> None:
    card = Card()
    for ptr in (4096, 8192, 4096, 1 << 40):
        card.launch_planned(plan, (Array((4,), ptr=ptr), Array((4,), F16, ptr=2 * ptr)), 7)
        assert card.last == [2 * ptr + 32, 7, ptr, 0]
    assert card.num_plans == 1


@pytest.mark.parametrize(
    ("x", "y", "option"),
    [
        (Array((5,)), Array((4,)), 7),
        (Array((4, 1)), Array((4,)), 7),
        (Array((4,), I32), Array((4,)), 7),
        (Array((4,), strides=(8,)), Array((4,)), 7),
        (Array((4,), ptr=4096 + 8), Array((4,)), 7),
        (Array((4,)), Array((4,), ptr=4096 + 4), 7),
        (Array((4,)), None, 7),
        (Array((4,)), Array((4,)), 8),
    ],
    ids=["size", "axes", "type", "strides", "alignment", "the other's alignment", "absent", "option"],
)
def test_whatever_differs_is_planned_anew(x: Any, y: Any, option: int) -> None:
    card = Card()
    card.launch_planned(plan, (Array((4,)), Array((4,))), 7)
    card.launch_planned(plan, (x, y), option)
    assert card.num_plans == 2
    assert card.last == [0 if y is None else y.data.ptr + 32, option, x.data.ptr, 0]


def test_what_a_plan_refuses_is_refused_each_time() -> None:
    card = Card()
    for _ in range(2):
        card.launch_planned(plan, (Array((8,)), None), 0)
        with pytest.raises(ValueError, match="too long"):
            card.launch_planned(plan, (Array((9,)), None), 0)
    assert len(card.library.launches) == 2


def test_an_array_that_is_given_twice_does_not_stand_for_two() -> None:
    card = Card()
    x = Array((4,))
    for arrays in ((x, x), (Array((4,), ptr=64), Array((4,), ptr=128))):
        card.launch_planned(plan, arrays, 0)
        assert card.last == [arrays[1].data.ptr + 32, 0, arrays[0].data.ptr, 0]


def test_an_address_of_another_array_is_refused() -> None:
    stray = Array((4,))

    def wrong(card: Card, x: Any) -> Launch:
        return Launch("kernel", "kernel<1>", (1,), 32, (x, Offset(stray, 4)))

    with pytest.raises(TypeError, match="none of its arrays"):
        Card().launch_planned(wrong, (Array((4,)),))


def test_no_array_is_held() -> None:
    card = Card()
    x = Array((4,))
    alive = weakref.ref(x)
    card.launch_planned(plan, (x, None), 0)
    del x
    gc.collect()
    assert alive() is None


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "MAX_PLANS", 2)
    card = Card()
    for option in (0, 1, 2, 0):
        card.launch_planned(plan, (Array((4,)), None), option)
        assert card.last == [0, option, 4096, 0]
    assert card.num_plans == 4


LAYOUT = QkvLayout(4, 2, 64)
CACHE = (3, 2, 100, 64)

Give = Callable[..., Any]  # the next array of a shape and type


def matrix(give: Give) -> TiledMatrix:
    layout = tile_layout("int8", 64, 256, 128, "float16", is_symmetric=False)
    shape = (layout.num_tiles, layout.num_groups, 16)
    return TiledMatrix(
        layout,
        give(layout.num_tiles, layout.num_units, 1024, dtype=U8),
        give(*shape, dtype=F16),
        give(*shape, dtype=U8),
    )


LAUNCHERS: dict[str, Callable[[Any, Give], None]] = {
    "rms_norm": lambda card, give: rms_norm(
        card, x=give(5, 64), weight=give(64), eps=1e-5, out=give(5, 64, dtype=F16), row_scale=give(5)
    ),
    "round_rows": lambda card, give: round_rows(card, x=give(5, 64), out=give(5, 64, dtype=F16), row_scale=give(5)),
    "scale_bias": lambda card, give: scale_bias(card, x=give(5, 64), row_scale=give(5), bias=give(64)),
    "residual_add": lambda card, give: residual_add(
        card, x=give(5, 64), row_scale=give(5), bias=None, hidden=give(5, 64)
    ),
    "swiglu": lambda card, give: swiglu(
        card, gate_up=give(5, 128), row_scale=give(5), out=give(5, 64, dtype=F16), out_scale=give(5)
    ),
    "head_norm": lambda card, give: head_norm(card, x=give(5, 128), weight=give(64), eps=1e-5),
    "rotary": lambda card, give: rotary(
        card, qkv=give(5, LAYOUT.width), layout=LAYOUT, positions=give(5, dtype=I32), cos_sin=give(100, 32, 2)
    ),
    "kv_append": lambda card, give: kv_append(
        card,
        qkv=give(5, LAYOUT.width),
        layout=LAYOUT,
        rows=give(5, dtype=I32),
        positions=give(5, dtype=I32),
        keys=give(*CACHE, dtype=F16),
        values=give(*CACHE, dtype=F16),
    ),
    "attention_prefill": lambda card, give: attention_prefill(
        card,
        qkv=give(5, LAYOUT.width),
        layout=LAYOUT,
        keys=give(*CACHE, dtype=F16),
        values=give(*CACHE, dtype=F16),
        row=1,
        start=20,
        window=None,
        out=give(5, LAYOUT.q_size),
    ),
    "dequantize": lambda card, give: dequantize(
        card, matrix=matrix(give), first_tile=1, num_tiles=2, out=give(32, 256, dtype=F16)
    ),
    "gemm_packed": lambda card, give: gemm_packed(
        card, matrix=matrix(give), x=give(5, 256, dtype=F16), out=give(5, 64)
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_pass_the_addresses_of_the_call(name: str) -> None:
    """What is planned for one set of arrays is right for another: no address is taken into a plan as a number."""

    def arrays_from(ptr: int) -> tuple[Give, list[int]]:
        given: list[int] = []

        def give(*shape: int, dtype: Any = F32) -> Array:
            given.append(ptr + len(given) * 0x100000)
            return Array(shape, dtype, given[-1])

        return give, given

    card, other = Card(), Card()
    for ptr in (0x7000_0000_0000, 0x7100_0000_0000):
        LAUNCHERS[name](card, arrays_from(ptr)[0])
    assert card.num_plans == 1
    give, given = arrays_from(0x7100_0000_0000)
    LAUNCHERS[name](other, give)
    assert card.last == other.last
    assert {address & ~0xFFFFF for address in card.last} >= set(given)
