"""What every form of output gets: the facts of the run, the events as they come, and the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmcli.engine.events import Event, Finished
from llmcli.sampling.params import ResolvedSampling
from llmcli.timeline import Timeline

if TYPE_CHECKING:
    from llmcli.engine.drafts import DraftUsage
    from llmcli.measure.energy import EnergyMeter
    from llmcli.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class RunFacts:
    """A run, before its first token. Samples are indices from 0; people see them numbered from 1.

    `model` is the folder or hub id as it was given, `name` what people call it. `lead` is what the texts continue: the
    prompt, or nothing where they answer one. `timeline` and `meter` are there for
    whoever asked for them. `draft_usage` counts while the run lasts; None where nothing drafts.
    """

    model: str
    name: str
    prompt: str
    lead: str
    prompt_token_ids: tuple[int, ...]
    sampling: ResolvedSampling
    seed: int
    samples: tuple[int, ...]
    load_seconds: float
    cache_type: str
    tokenizer: Tokenizer
    timeline: Timeline | None = None
    meter: EnergyMeter | None = None
    draft_usage: DraftUsage | None = None


class Output(Protocol):
    """One form of output."""

    def show(self, event: Event) -> None:
        """Take the next event."""

    def finish(self, finished: list[Finished]) -> None:
        """Take the end: the samples that ended, in their order, also after a Ctrl-C. There may be none."""
