"""Replayed layers against layers that launch directly: the same kernels, sizes, constants and addresses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from driverless_card import DriverlessCard
from families import VARIANTS
from quantized import SCHEMES, SIZES, export
from simulated_card import allocate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.driver import BoundLaunch
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.step.arena import on_card
from llmcli.runners.cuda.step.batch import LONG, SHORT, Batch, Slice, prompt_batch
from llmcli.runners.cuda.step.forward import Forward

# The tokens and the position of each prompt. Each chunk runs twice: the second time none of its layers is recorded.
CHUNKS = [
    *([(count, 20)] for count in (1, 2, 9, 64, 65, 200)),
    [(65, 21)],
    [(35, 20), (30, 0)],
    [(30, 20), (35, 0)],
]


def prompts(workspace: Any, method: int, parts: Sequence[tuple[int, int]]) -> Batch:
    """A batch of prompts, whose tokens and pages lie at the same places for equal numbers."""
    ends = list(accumulate(count for count, _ in parts))
    slices = [
        Slice(row, end - count, count, start) for row, (end, (count, start)) in enumerate(zip(ends, parts, strict=True))
    ]
    return prompt_batch(method, workspace.of_spans(ends[-1], len(parts)), slices)


class NotingCard(DriverlessCard):
    """Attributes: started: everything that launches and products consist of, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Any] = []
        self.num_recordings = 0

    def start(self, starter: Any, addresses: Sequence[int]) -> None:
        super().start(starter, addresses)
        if isinstance(starter, BoundLaunch):
            self.started.append((starter.label, starter._config, bytes(starter._memory)))
        else:
            self.started.append((*starter.noted, tuple(addresses)))

    def record(self, run: Callable[[], None], arrays: Any) -> Any:
        self.num_recordings += 1
        return super().record(run, arrays)


class CardWithoutReplays(NotingCard):
    def record(self, run: Callable[[], None], arrays: Any) -> Any:
        run()


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing needs a card."""
    monkeypatch.setattr("llmcli.runners.cuda.step.arena.allocate", allocate)
    monkeypatch.setattr("llmcli.runners.cuda.step.forward.copy", lambda *_: None)


@pytest.fixture
def check_replays(host_memory: None) -> Callable[..., None]:
    """Compares prompts and batches of a model, each on the same arrays; each kind of layer is recorded once.

    A layer's neighbours are of its kind, too.
    """

    def check(folder: Path, most_kinds: int, **options: Any) -> None:
        stored = StoredModel.of_model(open_model(folder), **options)
        plan = plan_memory(stored, max_seq_len=256, num_rows=9, chunk_tokens=200)
        weights, cache, workspace = on_card(plan.weights), on_card(plan.cache), on_card(plan.workspace)
        cards = NotingCard(), CardWithoutReplays()
        for card in cards:
            forward = Forward(card, plan, weights, cache, workspace)
            for parts in 2 * CHUNKS:
                forward.run(prompts(workspace, SHORT, parts))
                batch = prompts(workspace, LONG, parts)
                for needed in (None, [len(batch.rows) - 1], []):  # the last layer then runs for these alone
                    forward.run(batch, needed)
            for count in 2 * (1, 3, 8, 16):  # 16 lanes serve 9 rows
                rows, positions = workspace.lane_rows[:count], workspace.lane_positions[:count]
                forward.run(Batch(workspace.slot_token_ids, rows, positions, workspace.page_table, count, by_row=True))
            for count, num_rows in 2 * ((2, 1), (8, 1), (8, 2)):
                forward.run(Batch(*workspace.of_spans(count, num_rows), num_rows))
        replaying, straight = cards
        assert replaying.started == straight.started
        num_passes, num_alone = 2 * len(CHUNKS) + 7, 2 * len(CHUNKS) - 1  # a lone token is all of its chunk
        num_kinds = len({layer.kind for layer in forward._layers})
        assert replaying.num_recordings == num_passes * (num_kinds + 1) + num_alone  # also what comes first
        assert num_kinds <= most_kinds

    return check


OPTIONS: list[dict[str, Any]] = [{}, {"dtype": "float16"}, {"dtype": "float32"}, {"kv_cache": "int8"}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[] if (number - place) % len(OPTIONS) == 0 else [pytest.mark.long])
        for number, name in enumerate(VARIANTS)
        for place, options in enumerate(OPTIONS)
    ],
)
def test_every_family(name: str, options: dict[str, Any], check_replays: Any, tmp_path: Path) -> None:
    """In one of the types of weights and cache; in all with --all."""
    traits = dict(VARIANTS[name])
    if not {"layer_types", "no_rope_layers"} & traits.keys():
        traits["num_hidden_layers"] = 5
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **traits)
    config = open_model(folder).config
    alike = [None, *zip(config.traits.uses_rope, config.traits.sliding_windows, strict=True), None]
    kinds = set(zip(alike, alike[1:], alike[2:], strict=False))
    check_replays(folder, len(kinds), **options)


SKIPS: list[tuple[str, ...]] = [(), ("k_proj",), ("layers.1.",)]


@pytest.mark.parametrize(("name", "skip"), [(name, SKIPS[place % 3]) for place, name in enumerate(SCHEMES)])
def test_quantized_models_with_biases(name: str, skip: tuple[str, ...], check_replays: Any, tmp_path: Path) -> None:
    """A layer that stays as it was is a kind of its own."""
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 5}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name], skip=skip))
    check_replays(folder, 5 if skip == ("layers.1.",) else 3)


def test_which_launches_of_chunks_are_kept(host_memory: None, tmp_path: Path) -> None:
    """The last 256, for these kernels and these arrays."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 128)))
    plan = plan_memory(StoredModel.of_model(open_model(folder)), max_seq_len=512, num_rows=2, chunk_tokens=300)
    weights, cache, workspace = on_card(plan.weights), on_card(plan.cache), on_card(plan.workspace)
    card = NotingCard()
    forward = Forward(card, plan, weights, cache, workspace)

    def num_recorded(count: int, first_row: int = 0) -> int:
        before = card.num_recordings
        batch = prompts(workspace, LONG, [(count, 0)])
        forward.run(replace(batch, page_table=workspace.page_table[first_row : first_row + 1]))
        return card.num_recordings - before

    each = 4  # the first layer, one between, the last, and what comes before them
    assert [num_recorded(100) for _ in range(3)] == [each, 0, 0]
    assert [num_recorded(100, 1) for _ in range(2)] == [each, 0]
    card.uses_own = True
    assert [num_recorded(100) for _ in range(2)] == [each, 0]
    card.uses_own = False
    assert sum(num_recorded(count) for count in range(1, 256)) == 254 * each
    assert num_recorded(100) == 0
    assert num_recorded(256) == each
    assert num_recorded(1) == 0
    assert [num_recorded(100, 1), num_recorded(2)] == [each, each]
