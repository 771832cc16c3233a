"""Loads a model folder as float32: checks memory, then reads and widens the weights and arranges them."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from llmcli.checkpoint.formats import PackedLayer, StoredLayer
from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader, read_floats
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.translation import widen_layer, widened
from llmcli.errors import DeviceError, foreign_errors_explained
from llmcli.runners.base import Arithmetic
from llmcli.runners.host.device import HostDevice, limits_of
from llmcli.runners.host.llama import SeparateLinears
from llmcli.runners.host.load import OnProgress, build, describe, read_weights
from llmcli.runners.host.memory import check_memory
from llmcli.runners.host.predict import Form
from llmcli.runners.numpy.operators import Floats, NumpyOperators, PlainLinear, empty_cache
from llmcli.runners.stepping import SteppingRunner
from llmcli.timeline import Timeline

DTYPE = "float32"
# No flag asks for it: --dtype float32 asks for torch.
ARITHMETIC = Arithmetic("auto", "auto", None, ("numpy",))


def describe_on_numpy(model: Model) -> str:
    """Describe this run to the user."""
    return f"CPU, {describe(model, DTYPE)}, numpy"


def load(
    model: Model,
    *,
    max_seq_len: int,
    num_rows: int = 1,
    on_progress: OnProgress = lambda read, total: None,
    timeline: Timeline | None = None,
) -> SteppingRunner:
    """Read the weights and allocate the KV cache, all of it float32.

    `timeline` gets the time that the weights take.

    Raises: InsufficientMemoryError before anything is read, if weights and cache exceed the free memory, and later if
            the system gives less than it reported; CheckpointError for NaN, infinity and read errors.
    """
    with foreign_errors_explained(f"loading {model.checkpoint.folder}", DeviceError):
        plan = check_memory(
            widened(model),
            max_seq_len=max_seq_len,
            num_rows=num_rows,
            dtype=DTYPE,
            num_threads=1,
            has_other_types=False,
        )
        limits = limits_of(num_rows, max_seq_len, weight_bytes=plan.weight_bytes, cache_bytes=plan.cache_bytes)
        with (timeline or Timeline()).part("read and convert weights"):
            weights = read_weights(model, NumpyWeights(), on_progress)

            def linear(name: str) -> PlainLinear:
                return PlainLinear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

            llama = build(
                model,
                weights,
                weights[EMBEDDING],
                NumpyOperators(),
                linear,
                lambda names: SeparateLinears([linear(name) for name in names]),
                empty_cache(model.config, limits.num_pages),
            )
        return SteppingRunner(
            HostDevice(llama, limits, cache_type=DTYPE, description=describe_on_numpy(model), arithmetic=ARITHMETIC)
        )


class NumpyWeights:
    """The `WeightForms` of numpy: everything is widened."""

    def plain(self, info: TensorInfo, reader: TensorReader) -> Floats:
        """See `WeightForms.plain`."""
        return read_floats(info, 0, info.shape[0], reader)

    def joined(self, shape: tuple[int, int], pieces: Iterator[tuple[int, Floats]]) -> Floats:
        """See `WeightForms.joined`."""
        weight = np.empty(shape, np.float32)
        for begin, rows in pieces:
            weight[begin : begin + len(rows)] = rows
        return weight

    def packed(self, layer: PackedLayer, stored: StoredLayer) -> Floats:
        """See `WeightForms.packed`."""
        weight = np.empty(layer.shape, np.float32)
        widen_layer(stored, layer.scheme, weight)
        return weight


class NumpyProbes:
    """The `HostProbes` of the numpy runner."""

    dtype = DTYPE
    num_threads = 1

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A sum over `num_bytes` bytes."""
        memory = np.ones(num_bytes // 4, np.float32)
        return lambda: memory @ memory

    def multiply(self, form: Form, shape: tuple[int, int], chunks: Sequence[int]) -> Callable[[], object]:
        """Products of chunks with a random weight; all are held as floats, so `form` is None."""
        weight = np.random.default_rng(0).random(shape, np.float32)
        xs = [np.ones((num_tokens, shape[1]), np.float32) for num_tokens in chunks]
        return lambda: [x @ weight.T for x in xs]
