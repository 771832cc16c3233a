"""Writes a quantized export as a stream: one thread reads and writes, a few quantize, no tensor is ever held whole."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmcli.checkpoint.export_files import copy_files, small_files, source_files
from llmcli.checkpoint.export_plan import ExportPlan
from llmcli.checkpoint.export_workspace import ExportWorkspace, refuse_existing, refuse_overlap
from llmcli.checkpoint.planned_weight import PlannedWeight
from llmcli.checkpoint.reader import CHUNK_BYTES, TensorReader
from llmcli.checkpoint.safetensors_file import printable
from llmcli.checkpoint.writer import SafetensorsWriter
from llmcli.errors import CheckpointError
from llmcli.quantization.floats import STORED_AS, Array, narrow
from llmcli.quantization.packing import pack_rows, pack_zero_points
from llmcli.quantization.quality import TensorQuality, measure_quality
from llmcli.quantization.rounding import QuantizedRows, RowErrors, quantize_rows
from llmcli.quantization.schemes import PACKED_ITEMSIZE, WeightScheme

# Long against a hand-over between threads, short enough that the floats it makes stay in a core's cache and that few
# threads run dry while a weight comes to its end.
WEIGHTS_PER_TASK = 1 << 18
MAX_THREADS = 8  # beyond that, one reading and writing thread has nothing left to hand out

OnProgress = Callable[[int, int], None]
OnTensor = Callable[[str, TensorQuality], None]
_Quantized = tuple[Array, QuantizedRows]  # packed codes [rows, words] int32, and what they came from


@dataclass
class _Rows:
    """What is known of one weight so far; scales and zero points are small, and written last."""

    scales: list[Array] = field(default_factory=list)
    zero_points: list[Array] = field(default_factory=list)
    errors: list[RowErrors] = field(default_factory=list)
    num_rows: int = 0


class Exporter:
    """One export, by `plan`: `prepare`, which finds what an earlier run left, then `run`.

    `open_reader` opens what the source's tensors are read from, where that is not their files.
    """

    def __init__(
        self,
        plan: ExportPlan,
        destination: Path,
        source_name: str,
        *,
        replace: bool = False,
        open_reader: Callable[[], TensorReader] = TensorReader,
    ):
        self.plan = plan
        self._destination = Path(os.path.abspath(destination))  # "." has no name, and a link must stay a link
        self._source_name = source_name
        self._replace = replace
        self._open_reader = open_reader

    def prepare(self) -> ExportWorkspace:
        """Make the folder in which the export grows.

        Raises: UsageError if the destination exists or overlaps the source; CheckpointError if the disk is too small
        or cannot be written.
        """
        refuse_existing(self._destination, replace=self._replace)
        refuse_overlap(self.plan, self._destination)
        try:
            workspace = ExportWorkspace(self.plan, self._destination)
            workspace.check_disk()
        except OSError as error:
            raise _write_error(self._destination, error) from error
        return workspace

    def run(self, workspace: ExportWorkspace, on_progress: OnProgress, on_tensor: OnTensor) -> dict[str, TensorQuality]:
        """Write what is missing and give the export its name. A run that is stopped is taken up by the next one.

        Returns the quality of every quantized weight, by module name, in the order of the file.
        Units: on_progress gets bytes of the source done and in all.
        Raises: CheckpointError for weights that are not finite, a source that cannot be read or a disk that cannot
        be written. After an error in the source nothing is left behind.
        """
        plan = self.plan
        try:
            with self._open_reader() as reader:
                _write_shards(plan, workspace, reader, on_progress, on_tensor)
            qualities = {
                name: quality for shard in plan.shards for name, quality in workspace.finished[shard.file_name].items()
            }
            copy_files(source_files(plan.model.checkpoint.folder), workspace.folder)
            for name, text in small_files(plan, qualities, self._source_name, self._destination.name).items():
                workspace.write(name, text)
            workspace.publish()
        except CheckpointError:
            workspace.discard()
            raise
        except OSError as error:
            raise _write_error(self._destination, error) from error
        return qualities


def _write_shards(
    plan: ExportPlan, workspace: ExportWorkspace, reader: TensorReader, on_progress: OnProgress, on_tensor: OnTensor
) -> None:
    total = sum(shard.source_bytes for shard in plan.shards)
    done = 0
    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPoolExecutor(num_threads) as pool:
        for shard in plan.shards:
            if shard.file_name in workspace.finished:
                done += shard.source_bytes
                on_progress(done, total)
                continue
            qualities = {}
            tensors = [tensor for weight in shard.weights for tensor in weight.outputs]
            with SafetensorsWriter(workspace.torso(shard), tensors) as writer:
                for weight in shard.weights:
                    stream = _WeightStream(weight, reader, writer)
                    for num_bytes in stream.run(pool, num_threads):
                        done += num_bytes
                        on_progress(done, total)
                    if stream.quality is not None:
                        qualities[weight.module] = stream.quality
                        on_tensor(weight.module, stream.quality)
                writer.finish()
            workspace.keep(shard, qualities)


class _WeightStream:
    """Moves one weight from the source to a shard. `quality` is there when all of it is quantized."""

    def __init__(self, weight: PlannedWeight, reader: TensorReader, writer: SafetensorsWriter):
        self._weight = weight
        self._reader = reader
        self._writer = writer
        self.quality: TensorQuality | None = None

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> Iterator[int]:
        """Copy or quantize the weight; yields how many bytes of the source each step took."""
        if self._weight.scheme is None:
            yield from self._copy()
        else:
            yield from self._quantize(self._weight.scheme, pool, num_threads)

    def _copy(self) -> Iterator[int]:
        info = self._weight.info
        for begin in range(0, info.num_bytes, CHUNK_BYTES):
            chunk = bytearray(min(CHUNK_BYTES, info.num_bytes - begin))
            self._reader.read_range_into(info, begin, chunk)
            self._writer.write(self._weight.name, chunk, begin)
            yield len(chunk)

    def _quantize(self, scheme: WeightScheme, pool: ThreadPoolExecutor, num_threads: int) -> Iterator[int]:
        weight, rows = self._weight, _Rows()
        pending: deque[Future[_Quantized | None]] = deque()
        for stored in self._read_rows():
            pending.append(pool.submit(_quantize_and_pack, stored, weight.info.dtype, scheme, weight.scale_dtype))
            if len(pending) > 2 * num_threads:  # a task waits for each thread that works on another
                yield self._write_rows(pending.popleft().result(), rows)
        while pending:
            yield self._write_rows(pending.popleft().result(), rows)

        scales = np.concatenate(rows.scales)
        self._writer.write(f"{weight.name}_scale", narrow(scales, weight.scale_dtype).data)
        self._writer.write(f"{weight.name}_shape", np.array(weight.shape, np.int64).data)
        if rows.zero_points:
            zero_points = pack_zero_points(np.concatenate(rows.zero_points), scheme.num_bits)
            self._writer.write(f"{weight.name}_zero_point", zero_points.data)
        self.quality = measure_quality(rows.errors)

    def _read_rows(self) -> Iterator[Array]:
        """The weight's rows, a task's worth at a time."""
        info = self._weight.info
        num_rows, input_size = self._weight.shape
        rows_per_task = max(1, WEIGHTS_PER_TASK // input_size)
        for row in range(0, num_rows, rows_per_task):
            stored = np.empty((min(rows_per_task, num_rows - row), input_size), STORED_AS[info.dtype])
            self._reader.read_range_into(info, row * stored[0].nbytes, stored.data)
            yield stored

    def _write_rows(self, quantized: _Quantized | None, rows: _Rows) -> int:
        weight = self._weight
        if quantized is None:
            raise CheckpointError(
                f"{printable(weight.info.name)} in {weight.info.path} holds NaN, infinity or a value too large for "
                f"scales in {weight.scale_dtype}; the model is damaged, download it again"
            )
        packed, block = quantized
        self._writer.write(f"{weight.name}_packed", packed.data, rows.num_rows * packed.shape[1] * PACKED_ITEMSIZE)
        rows.scales.append(block.scales)
        rows.errors.append(block.errors)
        if block.zero_points is not None:
            rows.zero_points.append(block.zero_points)
        rows.num_rows += len(packed)
        return len(packed) * weight.info.num_bytes // weight.shape[0]


def _quantize_and_pack(stored: Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> _Quantized | None:
    """`quantize_rows`, and the codes packed, which is what a thread of the pool does."""
    block = quantize_rows(stored, dtype, scheme, scale_dtype)
    return None if block is None else (pack_rows(block.codes, scheme.num_bits), block)


def _write_error(destination: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the export to {destination} stopped: {error.strerror or error} ({error.filename or 'a file of it'}); "
        "run the same command again to go on where it is"
    )
