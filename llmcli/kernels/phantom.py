"""Arrays with an address but no memory. Launchers can check them; nothing can read them. Needs no card, no CuPy."""

import math
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import DTypeLike

Index = int | slice | EllipsisType


@dataclass(frozen=True)
class PhantomPointer:
    """An address without memory."""

    ptr: int

    def copy_from_device_async(self, source: "PhantomPointer", num_bytes: int, stream: Any) -> None:
        """Copy nothing: a dry run lists launches."""


class Phantom:
    """The part of an array that launchers see: type, shape, strides, address. Slices, reshapes and views as in NumPy.

    `assumed` are values for the elements, for predictions that depend on them.
    Shapes: assumed as the phantom, or one value for all
    Units: strides in bytes
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        address: int,
        strides: tuple[int, ...] | None = None,
        assumed: npt.ArrayLike | None = None,
    ):
        self.shape = shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.data = PhantomPointer(address)
        self.strides = _contiguous_strides(shape, self.dtype.itemsize) if strides is None else strides
        self.size = math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.assumed = None if assumed is None else np.broadcast_to(assumed, shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Phantom":
        """Index by whole numbers and slices, one for each axis.

        Raises: IndexError
        """
        indices = list(index) if isinstance(index, tuple) else [index]
        rest = [slice(None)] * (len(self.shape) - len(indices) + (Ellipsis in indices))
        place = indices.index(Ellipsis) if Ellipsis in indices else len(indices)
        indices[place : place + 1] = rest
        if len(indices) != len(self.shape):
            raise IndexError(f"{index} is too much for an array of {len(self.shape)} axes")
        address, shape, strides = self.data.ptr, [], []
        for one, size, stride in zip(indices, self.shape, self.strides, strict=True):
            if isinstance(one, slice):
                chosen = range(*one.indices(size))
                shape.append(len(chosen))
                strides.append(stride * chosen.step)
                address += stride * chosen.start if chosen else 0
            elif isinstance(one, int) and -size <= one < size:
                address += stride * (one % size)
            else:
                raise IndexError(f"{one!r} is outside an axis of {size}")
        assumed = None if self.assumed is None else self.assumed[tuple(indices)]
        return Phantom(tuple(shape), self.dtype, address, tuple(strides), assumed)

    def reshape(self, *shape: int) -> "Phantom":
        """The same elements in another shape; one size may be -1, which is then computed.

        Raises: ValueError, also for an array that is not C-contiguous, which NumPy would copy
        """
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        known = math.prod(size for size in wanted if size != -1)
        if wanted.count(-1) == 1 and known > 0:
            wanted = tuple(self.size // known if size == -1 else size for size in wanted)
        if math.prod(wanted) != self.size or min(wanted, default=0) < 0:
            raise ValueError(f"{self.size} elements do not make {list(shape)}")
        if not self._is_contiguous():
            raise ValueError(f"an array with strides {list(self.strides)} cannot be reshaped without a copy")
        assumed = None if self.assumed is None else self.assumed.reshape(wanted)
        return Phantom(wanted, self.dtype, self.data.ptr, assumed=assumed)

    def view(self, dtype: DTypeLike) -> "Phantom":
        """The same bytes as another type, with no assumed values.

        Raises: ValueError where the last axis does not hold whole elements
        """
        new, itemsize = np.dtype(dtype), self.dtype.itemsize
        if new.itemsize == itemsize:
            return Phantom(self.shape, new, self.data.ptr, self.strides)
        is_dense = len(self.shape) > 0 and (self.strides[-1] == itemsize or self.shape[-1] == 1)
        if not is_dense or self.shape[-1] * itemsize % new.itemsize:
            raise ValueError(f"an array {list(self.shape)} of {self.dtype} cannot be seen as {new}")
        shape = (*self.shape[:-1], self.shape[-1] * itemsize // new.itemsize)
        return Phantom(shape, new, self.data.ptr, (*self.strides[:-1], new.itemsize))

    def _is_contiguous(self) -> bool:
        contiguous = _contiguous_strides(self.shape, self.dtype.itemsize)
        return self.size == 0 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, contiguous, strict=True)
        )


def assumed_values(array: Any) -> list[int]:
    """The values assumed for a phantom's elements, in the order of its axes.

    Raises: TypeError for any other array, and where nothing is assumed
    """
    if not isinstance(array, Phantom) or array.assumed is None:
        raise TypeError("the cost depends on values that lie on the card; a dry run must assume them")
    values: list[int] = array.assumed.ravel().tolist()
    return values


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(size, 1)
    return tuple(reversed(strides))
