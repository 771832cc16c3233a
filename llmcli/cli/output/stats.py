"""`--stats`: times, rates, and where each setting came from, on stderr."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmcli.cli.output.base import RunFacts
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, Timings, Token

if TYPE_CHECKING:
    from llmcli.engine.drafts import DraftUsage
    from llmcli.measure.energy import Reading


class StatsOutput:
    """A table at the end; nothing if nothing was generated."""

    def __init__(self, facts: RunFacts):
        self._facts = facts
        self._first_reading: Reading | None = None
        self._last_reading: Reading | None = None
        self._has_started = False

    def show(self, event: Event) -> None:
        """Read the meter, if there is one, at the first token and at every end; the rest is known at the end."""
        if self._facts.meter is None:
            return
        if isinstance(event, Token) and not self._has_started:
            self._has_started = True
            self._first_reading = self._facts.meter.read()
        elif isinstance(event, Finished):
            self._last_reading = self._facts.meter.read()

    def finish(self, finished: list[Finished]) -> None:
        """Print the table."""
        if not finished:
            return
        facts, first = self._facts, finished[0].timings
        decode_tokens = sum(item.timings.decode_tokens for item in finished)
        rows = {
            "load": f"{facts.load_seconds:.2f} s",
            "KV cache": facts.cache_type,
            "time to first token": f"{first.time_to_first_token_seconds:.3f} s",
            "prefill": _rate(first.prefill_tokens, first.prefill_seconds),
            "decode": _rate(decode_tokens, decode_wall_seconds([item.timings for item in finished])),
            **draft_rows(facts.draft_usage),
            **self._energy(decode_tokens),
            "finish reason": ", ".join(item.finish_reason for item in finished),
        }
        for name, value, source in facts.sampling.rows():
            rows[name] = f"{value} ({source})"
        rows["seed"] = str(facts.seed)
        width = max(map(len, rows))
        for name, text in rows.items():
            terminal.show(f"{name:<{width}}  {text}\n")

    def _energy(self, num_tokens: int) -> dict[str, str]:
        """A row for decoding; none without a meter."""
        meter = self._facts.meter
        if meter is None or meter.idle_watts is None:
            return {}
        energy = meter.used(self._first_reading, self._last_reading)
        if energy is None or not num_tokens:
            return {"energy": "the run is too short for the card's counter"}
        joules, watts = energy.joules_per_token(num_tokens), energy.average_watts
        idle = f"{meter.idle_watts:.0f} W just before the run"
        return {"energy": f"{joules:.2g} J/token above the {idle}, {watts:.0f} W in total"}


def draft_rows(usage: DraftUsage | None) -> dict[str, str]:
    """What drafts have brought; nothing where nothing drafts."""
    if usage is None:
        return {}
    rows = {"drafts": f"{usage.num_drafts} drafted"}
    if usage.num_drafts:
        share = usage.num_kept / usage.num_drafts
        steps = f"{usage.steps} steps, {usage.tokens_per_step:.2f} tokens a step"
        rows["drafts"] += f", {usage.num_kept} kept ({share:.0%}); {steps}"
    if usage.step_seconds is not None:
        with_drafts, without = usage.step_seconds
        rows["step"] = f"{with_drafts * 1e3:.2f} ms with drafts, {without * 1e3:.2f} ms without"
        rows["gain of drafts"] = f"{usage.gain:.2f} times as fast"
    return rows


def decode_wall_seconds(timings: Iterable[Timings]) -> float:
    """How long samples were being decoded: the time that several of them share counts once."""
    total = end = 0.0
    for start, stop in sorted(
        (item.time_to_first_token_seconds, item.time_to_first_token_seconds + item.decode_seconds) for item in timings
    ):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def _rate(num_tokens: int, seconds: float) -> str:
    if not num_tokens or not seconds:
        return f"{num_tokens} tokens"
    return f"{num_tokens / seconds:.1f} tokens/s ({num_tokens} tokens in {seconds:.3f} s)"
