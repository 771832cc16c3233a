"""Lists a model's launches without launching any: their kernels, and what each moves and computes.

It runs `Forward` itself, over phantoms and on a device that takes notes. It needs no card, no CuPy and no model files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.launches import CardFacts, Launch, Launcher
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sample_token import NUM_RESULTS, RowLayout, sample_token
from llmcli.kernels.stage_wide import IMAGE_TOKENS, WIDE_TOKENS
from llmcli.kernels.tiles import fastest_widening
from llmcli.kernels.wide_plan import NARROW_TOKENS
from llmcli.runners.base import MAX_SPAN
from llmcli.runners.cuda.plan.memory import MemoryPlan
from llmcli.runners.cuda.plan.regions import held_bytes, lay_out
from llmcli.runners.cuda.plan.weight_layout import Weights, with_widening
from llmcli.runners.cuda.plan.workspace import LOGIT_ROWS, MANY_LANES, Cache, Workspace, num_lanes
from llmcli.runners.cuda.step.batch import LONG, SHORT, Batch, Slice, method_of, prompt_batch
from llmcli.runners.cuda.step.forward import Forward

_NO_ROW = -1


@dataclass
class Started:
    """A launch and how often it is started: for its layer, and again for each other layer of the same kind."""

    launch: Launch
    count: int = 1


class DryRun(Launcher):
    """Replaces a `Device`. It notes launches instead of making them.

    With `in_order` every launch has a note of its own, in the order in which a card starts them.
    """

    uses_own = False
    stream = None

    def __init__(self, card: CardFacts, *, in_order: bool = False):
        self.num_multiprocessors = card.num_multiprocessors
        self.shared_bytes_per_block = card.shared_bytes_per_block
        self.can_cluster = card.can_cluster
        self.can_wgmma = card.can_wgmma
        self._started: list[Started] = []
        self._in_order = in_order

    def make(self, launch: Launch) -> None:
        """Note a launch."""
        self._started.append(Started(launch))

    def record(self, run: Callable[[], None], arrays: Any) -> "_Repeat":
        """Run `run`, and return its launches in a form that can be started again."""
        begin = len(self._started)
        run()
        return _Repeat(self, self._started[begin:])

    def repeat(self, repeat: "_Repeat") -> None:
        """Note recorded launches once more."""
        if self._in_order:
            self._started += [Started(one.launch) for one in repeat.launches]
        else:
            for one in repeat.launches:
                one.count += 1

    def take(self) -> list[Started]:
        """Return the notes since the last call, and forget them."""
        started, self._started = self._started, []
        return started


@dataclass
class _Repeat:
    """Replaces a `Replay`. Its launches are among the notes that have not been taken."""

    dry_run: DryRun
    launches: list[Started]

    def start(self, addresses: Sequence[int]) -> None:
        self.dry_run.repeat(self)


def kernel_names(started: Iterable[Started]) -> Mapping[str, set[str]]:
    """The name expressions of our own kernels by `.cu` stem."""
    names: dict[str, set[str]] = {}
    for one in started:
        names.setdefault(one.launch.stem, set()).add(one.launch.name)
    return names


def phantoms(plan: Any, number: int) -> Any:
    """Lay out the plan's regions as phantoms. Each `number`, from 1 on, has an address space of its own.

    Shapes: see `lay_out`
    """
    return lay_out(plan, Phantom((held_bytes(plan),), np.uint8, number << 48))


class DryModel:
    """A planned model over phantoms: lists the launches of its decoding steps and prompts. `in_order`: see `DryRun`.

    Attributes: device: takes the notes; weights: phantoms
    """

    def __init__(self, plan: MemoryPlan, card: CardFacts, *, in_order: bool = False):
        self._dry_run = DryRun(card, in_order=in_order)
        self.device = cast(Device, self._dry_run)
        self.weights: Weights[Any] = with_widening(
            phantoms(plan.weights, 1), lambda part: (fastest_widening(part.layout), 0)
        )
        cache: Cache[Any] = phantoms(plan.cache, 2)
        self._workspace: Workspace[Any] = phantoms(plan.workspace, 3)
        row_bytes = RowLayout(plan.stored.config.vocab_size).row_bytes
        self._sampler_state = Phantom((plan.num_rows, row_bytes), np.uint8, 4 << 48)
        self._results = Phantom((plan.num_rows, 2, NUM_RESULTS), np.uint64, 5 << 48)
        self._num_rows = plan.num_rows
        self._longest = min(plan.chunk_tokens, plan.max_seq_len)  # a chunk also has room for every lane
        self._forward = Forward(self.device, plan, self.weights, cache, self._workspace)

    def take(self) -> list[Started]:
        """Return the notes since the last call, and forget them, also those that would be repeated."""
        self._forward.forget_passes()
        return self._dry_run.take()

    def step(self, num_rows: int, depth: int) -> list[Started]:
        """The launches of a decoding step, as `DecodeLanes` queues it. Each row has `depth` tokens before the new one.

        `num_rows` is at most the planned number of rows.
        """
        workspace, lanes = self._workspace, num_lanes(num_rows)
        used = np.arange(lanes) < num_rows
        rows = _assume(workspace.lane_rows[:lanes], np.where(used, 0, _NO_ROW))
        positions = _assume(workspace.lane_positions[:lanes], np.where(used, depth, 0))
        token_ids, logits = workspace.slot_token_ids, workspace.lane_logits[:lanes]
        self._forward.run(Batch(token_ids, rows, positions, workspace.page_table, lanes, by_row=True))
        self._forward.project_logits(self._forward.hidden[:lanes], logits)
        sample_token(
            self.device, logits=logits, rows=rows, positions=positions, token_ids=token_ids,
            history=workspace.history, state=self._sampler_state, results=self._results,
        )  # fmt: skip
        return self.take()

    def span(self, num_tokens: int, start: int, *, is_last: bool) -> list[Started]:
        """The launches of a prompt's chunk from `start` on, as `CudaDevice` runs it, without the head.

        Logits are read only after the last token of the last chunk.
        """
        self._run_prompt(method_of(num_tokens), num_tokens, start, [num_tokens - 1] if is_last else [])
        return self.take()

    def head(self, num_tokens: int = 1) -> list[Started]:
        """The launches for the logits of `num_tokens` tokens."""
        self._forward.project_logits(self._forward.hidden[:num_tokens], self._workspace.score_logits[:num_tokens])
        return self.take()

    def every_form(self) -> list[Started]:
        """Launches of every form that any step may need, without the sampler's."""
        for count in range(1, MAX_SPAN + 1):
            for num_rows in {1, count}:
                self._forward.run(Batch(*self._of_row(count, 0), num_rows))
        started = self.take()
        for count in range(1, MAX_SPAN + 1):
            started += self.head(count)
        # Up to MANY_LANES the number of lanes, a multiple of MAX_SPAN, decides the size of attention's blocks.
        counts = {*NARROW_TOKENS, *WIDE_TOKENS, *range(2 * MAX_SPAN, MANY_LANES, MAX_SPAN), self._num_rows}
        if self._num_rows <= MAX_SPAN:
            counts = set()
        for count in sorted({min(count, self._num_rows) for count in counts}):
            started += self.step(count, 0)
        for count in NARROW_TOKENS:
            started += self.head(min(count, LOGIT_ROWS, self._longest))
        for count in (*NARROW_TOKENS, *WIDE_TOKENS):
            self._run_prompt(SHORT, min(count, self._longest), 0)
        for count in (*NARROW_TOKENS, *range(IMAGE_TOKENS, self._longest, IMAGE_TOKENS), self._longest):
            if count <= self._longest:
                for needed in (None, [count - 1]):
                    self._run_prompt(LONG, count, 0, needed)
        return started + self.take()

    def _run_prompt(self, method: int, num_tokens: int, start: int, needed: Sequence[int] | None = None) -> None:
        slices = [Slice(0, 0, num_tokens, start)]
        self._forward.run(prompt_batch(method, self._of_row(num_tokens, start), slices), needed)

    def _of_row(self, num_tokens: int, start: int) -> tuple[Phantom, Phantom, Phantom, Phantom]:
        """Tokens of one row: their ids, rows and positions, and the row's pages."""
        token_ids, rows, positions, pages = self._workspace.of_spans(num_tokens, 1)
        rows = _assume(rows, np.zeros(num_tokens, np.int32))
        return token_ids, rows, _assume(positions, np.arange(start, start + num_tokens)), pages


def _assume(array: Phantom, values: Any) -> Phantom:
    """The same array, with these values assumed for its elements."""
    return Phantom(array.shape, array.dtype, array.data.ptr, assumed=values)
