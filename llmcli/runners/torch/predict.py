"""How long a model takes on the host, from its bytes and rates measured in the same process.

Reading bounds a decoded token from below; forms of product that are bound by arithmetic are timed one by one.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.checkpoint.layout import EMBEDDING, HEAD, WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.base import PAGE_TOKENS
from llmcli.runners.torch.cache import cache_bytes
from llmcli.runners.torch.device import PREFILL_CHUNK, chunk_end
from llmcli.runners.torch.memory import DTYPES, cache_type_of, plan_memory
from llmcli.runners.torch.packed_linear import PackedWeight, choose_product
from llmcli.runners.torch.precision import widens_prompts

# Beyond the cache of most processors, and touched in well under a second.
READ_BYTES = 256 * 2**20
# A matrix whose product stands for all of its form, of about so many inputs.
_PROBE_ROWS, _PROBE_INPUTS = 2048, 2048
# Runs of each, as many as the time allows.
_LEAST_RUNS, _MOST_RUNS, _SECONDS_A_RATE = 2, 8, 0.2

# What a layer costs beside its products: some thirty calls of operators. Two cores of an AVX-512 server.
LAYER_SECONDS = 2.5e-4


Form = WeightScheme | None  # of the weights of a product: quantized, or plain


def measure_read_bytes(num_threads: int | None = None) -> float:
    """Bytes a second that a large sum reads. The threads stay set, as `load` sets them."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    memory = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _fastest_seconds(memory.sum)


class HostPredictor:
    """Times of a model on the host with plain weights as `dtype`; measures what it has not measured yet.

    Units: `read_bytes` a second
    """

    def __init__(self, model: Model, *, dtype: str, read_bytes: float, kv_cache: str = "auto"):
        self._model = model
        self._dtype = DTYPES[dtype]
        self._is_widened = widens_prompts(model, dtype)
        self._read_bytes = read_bytes
        self._cache_bytes_per_token = (
            cache_bytes(model.config, PAGE_TOKENS, cache_type_of(dtype, kv_cache)) // PAGE_TOKENS
        )
        self._weight_bytes = plan_memory(model, max_seq_len=0, num_rows=1, dtype=dtype).weight_bytes
        config = model.config
        if model.tensors.head != EMBEDDING:  # one row of the embedding is read, not all
            self._weight_bytes -= (config.vocab_size - 1) * config.hidden_size * self._dtype.itemsize
        head = model.tensors.packed.get(model.tensors.head.removesuffix(WEIGHT_SUFFIX))
        self._head: Form = None if head is None else head.scheme
        self._head_size = config.vocab_size * config.hidden_size
        self._sizes = self._count_weights()

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        """Bytes that one step reads for `num_rows` rows, which are run one after the other."""
        return num_rows * (self._weight_bytes + depth * self._cache_bytes_per_token)

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        """One step of `num_rows` rows of `depth` tokens each."""
        computing = sum(size * _seconds_per_weight(form, self._dtype, 1) for form, size in self._sizes.items())
        computing += self._head_seconds()
        reading = self.decode_bytes(depth) / self._read_bytes
        return num_rows * (max(computing, reading) + self._overhead())

    def prefill_seconds(self, num_tokens: int) -> float:
        """The logits after a prompt."""
        total, begin = self._head_seconds(), 0
        while begin < num_tokens:
            end = min(chunk_end(begin, self._is_widened), num_tokens)
            count = end - begin
            for form, size in self._sizes.items():
                one, many = (_seconds_per_weight(form, self._dtype, tokens) for tokens in (1, PREFILL_CHUNK))
                total += size * (one + max(many - one, 0.0) * (count - 1) / (PREFILL_CHUNK - 1))
            total += self._attention_seconds(begin, count) + self._overhead()
            begin = end
        return total

    def first_token_seconds(self, num_tokens: int) -> float:
        """A prompt and the first token after it, whose choice takes no time to speak of."""
        return self.prefill_seconds(num_tokens)

    def _attention_seconds(self, begin: int, count: int) -> float:
        """The runner computes the whole rectangle of scores and masks it."""
        config = self._model.config
        multiplied = 2 * count * (begin + count) * config.q_size * config.num_hidden_layers
        return multiplied * _seconds_per_weight(None, self._dtype, PREFILL_CHUNK) / PREFILL_CHUNK

    def _head_seconds(self) -> float:
        reading = self._head_size * self._dtype.itemsize / self._read_bytes if self._head is None else 0.0
        return max(self._head_size * _seconds_per_weight(self._head, self._dtype, 1), reading)

    def _overhead(self) -> float:
        return self._model.config.num_hidden_layers * LAYER_SECONDS

    def _count_weights(self) -> dict[Form, int]:
        """How many weights of the layers are of each form; the head's are counted by themselves."""
        sizes: dict[Form, int] = {}
        for name, layer in self._model.tensors.packed.items():
            if name == HEAD.removesuffix(WEIGHT_SUFFIX):
                continue
            sizes[layer.scheme] = sizes.get(layer.scheme, 0) + layer.shape[0] * layer.shape[1]
        for name, info in self._model.tensors.tensors.items():
            if len(info.shape) == 2 and name.endswith("_proj.weight"):
                sizes[None] = sizes.get(None, 0) + info.shape[0] * info.shape[1]
        return sizes


@cache
def _seconds_per_weight(form: Form, dtype: torch.dtype, num_tokens: int) -> float:
    """Time of a product of so many tokens, for each weight of the matrix."""
    product, num_inputs = _probe(form, dtype)
    x = torch.ones(num_tokens, num_inputs)
    with torch.inference_mode():
        seconds = _fastest_seconds(lambda: product(x))
    return seconds / (_PROBE_ROWS * num_inputs)


@cache
def _probe(form: Form, dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], int]:
    """A product of the form, and the inputs of its matrix: whole groups."""
    generator = torch.Generator().manual_seed(0)
    if form is None:
        weight = torch.rand(_PROBE_ROWS, _PROBE_INPUTS, generator=generator).to(dtype)
        return (lambda x: F.linear(x.to(dtype), weight).float()), _PROBE_INPUTS
    group_size = form.group_size or _PROBE_INPUTS
    shape = _PROBE_ROWS, max(_PROBE_INPUTS // group_size, 1) * group_size
    codes = torch.randint(0, 256, (shape[0], 4 * form.packed_shape(shape)[1]), dtype=torch.uint8, generator=generator)
    scales = torch.full(form.scale_shape(shape), 0.01)
    zero_points = None if form.is_symmetric else torch.full(scales.shape, form.offset, dtype=torch.uint8)
    return choose_product(PackedWeight(form, shape, codes, scales, zero_points), dtype), shape[1]


def _fastest_seconds(work: Callable[[], object]) -> float:
    """The fastest of a few runs: what else the processor does is no property of the work."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() - begin < _SECONDS_A_RATE):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
