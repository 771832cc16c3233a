"""A model in numpy, as float32: its operators; and loading, which checks memory, and reads and widens the weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.formats import PackedLayer, StoredLayer
from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader, read_floats
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.translation import widen_layer, widened
from llmcli.config.llama import LlamaConfig
from llmcli.errors import DeviceError, foreign_errors_explained
from llmcli.runners.base import Arithmetic
from llmcli.runners.host.cache import PagedCache, cache_shape
from llmcli.runners.host.device import HostDevice, limits_of
from llmcli.runners.host.llama import SeparateLinears
from llmcli.runners.host.load import OnProgress, build, describe, read_weights
from llmcli.runners.host.memory import check_memory
from llmcli.runners.host.predict import Form
from llmcli.runners.stepping import SteppingRunner
from llmcli.timeline import Timeline

# The operators of the forward pass in numpy, and a plain linear layer. All is float32.

Floats = npt.NDArray[np.float32]


class NumpyOperators:
    """See `Operators`."""

    def running(self) -> np.errstate:
        """What overflows in a broken model, the sampler reports."""
        return np.errstate(over="ignore", invalid="ignore")

    def array(self, values: Floats) -> Floats:
        """As it is."""
        return values

    def numpy(self, array: Floats) -> Floats:
        """As it is."""
        return array

    def join(self, arrays: Sequence[Floats], axis: int = 0) -> Floats:
        """See `Operators.join`."""
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)

    def embed(self, weight: Floats, token_ids: Sequence[int]) -> Floats:
        """See `Operators.embed`."""
        return weight[list(token_ids)]

    def cos_sin(self, angles: Floats) -> tuple[Floats, Floats]:
        """See `Operators.cos_sin`."""
        return np.cos(angles), np.sin(angles)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """See `Operators.rms_norm`."""
        mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        y: Floats = weight * (x * (1 / np.sqrt(mean + np.float32(eps))))
        return y

    def swiglu(self, gate: Floats, up: Floats, sizes: Sequence[int]) -> Floats:
        """See `Operators.swiglu`; e^-gate may overflow, and the result is then 0."""
        y: Floats = gate / (1 + np.exp(-gate)) * up
        return y

    def attend(self, query: Floats, keys: Floats, values: Floats, position: int, window: int | None) -> Floats:
        """See `Operators.attend`.

        The query heads that share a key-value head are stacked along the token axis, so that keys and values are
        neither repeated nor read twice.
        """
        num_tokens, num_attention_heads, head_dim = query.shape
        num_key_value_heads, seq_len, _ = keys.shape
        group_size = num_attention_heads // num_key_value_heads
        stacked = query.reshape(num_tokens, num_key_value_heads, group_size, head_dim).transpose(1, 2, 0, 3)
        stacked = stacked.reshape(num_key_value_heads, group_size * num_tokens, head_dim) * np.float32(head_dim**-0.5)
        scores: Floats = stacked @ keys.transpose(0, 2, 1)  # [num_key_value_heads, group_size * num_tokens, seq_len]
        if num_tokens > 1:
            ages = np.arange(position, position + num_tokens)[:, None] - np.arange(seq_len)
            hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
            scores[:, np.tile(hidden, (group_size, 1))] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        mixed: Floats = (scores @ values).reshape(num_key_value_heads, group_size, num_tokens, head_dim)
        return mixed.transpose(2, 0, 1, 3).reshape(num_tokens, num_attention_heads * head_dim)


@dataclass(frozen=True)
class PlainLinear:
    """y = x @ weight.T + bias. Shapes: weight [output_size, input_size]; bias [output_size] or None"""

    weight: Floats
    bias: Floats | None = None

    def __call__(self, x: Floats, sizes: Sequence[int] = ()) -> Floats:
        """See `Linear`."""
        y: Floats = by_part(lambda part: part @ self.weight.T, x, sizes)
        return y if self.bias is None else y + self.bias


def by_part(function: Callable[[Floats], Floats], x: Floats, sizes: Sequence[int]) -> Floats:
    """Apply a function to each part of `x` alone."""
    if len(sizes) < 2:
        return function(x)
    return np.concatenate([function(x[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)])


def empty_cache(config: LlamaConfig, num_pages: int) -> PagedCache:
    """Keys and values in float32."""
    keys, values = (np.empty(cache_shape(config, num_pages), np.float32) for _ in range(2))
    return PagedCache(keys, values, lambda array, pages: array[:, pages])


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
