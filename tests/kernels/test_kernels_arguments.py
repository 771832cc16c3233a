"""Refusals of launchers: a wrong type, shape, stride or address, each named with its kernel and argument."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcli.kernels.arguments import c_type, check


class HostArray:
    """A NumPy array that shows its address as CuPy's arrays do."""

    def __init__(self, array: np.ndarray, address: int = 512) -> None:
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides
        self.data = SimpleNamespace(ptr=address)


def rows(num_rows: int, num_columns: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros((num_rows, num_columns), dtype)


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float32, "float"), (np.float16, "__half"), (np.uint16, "__nv_bfloat16")]
)
def test_c_types(dtype: Any, name: str) -> None:
    assert c_type(HostArray(rows(1, 1, dtype))) == name


def test_other_types_have_no_name() -> None:
    with pytest.raises(ValueError, match="not float64"):
        c_type(HostArray(rows(1, 1, np.float64)))


@pytest.mark.parametrize(
    ("array", "asked"),
    [
        (rows(3, 8), {"dtype": np.float32, "shape": (3, 8)}),
        (rows(3, 8, np.uint16), {"dtype": (np.float16, np.uint16), "shape": (None, 8)}),
        (rows(6, 8)[::2], {"row_stride": True}),
        (rows(3, 16)[:, :8], {"row_stride": True}),
        (rows(1, 16)[:, :8], {}),  # one row has no stride
        (np.zeros(()), {"shape": ()}),
    ],
)
def test_what_fits_passes(array: np.ndarray, asked: dict[str, Any]) -> None:
    check("kernel", "x", HostArray(array), **asked)


@pytest.mark.parametrize(
    ("array", "asked", "message"),
    [
        (rows(3, 8), {"dtype": np.float16}, r"kernel: x is float32, expected float16$"),
        (rows(3, 8), {"dtype": (np.float16, np.uint16)}, r"expected float16 or uint16$"),
        (rows(3, 8), {"shape": (3, 9)}, r"kernel: x is \[3, 8\], expected \[3, 9\]$"),
        (rows(3, 8), {"shape": (None, 9)}, r"expected \[any, 9\]$"),
        (rows(3, 8), {"shape": (24,)}, r"expected \[24\]$"),
        (rows(8, 3).T, {}, r"kernel: x is not contiguous"),
        (rows(6, 8)[::2], {}, "not contiguous"),
        (rows(3, 16)[:, ::2], {"row_stride": True}, "not contiguous"),
        (rows(3, 8).T, {"row_stride": True}, "not contiguous"),
        (np.broadcast_to(np.float32(1), (3, 8)), {}, "not contiguous"),
    ],
)
def test_what_does_not_fit_is_named(array: np.ndarray, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("kernel", "x", HostArray(array), **asked)


def test_alignment() -> None:
    check("kernel", "x", HostArray(rows(1, 4), address=0x208), aligned=8)
    with pytest.raises(ValueError, match=r"kernel: x is not aligned to 16 bytes \(address 0x208\)"):
        check("kernel", "x", HostArray(rows(1, 4), address=0x208))
