"""Goes through a model's launches without launching any: which kernels they are, what each moves and computes.

What runs is `Forward` itself, on a device that takes notes. Where arrays are phantoms too, neither a card nor CuPy is
needed, so models whose files do not exist can be gone through.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device
from llmcli.kernels.launches import Launch
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sample_token import NUM_RESULTS, RowLayout, sample_token
from llmcli.kernels.spec import Cost
from llmcli.runners.cuda.forward import Forward, Tokens
from llmcli.runners.cuda.memory import MAX_BATCH, MemoryPlan
from llmcli.runners.cuda.products import MAX_PACKED_TOKENS, Products
from llmcli.runners.cuda.regions import Arrays, Region, with_offsets
from llmcli.runners.cuda.weights import place_weights

PRODUCT = "cublas"  # stands for the stem of a product of the matrix library


@dataclass(frozen=True)
class CardFacts:
    """What of a card decides how kernels are launched, and how long the parts of them take that bytes do not tell.

    Units: bytes; `clock_hertz` is the highest
    """

    num_multiprocessors: int
    shared_bytes_per_block: int
    can_cluster: bool
    clock_hertz: float

    @classmethod
    def of_device(cls, device: Device) -> "CardFacts":
        """Those of a card that is here."""
        return cls(device.num_multiprocessors, device.shared_bytes_per_block, device.can_cluster, device.clock_hertz)


# What is assumed of a card that is not here: a Hopper of the kind that servers have.
TYPICAL_CARD = CardFacts(132, 227 * 1024, True, 1.98e9)


@dataclass
class Started:
    """A launch and how often it is started: once, and again for every layer that is like its own."""

    launch: Launch
    count: int = 1


class DryRun:
    """Stands in for a `Device`, and for the matrix library's products on it, and notes what would be launched."""

    def __init__(self, card: CardFacts):
        self.num_multiprocessors = card.num_multiprocessors
        self.shared_bytes_per_block = card.shared_bytes_per_block
        self.can_cluster = card.can_cluster
        self._started: list[Started] = []

    def launch(
        self,
        stem: str,
        name: str,
        *,
        grid: tuple[int, ...],
        block: int,
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        overlaps: bool = False,
        cost: Cost | None = None,
    ) -> None:
        """Note it."""
        self._started.append(Started(Launch(stem, name, grid, block, arguments, shared_bytes, overlaps, cost)))

    def start(self, product: Any, addresses: Sequence[int]) -> None:
        """Note a product of the matrix library."""
        self._started.append(Started(Launch(PRODUCT, "", (), 0, (), cost=product.cost)))

    def record(self, run: Callable[[], None], arrays: Any) -> "_Repeat":
        """Run it; what can be started again are its launches."""
        begin = len(self._started)
        run()
        return _Repeat(self._started[begin:])

    def take(self) -> list[Started]:
        """What has been noted since the last time."""
        started, self._started = self._started, []
        return started


@dataclass(frozen=True)
class _Repeat:
    """Stands for a `Replay`."""

    launches: list[Started]

    def start(self, addresses: Sequence[int]) -> None:
        for one in self.launches:
            one.count += 1


class DryLibrary(Cublas):
    """The matrix library without the library: arguments are checked and products described, none is made."""

    def __init__(self, device: Device):
        self._device = device


def num_launches(started: Iterable[Started]) -> int:
    """How many launches these are."""
    return sum(one.count for one in started)


def kernel_names(started: Iterable[Started]) -> Mapping[str, set[str]]:
    """The name expressions of our own kernels by `.cu` stem."""
    names: dict[str, set[str]] = {}
    for one in started:
        if one.launch.stem != PRODUCT:
            names.setdefault(one.launch.stem, set()).add(one.launch.name)
    return names


def dry_forward(device: DryRun, plan: MemoryPlan, weights: Arrays, cache: Arrays, workspace: Arrays) -> Forward:
    """The forward pass on a device that takes notes."""
    stand_in = cast(Device, device)
    products = Products(stand_in, DryLibrary(stand_in), workspace["widened"])
    return Forward(stand_in, plan, place_weights(plan, weights), cache, workspace, products)


def run_every_form(forward: Forward, workspace: Arrays) -> None:
    """Go through every form of launch once."""
    tokens = Tokens(workspace["token_ids"], workspace["rows"], workspace["positions"])
    for count in range(1, MAX_BATCH + 1):
        forward.run_batch(tokens.first(count))
        forward.project_logits(forward.hidden[:count], workspace["score_logits"][:count])
    for count in (*range(2, min(MAX_PACKED_TOKENS + 2, forward.chunk_tokens)), forward.chunk_tokens):
        forward.run_chunk(tokens.first(count), 0, 0)


class DryModel:
    """A planned model over phantoms, whose decode steps and prompts can be gone through."""

    def __init__(self, plan: MemoryPlan, card: CardFacts):
        # Addresses that no two arrays share; nothing lies there.
        weights, cache, self._workspace = (
            _phantoms(regions, (number + 1) << 48)
            for number, regions in enumerate((plan.weights, plan.cache, plan.workspace))
        )
        self._device = DryRun(card)
        self._vocab_size = plan.stored.config.vocab_size
        self._max_seq_len = plan.max_seq_len
        self._forward = dry_forward(self._device, plan, weights, cache, self._workspace)

    def step(self, num_rows: int, depth: int) -> list[Started]:
        """One decode step of up to MAX_BATCH rows of `depth` tokens each, as `Decoder` queues it."""
        tokens = self._tokens(num_rows, depth)
        logits = self._workspace["score_logits"][:num_rows]
        sample_token(
            self._forward.device,
            logits=logits,
            rows=tokens.rows,
            positions=tokens.positions,
            token_ids=tokens.token_ids,
            history=Phantom((num_rows, self._max_seq_len), np.int32, 1 << 52),
            state=Phantom((num_rows, RowLayout(self._vocab_size).row_bytes), np.uint8, 2 << 52),
            results=Phantom((num_rows, 2, NUM_RESULTS), np.uint64, 3 << 52),
        )
        self._forward.run_batch(tokens)
        self._forward.project_logits(self._forward.hidden[:num_rows], logits)
        return self._device.take()

    def chunk(self, num_tokens: int, start: int) -> list[Started]:
        """A chunk of a prompt, the first of its tokens at `start`, without the head."""
        self._forward.run_chunk(self._tokens(num_tokens, start), 0, start)
        return self._device.take()

    def head(self) -> list[Started]:
        """The logits after a prompt."""
        self._forward.project_logits(self._forward.hidden[:1], self._workspace["score_logits"][:1])
        return self._device.take()

    def _tokens(self, count: int, position: int) -> Tokens:
        workspace = self._workspace
        positions = Phantom((count,), np.int32, workspace["positions"].data.ptr, assumed=position)
        return Tokens(workspace["token_ids"][:count], workspace["rows"][:count], positions)


def _phantoms(regions: Iterable[Region], address: int) -> dict[str, Phantom]:
    return {
        region.name: Phantom(region.shape, region.dtype, address + begin) for region, begin in with_offsets(regions)
    }
