"""The matrix library of CUDA for prefill: out = x @ W.T with plain rows, accumulated and written in float32.

CuPy's binding resets the library's workspace and refuses graph capture, so the functions are called by themselves.
"""

import ctypes
import importlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost

# Values of library_types.h and cublas_api.h.
_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 2,
    np.dtype(np.uint16): 14,
}  # CUDA_R_32F, _16F, _16BF
_ITEMSIZES = {number: dtype.itemsize for dtype, number in _TYPES.items()}
_TRANSPOSED, _AS_IT_IS = 1, 0
_COMPUTE_32F = 68  # float32 sums, and for float32 inputs no TF32
_DEFAULT_MATH, _NO_REDUCED_SUMS = 0, 16  # partial sums of float16 products stay float32
_DEFAULT_ALGORITHM = -1

# What the library asks for by default on the largest cards; on others a part of it stays unused.
WORKSPACE_BYTES = 32 * 2**20

_Sizes = tuple[int, int, int]
_Operands = tuple[tuple[int, int], ...]  # type and leading dimension of each


class Cublas:
    """The library on one card: one handle on the device's stream, a workspace of our own, no allocation in a call."""

    def __init__(self, device: Device, workspace: Any) -> None:
        """`workspace` is used by every product and must live as long as this.

        Shapes: workspace uint8 [WORKSPACE_BYTES], aligned to 256 bytes
        Raises: DeviceError
        """
        check("cublas", "workspace", workspace, dtype="uint8", shape=(None,), aligned=256)
        self._device = device
        self._library = _load()
        self._workspace = workspace
        self._handle = ctypes.c_void_p()
        self._check("cublasCreate_v2", ctypes.byref(self._handle))
        # Given back with this object, but not at the end of the process, where the driver takes everything back.
        weakref.finalize(self, self._library.cublasDestroy_v2, self._handle).atexit = False
        self._check("cublasSetStream_v2", self._handle, ctypes.c_void_p(device.stream.ptr))
        address = ctypes.c_void_p(workspace.data.ptr)
        self._check("cublasSetWorkspace_v2", self._handle, address, ctypes.c_size_t(workspace.nbytes))
        self._check("cublasSetMathMode", self._handle, _DEFAULT_MATH | _NO_REDUCED_SUMS)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._one_address, self._zero_address = ctypes.byref(self._one), ctypes.byref(self._zero)

    def matmul(self, *, x: Any, weight: Any, out: Any) -> None:
        """out = x @ weight.T, in the order of the device's stream.

        Shapes: x [num_tokens, num_inputs], weight [num_rows, num_inputs], both float32, float16 or uint16 (bfloat16);
                out float32 [num_tokens, num_rows]; the rows of each any distance apart
        Raises: ValueError; DeviceError
        """
        check("cublas", "x", x, dtype=tuple(_TYPES), shape=(None, None), row_stride=True)
        num_tokens, num_inputs = x.shape
        check("cublas", "weight", weight, dtype=x.dtype, shape=(None, num_inputs), row_stride=True)
        num_rows = weight.shape[0]
        check("cublas", "out", out, dtype=np.float32, shape=(num_tokens, num_rows), row_stride=True)
        operands = (_operand(weight), _operand(x), _operand(out))
        product = _Product(self, (num_rows, num_tokens, num_inputs), operands)
        self._device.start(product, [array.data.ptr for array in (weight, x, out)])

    def multiply(self, sizes: _Sizes, operands: _Operands, addresses: Sequence[int]) -> None:
        """Start a product that has been checked: rows, tokens and inputs; weight, x and output.

        Raises: DeviceError
        """
        weight, x, out = map(ctypes.c_void_p, addresses)
        of_weight, of_x, of_out = operands
        # Column by column, as the library reads, rows are columns: out.T = (weight.T).T @ x.T.
        self._check(
            "cublasGemmEx",
            self._handle,
            _TRANSPOSED,
            _AS_IT_IS,
            *sizes,
            self._one_address,
            weight,
            *of_weight,
            x,
            *of_x,
            self._zero_address,
            out,
            *of_out,
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def _check(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise DeviceError(f"the matrix library's {function} failed with status {status}")


@dataclass(frozen=True)
class _Product:
    """One product of which only addresses are missing."""

    library: Cublas
    sizes: _Sizes
    operands: _Operands

    label = None

    def cost(self) -> KernelCost:
        """As `matmul_cost`."""
        num_rows, num_tokens, num_inputs = self.sizes
        itemsize = _ITEMSIZES[self.operands[0][0]]
        return matmul_cost(num_tokens=num_tokens, num_rows=num_rows, num_inputs=num_inputs, itemsize=itemsize)

    def start(self, addresses: Sequence[int]) -> None:
        """As `Cublas.multiply`."""
        self.library.multiply(self.sizes, self.operands, addresses)


def matmul_cost(*, num_tokens: int, num_rows: int, num_inputs: int, itemsize: int) -> KernelCost:
    """What a product moves at least, and what it computes."""
    return KernelCost(
        read_bytes=(num_tokens + num_rows) * num_inputs * itemsize,
        written_bytes=4 * num_tokens * num_rows,
        flops=2 * num_tokens * num_rows * num_inputs,
        element_bits=8 * itemsize,
    )


def _operand(array: Any) -> tuple[int, int]:
    """Type and leading dimension; a lone row's own stride may be anything."""
    itemsize = array.dtype.itemsize
    return _TYPES[array.dtype], array.strides[0] // itemsize if array.shape[0] > 1 else array.shape[1]


def _load() -> ctypes.CDLL:
    """The library that CuPy's binding is linked with: a search in the binding finds it.

    Raises: DeviceError if it cannot be loaded
    """
    try:
        binding = importlib.import_module("cupy_backends.cuda.libs.cublas")
        return ctypes.CDLL(str(binding.__file__))
    except (ImportError, OSError) as error:
        raise DeviceError(f"the CUDA matrix library cuBLAS does not load: {error}") from error
