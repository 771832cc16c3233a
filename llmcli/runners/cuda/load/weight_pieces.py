"""Cuts every tensor of a model into pieces for the upload, puts them into their tiles on the card, and checks them.

A weight's way: parts_of names its tensors, and row_ranges cuts them. One of the upload's threads reads a piece's
range; then the piece is put into the tiles that weight_layout planned. Norms, biases, and codes that become floats are
read and converted on the host: such a function fills its last argument, an array in pinned memory, and may run in any
thread.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.formats import check_shape
from llmcli.checkpoint.layout import EMBEDDING, WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import Floats, TensorReader, not_finite, read_floats
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.translation import PackedTensors, read_widened
from llmcli.errors import CheckpointError
from llmcli.kernels.device import Device
from llmcli.kernels.repack import (
    NOT_FINITE,
    OUT_OF_RANGE,
    Segment,
    lift_scales,
    repack,
    repack_scales,
    repack_zero_points,
    widening_of,
)
from llmcli.kernels.tiles import HALF_ROWS, Widening, power_of
from llmcli.runners.cuda.load.upload import UploadPiece
from llmcli.runners.cuda.plan.regions import ARRAY_DTYPES, Region, held_bytes, lay_out
from llmcli.runners.cuda.plan.staging import (
    CODES,
    SCALE,
    ZERO_POINT,
    LinearTensor,
    RowRange,
    Staging,
    embedding_part,
    is_unpacked,
    parts_of,
    row_ranges,
)
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import Linear, Projection, Weights, with_widening
from llmcli.runners.cuda.step.arena import copy

Buffer = npt.NDArray[np.uint8]
ReadPiece = Callable[[TensorReader, Buffer], None]


def read_bytes(info: TensorInfo, begin: int, reader: TensorReader, buffer: Buffer) -> None:
    """Read the tensor's bytes from `begin` on, unconverted. Raises: CheckpointError for read errors."""
    reader.read_range_into(info, begin, buffer.data)


def read_norm(info: TensorInfo, reader: TensorReader, values: Floats) -> None:
    """Read a norm as float32. Raises: CheckpointError for read errors, NaN and infinity."""
    values[:] = read_floats(info, 0, info.shape[0], reader)


