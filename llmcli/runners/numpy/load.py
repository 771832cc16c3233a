"""Loads a model folder as float32: checks memory, then reads and widens the weights and arranges them."""

from collections.abc import Callable

import numpy as np

from llmcli.checkpoint.formats import read_layer
from llmcli.checkpoint.layout import EMBEDDING, WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader, read_floats
from llmcli.checkpoint.translation import widen_layer, widened
from llmcli.errors import DeviceError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.runners.base import Arithmetic
from llmcli.runners.host.description import describe
from llmcli.runners.host.device import HostDevice, limits_of
from llmcli.runners.host.layers import build_layers
from llmcli.runners.host.memory import check_memory
from llmcli.runners.numpy.cache import Floats, PagedCache
from llmcli.runners.numpy.llama import Layer, Linear, Llama, RMSNorm
from llmcli.runners.stepping import SteppingRunner
from llmcli.timeline import Timeline

DTYPE = "float32"
# No flag asks for it: --dtype float32 asks for torch.
ARITHMETIC = Arithmetic("auto", "auto", None, ("numpy",))

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


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
            llama = _build(model, _read_weights(model, on_progress), PagedCache(model.config, limits.num_pages))
        return SteppingRunner(
            HostDevice(llama, limits, cache_type=DTYPE, description=describe_on_numpy(model), arithmetic=ARITHMETIC)
        )


def _read_weights(model: Model, on_progress: OnProgress) -> dict[str, Floats]:
    """Read every weight, norm and bias, by name; a quantized weight has the name of the plain one."""
    infos = model.tensors.tensors
    total = sum(info.num_bytes for info in infos.values())
    read = 0
    weights: dict[str, Floats] = {}
    with TensorReader() as reader:
        for source, parts in model.tensors.sources.items():
            if source in model.tensors.packed:
                layer = model.tensors.packed[source]
                weight = weights[source + WEIGHT_SUFFIX] = np.empty(layer.shape, np.float32)
                widen_layer(read_layer(source, layer, infos, reader), layer.scheme, weight)
            elif source in model.tensors.scaled:
                scaled = model.tensors.scaled[source]
                weight = weights[source + WEIGHT_SUFFIX] = np.empty(scaled.shape, np.float32)
                for begin, rows in scaled.read(source, infos, reader):
                    weight[begin : begin + len(rows)] = rows
            else:
                weights[source] = read_floats(infos[source], 0, infos[source].shape[0], reader)
            read += sum(info.num_bytes for info in parts)
            on_progress(read, total)
    return weights


def _build(model: Model, weights: dict[str, Floats], cache: PagedCache) -> Llama:
    """Arrange arrays under the names the forward pass uses."""
    config = model.config

    def linear(name: str) -> Linear:
        return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights[f"{name}.weight"], config.rms_norm_eps)

    return Llama(
        config=config,
        embed_tokens=weights[EMBEDDING],
        layers=build_layers(config.num_hidden_layers, weights, Layer, linear, norm),
        norm=norm("model.norm"),
        lm_head=linear(model.tensors.head.removesuffix(".weight")),
        inverse_frequencies=config.rope.inverse_frequencies(config.head_dim),
        cache=cache,
    )
