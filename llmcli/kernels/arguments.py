"""What a launcher requires of its arrays before a kernel reads them, and the C++ name of their type.

CUDA sees bare pointers: a wrong type, shape, stride or alignment is caught here or nowhere.
"""

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

C_TYPES: dict[np.dtype[Any], str] = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "__half",
    np.dtype(np.uint16): "__nv_bfloat16",
}
VECTOR = 4  # float32 values in 16 bytes


def struct_fields(integers: str, floats: str = "") -> list[tuple[str, Any]]:
    """The fields of a struct that a kernel takes: their names, those of int32 first, then those of float."""
    return [
        *((name, ctypes.c_int32) for name in integers.split()),
        *((name, ctypes.c_float) for name in floats.split()),
    ]


class Array(Protocol):
    """An array on the card, as far as launchers see it, such as CuPy's ndarray."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    data: Any  # .ptr is the address

    def __getitem__(self, index: Any, /) -> Any:
        """A part of the array."""


def c_type(array: Array) -> str:
    """The C++ type of an array's elements; bfloat16 is kept as uint16.

    Raises: ValueError for a type no kernel takes
    """
    try:
        return C_TYPES[array.dtype]
    except KeyError:
        raise ValueError(f"kernels take float32, float16 and uint16 (bfloat16) arrays, not {array.dtype}") from None


def int32s(*values: int) -> tuple[np.int32, ...]:
    """Whole numbers as a kernel takes them."""
    return tuple(map(np.int32, values))


def row_stride(array: Array) -> int:
    """Elements from one row of a matrix to the next; 0 if there is no next."""
    return array.strides[0] // array.dtype.itemsize if array.shape[0] > 1 else 0


def check(
    kernel: str,
    name: str,
    array: Array,
    *,
    dtype: DTypeLike | tuple[DTypeLike, ...] | None = None,
    shape: tuple[int | None, ...] | None = None,
    row_stride: bool = False,
    aligned: int = 16,
) -> None:
    """Refuse an array that the kernel cannot take.

    `dtype` is one type or several; None in `shape` stands for any size. The array must be C-contiguous; with
    `row_stride` its first axis may have any stride. Its address must be a multiple of `aligned` bytes.
    Raises: ValueError naming kernel and argument
    """
    if dtype is not None:
        allowed = [np.dtype(one) for one in (dtype if isinstance(dtype, tuple) else (dtype,))]
        if array.dtype not in allowed:
            expected = " or ".join(str(one) for one in allowed)
            raise ValueError(f"{kernel}: {name} is {array.dtype}, expected {expected}")
    if shape is not None:
        fits = len(shape) == len(array.shape) and all(
            want is None or want == have for want, have in zip(shape, array.shape, strict=True)
        )
        if not fits:
            expected = ", ".join("any" if want is None else str(want) for want in shape)
            raise ValueError(f"{kernel}: {name} is {list(array.shape)}, expected [{expected}]")
    _check_strides(kernel, name, array, 1 if row_stride else 0)
    if array.data.ptr % aligned:
        raise ValueError(f"{kernel}: {name} is not aligned to {aligned} bytes (address {array.data.ptr:#x})")


def _check_strides(kernel: str, name: str, array: Array, first_axis: int) -> None:
    step = array.dtype.itemsize
    for axis in range(len(array.shape) - 1, first_axis - 1, -1):
        if array.shape[axis] > 1 and array.strides[axis] != step:
            raise ValueError(f"{kernel}: {name} is not contiguous (strides {list(array.strides)} bytes)")
        step *= array.shape[axis]