def read_bias(biases: Sequence[tuple[Linear, TensorInfo]], reader: TensorReader, values: Floats) -> None:
    """Read the biases of one matrix as float32, each at the index of its layer's outputs; zeros between them.

    Raises: CheckpointError for read errors, NaN and infinity
    """
    halves = values.reshape(-1, HALF_ROWS)
    halves[:] = 0
    for linear, info in biases:
        bias = read_floats(info, 0, info.shape[0], reader)
        padded = np.zeros((-(-len(bias) // HALF_ROWS), HALF_ROWS), np.float32)
        padded.reshape(-1)[: len(bias)] = bias
        halves[linear.first_half :: linear.half_step][: len(padded)] = padded


def read_unpacked(
    layer: PackedTensors, order: bytes | None, begin: int, end: int, reader: TensorReader, buffer: Buffer
) -> None:
    """Read rows begin ... end - 1 of a quantized weight as float32; `begin` is the start of a tile.

    `order`, as in `MatrixFormat`, is that of the stored columns; each is moved to its input's index.
    Raises: CheckpointError for read errors, NaN and infinity
    """
    weights = buffer.view(np.float32).reshape(end - begin, -1)
    if order is None:
        read_widened(layer, begin, end, reader, weights)
    else:
        sorted_weights = np.empty_like(weights)
        read_widened(layer, begin, end, reader, sorted_weights)
        weights[:, np.frombuffer(order, np.int32)] = sorted_weights


def storing(read: Callable[[TensorReader], npt.NDArray[Any]], step: int = 1) -> ReadPiece:
    """A function that fills a buffer with every `step`-th row that `read` reads, as it gives them."""

    def store(reader: TensorReader, buffer: Buffer) -> None:
        values = read(reader)[::step]
        buffer.view(values.dtype).reshape(values.shape)[:] = values

    return store


class WeightPieces:
    """The pieces of one model. After the upload call `checked` with the flags, which mark bad values.

    `weights` and `staging` lie on the card; the flags must be zeros at first.
    """

    def __init__(
        self, device: Device, model: Model, stored: StoredModel, weights: Weights[Any], staging: Staging[Any]
    ) -> None:
        self._device = device
        self._stored = stored
        self._weights = weights
        self._infos = model.tensors.tensors
        self._packed = model.tensors.packed
        self._scaled = model.tensors.scaled
        self._flags = staging.flags
        self._flag_indices = {name: index for index, name in enumerate(stored.dtypes)}

    def __iter__(self) -> Iterator[UploadPiece]:
        """All pieces; the one of small tensors comes first."""
        yield self._small_piece()
        yield from self.for_kernels()

    def for_kernels(self) -> Iterator[UploadPiece]:
        """The pieces of matrices and embedding, in the order of the files. Kernels put them into tiles."""
        sources = [(self._infos[EMBEDDING], self._embedding_pieces(self._infos[EMBEDDING]))]
        for projection in self._weights.projections:
            for linear in projection.linears:
                sources += self._layer_sources(projection, linear)
        for _, pieces in sorted(sources, key=lambda source: (source[0].path, source[0].offset)):
            yield from pieces

    def _small_piece(self) -> UploadPiece:
        """One piece of all norms and biases: sent one by one, each costs the host as much as a large piece.

        Reading it also checks the stored shapes.
        """
        norms = [(norm, partial(read_norm, self._infos[name])) for name, norm in self._weights.norms]
        biased = [projection for projection in self._weights.projections if projection.bias is not None]
        biases = [(projection.bias, partial(read_bias, self._biases_of(projection))) for projection in biased]
        shapes = [(self._infos[f"{module}.weight_shape"], layer.shape) for module, layer in self._packed.items()]
        tensors = [self._infos[name] for name, _ in self._weights.norms] + [info for info, _ in shapes]
        tensors += [info for projection in biased for _, info in self._biases_of(projection)]
        regions = tuple(Region(target.shape, target.dtype) for target, _ in (*norms, *biases))

        def read(reader: TensorReader, buffer: Buffer) -> None:
            for values, (_, read_values) in zip(lay_out(regions, buffer), (*norms, *biases), strict=True):
                read_values(reader, values)
            for info, shape in shapes:
                check_shape(info, shape, reader)

        def take(source: Any) -> None:
            for values, (target, _) in zip(lay_out(regions, source), (*norms, *biases), strict=True):
                copy(self._device, target, values)

        return UploadPiece(held_bytes(regions), sum(info.num_bytes for info in tensors), read, take)

    def _biases_of(self, projection: Projection[Any]) -> list[tuple[Linear, TensorInfo]]:
        named = ((linear, self._infos.get(f"{linear.module}.bias")) for linear in projection.linears)
        return [(linear, info) for linear, info in named if info is not None]

    def _layer_sources(
        self, projection: Projection[Any], linear: Linear
    ) -> Iterator[tuple[TensorInfo, Iterator[UploadPiece]]]:
        """The tensors of one linear layer, each with its pieces."""
        if linear.module == EMBEDDING.removesuffix(WEIGHT_SUFFIX):
            return  # a tied head
        for part in parts_of(self._stored, projection, linear):
            info = self._infos[linear.module + part.suffix]
            if is_unpacked(self._stored, projection, linear):
                yield info, self._unpacked_pieces(part, projection, linear)
            else:
                yield info, self._tensor_pieces(info, part, projection, linear)

    def _tensor_pieces(
        self, info: TensorInfo, part: LinearTensor, projection: Projection[Any], linear: Linear
    ) -> Iterator[UploadPiece]:
        if linear.module in self._scaled and part.suffix != WEIGHT_SUFFIX:
            yield from self._fp8_scale_pieces(info, part, projection, linear)
            return
        put = {CODES: self._put_weights, SCALE: self._put_scales, ZERO_POINT: self._put_zero_points}
        put_part = partial(put.get(part.suffix, self._put_weights), info, projection)
        for rows, take in _cut(part, linear, put_part):
            yield UploadPiece(rows.num_bytes, rows.num_bytes, partial(read_bytes, info, rows.first_byte), take)

    def _fp8_scale_pieces(
        self, info: TensorInfo, part: LinearTensor, projection: Projection[Any], linear: Linear
    ) -> Iterator[UploadPiece]:
        """Scales of 8-bit floats, which many rows share, row by row. The first piece counts all bytes of the file."""
        layer, file_bytes = self._scaled[linear.module], info.num_bytes
        for rows, take in _cut(part, linear, partial(self._put_scales, info, projection)):
            read = partial(layer.read_scales, linear.module, self._infos, rows.begin, rows.end)
            yield UploadPiece(rows.num_bytes, file_bytes, storing(read, part.rows_per_row), take)
            file_bytes = 0

    def _put_weights(self, info: TensorInfo, projection: Projection[Any], segment: Segment, source: Any) -> None:
        source_type = self._stored.dtypes.get(info.name, projection.layout.weight_type)  # codes have no float type
        flags, matrix = self._flags_of(info), projection.matrix
        repack(self._device, source=source, source_type=source_type, segment=segment, matrix=matrix, flags=flags)

    def _put_scales(self, info: TensorInfo, projection: Projection[Any], segment: Segment, source: Any) -> None:
        assert projection.format.scheme is not None
        repack_scales(
            self._device,
            source=source.view(ARRAY_DTYPES[self._stored.dtypes[info.name]]).reshape(
                -(-segment.num_rows // projection.layout.scale_rows), -1
            ),
            group_size=projection.format.scheme.group_size,
            segment=segment,
            matrix=projection.matrix,
            flags=self._flags_of(info),
        )

    def _put_zero_points(self, info: TensorInfo, projection: Projection[Any], segment: Segment, source: Any) -> None:
        assert projection.format.scheme is not None
        words = source.view(np.int32).reshape(-1, info.shape[1])
        group_size = projection.format.scheme.group_size
        repack_zero_points(self._device, source=words, group_size=group_size, segment=segment, matrix=projection.matrix)

    def _unpacked_pieces(
        self, part: LinearTensor, projection: Projection[Any], linear: Linear
    ) -> Iterator[UploadPiece]:
        """Pieces of a quantized layer's rows as float32. The first one counts all bytes of the files."""
        module, infos, scaled = linear.module, self._infos, self._scaled.get(linear.module)
        if scaled is not None:
            tensors: list[TensorInfo | None] = [infos[f"{module}.{name}"] for name in ("weight", scaled.scale)]
        else:
            scheme, tensors = (
                self._packed[module].scheme,
                [infos.get(module + one) for one in (CODES, SCALE, ZERO_POINT)],
            )
            layer = PackedTensors(scheme, infos[module + CODES], infos[module + SCALE], tensors[2])
        file_bytes = sum(info.num_bytes for info in tensors if info is not None)
        for rows, take in _cut(part, linear, partial(self._put_floats, projection)):
            if scaled is not None:
                read = storing(partial(scaled.read_rows, module, infos, rows.begin, rows.end))
            else:
                read = partial(read_unpacked, layer, self._stored.orders.get(module), rows.begin, rows.end)
            yield UploadPiece(rows.num_bytes, file_bytes, read, take)
            file_bytes = 0

    def _put_floats(self, projection: Projection[Any], segment: Segment, source: Any) -> None:
        repack(self._device, source=source, source_type="float32", segment=segment, matrix=projection.matrix)

    def _embedding_pieces(self, info: TensorInfo) -> Iterator[UploadPiece]:
        for rows in row_ranges(embedding_part(self._stored), info.shape[0]):
            take = partial(self._put_embedding, rows.begin, rows.end)
            yield UploadPiece(rows.num_bytes, rows.num_bytes, partial(read_bytes, info, rows.first_byte), take)

    def _put_embedding(self, begin: int, end: int, source: Any) -> None:
        segment, flags = Segment(end - begin, begin // HALF_ROWS), self._flags_of(self._infos[EMBEDDING])
        source_type, matrix = self._stored.dtypes[EMBEDDING], self._weights.embed_tokens
        repack(self._device, source=source, source_type=source_type, segment=segment, matrix=matrix, flags=flags)

    def _flags_of(self, info: TensorInfo) -> Any:
        """A tensor's flags; None for codes, all of which are valid."""
        index = self._flag_indices.get(info.name)
        return None if index is None else self._flags[index]

    def checked(self, found: npt.NDArray[np.int32]) -> Weights[Any]:
        """The weights, with the ways in which kernels may widen them. Scales of lifted codes are lifted now.

        Shapes: found int32 [flags, 2]
        Raises: CheckpointError naming the first tensor with NaN, infinity, or values that the new type cannot hold
        """
        for name, (flags, _) in zip(self._stored.dtypes, found.tolist(), strict=True):
            info = self._infos[name]
            if flags & NOT_FINITE:
                raise not_finite(info)
            if flags & OUT_OF_RANGE:
                raise CheckpointError(
                    f"{info.name} in {info.path.name} holds values that {self._stored.dtype} cannot; use --dtype auto"
                )
        weights = with_widening(self._weights, lambda part: self._widening_of(part, found))
        for part in weights.projections:
            if part.matrix.widening == "lifted":
                lift_scales(self._device, matrix=part.matrix)
        return weights

    def _widening_of(self, projection: Projection[Any], found: npt.NDArray[np.int32]) -> tuple[Widening, int]:
        """How a matrix's scales, by the flags of their tensors, let it be widened; and the power of lifted ones."""
        scales = [f"{one.module}.{self._stored.scale_of(one.module)}" for one in projection.linears]
        of_scales = found[[self._flag_indices[name] for name in scales]]
        widening = widening_of(projection.layout, int(np.bitwise_or.reduce(of_scales[:, 0])))
        largest = float(of_scales[:, 1].max().view(np.float32))
        return widening, power_of(largest) if widening == "lifted" else 0


def _cut(
    part: LinearTensor, linear: Linear, put: Callable[[Segment, Any], None]
) -> Iterator[tuple[RowRange, Callable[[Any], None]]]:
    """The ranges of a tensor's rows, and for each what puts its bytes into the half tiles of a layer."""
    for rows in row_ranges(part, linear.num_rows):  # each begins at a tile
        first_half = linear.first_half + rows.begin // HALF_ROWS * linear.half_step
        yield rows, partial(put, Segment(rows.end - rows.begin, first_half, linear.half_step))
