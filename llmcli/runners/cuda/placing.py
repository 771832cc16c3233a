"""Where each tensor of a model folder goes on the card: matrices in pieces of rows, norms and biases by the host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.device import Device
from llmcli.kernels.repack import NOT_FINITE, OUT_OF_RANGE, repack, repack_scales, repack_zero_points, row_bytes
from llmcli.kernels.repack import Segment as Target
from llmcli.kernels.tiles import HALF_ROWS, TiledMatrix, tile_layout
from llmcli.quantization.floats import STORED_AS, widen
from llmcli.quantization.packing import unpack_rows, unpack_zero_points
from llmcli.runners.cuda.arena import Arena, send
from llmcli.runners.cuda.matrices import MatrixPlan, Segment
from llmcli.runners.cuda.memory import MemoryPlan, bias_region, has_bias
from llmcli.runners.cuda.regions import ARRAY_DTYPES, STORED_DTYPES
from llmcli.runners.cuda.staging import rows_of_piece
from llmcli.runners.cuda.upload import Piece
from llmcli.runners.cuda.weights import Weights

_CODES, _SCALE, _ZERO_POINT, _SHAPE = ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"
_HOST_DTYPES: dict[str, type[np.generic]] = {"I32": np.int32, "I64": np.int64, **STORED_AS}
_MATRIX_PARTS = (".weight", _CODES, _SCALE, _ZERO_POINT)


@dataclass(frozen=True)
class Place:
    """A linear layer's place on the card: its rows are `segment` of `matrix`, which is held as `plan` says."""

    plan: MatrixPlan
    segment: Segment
    matrix: TiledMatrix

    def rows(self, begin: int, end: int) -> Target:
        """Where the layer's rows begin ... end - 1 go; `begin` is the start of a tile."""
        first_half = self.segment.first_half + begin // HALF_ROWS * self.segment.half_step
        return Target(end - begin, first_half, self.segment.half_step)


