"""The kernels that a model launches in a step of decoding and for a prompt, and what each needs. Needs no card.

The launches are those of a dry run. Launches of one kernel that move and compute the same are one `Call`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmcli.checkpoint.model import Model
from llmcli.errors import UsageError
from llmcli.kernels.cache import CachedKernels, KernelCache, OnCompile, say_nothing
from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.elementwise import EMBEDDING_SPEC as EMBEDDING
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts, Launch, addresses_of
from llmcli.kernels.spec import KernelCost
from llmcli.lab.occupancy import MULTIPROCESSORS, Occupancy, occupancy
from llmcli.runners.base import MAX_ROWS
from llmcli.runners.cuda.plan.memory import PREFILL_CHUNKS, MemoryPlan, plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.dry_run import DryModel

# What one launch of a kernel needs of a multiprocessor: registers, shared memory, spills, theoretical occupancy.


@dataclass(frozen=True)
class KernelUse:
    """What one launch of a kernel needs of a multiprocessor. `shared_bytes` of a block are static and dynamic ones."""

    name: str
    num_blocks: int
    block: int
    shared_bytes: int
    resources: KernelResources
    occupancy: Occupancy

    @property
    def spill_bytes(self) -> int:
        """Bytes that a thread writes to memory and reads again for lack of registers."""
        return self.resources.spill_store_bytes + self.resources.spill_load_bytes


def require_architecture(arch: str) -> None:
    """Refuse an architecture whose multiprocessors are not known. Raises: UsageError"""
    if arch not in MULTIPROCESSORS:
        raise UsageError(f"the architecture {arch!r} is not known; known are {', '.join(MULTIPROCESSORS)}")


def use_of(launch: Launch, kernels: CachedKernels, arch: str) -> KernelUse:
    """What a launch needs of a multiprocessor, as compiled for an architecture."""
    resources, block = kernels.resources[launch.name], math.prod(launch.block_shape)
    shared_bytes = resources.shared_bytes + launch.shared_bytes
    return KernelUse(
        launch.name,
        math.prod(launch.grid),
        block,
        shared_bytes,
        resources,
        occupancy(arch, block=block, registers=resources.registers, shared_bytes=shared_bytes),
    )


MAX_PROMPT = PREFILL_CHUNKS[0]  # tokens that run together
DEFAULT_LENGTH = 512
# Tokens that the context has beyond the depth: timing the sampler advances its row. The least, and the best.
LEAST_ROOM, BEST_ROOM = 128, 2048

_CLUSTERS_FROM = 90  # sm_90
_WGMMA_ON = "sm_90"


@dataclass(frozen=True)
class Lengths:
    """A prompt of `prompt` tokens; a step of decoding in `rows` rows of `depth` tokens; the context they run in."""

    prompt: int
    depth: int
    rows: int
    context: int

    @classmethod
    def within(cls, maximum: int, prompt: int | None, depth: int | None, rows: int) -> "Lengths":
        """The requested or usual lengths, in a model whose context limit is `maximum` tokens. Raises: UsageError"""
        longest_prompt, deepest = min(MAX_PROMPT, maximum), maximum - LEAST_ROOM
        if deepest < 1:
            raise UsageError(f"the model's context limit is {maximum} tokens; {LEAST_ROOM + 1} are needed")
        for flag, number, most in (
            ("--prompt", prompt, longest_prompt),
            ("--depth", depth, deepest),
            ("--rows", rows, MAX_ROWS),
        ):
            if number is not None and number > most:
                raise UsageError(f"{flag} is {number}, use at most {most} with this model")
        prompt = prompt or min(DEFAULT_LENGTH, longest_prompt)
        depth = depth or min(DEFAULT_LENGTH, deepest)
        return cls(prompt, depth, rows, max(prompt, min(depth + BEST_ROOM, maximum)))


@dataclass(frozen=True)
class Call:
    """Launches of one kernel that move and compute the same. `places` are their indices in the launches of the walk.

    `launch` is the first of them. `matrix` names the linear layers whose weights it reads, such as `gate_proj up_proj`,
    or empty. `use` is None for the matrix library's kernels.
    """

    launch: Launch
    matrix: str
    cost: KernelCost
    places: tuple[int, ...]
    use: KernelUse | None

    @property
    def name(self) -> str:
        """The name expression of our kernel, or the library's name."""
        return self.launch.name or self.launch.stem

    @property
    def num_bytes(self) -> int:
        """Bytes that a launch reads and writes."""
        return self.cost.read_bytes + self.cost.written_bytes


