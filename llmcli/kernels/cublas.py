"""The matrix library of CUDA, to measure cards and to compare with: out = x @ W.T with plain rows and float32 sums.

cuBLASLt, without algorithms that sum in separate parts. So it gets no workspace either. With one it searches algorithms
that split sums, rejects them, and may be left with one ten times slower than the best
(docs/log/2026-11-24-prompts.md). CuPy has no binding for it, so the functions are called directly.
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

# Values of library_types.h, cublas_api.h and cublasLt.h.
_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 2,
    np.dtype(np.uint16): 14,
}  # CUDA_R_32F, _16F, _16BF
_FLOAT32, _INT8, _INT32 = 0, 3, 10
_ITEMSIZES = {number: dtype.itemsize for dtype, number in _TYPES.items()}
_COMPUTE_32F = 68  # float32 sums, and for float32 inputs no TF32
_COMPUTE_32I = 72  # int32 sums
_DESC_TRANSA, _TRANSPOSED = 3, 1
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3
_PREF_MIN_ALIGNMENT_BYTES = (5, 6, 8)  # of A, B and D
_PREF_MIN_ALIGNMENT_C_BYTES = 7
_REDUCTION_SCHEME_NONE = 0

_MAX_ALIGNMENT = 16  # bytes; what the widest loads ask for

_Sizes = tuple[int, int, int]
_Operands = tuple[tuple[int, int, int], ...]  # type, leading dimension and alignment of each


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Library:
    """The library's functions, which return a status."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises: DeviceError
        """
        status = getattr(self._functions, function)(*arguments)
        if status != 0:
            raise DeviceError(f"the matrix library's {function} failed with status {status}")

    def create(self, kind: str, owner: Any, *arguments: Any) -> ctypes.c_void_p:
        """Make one of the library's objects, which lives as long as `owner`.

        Raises: DeviceError
        """
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *arguments)
        # Not destroyed when the process ends: the driver then frees everything.
        weakref.finalize(owner, getattr(self._functions, f"{kind}Destroy"), made).atexit = False
        return made


class Cublas:
    """The library on one card: one handle, no memory of the card."""

    _inputs: dict[np.dtype[Any], int] = _TYPES  # the types of the factors, with the library's numbers
    _outputs: dict[np.dtype[Any], int] = {np.dtype(np.float32): _FLOAT32}
    _sums = _COMPUTE_32F, _FLOAT32
    _factor: Any = ctypes.c_float

    def __init__(self, device: Device) -> None:
        """Open it.

        Raises: DeviceError
        """
        self._device = device
        self._library = library = _Library(_load())
        self._handle = library.create("cublasLt", self)
        self._operation = library.create("cublasLtMatmulDesc", self, *self._sums)
        transposed = ctypes.c_int32(_TRANSPOSED)
        self._set("cublasLtMatmulDesc", self._operation, _DESC_TRANSA, transposed)
        self._preference = library.create("cublasLtMatmulPreference", self)
        for attribute, value in (
            (_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(0)),
            (_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(_REDUCTION_SCHEME_NONE)),
        ):
            self._set("cublasLtMatmulPreference", self._preference, attribute, value)
        self._algorithms: dict[tuple[_Sizes, _Operands], _Algorithm] = {}
        self._one, self._zero = self._factor(1), self._factor(0)
        # Everything that is the same in every product.
        self._one_address, self._zero_address = ctypes.byref(self._one), ctypes.byref(self._zero)
        self._workspace_and_stream = (None, ctypes.c_size_t(0), ctypes.c_void_p(device.stream.ptr))

    def matmul(self, *, x: Any, weight: Any, out: Any) -> None:
        """out = x @ weight.T, in the order of the device's stream.

        Shapes: x [num_tokens, num_inputs], weight [num_rows, num_inputs], both float32, float16 or uint16 (bfloat16);
                out float32 [num_tokens, num_rows]; the rows of each any distance apart
        Raises: ValueError; DeviceError
        """
        check("cublas", "x", x, dtype=tuple(self._inputs), shape=(None, None), row_stride=True)
        num_tokens, num_inputs = x.shape
        check("cublas", "weight", weight, dtype=x.dtype, shape=(None, num_inputs), row_stride=True)
        num_rows = weight.shape[0]
        check("cublas", "out", out, dtype=tuple(self._outputs), shape=(num_tokens, num_rows), row_stride=True)
        arrays = (weight, x, out)
        types = self._inputs | self._outputs
        product = self._product((num_rows, num_tokens, num_inputs), tuple(_operand(one, types) for one in arrays))
        self._device.start(product, [array.data.ptr for array in arrays])

    def multiply(self, product: "_Product", addresses: Sequence[int]) -> None:
        """Start a product that has been checked, with weight, x and output at these addresses.

        Raises: DeviceError
        """
        weight, x, out = map(ctypes.c_void_p, addresses)
        of_weight, of_x, of_out = product.layouts
        self._library.call(
            "cublasLtMatmul",
            self._handle,
            self._operation,
            self._one_address,
            weight,
            of_weight,
            x,
            of_x,
            self._zero_address,
            out,
            of_out,
            out,
            of_out,
            product.algorithm,
            *self._workspace_and_stream,
        )

    def _product(self, sizes: _Sizes, operands: _Operands) -> "_Product":
        product = _Product(self, sizes, operands)
        product.layouts = self._layouts(product, sizes, operands)
        product.algorithm = ctypes.byref(self._chosen(sizes, operands))
        return product

    def _chosen(self, sizes: _Sizes, operands: _Operands) -> _Algorithm:
        """The library's choice for a product; asked once."""
        if (sizes, operands) not in self._algorithms:
            self._algorithms[sizes, operands] = self.propose(sizes, operands).algorithm
        return self._algorithms[sizes, operands]

    def propose(self, sizes: _Sizes, operands: _Operands) -> _Heuristic:
        """The library's proposal for a product. Raises: DeviceError"""
        for attribute, (_, _, alignment) in zip(_PREF_MIN_ALIGNMENT_BYTES, operands, strict=True):
            self._set("cublasLtMatmulPreference", self._preference, attribute, ctypes.c_uint32(alignment))
        of_out = ctypes.c_uint32(operands[-1][2])
        self._set("cublasLtMatmulPreference", self._preference, _PREF_MIN_ALIGNMENT_C_BYTES, of_out)
        found, num_found = _Heuristic(), ctypes.c_int()
        of_weight, of_x, of_out_layout = self._layouts(found, sizes, operands)
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._operation,
            of_weight,
            of_x,
            of_out_layout,
            of_out_layout,
            self._preference,
            1,
            ctypes.byref(found),
            ctypes.byref(num_found),
        )
        if num_found.value != 1 or found.state != 0:
            raise DeviceError(f"the matrix library has no algorithm for a product of {sizes} (rows, tokens, inputs)")
        return found

    def _layouts(self, owner: Any, sizes: _Sizes, operands: _Operands) -> list[ctypes.c_void_p]:
        """Where weight, x and output lie, for as long as `owner` lives.

        Column by column, as the library reads, rows are columns: out.T = (weight.T).T @ x.T.
        """
        num_rows, num_tokens, num_inputs = sizes
        shapes = ((num_inputs, num_rows), (num_inputs, num_tokens), (num_rows, num_tokens))
        return [
            self._library.create(
                "cublasLtMatrixLayout",
                owner,
                kind,
                ctypes.c_uint64(height),
                ctypes.c_uint64(width),
                ctypes.c_int64(stride),
            )
            for (height, width), (kind, stride, _) in zip(shapes, operands, strict=True)
        ]

    def _set(self, kind: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._library.call(f"{kind}SetAttribute", target, attribute, ctypes.byref(value), size)


class IntegerCublas(Cublas):
    """The same for int8 factors with int32 sums. It measures what a card could do; no model uses it."""

    _inputs = {np.dtype(np.int8): _INT8}
    _outputs = {np.dtype(np.int32): _INT32}
    _sums = _COMPUTE_32I, _INT32
    _factor = ctypes.c_int32


class DryCublas(Cublas):
    """The library without the library, for dry runs: products are checked and described, none can be started."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def _product(self, sizes: _Sizes, operands: _Operands) -> "_Product":
        return _Product(self, sizes, operands)


@dataclass(eq=False)
class _Product:
    """One product that lacks only its addresses."""

    library: Cublas
    sizes: _Sizes
    operands: _Operands
    algorithm: Any = None
    layouts: Sequence[ctypes.c_void_p] = ()

    label = None

    def cost(self) -> KernelCost:
        """As `matmul_cost`."""
        num_rows, num_tokens, num_inputs = self.sizes
        itemsize = _ITEMSIZES[self.operands[0][0]]
        return matmul_cost(num_tokens=num_tokens, num_rows=num_rows, num_inputs=num_inputs, itemsize=itemsize)

    def start(self, addresses: Sequence[int]) -> None:
        """As `Cublas.multiply`."""
        self.library.multiply(self, addresses)


def matmul_cost(*, num_tokens: int, num_rows: int, num_inputs: int, itemsize: int) -> KernelCost:
    """The least that a product moves, and what it computes."""
    return KernelCost(
        read_bytes=(num_tokens + num_rows) * num_inputs * itemsize,
        written_bytes=4 * num_tokens * num_rows,
        flops=2 * num_tokens * num_rows * num_inputs,
        element_bits=8 * itemsize,
    )


def _operand(array: Any, types: dict[np.dtype[Any], int]) -> tuple[int, int, int]:
    """Type, leading dimension and alignment; a lone row's own stride may be anything."""
    itemsize, address = array.dtype.itemsize, array.data.ptr
    stride = array.strides[0] // itemsize if array.shape[0] > 1 else array.shape[1]
    return types[array.dtype], stride, min(_MAX_ALIGNMENT, address & -address)


def _load() -> ctypes.CDLL:
    """The library that CuPy's binding is linked with, and what that is linked with: a search in the binding finds both.

    Raises: DeviceError if it cannot be loaded
    """
    try:
        binding = importlib.import_module("cupy_backends.cuda.libs.cublas")
        return ctypes.CDLL(str(binding.__file__))
    except (ImportError, OSError) as error:
        raise DeviceError(f"the CUDA matrix library cuBLAS does not load: {error}") from error
