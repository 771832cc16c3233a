"""Predicts how long a model takes on the host, from its bytes and from rates measured in the same process.

A decoded token takes at least the time of reading; products that are bound by arithmetic are timed one by one.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from llmcli.checkpoint.layout import EMBEDDING, HEAD, WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.base import PAGE_TOKENS
from llmcli.runners.host.device import PREFILL_CHUNK, chunks, span_end
from llmcli.runners.host.memory import ITEMSIZES, cache_bytes, cache_type_of, plan_memory

# Beyond the cache of most processors, and touched in well under a second.
READ_BYTES = 256 * 2**20
# A matrix of about this many inputs; its product represents all products of its form.
_PROBE_ROWS, _PROBE_INPUTS = 2048, 2048
# Runs of each, as many as the time allows.
_LEAST_RUNS, _MOST_RUNS, _SECONDS_A_RATE = 2, 8, 0.2

# What a layer costs besides its products: some thirty calls of operators. Two cores of an AVX-512 server.
LAYER_SECONDS = 2.5e-4


Form = WeightScheme | None  # of the weights of a product: quantized, or plain


class HostProbes(Protocol):
    """What a runner of the CPU can time, and its number of threads."""

    @property
    def num_threads(self) -> int:
        """Threads that compute."""

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A function that reads `num_bytes` bytes of memory: a sum."""

    def multiply(self, form: Form, shape: tuple[int, int], chunks: Sequence[int]) -> Callable[[], object]:
        """A function that multiplies chunks of these lengths with a weight [output_size, input_size] of that form."""


class HostRates:
    """The rates of this machine, each measured once, on first use. Units: `read_bytes` a second"""

    def __init__(self, probes: HostProbes):
        self.read_bytes = READ_BYTES / _fastest_seconds(probes.read(READ_BYTES))
        self._probes = probes
        self._seconds: dict[tuple[Form, tuple[int, ...]], float] = {}

    def seconds_per_weight(self, form: Form, *chunks: int) -> float:
        """Time of a span's products, per weight of the matrix; `chunks` are the lengths of its chunks."""
        if (form, chunks) not in self._seconds:
            group_size = _PROBE_INPUTS if form is None or form.group_size is None else form.group_size
            shape = _PROBE_ROWS, max(_PROBE_INPUTS // group_size, 1) * group_size
            seconds = _fastest_seconds(self._probes.multiply(form, shape, chunks))
            self._seconds[form, chunks] = seconds / (shape[0] * shape[1])
        return self._seconds[form, chunks]


class HostPredictor:
    """Times of a model on the host with plain weights as `dtype`; `widens_prompts` as for `HostDevice`."""

    def __init__(
        self, model: Model, rates: HostRates, *, dtype: str, kv_cache: str = "auto", widens_prompts: bool = False
    ):
        self._model = model
        self._rates = rates
        self._itemsize = ITEMSIZES[dtype]
        self._widens_prompts = widens_prompts
        self._cache_bytes_per_token = (
            cache_bytes(model.config, PAGE_TOKENS, cache_type_of(dtype, kv_cache)) // PAGE_TOKENS
        )
        self._weight_bytes = plan_memory(model, max_seq_len=0, num_rows=1, dtype=dtype).weight_bytes
        config = model.config
        if model.tensors.head != EMBEDDING:  # one row of the embedding is read, not all
            self._weight_bytes -= (config.vocab_size - 1) * config.hidden_size * self._itemsize
        head = model.tensors.packed.get(model.tensors.head.removesuffix(WEIGHT_SUFFIX))
        self._head: Form = None if head is None else head.scheme
        self._head_size = config.vocab_size * config.hidden_size
        self._sizes = self._count_weights()

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        """Bytes that one step reads for `num_rows` rows, which are run one after the other."""
        return num_rows * (self._weight_bytes + depth * self._cache_bytes_per_token)

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        """One step of `num_rows` rows of `depth` tokens each."""
        computing = sum(size * self._rates.seconds_per_weight(form, 1) for form, size in self._sizes.items())
        computing += self._head_seconds()
        reading = self.decode_bytes(depth) / self._rates.read_bytes
        return num_rows * (max(computing, reading) + self._overhead())

    def prefill_seconds(self, num_tokens: int) -> float:
        """The logits after a prompt."""
        total, begin = self._head_seconds(), 0
        while begin < num_tokens:
            end = span_end(begin, num_tokens, num_tokens, self._widens_prompts)
            sizes = chunks(begin, end, self._widens_prompts)
            total += sum(size * self._rates.seconds_per_weight(form, *sizes) for form, size in self._sizes.items())
            for count in sizes:
                total += self._attention_seconds(begin, count) + self._overhead()
                begin += count
        return total

    def first_token_seconds(self, num_tokens: int) -> float:
        """A prompt and the first token after it; choosing that token takes next to no time."""
        return self.prefill_seconds(num_tokens)

    def decode_floor_seconds(self, depth: int, num_rows: int = 1) -> float:
        """A step's bytes at the rate of reading; its rows could share the weights."""
        num_bytes = self._weight_bytes + num_rows * depth * self._cache_bytes_per_token
        return num_bytes / self._rates.read_bytes

    def prefill_floor_seconds(self, num_tokens: int) -> None:
        """Not known: products are timed as they run, not at their best."""

    def _attention_seconds(self, begin: int, count: int) -> float:
        """The runner computes the full rectangle of scores, then masks it."""
        config = self._model.config
        multiplied = 2 * count * (begin + count) * config.q_size * config.num_hidden_layers
        return multiplied * self._rates.seconds_per_weight(None, PREFILL_CHUNK) / PREFILL_CHUNK

    def _head_seconds(self) -> float:
        reading = self._head_size * self._itemsize / self._rates.read_bytes if self._head is None else 0.0
        return max(self._head_size * self._rates.seconds_per_weight(self._head, 1), reading)

    def _overhead(self) -> float:
        return self._model.config.num_hidden_layers * LAYER_SECONDS

    def _count_weights(self) -> dict[Form, int]:
        """How many of the layers' weights have each form; the head's are counted apart."""
        sizes: dict[Form, int] = {}
        for name, layer in self._model.tensors.packed.items():
            if name == HEAD.removesuffix(WEIGHT_SUFFIX):
                continue
            sizes[layer.scheme] = sizes.get(layer.scheme, 0) + layer.shape[0] * layer.shape[1]
        for name, info in self._model.tensors.tensors.items():
            if len(info.shape) == 2 and name.endswith("_proj.weight"):
                sizes[None] = sizes.get(None, 0) + info.shape[0] * info.shape[1]
        return sizes


def _fastest_seconds(work: Callable[[], object]) -> float:
    """The fastest of a few runs: the slower ones shared the processor with other work."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() - begin < _SECONDS_A_RATE):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
