"""How row kernels share a row out among threads: the host's side of kernels/common/rows.cuh."""

from dataclasses import dataclass

from llmcli.kernels.arguments import Array

VECTOR = 4  # float32 values in 16 bytes
_WARP = 32
_WARP_FORM_BLOCK = 128


@dataclass(frozen=True)
class RowForm:
    """`threads` threads a row (32: a warp, more: a block) take `vector` columns each, `steps` times, in registers."""

    threads: int
    steps: int
    vector: int

    @property
    def num_columns(self) -> int:
        """Columns that are kept in registers."""
        return self.threads * self.steps * self.vector

    @property
    def block(self) -> int:
        """Threads of a block."""
        return _WARP_FORM_BLOCK if self.threads <= _WARP else self.threads

    @property
    def parameters(self) -> str:
        """The template parameters ROW_THREADS, STEPS, VECTOR."""
        return f"{self.threads}, {self.steps}, {self.vector}"

    def grid(self, num_rows: int) -> tuple[int]:
        """Blocks for `num_rows` rows."""
        return (-(-num_rows * self.threads // self.block),)


def row_stride(array: Array) -> int:
    """Elements from one row of a matrix to the next; 0 if there is no next."""
    return array.strides[0] // array.dtype.itemsize if array.shape[0] > 1 else 0
