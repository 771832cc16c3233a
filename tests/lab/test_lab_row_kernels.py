"""Forms of rows: each holds the rows it is chosen for, its grid covers all rows, and every launch was specified."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcli.kernels.arguments import row_stride
from llmcli.kernels.elementwise import add_parts, embedding
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.engine import KERNELS
from llmcli.lab.matrices import STORAGE, storage_name
from llmcli.lab.row_kernels import (
    MAX_SPLITS,
    PACKED_FORMS,
    SCALAR_FORMS,
    rms_norm,
    row_form,
    row_reduce,
    softmax,
    swiglu,
)
from llmcli.lab.rows import COLUMNS


class Recorder:
    """A card that only records launches."""

    num_multiprocessors = 64

    def __init__(self) -> None:
        self.launches: list[tuple[str, str, tuple[int, ...], int]] = []

    def launch(self, stem: str, name: str, *, grid: tuple[int, ...], block: int, **details: Any) -> None:
        self.launches.append((stem, name, grid, block))


def array(*shape: int, dtype: Any = np.float32) -> Any:
    """An array as launchers see it."""
    host = np.broadcast_to(np.zeros(1, dtype), shape)
    strides = tuple(int(np.prod(shape[axis + 1 :])) * host.dtype.itemsize for axis in range(len(shape)))
    return SimpleNamespace(dtype=host.dtype, shape=shape, strides=strides, data=SimpleNamespace(ptr=4096))


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_smallest_form_that_holds_a_row(num_columns: int, is_packed: bool) -> None:
    forms = PACKED_FORMS if is_packed else SCALAR_FORMS
    form = row_form(num_columns, is_packed)
    smaller = forms[: forms.index(form)]
    assert all(one.num_columns < num_columns for one in smaller)
    assert form.num_columns >= num_columns or form == forms[-1]


@pytest.mark.parametrize("form", PACKED_FORMS + SCALAR_FORMS)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 1000])
def test_a_grid_covers_the_rows_and_no_whole_block_more(form: Any, num_rows: int) -> None:
    rows_per_block = form.block // form.threads
    assert rows_per_block == (4 if form.threads == 32 else 1)
    (blocks,) = form.grid(num_rows)
    assert (blocks - 1) * rows_per_block < num_rows <= blocks * rows_per_block


def test_row_stride_is_in_elements_and_0_without_a_second_row() -> None:
    x = np.zeros((4, 24), np.float32)
    assert row_stride(x[:, 3:9]) == 24
    assert row_stride(x[::2]) == 48
    assert row_stride(x[:1, :7]) == 0


@pytest.mark.parametrize("num_columns", [*COLUMNS, 128256])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_every_launch_is_of_a_specified_variant(num_columns: int, num_rows: int) -> None:
    device: Any = Recorder()
    x, vector, scale = array(num_rows, num_columns), array(num_columns), array(num_rows)
    ids = array(num_rows, dtype=np.int32)
    for dtype in STORAGE:
        out = array(num_rows, num_columns, dtype=dtype)
        rms_norm(device, x=x, weight=vector, eps=1e-5, out=out, row_scale=scale)
        gate_up = array(num_rows, 16 * -(-num_columns // 8))
        swiglu(device, gate_up=gate_up, row_scale=scale, out=out, out_scale=scale)
        layout = tile_layout(storage_name(dtype), 9, num_columns)
        table = layout.place(Phantom((layout.arena_bytes,), np.uint8, 4096))
        embedding(device, table=table, token_ids=ids, out=x)
    add_parts(device, parts=array(2, num_rows, num_columns), out=x)
    for log in (False, True):
        softmax(device, x=x, out=x, log=log)
    workspace = {"partials": array(num_rows, 2 * MAX_SPLITS), "counters": ids}
    for op, result in (("sum", scale), ("max", scale), ("argmax", ids), ("log_sum_exp", scale)):
        row_reduce(device, op=op, x=x, out=result)
        row_reduce(device, op=op, x=x, out=result, **workspace)
    for stem, name, grid, block in device.launches:
        assert name in KERNELS[stem].variants
        assert min(grid) >= 1
        assert block in (128, 256, 512, 1024)
    names = [name for _, name, _, _ in device.launches]
    assert any("split" in name for name in names) == (num_columns >= 8192 and num_rows == 1)
