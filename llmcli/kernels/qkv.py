"""Where queries, keys and values lie in a row of the fused projection's output, and the checks of its kernels."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, check, row_stride

# Types of the KV cache: floats, and codes of a head's vector that share a scale.
CACHE_TYPES: dict[np.dtype[Any], str] = {**C_TYPES, np.dtype(np.uint8): "KvCode"}
_SCALE_BYTES = 4
MIXED_DTYPES = (np.dtype(np.float16), np.dtype(np.float32))  # of attention's outputs

PAGE_TOKENS = 16  # tokens in a page of the cache; kernels/common/pages.cuh has the same number

_SEGMENT_ROWS = 16  # the matrices are fused in whole tiles of rows
_HEAD_DIM_STEP = 8  # 16 bytes of a 16-bit type


@dataclass(frozen=True)
class QkvLayout:
    """A row [width] float32: all query heads, all key heads, all value heads, each part padded to 16 columns."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        """Columns of the queries."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the keys, and of the values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def k_offset(self) -> int:
        """First column of the keys."""
        return _padded(self.q_size)

    @property
    def v_offset(self) -> int:
        """First column of the values."""
        return self.k_offset + _padded(self.kv_size)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.v_offset + _padded(self.kv_size)


def _padded(size: int) -> int:
    return -(-size // _SEGMENT_ROWS) * _SEGMENT_ROWS


def check_layout(kernel: str, layout: QkvLayout) -> None:
    """Refuse a shape that the attention kernels do not have.

    Raises: ValueError
    """
    if layout.head_dim % _HEAD_DIM_STEP or not 0 < layout.head_dim <= 256:
        raise ValueError(f"{kernel}: head_dim is {layout.head_dim}, expected a multiple of 8 up to 256")
    if layout.num_attention_heads % layout.num_key_value_heads:
        raise ValueError(
            f"{kernel}: {layout.num_attention_heads} query heads do not share {layout.num_key_value_heads} key-value "
            "heads evenly"
        )


def check_qkv(kernel: str, qkv: Array, layout: QkvLayout) -> int:
    """Check `qkv` [n, width]; returns the columns from one row to the next, 0 if there is no next.

    Raises: ValueError
    """
    check(kernel, "qkv", qkv, dtype=np.float32, shape=(None, layout.width), row_stride=True)
    stride = row_stride(qkv)
    if stride % 4:
        raise ValueError(f"{kernel}: rows of qkv are {stride} columns apart, expected a multiple of 4")
    return stride


def has_scales(itemsize: int) -> bool:
    """Whether a KV cache with elements of this size is one of codes."""
    return itemsize == 1


def cached_bytes(layout: QkvLayout, itemsize: int) -> int:
    """Bytes of the keys of one token, or of its values, in a cache with elements of this size."""
    scales = layout.num_key_value_heads * _SCALE_BYTES if has_scales(itemsize) else 0
    return layout.kv_size * itemsize + scales


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: floats, or codes with scales.

    Shapes: keys, values [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim]; key_scales, value_scales float32
            [num_pages, num_key_value_heads, PAGE_TOKENS] with codes, else None
    """

    keys: Array
    values: Array
    key_scales: Array | None = None
    value_scales: Array | None = None

    @property
    def arrays(self) -> tuple[Array, Array, Array | None, Array | None]:
        """All of them, as kernels take them."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of keys and values."""
        return self.keys.dtype

    def check(self, kernel: str, layout: QkvLayout, *, aligned: int | None = None) -> None:
        """Refuse arrays that do not fit. `aligned`: of keys and values, in bytes; by default what each type needs.

        Raises: ValueError
        """
        is_coded = has_scales(self.dtype.itemsize)
        aligned = aligned or (8 if is_coded else 16)
        shape = (None, layout.num_key_value_heads, PAGE_TOKENS, layout.head_dim)
        check(kernel, "keys", self.keys, dtype=tuple(CACHE_TYPES), shape=shape, aligned=aligned)
        check(kernel, "values", self.values, dtype=self.dtype, shape=self.keys.shape, aligned=aligned)
        for name, scales in (("key_scales", self.key_scales), ("value_scales", self.value_scales)):
            if (scales is not None) != is_coded:
                raise ValueError(f"{kernel}: {name} belong to keys and values of uint8, which are {self.dtype}")
            if scales is not None:
                check(kernel, name, scales, dtype=np.float32, shape=self.keys.shape[:3], aligned=4)


def softmax_scale(layout: QkvLayout) -> np.float32:
    """The factor of attention's scores, as a kernel argument: softmax is computed with powers of two."""
    return np.float32(layout.head_dim**-0.5 * math.log2(math.e))


def check_window(kernel: str, window: int | None) -> np.int32:
    """A sliding window as a kernel argument; None shows everything.

    Raises: ValueError
    """
    if window is not None and window < 1:
        raise ValueError(f"{kernel}: a window of {window} tokens does not show the token itself")
    largest = np.iinfo(np.int32).max
    return np.int32(min(window, largest) if window is not None else largest)
