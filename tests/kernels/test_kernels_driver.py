"""Launches as the driver gets them: a fake driver library reads the C structures back."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcli.errors import DeviceError
from llmcli.kernels.driver import LaunchDriver
from llmcli.kernels.launches import Launch, addresses_of, check_launch

KINDS = (ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8 bytes, and a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class FakeLibrary:
    """Reads what cuLaunchKernelEx is given, with the parameter types of KINDS, and answers `status`."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launches: list[SimpleNamespace] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        assert len(config) == ctypes.sizeof(LaunchConfig)
        config = LaunchConfig.from_buffer_copy(config)
        values = [
            ctypes.cast(address, ctypes.POINTER(kind))[0] for address, kind in zip(parameters, KINDS, strict=False)
        ]
        attributes = [(config.attributes[i].id, config.attributes[i].value) for i in range(config.num_attributes)]
        self.launches.append(
            SimpleNamespace(
                grid=tuple(config.grid),
                block=tuple(config.block),
                shared_bytes=config.shared_bytes,
                stream=config.stream,
                function=function.value,
                values=values,
                attributes=attributes,
                extra=extra,
            )
        )
        return self.status

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"invalid argument" if status == 1 else None
        return 0


def launch(driver: LaunchDriver, **changes: Any) -> None:
    values: dict[str, Any] = {"grid": (3, 2), "block": 128, "arguments": ()}
    described = Launch("kernel", "kernel<1>", **(values | changes))
    check_launch(described, max_shared_bytes=1000)
    bound = driver.bind(described, 0x7000_0000_1234, 0x1000, described.overlaps)
    bound.start(addresses_of(described.arguments))


def test_every_argument_arrives_in_its_c_type() -> None:
    library = FakeLibrary()
    array = SimpleNamespace(data=SimpleNamespace(ptr=0x7F00_1234_5678))
    arguments = (np.int32(-7), np.float32(0.1), np.uint64(2**64 - 1), np.float64(0.1), array, None)
    launch(LaunchDriver(library), arguments=arguments, shared_bytes=512)
    (seen,) = library.launches
    assert seen.values == [-7, float(np.float32(0.1)), 2**64 - 1, 0.1, 0x7F00_1234_5678, None]
    assert (seen.grid, seen.block, seen.shared_bytes) == ((3, 2, 1), (128, 1, 1), 512)
    assert (seen.stream, seen.function, seen.extra) == (0x1000, 0x7000_0000_1234, None)
    assert seen.attributes == []


@pytest.mark.parametrize(("grid", "whole"), [((5,), (5, 1, 1)), ((5, 4), (5, 4, 1)), ((5, 4, 3), (5, 4, 3))])
def test_absent_dimensions_are_one(grid: tuple[int, ...], whole: tuple[int, int, int]) -> None:
    library = FakeLibrary()
    launch(LaunchDriver(library), grid=grid)
    assert library.launches[0].grid == whole


def test_overlapping_is_an_attribute_of_the_launch() -> None:
    library = FakeLibrary()
    driver = LaunchDriver(library)
    launch(driver, overlaps=True)
    launch(driver, overlaps=False)
    assert [seen.attributes for seen in library.launches] == [[(6, 1)], []]


@pytest.mark.parametrize(
    "argument",
    [1, 1.0, True, "x", np.float16(1), np.int8(1), np.bool_(True), np.zeros(3), [1]],
    ids=lambda argument: type(argument).__name__,
)
def test_what_has_no_certain_size_is_refused(argument: Any) -> None:
    library = FakeLibrary()
    with pytest.raises(TypeError, match=f"kernel: argument 2 is {type(argument).__name__}"):
        launch(LaunchDriver(library), arguments=(None, np.int32(0), argument))
    assert library.launches == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ()}, "grid"),
        ({"grid": (0,)}, "empty"),
        ({"grid": (4, 0)}, "empty"),
        ({"grid": (1, 1, 1, 1)}, "dimensions"),
        ({"block": 0}, "a block of 0 threads"),
        ({"block": 1025}, "a block of 1025 threads"),
        ({"shared_bytes": 1001}, "1001 bytes of shared memory a block, this card has 1000"),
    ],
)
def test_impossible_sizes_are_refused_before_the_driver_sees_them(changes: dict[str, Any], message: str) -> None:
    library = FakeLibrary()
    with pytest.raises(ValueError, match=message):
        launch(LaunchDriver(library), **changes)
    assert library.launches == []


def test_the_drivers_refusal_is_one_line() -> None:
    with pytest.raises(DeviceError, match=r"^kernel kernel did not start: invalid argument \(CUDA error 1\)$"):
        launch(LaunchDriver(FakeLibrary(1)))
    with pytest.raises(DeviceError, match=r"unknown \(CUDA error 98765\)$"):
        launch(LaunchDriver(FakeLibrary(98765)))
