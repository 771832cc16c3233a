"""`llmcli plan`: memory and speed of a model or of a shape, before anything is read."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from llmcli.cli import lazy, shared
from llmcli.cli.cards import CARDS, find_card
from llmcli.cli.command import option
from llmcli.cli.completion import complete_subject
from llmcli.cli.session import resolve_context
from llmcli.cli.tables import format_table
from llmcli.cli.targets import LENGTHS, open_subject, open_target
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.cli.units import duration, rate, size
from llmcli.errors import UsageError


@dataclass(frozen=True)
class DistantCardOptions:
    """A card in another machine, by its name or its figures.

    Raises: UsageError for an unknown name, one of two figures, or both ways
    """

    card: str | None = shared.model_option(
        None,
        'Plan for this card, such as "RTX 4090", which need not be here.',
        metavar="NAME",
        words=[card.replace(" ", "-") for card in CARDS],
    )
    memory: float | None = shared.model_option(
        None, "Plan for a card with this much memory; needs --bandwidth.", min=0.1, max=1e6, metavar="GiB", hidden=True
    )
    bandwidth: float | None = shared.model_option(
        None, "Read bandwidth of the card that --memory describes.", min=0.1, max=1e6, metavar="GB/s", hidden=True
    )

    def __post_init__(self) -> None:
        if (self.memory is None) != (self.bandwidth is None):
            raise UsageError("--memory and --bandwidth describe a card together; give both or neither")
        if self.card is not None:
            if self.memory is not None:
                raise UsageError("--card has its own --memory and --bandwidth; give either the name or the figures")
            find_card(self.card)

    @property
    def is_given(self) -> bool:
        """Whether there is such a card."""
        return self.card is not None or self.memory is not None

    def target(self, dtype: str, kv_cache: str) -> lazy.device_targets.CardTarget:
        """The card."""
        name = None if self.card is None else find_card(self.card)
        memory, bandwidth = (self.memory, self.bandwidth) if name is None else CARDS[name]
        assert memory is not None
        assert bandwidth is not None
        return lazy.device_targets.distant_card(name, memory, bandwidth, dtype, kv_cache)


@dataclass(frozen=True)
class PlaceOptions:
    """Where the model would run: context, rows, and a device of this machine or a distant card.

    Raises: UsageError for both.
    """

    context: int | None = shared.context_option()
    rows: str = shared.rows_option("1")
    devices: shared.DeviceOptions = shared.DeviceOptions()
    card: DistantCardOptions = DistantCardOptions()

    def __post_init__(self) -> None:
        if self.card.is_given and (self.devices.device, self.devices.threads) != (shared.AUTO, None):
            raise UsageError(
                "--card, or --memory and --bandwidth, describe a card that is not here; leave out --device and "
                "--threads"
            )


def plan(
    *,
    names: shared.SubjectOptions,
    place: PlaceOptions,
    draft: str | None = shared.model_option(
        None, "A draft model (or SHAPE) next to it.", metavar="MODEL", complete=complete_subject
    ),
    json_: bool = option(False, "Print one JSON object instead of tables."),
    messages: shared.MessageOptions,
) -> None:
    """Predict memory and speed of a model without reading its weights.

    If the model does not fit, the error names the largest context that does.

    Examples:

    llmcli plan my-model --context 32768

    llmcli plan Llama-3.1-8B --card "RTX 4070"

    llmcli plan Llama-3.1-8B --draft Llama-3.2-1B
    """
    num_rows = shared.parse_rows(place.rows)
    options = place.devices.checked()
    subject = open_subject(names.chosen, names.form)
    card = place.card
    is_distant = card.is_given
    target: lazy.subject.Target = (
        card.target(options.dtype, options.kv_cache) if is_distant else open_target(options, subject)
    )
    context = resolve_context(subject.model.config, subject.name, place.context)
    facts = lazy.subject.plan_subject(subject, target, context=context, num_rows=num_rows, lengths=LENGTHS)
    drafter = None
    if draft is not None:
        other = open_subject(draft, None)
        sizes = other.model.config.vocab_size, subject.model.config.vocab_size
        if sizes[0] != sizes[1]:
            terminal.warn(
                f"--draft: {other.name} has another vocabulary than {subject.name}: {sizes[0]} tokens, not {sizes[1]}; "
                "generate makes no drafts with it"
            )
        drafter = lazy.subject.plan_draft(other, target if is_distant else open_target(options, other), facts)
    if json_:
        terminal.write_json(_as_json(facts, drafter))
        return
    source = "measured" if not is_distant else "as given" if card.card is None else "by its data sheet"
    terminal.write(fact_lines(_lines(facts, source, drafter), 18, sys.stdout))
    rows = [
        [str(item.depth), f"{item.bytes_per_step / 1e9:.3f} GB", rate(item.tokens_per_second)] for item in facts.decode
    ]
    terminal.write("\n" + format_table(["depth", "read per step", "tokens/s"], rows), is_drawn=True)
    rows = [
        [str(item.num_tokens), rate(item.tokens_per_second), duration(item.first_token_seconds)]
        for item in facts.prompts
        if item.tokens_per_second is not None and item.first_token_seconds is not None
    ]
    if facts.prompts[0].first_token_seconds is not None:
        terminal.write("\n" + format_table(["prompt", "tokens/s", "first token"], rows), is_drawn=True)


def _lines(facts: lazy.plan.Plan, source: str, drafter: lazy.plan.DraftPlan | None) -> list[tuple[str, str]]:
    memory = facts.memory
    cache = f"KV cache {size(memory.cache_bytes)} ({memory.cache_type})"
    parts = f"weights {size(memory.weight_bytes)} + {cache}"
    rows = "" if facts.num_rows == 1 else f" in each of {facts.num_rows} rows"
    has_more = memory.largest_context > facts.context
    largest = f"; up to {memory.largest_context} fit" if has_more else " (the maximum)"
    lines = [
        ("model", f"{facts.model}, {facts.precision}, {facts.num_parameters:,} parameters"),
        ("device", f"{facts.device}, reads {facts.read_bytes_per_second / 1e9:,.1f} GB/s ({source})"),
        ("memory", f"needs {size(memory.total_bytes)}; {size(memory.available_bytes)} free"),
        ("", f"{parts} + workspace {size(memory.workspace_bytes)}"),
        ("context", f"{facts.context} tokens{rows}{largest}"),
    ]
    if drafter is not None:
        more, both = size(drafter.memory.total_bytes), size(drafter.bytes_of_both)
        fits = "" if drafter.bytes_of_both <= memory.available_bytes else ", which is not free"
        lines.append(("draft model", f"{drafter.model} needs {more} more, {both} in all{fits}"))
    return lines


def _as_json(facts: lazy.plan.Plan, drafter: lazy.plan.DraftPlan | None) -> dict[str, object]:
    def with_total(memory: lazy.plan.MemoryUse) -> dict[str, object]:
        return {**dataclasses.asdict(memory), "total_bytes": memory.total_bytes}

    record = {**dataclasses.asdict(facts), "memory": with_total(facts.memory)}
    if drafter is not None:
        record["draft"] = {**dataclasses.asdict(drafter), "memory": with_total(drafter.memory)}
    return record
