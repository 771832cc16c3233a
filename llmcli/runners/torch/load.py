"""Loads a model folder for torch: checks memory, reads weights, chooses what multiplies them. `TorchProbes`."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.errors import DeviceError, foreign_errors_explained
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.cpp_library import source_digest
from llmcli.runners.base import Arithmetic
from llmcli.runners.host.device import HostDevice, limits_of
from llmcli.runners.host.llama import Array, Linear, Linears, Llama, SeparateLinears
from llmcli.runners.host.load import OnProgress, build, describe, read_weights
from llmcli.runners.host.memory import cache_type_of, check_memory, plan_memory
from llmcli.runners.host.predict import Form
from llmcli.runners.stepping import SteppingRunner
from llmcli.runners.torch import codes_product, token_operators
from llmcli.runners.torch.operators import PlainLinear, TorchOperators, empty_cache
from llmcli.runners.torch.packed_linear import JoinedLinear, PackedLinear
from llmcli.runners.torch.precision import resolve_dtype, widens_prompts
from llmcli.runners.torch.token_operators import FusedLlama
from llmcli.runners.torch.weights import PackedWeight, TorchWeights
from llmcli.timeline import Timeline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Below this the threads wait for each other as long as they compute; with other programs running, ten times as long.
_LEAST_BYTES_OF_THREADS = 128 * 2**20
_ALL_THREADS = torch.get_num_threads()


def load(
    model: Model,
    *,
    max_seq_len: int,
    num_rows: int = 1,
    dtype: str = "float32",
    kv_cache: str = "auto",
    num_threads: int | None = None,
    on_compile: OnCompile = say_nothing,
    on_progress: OnProgress = lambda read, total: None,
    timeline: Timeline | None = None,
) -> SteppingRunner:
    """Read the weights and allocate the KV cache, of the type computed in (auto) or int8.

    `dtype` is float32, bfloat16, or auto: see `resolve_dtype`. `on_compile` is called before and after the products of
    packed weights are compiled, once on a machine. `timeline` gets the time that the weights take.

    Raises: InsufficientMemoryError before anything is read, if weights and cache exceed the free memory, and later if
            the system gives less than it reported; CheckpointError for NaN, infinity and read errors.
    """
    with foreign_errors_explained(f"loading {model.checkpoint.folder}", DeviceError):
        dtype = resolve_dtype(dtype, model)
        plan = plan_memory(model, max_seq_len=max_seq_len, num_rows=num_rows, dtype=dtype, kv_cache=kv_cache)
        set_threads(num_threads, plan.weight_bytes)
        threads = torch.get_num_threads()
        check_memory(
            model,
            max_seq_len=max_seq_len,
            num_rows=num_rows,
            dtype=dtype,
            num_threads=threads,
            kv_cache=kv_cache,
        )
        limits = limits_of(num_rows, max_seq_len, weight_bytes=plan.weight_bytes, cache_bytes=plan.cache_bytes)
        cache_type = cache_type_of(dtype, kv_cache)
        timeline = timeline or Timeline()
        own: dict[str, str] = {}
        operators, make = TorchOperators(), Llama
        if model.tensors.packed and dtype == "bfloat16":
            with timeline.part("C++ compiler"):
                fused = token_operators.token_operators() if codes_product.is_available(on_compile) else None
                if fused is not None:
                    operators, make = fused, FusedLlama
                    own = {stem: source_digest(stem) for stem in (codes_product.STEM, token_operators.STEM)}
        empty = empty_cache(model.config, limits.num_pages, cache_type)
        with timeline.part("read and convert weights"):
            weights = read_weights(model, TorchWeights(DTYPES[dtype]), on_progress)
            norms = {name: weight.float() for name, weight in weights.items() if name.endswith("norm.weight")}
            llama = build(
                model,
                norms,
                weights[EMBEDDING],
                operators,
                partial(_linear, weights, DTYPES[dtype]),
                partial(_linears, weights, DTYPES[dtype]),
                empty,
                make,
            )
        cache = "" if cache_type == dtype else f", KV cache {cache_type}"
        device = HostDevice(
            llama,
            limits,
            cache_type=cache_type,
            description=f"CPU, {describe(model, dtype)}{cache}, {threads} thread{'' if threads == 1 else 's'}",
            arithmetic=Arithmetic(dtype, kv_cache, threads, ("torch",), cpu_sources=own),
            widens_prompts=widens_prompts(model, dtype),
        )
        return SteppingRunner(device)


def set_threads(num_threads: int | None, weight_bytes: int) -> None:
    """Set torch's threads: `num_threads` if given, else one for a model of few weights and all for others.

    The number must not depend on how busy the machine is: float32 sums, and so texts, depend on it.
    """
    torch.set_num_threads(num_threads or (1 if weight_bytes < _LEAST_BYTES_OF_THREADS else _ALL_THREADS))


def _linear(weights: dict[str, Array], dtype: torch.dtype, name: str) -> Linear:
    """A layer. A packed weight leaves `weights` for its final form."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if not isinstance(weight, PackedWeight):
        return PlainLinear(weight, bias)
    del weights[f"{name}.weight"]
    return PackedLinear(weight, bias, dtype)


def _linears(weights: dict[str, Array], dtype: torch.dtype, names: Sequence[str]) -> Linears:
    """Layers with the same input."""
    of_layers = [weights[f"{name}.weight"] for name in names]
    if not all(isinstance(weight, PackedWeight) for weight in of_layers) or not JoinedLinear.takes(of_layers, dtype):
        del of_layers
        return SeparateLinears([_linear(weights, dtype, name) for name in names])
    for name in names:
        del weights[f"{name}.weight"]
    return JoinedLinear(of_layers, [weights.get(f"{name}.bias") for name in names])


class TorchProbes:
    """The `HostProbes` of a run in `dtype`. The threads stay set, as `load` sets them."""

    def __init__(self, dtype: str, num_threads: int | None):
        self._dtype = DTYPES[dtype]
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.num_threads = torch.get_num_threads()

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A sum over `num_bytes` bytes."""
        return torch.ones(num_bytes // 4).sum

    def multiply(self, form: Form, shape: tuple[int, int], chunks: Sequence[int]) -> Callable[[], object]:
        """Products of chunks with a random weight; see `HostProbes.multiply`."""
        generator = torch.Generator().manual_seed(0)
        x = torch.ones(sum(chunks), shape[1])
        if form is None:
            plain = PlainLinear(torch.rand(shape, generator=generator).to(self._dtype))
            return torch.inference_mode()(lambda: plain(x, chunks))
        code_bytes = shape[0], 4 * form.packed_shape(shape)[1]
        codes = torch.randint(0, 256, code_bytes, dtype=torch.uint8, generator=generator)
        scales = torch.full(form.scale_shape(shape), 0.01)
        zero_points = None if form.is_symmetric else torch.full(scales.shape, form.offset, dtype=torch.uint8)
        packed = PackedLinear(PackedWeight(form, shape, codes, scales, zero_points), None, self._dtype)
        return torch.inference_mode()(lambda: packed(x, chunks))