@dataclass(frozen=True)
class Walk:
    """All calls of a step of decoding or of a prompt; `labels` are stem and name of every launch in order."""

    title: str
    labels: tuple[tuple[str, str], ...]
    calls: tuple[Call, ...]


def card_of(arch: str) -> CardFacts:
    """A card of an architecture that is not in this machine, with the multiprocessors of the typical card.

    Raises: UsageError
    """
    require_architecture(arch)
    return replace(
        TYPICAL_CARD,
        shared_bytes_per_block=MULTIPROCESSORS[arch].shared_bytes_per_block,
        can_cluster=int(arch.removeprefix("sm_")) >= _CLUSTERS_FROM,
        can_wgmma=arch == _WGMMA_ON,
    )


def plan_walk(model: Model, lengths: Lengths, card: CardFacts) -> MemoryPlan:
    """The memory that the walk needs. Raises: UnsupportedModelError; CheckpointError as `StoredModel.of_model`"""
    stored = StoredModel.of_model(model)
    return plan_memory(stored, max_seq_len=lengths.context, num_rows=lengths.rows, chunk_tokens=MAX_PROMPT, card=card)


def walk_model(
    model: Model, lengths: Lengths, card: CardFacts, arch: str, on_compile: OnCompile = say_nothing
) -> tuple[Walk, Walk]:
    """The launches of a step of decoding, and of a prompt without its logits, compiled for an architecture.

    Raises: as `plan_walk`; UsageError, KernelCompileError
    """
    require_architecture(arch)
    dry = DryModel(plan_walk(model, lengths, card), card, in_order=True)
    rows = "" if lengths.rows == 1 else f" of {lengths.rows} rows"
    steps = {
        f"A step of decoding{rows} at depth {lengths.depth:,}": dry.step(lengths.rows, lengths.depth),
        f"A prompt of {lengths.prompt:,} tokens, without its logits": dry.span(lengths.prompt, 0, is_last=True),
    }
    launches = {title: [one.launch for one in started] for title, started in steps.items()}
    kernels = {(one.stem, one.name) for step in launches.values() for one in step}
    compiled = KernelCache().get_all(sorted(kernels), arch, on_compile)

    def use(launch: Launch) -> KernelUse:
        return use_of(launch, compiled[launch.stem, launch.name], arch)

    matrices = {
        one.matrix.tiles.data.ptr: " ".join(linear.module.rpartition(".")[2] for linear in one.linears)
        for one in dry.weights.projections
    }
    decode, prefill = (_walk(title, step, matrices, use) for title, step in launches.items())
    return decode, prefill


def _walk(
    title: str, launches: Sequence[Launch], matrices: Mapping[int, str], use: Callable[[Launch], KernelUse | None]
) -> Walk:
    places: dict[object, list[int]] = {}
    read, costs = _matrices_read(launches, matrices), _costs(launches)
    for place, (launch, matrix, cost) in enumerate(zip(launches, read, costs, strict=True)):
        moved = cost.read_bytes, cost.written_bytes, cost.flops
        key = launch.stem, launch.name, launch.grid, launch.block_shape, launch.shared_bytes, matrix, moved
        places.setdefault(key, []).append(place)
    calls = []
    for found in places.values():
        first = found[0]
        calls.append(Call(launches[first], read[first], costs[first], tuple(found), use(launches[first])))
    return Walk(title, tuple((launch.stem, launch.name) for launch in launches), tuple(calls))


def _costs(launches: Sequence[Launch]) -> list[KernelCost]:
    """The cost of each; equal layers share a launch, whose cost is computed once."""
    known: dict[int, KernelCost] = {}
    for launch in launches:
        if id(launch) not in known:
            assert launch.cost is not None
            known[id(launch)] = launch.cost()
    return [known[id(launch)] for launch in launches]


def _matrices_read(launches: Sequence[Launch], matrices: Mapping[int, str]) -> list[str]:
    """The matrix that each launch reads."""
    read: list[str] = []
    for launch in launches:
        if launch.stem == EMBEDDING.stem:  # its table may be the head's matrix
            read.append("")
        else:
            names = (matrices.get(address) for address in addresses_of(launch.arguments))
            read.append(next((name for name in names if name), ""))
    return read
