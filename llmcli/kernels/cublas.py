"""The matrix library of CUDA, to measure cards and to compare with: out = x @ weight.T with plain rows.

Its plain call, and its own choice of an algorithm. CuPy's binding of that call refuses to be captured in a graph.
"""

import ctypes
import importlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device

# Values of library_types.h and cublas_api.h.
_TYPES = {np.dtype(name): number for name, number in (("f4", 0), ("f2", 2), ("i1", 3), ("i4", 10), ("u2", 14))}
_COMPUTE_32F, _COMPUTE_32I = 68, 72  # float32 sums, and for float32 inputs no TF32; int32 sums
_PLAIN, _TRANSPOSED, _DEFAULT_ALGORITHM = 0, 1, -1
_FLOATS = (np.float32, np.float16, np.uint16)


class Cublas:
    """The library on one card; opened with the first product that starts."""

    def __init__(self, device: Device) -> None:
        """Nothing is loaded yet."""
        self._device = device

    def matmul(self, *, x: Any, weight: Any, out: Any) -> None:
        """out = x @ weight.T, in the order of the device's stream.

        Shapes: x [num_tokens, num_inputs], weight [num_rows, num_inputs], both float32, float16, uint16 (bfloat16) or
                int8; out [num_tokens, num_rows] float32, of int8 int32; the rows of each any distance apart
        Raises: ValueError; DeviceError
        """
        check("cublas", "x", x, dtype=(*_FLOATS, np.int8), shape=(None, None), row_stride=True)
        check("cublas", "weight", weight, dtype=x.dtype, shape=(None, x.shape[1]), row_stride=True)
        is_whole = x.dtype == np.int8
        result = np.int32 if is_whole else np.float32
        check("cublas", "out", out, dtype=result, shape=(x.shape[0], weight.shape[0]), row_stride=True)
        # Column by column, as the library reads, rows are columns: out.T = (weight.T).T @ x.T.
        sizes = weight.shape[0], *x.shape
        operands = tuple((_TYPES[one.dtype], _columns(one)) for one in (weight, x, out))
        self._device.start(_Product(self, sizes, operands, is_whole), [one.data.ptr for one in (weight, x, out)])

    @cached_property
    def functions(self) -> Any:
        """The library that CuPy's binding is linked with: a search in the binding finds it.

        Raises: DeviceError if it cannot be loaded
        """
        try:
            binding = importlib.import_module("cupy_backends.cuda.libs.cublas")
            return ctypes.CDLL(str(binding.__file__))
        except (ImportError, OSError) as error:
            raise DeviceError(f"the CUDA matrix library cuBLAS does not load: {error}") from error

    @cached_property
    def handle(self) -> ctypes.c_void_p:
        """What all products go through. Raises: DeviceError"""
        made = ctypes.c_void_p()
        self.call("cublasCreate_v2", ctypes.byref(made))
        # Not destroyed when the process ends: the driver then frees everything.
        weakref.finalize(self, self.functions.cublasDestroy_v2, made).atexit = False
        self.call("cublasSetStream_v2", made, ctypes.c_void_p(self._device.stream.ptr))
        return made

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the library, which returns a status. Raises: DeviceError"""
        status = getattr(self.functions, function)(*arguments)
        if status != 0:
            raise DeviceError(f"the matrix library's {function} failed with status {status}")


@dataclass(frozen=True)
class _Product:
    """One product that lacks only its addresses: rows, tokens, inputs; of each operand the type and the distance."""

    library: Cublas
    sizes: tuple[int, ...]
    operands: tuple[tuple[int, int], ...]
    is_whole: bool

    label = None  # none of our kernels

    def start(self, addresses: Sequence[int]) -> None:
        """Start it. Raises: DeviceError"""
        factor = ctypes.c_int32 if self.is_whole else ctypes.c_float
        weight, x, out = (
            (ctypes.c_void_p(address), *operand) for address, operand in zip(addresses, self.operands, strict=True)
        )
        self.library.call(
            "cublasGemmEx",
            *(self.library.handle, _TRANSPOSED, _PLAIN, *self.sizes),
            *(ctypes.byref(factor(1)), *weight, *x, ctypes.byref(factor(0)), *out),
            *(_COMPUTE_32I if self.is_whole else _COMPUTE_32F, _DEFAULT_ALGORITHM),
        )


def _columns(array: Any) -> int:
    """Elements from one row to the next; a lone row's own stride may be anything."""
    return int(array.strides[0] // array.dtype.itemsize if array.shape[0] > 1 else array.shape[1])
