"""How much of the host's memory a model needs, how much is free, and the refusal if it does not fit."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmcli.checkpoint.model import Model
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.config.llama import LlamaConfig
from llmcli.errors import InsufficientMemoryError
from llmcli.runners.base import PAGE_TOKENS, pages_of
from llmcli.runners.host.device import PREFILL_CHUNK, WIDENED_SPAN

# As float32 these are 128 MiB. A smaller model answers faster than one reads in every form, and is done before torch
# is imported, which takes 1.5 s or more. From here on torch's threads and packed weights win that back.
SMALL_PARAMETERS = 2**25

CODES = "int8"  # the KV cache's only type that is not a float type
ITEMSIZES = {"float32": 4, "bfloat16": 2, CODES: 1}

_SCALE_BYTES = 4  # float32: 16 bits would save 1.5 % at head_dim 128 and lose the small values of some tokens
_SMALLEST_USEFUL_CONTEXT = 128
_CGROUP = Path("/sys/fs/cgroup")
_USUAL_STACK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class HostMemory:
    """What a model takes of the host's memory. Units: bytes"""

    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes


def cache_type_of(dtype: str, kv_cache: str) -> str:
    """The type of the KV cache that `kv_cache` asks for, in a run in `dtype`."""
    return dtype if kv_cache == "auto" else kv_cache


def cache_bytes(config: LlamaConfig, max_seq_len: int, cache_type: str) -> int:
    """Memory of one row."""
    scale_bytes = _SCALE_BYTES if cache_type == CODES else 0
    return config.kv_cache_bytes(pages_of(max_seq_len) * PAGE_TOKENS, ITEMSIZES[cache_type], scale_bytes)


def plan_memory(model: Model, *, max_seq_len: int, num_rows: int, dtype: str, kv_cache: str = "auto") -> HostMemory:
    """The memory of a model whose plain weights are held as `dtype`; its files need not exist."""
    itemsize = ITEMSIZES[dtype]
    cache_type = cache_type_of(dtype, kv_cache)
    return HostMemory(
        weight_bytes=sum(_held_bytes(info, itemsize) for info in model.tensors.tensors.values()),
        cache_bytes=num_rows * cache_bytes(model.config, max_seq_len, cache_type),
        workspace_bytes=_workspace_bytes(model, max_seq_len, cache_type),
    )


def fitting_context(model: Model, *, num_rows: int, dtype: str, available: int, kv_cache: str = "auto") -> int:
    """The largest context that fits, up to the model's maximum; 0 if none does."""

    def needed(length: int) -> int:
        return plan_memory(model, max_seq_len=length, num_rows=num_rows, dtype=dtype, kv_cache=kv_cache).total_bytes

    lengths = range(1, model.config.max_position_embeddings + 1)
    return bisect_right(lengths, available, key=needed)


def check_memory(
    model: Model,
    *,
    max_seq_len: int,
    num_rows: int,
    dtype: str,
    num_threads: int,
    kv_cache: str = "auto",
    has_other_types: bool = True,
) -> HostMemory:
    """The memory that `plan_memory` gives. `num_threads` are those that will compute.

    With `has_other_types` the refusal names a type of the weights or the KV cache that would make the model fit.
    Raises: InsufficientMemoryError if there is too little, with the figures and the change that would make it fit
    """
    available = available_memory(num_threads)

    def needed(dtype: str, max_seq_len: int, kv_cache: str = kv_cache) -> HostMemory:
        return plan_memory(model, max_seq_len=max_seq_len, num_rows=num_rows, dtype=dtype, kv_cache=kv_cache)

    plan = needed(dtype, max_seq_len)
    if plan.total_bytes <= available:
        return plan
    context = fitting_context(model, num_rows=num_rows, dtype=dtype, available=available, kv_cache=kv_cache)
    in_bfloat16 = needed("bfloat16", max_seq_len).total_bytes
    if context >= _SMALLEST_USEFUL_CONTEXT:
        remedy = f"use --context {context} or less"
        if has_other_types and needed(dtype, max_seq_len, CODES).total_bytes <= available:
            remedy += f", or --kv-cache {CODES}"
    elif not has_other_types:
        remedy = "use a smaller model"
    elif dtype == "float32" and in_bfloat16 <= available:
        remedy = f"use --dtype bfloat16, which needs {_gib(in_bfloat16)}"
    else:
        shorter = _gib(needed("bfloat16", 512).total_bytes)
        remedy = f"at --dtype bfloat16 --context 512 it needs {shorter}; use a smaller model"
    raise InsufficientMemoryError(
        f"{model.checkpoint.folder} at {dtype} with context {max_seq_len} needs {_gib(plan.total_bytes)} of memory "
        f"(KV cache {_gib(plan.cache_bytes)}), {_gib(available)} is available: {remedy}"
    )


def _held_bytes(info: TensorInfo, itemsize: int) -> int:
    """A tensor's memory: quantized weights stay as they are, others take the precision of the run."""
    return info.num_bytes if info.dtype.startswith("I") else math.prod(info.shape) * itemsize


def _workspace_bytes(model: Model, max_seq_len: int, cache_type: str) -> int:
    """Memory besides weights and cache: the activations of a prompt's span, the mask of a chunk, logits."""
    config = model.config
    widest = 4 * config.hidden_size + 3 * config.intermediate_size + 4 * config.q_size
    activations = WIDENED_SPAN * widest * 4 + 2 * config.vocab_size * 4
    # A chunk's attention mask, as bool and as float; and the current layer's keys and values, if widened from codes.
    mask = PREFILL_CHUNK * (config.num_attention_heads // config.num_key_value_heads) * (1 + 4)
    widened = 2 * config.kv_size * 4 if cache_type == CODES else 0
    return activations + max_seq_len * (mask + widened)


def available_memory(num_threads: int) -> int:
    """Bytes this process may still take: what the system has left, or less by a cgroup (a container) or `ulimit -v`.

    `num_threads` are those that will compute.
    """
    available = int(psutil.virtual_memory().available)
    return max(min(available, _left_in_cgroup(available), _left_of_address_space(available, num_threads)), 0)


def _left_in_cgroup(unlimited: int) -> int:
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # File pages count as used there, but are given up on demand.
        return limit - used + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):  # no cgroup v2 here, or its limit is "max"
        return unlimited


def _left_of_address_space(unlimited: int, num_threads: int) -> int:
    """What `ulimit -v` leaves, less the stacks of threads that are not started yet: OpenMP ends the process there."""
    if not hasattr(psutil, "RLIMIT_AS"):  # it is Linux's
        return unlimited
    process = psutil.Process()
    limit, stack = (process.rlimit(kind)[0] for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_STACK))
    if limit == psutil.RLIM_INFINITY:
        return unlimited
    if stack == psutil.RLIM_INFINITY:
        stack = _USUAL_STACK_BYTES
    return int(limit) - process.memory_info().vms - (num_threads - 1) * int(stack)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
