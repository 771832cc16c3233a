"""Writes an export as a stream: one thread reads and writes, a quantizer works, no tensor is held whole."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from llmcli.checkpoint import export_workspace as workspaces
from llmcli.checkpoint.export_plan import ExportPlan, PlannedWeight
from llmcli.checkpoint.folder import files_to_copy
from llmcli.checkpoint.formats import PackedLayer, read_stored
from llmcli.checkpoint.reader import CHUNK_BYTES, TensorReader
from llmcli.checkpoint.safetensors_file import SafetensorsWriter, TensorInfo, printable
from llmcli.destination_lock import DestinationLock
from llmcli.errors import CheckpointError
from llmcli.quantization import rounding
from llmcli.quantization.schemes import PACKED_ITEMSIZE, WeightScheme
from llmcli.reading import COPIED_FILE

# Turns blocks of a weight's rows into packed codes while an export is written; here with threads of the CPU.

# Long compared with a hand-over between threads; short enough that its floats stay in a core's cache and few threads
# are idle at the end of a weight.
WEIGHTS_PER_TASK = 1 << 18
MAX_THREADS = 8  # one thread reads and writes, and cannot feed more


@dataclass(frozen=True)
class PackedRows:
    """A block of rows as it goes into the export.

    Shapes: packed int32 [rows, words]; scales float32 [rows, groups], representable in the dtype they are stored in;
    zero_points uint8 [rows, groups], None if symmetric.
    """

    packed: rounding.Array
    scales: rounding.Array
    zero_points: rounding.Array | None
    errors: rounding.RowErrors


class PendingRows(Protocol):
    """A block being quantized."""

    def result(self) -> PackedRows | None:
        """Wait for the block; None if a weight is NaN or infinite, or too large for its scale's dtype.

        `packed` is the caller's until `capacity` more buffers are requested.
        """
        ...


class RowQuantizer(Protocol):
    """Quantizes blocks of rows, up to `capacity` of them at a time. Results are read in order.

    The one on the CPU and the one on a card give the same bytes.
    """

    capacity: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def block_rows(self, input_size: int) -> int:
        """How many rows of `input_size` weights make a block."""
        ...

    def buffer(self, shape: tuple[int, int], dtype: str) -> rounding.Array:
        """The buffer to read the next block into. Shapes: as requested, as STORED_AS[dtype]."""
        ...

    def submit(self, stored: rounding.Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> PendingRows:
        """Start quantizing the block in the latest buffer; the scheme's group size must divide its rows."""
        ...


