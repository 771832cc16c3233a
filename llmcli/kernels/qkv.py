"""Where queries, keys and values lie in a row of the fused projection's output, and the checks of its kernels."""

from dataclasses import dataclass

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, check

_SEGMENT_ROWS = 16  # the matrices are fused in whole tiles of rows
HEAD_DIM_STEP = 8  # 16 bytes of a 16-bit type


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
    if layout.head_dim % HEAD_DIM_STEP or not 0 < layout.head_dim <= 256:
        raise ValueError(f"{kernel}: head_dim is {layout.head_dim}, expected a multiple of 8 up to 256")
    if layout.num_attention_heads % layout.num_key_value_heads:
        raise ValueError(
            f"{kernel}: {layout.num_attention_heads} query heads do not share {layout.num_key_value_heads} key-value "
            "heads evenly"
        )


def row_stride(kernel: str, qkv: Array, layout: QkvLayout) -> int:
    """Columns from one row of `qkv` [n, width] to the next, once it is checked.

    Raises: ValueError
    """
    check(kernel, "qkv", qkv, dtype=np.float32, shape=(None, layout.width), row_stride=True)
    stride = qkv.strides[0] // 4 if qkv.shape[0] > 1 else layout.width
    if stride % 4:
        raise ValueError(f"{kernel}: rows of qkv are {stride} columns apart, expected a multiple of 4")
    return stride


def column_address(qkv: Array, column: int) -> np.uint64:
    """The address of a column of the first row, as a kernel argument."""
    return np.uint64(qkv.data.ptr + 4 * column)


def check_cache(kernel: str, keys: Array, values: Array, layout: QkvLayout) -> int:
    """Check one layer's keys and values [num_rows, num_key_value_heads, max_seq_len, head_dim]; returns max_seq_len.

    Raises: ValueError
    """
    check(
        kernel,
        "keys",
        keys,
        dtype=tuple(C_TYPES),
        shape=(None, layout.num_key_value_heads, None, layout.head_dim),
    )
    check(kernel, "values", values, dtype=keys.dtype, shape=keys.shape)
    return keys.shape[2]


def check_window(kernel: str, window: int | None) -> np.int32:
    """A sliding window as a kernel argument; None shows everything.

    Raises: ValueError
    """
    if window is not None and window < 1:
        raise ValueError(f"{kernel}: a window of {window} tokens does not show the token itself")
    largest = np.iinfo(np.int32).max
    return np.int32(min(window, largest) if window is not None else largest)
