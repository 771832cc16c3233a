"""How row kernels share a row out among threads: the host's side of kernels/common/rows.cuh."""

from collections.abc import Sequence
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


# By rising size; a row longer than the last form holds is partly read twice.
PACKED_FORMS = (
    RowForm(32, 2, VECTOR),
    RowForm(32, 8, VECTOR),
    RowForm(256, 4, VECTOR),
    RowForm(512, 4, VECTOR),
    RowForm(512, 8, VECTOR),
)
SCALAR_FORMS = (RowForm(32, 8, 1), RowForm(1024, 8, 1))


def row_form(num_columns: int, is_packed: bool, packed_forms: Sequence[RowForm] = PACKED_FORMS) -> RowForm:
    """The smallest form that holds a row, else the largest; `is_packed` if all rows are 16-byte aligned."""
    forms = packed_forms if is_packed else SCALAR_FORMS
    return next((form for form in forms if num_columns <= form.num_columns), forms[-1])


def row_stride(array: Array) -> int:
    """Elements from one row of a matrix to the next; 0 if there is no next."""
    return array.strides[0] // array.dtype.itemsize if array.shape[0] > 1 else 0