class ThreadedQuantizer:
    """The quantizer on the CPU: a few threads, a block each."""

    def __init__(self) -> None:
        num_threads = min(os.cpu_count() or 1, MAX_THREADS)
        self.capacity = 2 * num_threads + 1  # a block waits for each thread that works on another
        self._pool = ThreadPoolExecutor(num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def block_rows(self, input_size: int) -> int:
        """How many rows of `input_size` weights make a block."""
        return max(1, WEIGHTS_PER_TASK // input_size)

    def buffer(self, shape: tuple[int, int], dtype: str) -> rounding.Array:
        """The buffer to read the next block into."""
        return np.empty(shape, rounding.STORED_AS[dtype])

    def submit(self, stored: rounding.Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> PendingRows:
        """Start quantizing the block in the latest buffer."""
        return self._pool.submit(quantize_and_pack, stored, dtype, scheme, scale_dtype)


def quantize_and_pack(stored: rounding.Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> PackedRows | None:
    """`quantize_rows`, and the codes packed."""
    block = rounding.quantize_rows(stored, dtype, scheme, scale_dtype)
    if block is None:
        return None
    return PackedRows(rounding.pack_rows(block.codes, scheme.num_bits), block.scales, block.zero_points, block.errors)


OnProgress = Callable[[int, int], None]
OnTensor = Callable[[str, rounding.TensorQuality], None]


@dataclass
class _Rows:
    """What is known of one weight so far; scales and zero points are small, and written last."""

    scales: list[rounding.Array] = field(default_factory=list)
    zero_points: list[rounding.Array] = field(default_factory=list)
    errors: list[rounding.RowErrors] = field(default_factory=list)
    num_rows: int = 0


class Exporter:
    """One export, by `plan`: `prepare`, which finds what an earlier run left, then `run`.

    `open_reader` replaces reading the source's files, `open_quantizer` the quantizer on the CPU. No other process
    writes to the destination from `prepare` to the end of `run`, nor while a caller holds `lock`.
    Raises: UsageError for a destination whose path cannot be used.
    """

    def __init__(
        self,
        plan: ExportPlan,
        destination: Path,
        source_name: str,
        *,
        replace: bool = False,
        open_reader: Callable[[], TensorReader] = TensorReader,
        open_quantizer: Callable[[], RowQuantizer] = ThreadedQuantizer,
    ):
        self.plan = plan
        self._destination = workspaces.resolve_destination(destination)
        self.lock = DestinationLock(self._destination)
        self._source_name = source_name
        self._replace = replace
        self._open_reader = open_reader
        self._open_quantizer = open_quantizer

    def prepare(self) -> workspaces.ExportWorkspace:
        """Make the folder in which the export grows.

        Raises: UsageError if the destination exists, overlaps the source or is being written by another process;
        OutputError if the disk is too small or cannot be written.
        """
        workspaces.refuse_overlap(self.plan, self._destination)
        with workspaces.destination_errors_explained(self._destination), ExitStack() as undo:
            self._destination.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
            undo.callback(self.lock.release)
            workspace = workspaces.ExportWorkspace(self.plan, self._destination, replace=self._replace)
            workspace.check_disk()
            undo.pop_all()
        return workspace

    def run(
        self, workspace: workspaces.ExportWorkspace, on_progress: OnProgress, on_tensor: OnTensor
    ) -> dict[str, rounding.TensorQuality]:
        """Write what is missing and give the export its name. The next run resumes a stopped one.

        Returns the quality of every quantized weight, by module name, in the order of the file.
        Units: on_progress gets bytes of the source done and in all.
        Raises: CheckpointError for weights that are not finite or cannot be read, after which nothing remains,
        or a source that changes meanwhile; UsageError if the destination appears meanwhile; OutputError for
        a disk that cannot be written.
        """
        plan = self.plan
        with workspaces.destination_errors_explained(self._destination), ExitStack() as at_end:
            at_end.callback(self.lock.release)
            with self._open_reader() as reader, self._open_quantizer() as quantizer:
                _write_shards(plan, workspace, reader, quantizer, on_progress, on_tensor)
            qualities = {
                name: quality for shard in plan.shards for name, quality in workspace.finished[shard.file_name].items()
            }
            for name, path in files_to_copy(plan.source.folder).items():
                workspace.write(name, COPIED_FILE.read_bytes(path))
            for name, text in workspaces.small_files(
                plan, qualities, self._source_name, self._destination.name
            ).items():
                workspace.write(name, text.encode())
            plan.check_sources()
            workspace.publish()
        return qualities


def _write_shards(
    plan: ExportPlan,
    workspace: workspaces.ExportWorkspace,
    reader: TensorReader,
    quantizer: RowQuantizer,
    on_progress: OnProgress,
    on_tensor: OnTensor,
) -> None:
    total = sum(shard.source_bytes for shard in plan.shards)
    done = 0
    for shard in plan.shards:
        if shard.file_name in workspace.finished:
            done += shard.source_bytes
            on_progress(done, total)
            continue
        qualities = {}
        tensors = [tensor for weight in shard.weights for tensor in weight.outputs]
        try:
            with SafetensorsWriter(workspace.torso(shard), tensors) as writer:
                for weight in shard.weights:
                    stream = _WeightStream(weight, reader, writer)
                    for num_bytes in stream.run(quantizer):
                        done += num_bytes
                        on_progress(done, total)
                    if stream.quality is not None:
                        qualities[weight.module] = stream.quality
                        on_tensor(weight.module, stream.quality)
                writer.finish()
        except CheckpointError:
            workspace.discard()
            raise
        plan.check_sources()  # what an earlier run has finished is trusted by the files' states
        workspace.keep(shard, qualities)


def copy_tensor(info: TensorInfo, name: str, reader: TensorReader, writer: SafetensorsWriter) -> Iterator[int]:
    """Write a tensor as it is read, under `name`; yields how many bytes each step took."""
    for begin in range(0, info.num_bytes, CHUNK_BYTES):
        chunk = bytearray(min(CHUNK_BYTES, info.num_bytes - begin))
        reader.read_range_into(info, begin, chunk)
        writer.write(name, chunk, begin)
        yield len(chunk)


class _WeightStream:
    """Moves one weight from the source to a shard. `quality` is set when all of it is quantized."""

    def __init__(self, weight: PlannedWeight, reader: TensorReader, writer: SafetensorsWriter):
        self._weight = weight
        self._reader = reader
        self._writer = writer
        self.quality: rounding.TensorQuality | None = None

    def run(self, quantizer: RowQuantizer) -> Iterator[int]:
        """Copy, convert or quantize the weight; yields how many bytes of the source each step took."""
        if self._weight.layer is not None:
            yield self._convert(self._weight.layer)
        elif self._weight.scheme is None:
            yield from copy_tensor(self._weight.info, self._weight.name, self._reader, self._writer)
        else:
            yield from self._quantize(self._weight.scheme, quantizer)

    def _convert(self, layer: PackedLayer) -> int:
        """Write a layer in our layout, the same codes, scales and zero points. It is held whole meanwhile."""
        weight = self._weight
        stored = read_stored(weight.module, layer, {info.name: info for info in weight.parts}, self._reader)
        self._writer.write(f"{weight.name}_packed", stored.packed.data)
        self._write_parts(stored.scales, stored.zero_points, layer.scheme)
        if weight.stores_order:
            self._writer.write(f"{weight.name}_g_idx", stored.group_index(layer).data)
        return weight.source_bytes

    def _write_parts(self, scales: rounding.Array, zero_points: rounding.Array | None, scheme: WeightScheme) -> None:
        """All but the codes. Shapes: scales [rows, groups] as stored; zero_points uint8 [rows, groups]"""
        weight = self._weight
        self._writer.write(f"{weight.name}_scale", scales.data)
        self._writer.write(f"{weight.name}_shape", np.array(weight.shape, np.int64).data)
        if zero_points is not None:
            self._writer.write(
                f"{weight.name}_zero_point", rounding.pack_zero_points(zero_points, scheme.num_bits).data
            )

    def _quantize(self, scheme: WeightScheme, quantizer: RowQuantizer) -> Iterator[int]:
        weight, rows = self._weight, _Rows()
        num_rows, input_size = weight.shape
        block_rows = quantizer.block_rows(input_size)
        pending: deque[PendingRows] = deque()
        for row in range(0, num_rows, block_rows):
            if len(pending) == quantizer.capacity:
                yield self._write_rows(pending.popleft().result(), rows)
            stored = quantizer.buffer((min(block_rows, num_rows - row), input_size), weight.info.dtype)
            self._reader.read_range_into(weight.info, row * stored[0].nbytes, stored.data)
            pending.append(quantizer.submit(stored, weight.info.dtype, scheme, weight.scale_dtype))
        while pending:
            yield self._write_rows(pending.popleft().result(), rows)

        scales = np.concatenate(rows.scales)
        zero_points = np.concatenate(rows.zero_points) if rows.zero_points else None
        self._write_parts(rounding.narrow(scales, weight.scale_dtype), zero_points, scheme)
        self.quality = rounding.measure_quality(rows.errors)

    def _write_rows(self, block: PackedRows | None, rows: _Rows) -> int:
        weight = self._weight
        if block is None:
            raise CheckpointError(
                f"{printable(weight.info.name)} in {weight.info.path} holds NaN, infinity or a value too large for "
                f"scales in {weight.scale_dtype}; the model is damaged, download it again"
            )
        packed = block.packed
        self._writer.write(f"{weight.name}_packed", packed.data, rows.num_rows * packed.shape[1] * PACKED_ITEMSIZE)
        rows.scales.append(block.scales)
        rows.errors.append(block.errors)
        if block.zero_points is not None:
            rows.zero_points.append(block.zero_points)
        rows.num_rows += len(packed)
        return len(packed) * weight.info.num_bytes // weight.shape[0]
