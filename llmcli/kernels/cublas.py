"""The matrix library of CUDA for prefill: out = x @ W.T with plain rows, accumulated and written in float32.

CuPy's binding resets the library's workspace and refuses graph capture, so the functions are called by themselves.
"""

import ctypes
import importlib
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device
from llmcli.kernels.planned import MAX_PLANS, likeness
from llmcli.kernels.spec import KernelCost

# Values of library_types.h and cublas_api.h.
_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 2,
    np.dtype(np.uint16): 14,
}  # CUDA_R_32F, _16F, _16BF
_TRANSPOSED, _AS_IT_IS = 1, 0
_COMPUTE_32F = 68  # float32 sums, and for float32 inputs no TF32
_DEFAULT_MATH, _NO_REDUCED_SUMS = 0, 16  # partial sums of float16 products stay float32
_DEFAULT_ALGORITHM = -1

# What the library asks for by default on the largest cards; on others a part of it stays unused.
WORKSPACE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _Product:
    """What the library wants to know: rows, tokens and inputs; type and leading dimension of each array."""

    sizes: tuple[int, int, int]
    weight: tuple[int, int]
    x: tuple[int, int]
    out: tuple[int, int]


class Cublas:
    """The library on one card: one handle on the device's stream, a workspace of our own, no allocation in a call."""

    def __init__(self, device: Device, workspace: Any) -> None:
        """`workspace` is used by every product and must live as long as this.

        Shapes: workspace uint8 [WORKSPACE_BYTES], aligned to 256 bytes
        Raises: DeviceError
        """
        check("cublas", "workspace", workspace, dtype="uint8", shape=(None,), aligned=256)
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
        self._planned: dict[Hashable, _Product] = {}

    def matmul(self, *, x: Any, weight: Any, out: Any) -> None:
        """out = x @ weight.T, in the order of the device's stream.

        Shapes: x [num_tokens, num_inputs], weight [num_rows, num_inputs], both float32, float16 or uint16 (bfloat16);
                out float32 [num_tokens, num_rows]; the rows of each any distance apart
        Raises: ValueError; DeviceError
        """
        arrays = (weight, x, out)
        addresses = [array.data.ptr for array in arrays]
        key = likeness(arrays, addresses)
        product = self._planned.get(key)
        if product is None:
            if len(self._planned) >= MAX_PLANS:
                self._planned.clear()
            product = self._planned[key] = _plan(x, weight, out)
        # Column by column, as the library reads, rows are columns: out.T = (weight.T).T @ x.T.
        weight_address, x_address, out_address = map(ctypes.c_void_p, addresses)
        self._check(
            "cublasGemmEx",
            self._handle,
            _TRANSPOSED,
            _AS_IT_IS,
            *product.sizes,
            self._one_address,
            weight_address,
            *product.weight,
            x_address,
            *product.x,
            self._zero_address,
            out_address,
            *product.out,
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def _check(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise DeviceError(f"the matrix library's {function} failed with status {status}")


def matmul_cost(*, num_tokens: int, num_rows: int, num_inputs: int, itemsize: int) -> KernelCost:
    """What a product moves at least, and what it computes."""
    return KernelCost(
        read_bytes=(num_tokens + num_rows) * num_inputs * itemsize,
        written_bytes=4 * num_tokens * num_rows,
        flops=2 * num_tokens * num_rows * num_inputs,
    )


def _plan(x: Any, weight: Any, out: Any) -> _Product:
    check("cublas", "x", x, dtype=tuple(_TYPES), shape=(None, None), row_stride=True)
    num_tokens, num_inputs = x.shape
    check("cublas", "weight", weight, dtype=x.dtype, shape=(None, num_inputs), row_stride=True)
    num_rows = weight.shape[0]
    check("cublas", "out", out, dtype=np.float32, shape=(num_tokens, num_rows), row_stride=True)
    return _Product((num_rows, num_tokens, num_inputs), _operand(weight), _operand(x), _operand(out))


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
