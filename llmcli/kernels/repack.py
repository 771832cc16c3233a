"""Copies weights, scales and zero points from a checkpoint's form into the tiles of a matrix, on the card."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.arguments import check, struct_fields
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import (
    HALF_ROWS,
    SCALE_C_TYPES,
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
    Widening,
    fastest_widening,
)

BLOCK_SIZE = 256
NOT_FINITE = 1  # flags: the source has NaN or infinity
OUT_OF_RANGE = 2  # flags: a finite value that the new type cannot hold
NOT_HALF = 4  # flags: fp16 lacks a scale

_HALF_UNIT_BYTES = UNIT_BYTES // 2
_FLOATS = ("float", "__half", "__nv_bfloat16")

SPEC = KernelSpec(
    "repack",
    "checkpoint tensors into tiles",
    (
        "repack<Int8, Int8>",
        "repack<Int4, Int4>",
        "repack<Fp8, Fp8>",
        *(f"repack<{source}, {weight}>" for source in _FLOATS for weight in _FLOATS),
        *(f"repack_scales<{scale}>" for scale in SCALE_C_TYPES.values()),
        "lift_scales<__half>",
        "lift_scales<__nv_bfloat16>",
        "repack_zero_points<4>",
        "repack_zero_points<8>",
    ),
)


@dataclass(frozen=True)
class Segment:
    """The half tiles of a tensor's rows: rows 8i .. 8i+7 go to half `first_half` + i * `half_step` of the matrix.

    A tile has two halves. With a step of 2 another tensor has the other half of each tile.
    """

    num_rows: int
    first_half: int = 0
    half_step: int = 1

    @property
    def num_halves(self) -> int:
        """Halves that the rows fill, the last one padded; a tensor with no other in its tiles pads its last tile."""
        whole = TILE_ROWS if self.half_step == 1 else HALF_ROWS
        return -(-self.num_rows // whole) * (whole // HALF_ROWS)

    def check_fits(self, layout: TileLayout) -> None:
        """Refuse halves outside the matrix.

        Raises: ValueError
        """
        last = self.first_half + (self.num_halves - 1) * self.half_step
        if self.num_rows < 1 or self.first_half < 0 or self.half_step < 1 or last >= 2 * layout.num_tiles:
            raise ValueError(f"repack: {self} does not lie in {layout.num_tiles} tiles")


class SourceShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = [
        *struct_fields("num_rows num_inputs num_units num_halves first_half half_step"),
        ("row_bytes", ctypes.c_uint64),
    ]


class GroupShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = struct_fields(
        "num_rows source_groups source_group_size num_groups group_size num_halves first_half half_step"
    )


def row_bytes(weight_type: str, num_inputs: int) -> int:
    """Bytes of a row in a checkpoint, where codes fill whole int32."""
    bits = num_inputs * WEIGHT_BITS[weight_type]
    return -(-bits // 32) * 4 if weight_type in ("int8", "int4") else bits // 8


def repack(
    device: Launcher, *, source: Any, source_type: str, segment: Segment, matrix: TiledMatrix, flags: Any | None = None
) -> None:
    """Put the rows of one weight or weight_packed tensor into their tiles, converted to the matrix's type.

    Shapes: source uint8 [num_rows * row_bytes], the tensor's bytes as on disk, aligned to its elements (codes need no
            alignment); flags int32 [2], to the first of which NOT_FINITE and OUT_OF_RANGE are added
    Raises: ValueError
    """
    layout = matrix.layout
    pitch = row_bytes(source_type, layout.num_inputs)
    alignment = 1 if layout.has_codes else WEIGHT_BITS[source_type] // 8
    check("repack", "source", source, dtype="uint8", shape=(segment.num_rows * pitch,), aligned=alignment)
    if layout.has_scales and source_type != layout.weight_type:
        raise ValueError(f"repack: {source_type} weights do not become {layout.weight_type}")
    _check_flags(flags)
    segment.check_fits(layout)
    shape = SourceShape(
        num_rows=segment.num_rows,
        num_inputs=layout.num_inputs,
        num_units=layout.num_units,
        num_halves=segment.num_halves,
        first_half=segment.first_half,
        half_step=segment.half_step,
        row_bytes=pitch,
    )
    vectors = segment.num_halves * layout.num_units * (_HALF_UNIT_BYTES // 16)
    device.launch(
        "repack",
        f"repack<{WEIGHT_C_TYPES[source_type]}, {WEIGHT_C_TYPES[layout.weight_type]}>",
        grid=(-(-vectors // BLOCK_SIZE),),
        block=BLOCK_SIZE,
        arguments=(source, matrix.tiles, flags, shape),
    )


def repack_scales(
    device: Launcher,
    *,
    source: Any,
    group_size: int | None,
    segment: Segment,
    matrix: TiledMatrix,
    flags: Any | None = None,
) -> None:
    """Put one weight_scale tensor into the matrix; `group_size` is the checkpoint's.

    Shapes: source [num_rows / scale_rows, rounded up, groups] in the matrix's scale type; flags int32 [2], the first as
            in `repack`, the second the bits of the largest magnitude so far as a float32
    Raises: ValueError
    """
    layout = matrix.layout
    if matrix.scales is None:
        raise ValueError(f"repack: {layout.weight_type} weights have no scales")
    groups = _source_groups(layout, group_size)
    num_rows = -(-segment.num_rows // layout.scale_rows)
    shape = (num_rows, groups)
    check("repack", "source", source, dtype=matrix.scales.dtype, shape=shape, aligned=source.dtype.itemsize)
    _check_flags(flags)
    segment.check_fits(layout)
    device.launch(
        "repack",
        f"repack_scales<{SCALE_C_TYPES[layout.scale_type or '']}>",
        grid=_group_grid(layout, segment, layout.scale_rows),
        block=BLOCK_SIZE,
        arguments=(source, matrix.scales, flags, _group_shape(layout, group_size, segment, num_rows)),
    )


def lift_scales(device: Launcher, *, matrix: TiledMatrix) -> None:
    """Write a matrix's scales as kernels take them of lifted codes, in place of the stored ones.

    Raises: ValueError for a matrix whose codes are not lifted
    """
    layout = matrix.layout
    if matrix.widening != "lifted":
        raise ValueError(f"repack: codes of {layout} are not lifted")
    num_groups = layout.num_tiles * layout.num_groups
    device.launch(
        "repack",
        f"lift_scales<{SCALE_C_TYPES[layout.scale_type or '']}>",
        grid=(-(-num_groups // BLOCK_SIZE),),
        block=BLOCK_SIZE,
        arguments=(matrix.scales, np.int32(num_groups), np.float32(1 / matrix.unlift)),
    )


def widening_of(layout: TileLayout, flags: int) -> Widening:
    """The fastest way to widen a matrix whose scales left these flags."""
    fastest = fastest_widening(layout)
    return "floats" if fastest == "halves" and flags & NOT_HALF else fastest


def repack_zero_points(
    device: Launcher, *, source: Any, group_size: int | None, segment: Segment, matrix: TiledMatrix
) -> None:
    """Put one weight_zero_point tensor into the matrix; `group_size` is the checkpoint's.

    Shapes: source int32 [ceil(num_rows * bits / 32), groups]
    Raises: ValueError
    """
    layout = matrix.layout
    if matrix.zero_points is None:
        raise ValueError("repack: a symmetric matrix has no zero points")
    bits = WEIGHT_BITS[layout.weight_type]
    words = -(-segment.num_rows * bits // 32)
    shape = (words, _source_groups(layout, group_size))
    check("repack", "source", source, dtype="int32", shape=shape, aligned=4)
    segment.check_fits(layout)
    device.launch(
        "repack",
        f"repack_zero_points<{bits}>",
        grid=_group_grid(layout, segment),
        block=BLOCK_SIZE,
        arguments=(source, matrix.zero_points, _group_shape(layout, group_size, segment, segment.num_rows)),
    )


def repack_cost(*, source_type: str, segment: Segment, layout: TileLayout) -> KernelCost:
    """What `repack` of one weight tensor moves."""
    return KernelCost(
        read_bytes=segment.num_rows * row_bytes(source_type, layout.num_inputs),
        written_bytes=segment.num_halves * layout.num_units * _HALF_UNIT_BYTES,
        flops=0,
    )


def _check_flags(flags: Any | None) -> None:
    if flags is not None:
        check("repack", "flags", flags, dtype=np.int32, shape=(2,), aligned=4)


def _source_groups(layout: TileLayout, group_size: int | None) -> int:
    return 1 if group_size is None else -(-layout.num_inputs // group_size)


def _group_grid(layout: TileLayout, segment: Segment, scale_rows: int = 1) -> tuple[int]:
    return (-(-segment.num_halves * layout.num_groups * (HALF_ROWS // scale_rows) // BLOCK_SIZE),)


def _group_shape(layout: TileLayout, group_size: int | None, segment: Segment, num_rows: int) -> GroupShape:
    whole_row = layout.num_units * layout.unit_inputs
    return GroupShape(
        num_rows=num_rows,
        source_groups=_source_groups(layout, group_size),
        source_group_size=group_size or whole_row,
        num_groups=layout.num_groups,
        group_size=layout.group_size or whole_row,
        num_halves=segment.num_halves,
        first_half=segment.first_half,
        half_step=segment.half_step,
    )
