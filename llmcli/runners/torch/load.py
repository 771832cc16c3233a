"""Loads a model folder onto the CPU: checks memory, then reads the weights and arranges them."""

from typing import Any

import torch

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.errors import DeviceError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.cpp_library import source_digest
from llmcli.runners.base import Arithmetic
from llmcli.runners.host.description import describe
from llmcli.runners.host.device import HostDevice, limits_of
from llmcli.runners.host.layers import build_layers
from llmcli.runners.host.memory import cache_type_of, check_memory, plan_memory
from llmcli.runners.stepping import SteppingRunner
from llmcli.runners.torch import codes_product, token_operators
from llmcli.runners.torch.cache import PagedCache
from llmcli.runners.torch.joined_linear import JoinedLinear, SeparateLinears
from llmcli.runners.torch.llama import Layer, Linear, Llama, Projection, Projections, RMSNorm
from llmcli.runners.torch.model import TorchModel
from llmcli.runners.torch.packed_linear import PackedLinear
from llmcli.runners.torch.precision import resolve_dtype, widens_prompts
from llmcli.runners.torch.reordered_linear import ReorderedLinear
from llmcli.runners.torch.threads import set_threads
from llmcli.runners.torch.token_operators import TokenOperators
from llmcli.runners.torch.weights import LoadedWeights, OnProgress, read_weights
from llmcli.timeline import Timeline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        sizes = {"max_seq_len": max_seq_len, "num_rows": num_rows}
        plan = plan_memory(model, **sizes, dtype=dtype, kv_cache=kv_cache)
        set_threads(num_threads, plan.weight_bytes)
        check_memory(
            model,
            max_seq_len=max_seq_len,
            num_rows=num_rows,
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            kv_cache=kv_cache,
        )
        timeline = timeline or Timeline()
        own: dict[str, str] = {}
        operators = None
        if model.tensors.packed and dtype == "bfloat16":
            with timeline.part("C++ compiler"):
                if codes_product.is_available(on_compile):
                    operators = token_operators.token_operators(on_compile)
                    stems = [codes_product.STEM] + ([] if operators is None else [token_operators.STEM])
                    own = {stem: source_digest(stem) for stem in stems}
        with timeline.part("read and convert weights"):
            weights = read_weights(model, DTYPES[dtype], on_progress)
            llama = _build(model, weights, DTYPES[dtype], operators)
        threads = torch.get_num_threads()
        cache_type = cache_type_of(dtype, kv_cache)
        cache = "" if cache_type == dtype else f", KV cache {cache_type}"
        description = f"CPU, {describe(model, dtype)}{cache}, {threads} thread{'' if threads == 1 else 's'}"
        limits = limits_of(num_rows, max_seq_len, weight_bytes=plan.weight_bytes, cache_bytes=plan.cache_bytes)
        device = HostDevice(
            TorchModel(llama, PagedCache(llama.config, limits.num_pages, cache_type)),
            limits,
            cache_type=cache_type,
            description=description,
            arithmetic=Arithmetic(dtype, kv_cache, threads, ("torch",), cpu_sources=own),
            widens_prompts=widens_prompts(model, dtype),
        )
        return SteppingRunner(device)


def _build(model: Model, loaded: LoadedWeights, dtype: torch.dtype, operators: TokenOperators | None) -> Llama:
    """Arrange tensors under the names the forward pass uses; packed weights leave `loaded` for their final form."""
    config, weights = model.config, loaded.plain

    def linear(name: str) -> Projection:
        bias = weights.get(f"{name}.bias")
        if name not in loaded.packed:
            return Linear(weights[f"{name}.weight"], bias)
        ordered = loaded.packed.pop(name)
        packed = PackedLinear(ordered.weight, bias, dtype)
        return packed if ordered.input_order is None else ReorderedLinear(packed, ordered.input_order)

    def linears(*names: str) -> Projections:
        ordered = [loaded.packed.get(name) for name in names]
        plain = [of.weight for of in ordered if of is not None and of.input_order is None]
        if len(plain) < len(names) or not JoinedLinear.takes(plain, dtype):
            return SeparateLinears([linear(name) for name in names])
        for name in names:
            del loaded.packed[name]
        return JoinedLinear(plain, [weights.get(f"{name}.bias") for name in names])

    def layer(**parts: Any) -> Layer:
        """Build a layer from its norms and the names of its linear layers."""
        q, k, v, o, gate, up, down = (parts.pop(f"{name}_proj") for name in ("q", "k", "v", "o", "gate", "up", "down"))
        return Layer(
            qkv_proj=linears(q, k, v), o_proj=linear(o), gate_up_proj=linears(gate, up), down_proj=linear(down), **parts
        )

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights[f"{name}.weight"].float(), config.rms_norm_eps, operators)

    return Llama(
        config=config,
        embed_tokens=weights[EMBEDDING],
        layers=build_layers(config.num_hidden_layers, weights, layer, str, norm),
        norm=norm("model.norm"),
        lm_head=linear(model.tensors.head.removesuffix(".weight")),
        inverse_frequencies=torch.from_numpy(config.rope.inverse_frequencies(config.head_dim)),
        operators=operators,
    )
