"""The inputs of every output, and the plain forms: text as it comes, JSON for programs, and `--stats` on stderr."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.cli.tables import aligned_lines
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Event, Finished, PrefillProgress, Timings, Token
from llmcli.sampling.params import ResolvedSampling
from llmcli.timeline import Part, Timeline

if TYPE_CHECKING:
    from llmcli.engine.drafts import DraftUsage
    from llmcli.measure.energy import EnergyMeter, Reading
    from llmcli.sampling.inspect import Inspection, TokenLogprob
    from llmcli.tokenizer.base import Tokenizer

BAR_CELLS = 40
_SHADES = " ░▒▓█"
_SHORTEST = 0.0005  # shorter parts get no row: their milliseconds would read 0.000


@dataclass(frozen=True)
class RunFacts:
    """A run, before its first token. Samples are indices from 0; users see them numbered from 1.

    `model` is the folder or hub id as given, `name` the name shown. `lead` is what the texts continue: the prompt, or
    nothing if they answer it. `timeline` and `meter` are set if requested. `draft_usage` counts during the run; None
    without drafts.
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


class Output:
    """One form of output; by itself it writes nothing."""

    def show(self, event: Event) -> None:
        """Take the next event."""

    def finish(self, finished: list[Finished]) -> None:
        """Take the end: the samples that ended, in their order, also after a Ctrl-C. There may be none."""


def begin_text(facts: RunFacts, sample: int) -> None:
    """Write what precedes a sample: a heading on stdout if there are several, and on a terminal the prompt."""
    if len(facts.samples) > 1:
        terminal.write(f"--- sample {sample + 1} ---\n")
    terminal.show_prompt(facts.lead)


class TextOutput(Output):
    """Writes each sample's text as it comes, in any order of computation.

    The caller begins the first with `begin_text`, so that the prompt is visible while it is computed.
    """

    is_drawn = False  # whether `style` adds control sequences

    def __init__(self, facts: RunFacts):
        self._facts = facts
        self._waiting = list(facts.samples)  # the first of them is being written
        self._pending: dict[int, str] = {sample: "" for sample in facts.samples}
        self._finished: set[int] = set()

    def show(self, event: Event) -> None:
        """Write what the event adds, if it is the sample's turn."""
        if isinstance(event, Token):
            self._pending[event.sample] += self.style(event)
        elif isinstance(event, Finished):
            self._pending[event.sample] += event.tail
            self._finished.add(event.sample)
        while self._waiting:
            sample = self._waiting[0]
            if text := self._pending[sample]:
                self._pending[sample] = ""
                terminal.write(text, is_drawn=self.is_drawn, wraps=True)
            if sample not in self._finished:
                return
            self._waiting.pop(0)
            terminal.write("\n")
            if self._waiting:
                begin_text(self._facts, self._waiting[0])

    def style(self, token: Token) -> str:
        """The token's text as it is written."""
        return token.text


@dataclass(frozen=True)
class CutNotice(Output):
    """One line on stderr.

    `default` is the number of new tokens if none was requested, None if one was or there is no limit.
    `longest` is the largest context of the model.
    """

    default: int | None
    context: int
    longest: int

    def finish(self, finished: Sequence[Finished]) -> None:
        """Name the limits, each once."""
        reasons = {one.finish_reason for one in finished}
        if "length" in reasons and self.default is not None:
            terminal.info(f"stopped at {self.default} new tokens; --max-new-tokens N for more")
        if "context" in reasons:
            remedy = "; --context N for more" if self.context < self.longest else ", the model's largest"
            terminal.info(f"stopped: the context of {self.context} tokens is full{remedy}")