class Placement:
    """Turns the tensors of one model into pieces for the upload, and says afterwards whether their values were sound.

    `scratch`, uint8, holds the tiles of one piece; `flags`, int32 [number of tensors], collects what was found.
    """

    def __init__(self, device: Device, model: Model, plan: MemoryPlan, weights: Weights, scratch: Any, flags: Any):
        infos = model.tensors.tensors.values()
        self._device = device
        self._model = model
        self._plan = plan
        self._weights = weights
        self._scratch = scratch
        self._flags = flags
        self._infos = sorted(infos, key=lambda info: (info.path, info.offset))
        self._places = {
            segment.module: Place(matrix, segment, weights.by_name[matrix.name])
            for matrix in plan.matrices
            for segment in matrix.segments
        }

    def pieces(self) -> Iterator[Piece]:
        """Every matrix of the model in the order of the files, in parts that fit a slot."""
        for index, info in enumerate(self._infos):
            flags = self._flags[index : index + 1]
            if info.name == EMBEDDING:
                yield from self._embedding_pieces(info, flags)
                continue
            module, part = _split_name(info.name)
            place = self._places.get(module)
            if place is not None and part in _MATRIX_PARTS and not self._is_widened(place):
                yield from self._matrix_pieces(info, part, place, flags)

    def _matrix_pieces(self, info: TensorInfo, part: str, place: Place, flags: Any) -> Iterator[Piece]:
        num_rows = place.segment.num_rows
        source_type = place.plan.layout.weight_type if part == _CODES else STORED_DTYPES.get(info.dtype, "")
        scheme = place.plan.format.scheme
        rows_per_tensor_row = 32 // scheme.num_bits if scheme and part == _ZERO_POINT else 1
        for begin, end, begin_byte, num_bytes in _row_ranges(info, num_rows, rows_per_tensor_row):

            def take(source: Any, begin: int = begin, end: int = end) -> None:
                segment, matrix, device = place.rows(begin, end), place.matrix, self._device
                if part == _SCALE:
                    assert scheme is not None
                    scales = source.view(ARRAY_DTYPES[source_type]).reshape(end - begin, -1)
                    group_size = scheme.group_size
                    repack_scales(
                        device, source=scales, group_size=group_size, segment=segment, matrix=matrix, flags=flags
                    )
                elif part == _ZERO_POINT:
                    assert scheme is not None
                    words = source.view(np.int32).reshape(-1, info.shape[1])
                    repack_zero_points(
                        device, source=words, group_size=scheme.group_size, segment=segment, matrix=matrix
                    )
                else:
                    repack(device, source=source, source_type=source_type, segment=segment, matrix=matrix, flags=flags)

            yield Piece(info, begin_byte, num_bytes, take)

    def _embedding_pieces(self, info: TensorInfo, flags: Any) -> Iterator[Piece]:
        """The table takes its rows by way of tiles, which checks and converts them; a shared head takes them too."""
        table, head = self._weights.table, self._places.get(EMBEDDING.removesuffix(".weight"))
        source_type = STORED_DTYPES[info.dtype]
        vocab_size, hidden_size = info.shape
        for begin, end, begin_byte, num_bytes in _row_ranges(info, vocab_size):

            def take(source: Any, begin: int = begin, end: int = end) -> None:
                layout = tile_layout(self._plan.stored.embedding_type, end - begin, hidden_size)
                tiles = layout.place(self._scratch)
                whole = Target(end - begin)
                repack(self._device, source=source, source_type=source_type, segment=whole, matrix=tiles, flags=flags)
                rows = table[begin : begin + layout.padded_rows]
                dequantize(self._device, matrix=tiles, first_tile=0, num_tiles=layout.num_tiles, out=rows)
                if head is not None:
                    segment = head.rows(begin, end)
                    repack(self._device, source=source, source_type=source_type, segment=segment, matrix=head.matrix)

            yield Piece(info, begin_byte, num_bytes, take)

    def place_small(self, arena: Arena, staging: Any) -> int:
        """Read norms and biases, check the shapes that are stored, and widen what must be; returns the bytes read.

        Raises: CheckpointError
        """
        biases = {
            bias_region(plan): np.zeros(plan.layout.padded_rows, np.float32)
            for plan in self._plan.matrices
            if has_bias(self._plan.stored.config, plan)
        }
        read = 0
        with TensorReader() as reader:
            for info in self._infos:
                module, part = _split_name(info.name)
                place = self._places.get(module)
                if info.name == EMBEDDING or (part in _MATRIX_PARTS and place and not self._is_widened(place)):
                    continue
                read += info.num_bytes
                if place is None:
                    send(self._device, arena[info.name], _read_floats(reader, info))
                elif part == ".bias":
                    halves = biases[bias_region(place.plan)].reshape(-1, HALF_ROWS)
                    _place_bias(halves, place.segment, _read_floats(reader, info))
                elif part == _SHAPE:
                    self._check_shape(module, _read_array(reader, info))
                elif part in (".weight", _CODES):
                    self._widen(reader, module, place, staging)
            for name, bias in biases.items():
                send(self._device, arena[name], bias)
        return read

    def _is_widened(self, place: Place) -> bool:
        """Whether a layer's weights become float32 on the way, for the sake of a neighbour in the same matrix."""
        return place.plan.format != self._plan.stored.format_of(place.segment.module)

    def _widen(self, reader: TensorReader, module: str, place: Place, staging: Any) -> None:
        infos = self._model.tensors.tensors
        layer = self._model.tensors.packed.get(module)
        if layer is None:
            weights = _read_floats(reader, infos[f"{module}.weight"])
        else:
            codes = _read_array(reader, infos[f"{module}{_CODES}"])
            scales = _read_floats(reader, infos[f"{module}{_SCALE}"])
            zeros: npt.NDArray[Any] | int = layer.scheme.offset
            if not layer.scheme.is_symmetric:
                packed = _read_array(reader, infos[f"{module}{_ZERO_POINT}"])
                unpacked = unpack_zero_points(packed, layer.scheme.num_bits, layer.shape[0])
                zeros = unpacked.astype(np.float32)[:, :, None]
            num_rows, num_inputs = layer.shape
            grouped = unpack_rows(codes, layer.scheme.num_bits, num_inputs).astype(np.float32)
            grouped = grouped.reshape(num_rows, scales.shape[1], -1) - zeros
            weights = (grouped * scales[:, :, None]).reshape(num_rows, num_inputs)
        pitch = row_bytes("float32", weights.shape[1])
        step = rows_of_piece(pitch)
        for begin in range(0, len(weights), step):
            rows = weights[begin : begin + step]
            source = staging[: rows.nbytes]
            send(self._device, source, rows)
            segment = place.rows(begin, begin + len(rows))
            repack(self._device, source=source, source_type="float32", segment=segment, matrix=place.matrix)

    def _check_shape(self, module: str, stored: npt.NDArray[Any]) -> None:
        shape = self._model.tensors.packed[module].shape
        if tuple(stored.tolist()) != shape:
            raise CheckpointError(
                f"{module}.weight_shape is {stored.tolist()}, expected {list(shape)}; damaged export?"
            )

    def check_values(self, found: npt.NDArray[np.int32]) -> None:
        """Refuse NaN, infinity and what the new type cannot hold. Shapes: found int32, the flags.

        Raises: CheckpointError naming the first such tensor
        """
        for info, flags in zip(self._infos, found.tolist(), strict=False):
            if flags & NOT_FINITE:
                raise _not_finite(info)
            if flags & OUT_OF_RANGE:
                raise CheckpointError(
                    f"{info.name} in {info.path.name} holds values that {self._plan.stored.dtype} cannot; "
                    "use --dtype auto"
                )


def _split_name(name: str) -> tuple[str, str]:
    """A tensor's name as module and part: `lm_head` and `.weight_scale`."""
    module, dot, part = name.rpartition(".")
    return module, dot + part


def _row_ranges(info: TensorInfo, num_rows: int, rows_per_tensor_row: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """Whole tiles of a weight's rows that fit a slot, as (first row, end, first byte, number of bytes).

    Of zero points `rows_per_tensor_row` lie in one row of the tensor, a divisor of a tile's rows.
    """
    pitch = info.num_bytes // info.shape[0]
    step = rows_of_piece(-(-pitch // rows_per_tensor_row))
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        first, last = begin // rows_per_tensor_row, -(-end // rows_per_tensor_row)
        yield begin, end, first * pitch, (last - first) * pitch


def _read_array(reader: TensorReader, info: TensorInfo) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.empty(info.shape, _HOST_DTYPES[info.dtype])
    reader.read_tensor_into(info, array.data)
    return array


def _read_floats(reader: TensorReader, info: TensorInfo) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = widen(_read_array(reader, info), info.dtype)
    if not np.isfinite(values).all():
        raise _not_finite(info)
    return values


def _not_finite(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.name} in {info.path.name} holds NaN or infinity, expected finite weights; the file is damaged or "
        "was exported from a broken run: download or export it again"
    )


def _place_bias(halves: npt.NDArray[np.float32], segment: Segment, bias: npt.NDArray[np.float32]) -> None:
    """Write a layer's bias to where its outputs are. Shapes: halves [2 * num_tiles, 8]; bias [num_rows]."""
    count = -(-len(bias) // HALF_ROWS)
    padded = np.zeros((count, HALF_ROWS), np.float32)
    padded.reshape(-1)[: len(bias)] = bias
    halves[segment.first_half :: segment.half_step][:count] = padded