class StartOutput(Output):
    """A table at the end, one row a part; nothing if no token came."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._begin = timeline.now()

    def show(self, event: Event) -> None:
        """Take the times of the prompt and of the first token; the timeline ends there."""
        timeline = self._timeline
        if timeline.end is not None:
            return
        if isinstance(event, PrefillProgress) and event.num_computed > 0:
            timeline.since("prefill", self._begin)
        elif isinstance(event, Token):
            timeline.since("first sample", self._begin)
            timeline.finish()
        self._begin = timeline.now()

    def finish(self, finished: list[Finished]) -> None:
        """Print the table."""
        for line in start_table(self._timeline):
            terminal.show(f"{line}\n")


def start_table(timeline: Timeline) -> list[str]:
    """The lines of the table; none before the timeline has ended."""
    end = timeline.end
    if end is None:
        return []
    counted = [part for part in timeline.parts if not part.is_beside]
    shown = [part for part in timeline.parts if part.seconds >= _SHORTEST]
    other = timeline.other_seconds + sum(part.seconds for part in counted if part not in shown)
    rows = [_start_row(part, end) for part in shown]
    rows.append(("other", "", f"{other:.3f} s", f"{other / end:.1%}", ""))
    rows.append(("start to first token", "", f"{end:.3f} s", "100.0%", ""))
    rows.insert(0, ("part", "begins", "takes", "share", ""))
    lines = aligned_lines(rows, "<>>><")
    if any(part.is_beside for part in shown):
        lines.append("beside: done by another thread meanwhile, not in the sum")
    largest = max(counted, key=lambda part: part.seconds)
    lines.append(f"largest part: {largest.name}, {largest.seconds:.3f} s of {end:.3f} s ({largest.seconds / end:.1%})")
    return lines


def start_json(timeline: Timeline) -> dict[str, Any] | None:
    """The table for programs; None before the timeline has ended."""
    if timeline.end is None:
        return None
    return {
        "seconds": timeline.end,
        "parts": [
            {
                "name": part.name,
                "note": part.note,
                "beside": part.is_beside,
                "begin_seconds": part.begin,
                "seconds": part.seconds,
            }
            for part in timeline.parts
        ],
        "other_seconds": timeline.other_seconds,
    }


def _start_row(part: Part, end: float) -> tuple[str, str, str, str, str]:
    name = f"{part.name} ({part.note})" if part.note else part.name
    share = "beside" if part.is_beside else f"{part.seconds / end:.1%}"
    return name, f"{part.begin:.3f} s", f"{part.seconds:.3f} s", share, _start_bar(part, end)


def _start_bar(part: Part, end: float) -> str:
    """When the part ran: the darker a cell, the more of its time."""
    covered = [0.0] * BAR_CELLS
    for begin, stop in part.intervals:
        first, last = begin / end * BAR_CELLS, min(stop / end, 1.0) * BAR_CELLS
        for cell in range(int(first), min(int(last) + 1, BAR_CELLS)):
            covered[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
    # Any activity in a cell shows in it.
    return "".join(_SHADES[min(math.ceil(share * 4), 4)] for share in covered).rstrip()


class StatsOutput(Output):
    """A table at the end; nothing if nothing was generated."""

    def __init__(self, facts: RunFacts):
        self._facts = facts
        self._first_reading: Reading | None = None
        self._last_reading: Reading | None = None
        self._has_started = False

    def show(self, event: Event) -> None:
        """Read the meter, if there is one, at the first token and at every end; the rest follows at the end."""
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
        for line in aligned_lines(list(rows.items()), "<<"):
            terminal.show(f"{line}\n")

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
    """The gain of drafts; nothing without drafts."""
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
    """Seconds of decoding; time shared by several samples counts once."""
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


class JsonOutput(Output):
    """One object: flat for a single sample, with a list under `samples` for several."""

    def __init__(self, facts: RunFacts, with_logprobs: bool):
        self._facts = facts
        self._logprobs: dict[int, list[dict[str, Any]]] | None = None
        if with_logprobs:
            self._logprobs = {sample: [] for sample in facts.samples}

    def show(self, event: Event) -> None:
        """Collect log-probabilities."""
        if self._logprobs is not None and isinstance(event, Token) and event.inspection is not None:
            self._logprobs[event.sample].append(_logprobs_json(event.inspection))

    def finish(self, finished: list[Finished]) -> None:
        """Write the object, if anything was generated."""
        if not finished:
            return
        facts = self._facts
        common = {"prompt_token_ids": list(facts.prompt_token_ids), "seed": facts.seed, "model": facts.model}
        if facts.timeline is not None:
            common["start"] = start_json(facts.timeline)
        samples = [sample_json(item, facts.load_seconds) for item in finished]
        if self._logprobs is not None:
            for item, values in zip(finished, samples, strict=True):
                values["logprobs"] = self._logprobs[item.sample]
        if len(facts.samples) > 1:
            numbered = [{"sample": item.sample + 1, **values} for item, values in zip(finished, samples, strict=True)]
            terminal.write_json({**common, "samples": numbered})
        else:
            terminal.write_json({**samples[0], **common})


class JsonLinesOutput(Output):
    """One object a line: first the run, then each token as it comes, and for each sample its end."""

    def __init__(self, facts: RunFacts):
        self._facts = facts
        terminal.write_json(
            {"type": "run", "model": facts.model, "seed": facts.seed, "prompt_token_ids": list(facts.prompt_token_ids)}
        )

    def show(self, event: Event) -> None:
        """Write a token or the end of a sample."""
        if isinstance(event, Token):
            values: dict[str, Any] = {"sample": event.sample + 1, "token_id": event.token_id, "text": event.text}
            if event.inspection is not None:
                values |= _logprobs_json(event.inspection)
            terminal.write_json({"type": "token", **values})
        elif isinstance(event, Finished):
            terminal.write_json(
                {
                    "type": "finished",
                    "sample": event.sample + 1,
                    "text": event.tail,  # what was held back: a sample's texts joined are its whole text
                    "finish_reason": event.finish_reason,
                    **_completeness(event),
                    "timings": _timings_json(event.timings, self._facts.load_seconds),
                }
            )

    def finish(self, finished: list[Finished]) -> None:
        """Write the parts of the time to the first token if requested; all else is written."""
        if self._facts.timeline is not None:
            terminal.write_json({"type": "start", **(start_json(self._facts.timeline) or {})})


def sample_json(item: Finished, load_seconds: float) -> dict[str, Any]:
    """The facts about one text."""
    return {
        "text": item.text,
        "token_ids": list(item.token_ids),
        "finish_reason": item.finish_reason,
        **_completeness(item),
        "timings": _timings_json(item.timings, load_seconds),
    }


def _completeness(item: Finished) -> dict[str, bool]:
    """Whether a text with a schema is complete; nothing for others."""
    return {} if item.is_complete is None else {"is_complete": item.is_complete}


def _logprobs_json(inspection: Inspection) -> dict[str, Any]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token_id": token.token_id, "logprob": token.logprob}

    return {**entry(inspection.chosen), "top_logprobs": [entry(token) for token in inspection.alternatives]}


def _timings_json(timings: Timings, load_seconds: float) -> dict[str, float | int | None]:
    return {
        "load_seconds": load_seconds,
        "time_to_first_token_seconds": timings.time_to_first_token_seconds,
        "prefill_tokens": timings.prefill_tokens,
        "prefill_seconds": timings.prefill_seconds,
        "prefill_tokens_per_second": timings.prefill_tokens_per_second,
        "decode_tokens": timings.decode_tokens,
        "decode_seconds": timings.decode_seconds,
        "decode_tokens_per_second": timings.decode_tokens_per_second,
    }
