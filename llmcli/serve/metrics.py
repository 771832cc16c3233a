"""What the server counts, in Prometheus's text format."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llmcli.serve.engine_end import EngineState

_QUANTILES = (0.5, 0.9, 0.99)
_NUM_KEPT = 2048


@dataclass
class Summary:
    """Durations: all are counted, and the latest give the percentiles. Unit: seconds"""

    count: int = 0
    total: float = 0.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.count += 1
        self.total += seconds
        self.latest.append(seconds)


@dataclass
class Metrics:
    """Counts since the start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    new_tokens: int = 0
    request_seconds: Summary = field(default_factory=Summary)
    first_token_seconds: Summary = field(default_factory=Summary)

    def text(self, engine: EngineState, num_texts: int) -> str:
        """The page that Prometheus reads; `num_texts` wait or run."""
        return "".join(f"{line}\n" for line in self._lines(engine, num_texts))

    def _lines(self, engine: EngineState, num_texts: int) -> Iterator[str]:
        usage = engine.usage
        requests = [
            (f'{{path="{path}",status="{status}"}}', count) for (path, status), count in sorted(self.requests.items())
        ]
        yield from _metric("requests_total", "counter", "Requests that have ended", requests)
        yield from _metric("texts_waiting", "gauge", "Texts that have no row yet", [("", engine.num_waiting)])
        yield from _metric("texts", "gauge", "Texts that wait or run", [("", num_texts)])
        yield from _metric("rows", "gauge", "Texts that can run side by side", [("", usage.num_rows)])
        yield from _metric("pages", "gauge", "Pages of the KV cache", [("", engine.num_pages)])
        yield from _metric("pages_free", "gauge", "Pages that no text holds", [("", engine.free_pages)])
        for name, what, count in (
            ("steps_total", "Steps of the model", usage.steps),
            ("row_steps_total", "Steps, times the rows in use", usage.row_steps),
            ("preemptions_total", "Texts that had to give their pages back for a while", usage.preemptions),
            ("prompt_tokens_computed_total", "Tokens of prompts that were run", usage.prompt_tokens_computed),
            ("prompt_tokens_shared_total", "Tokens of prompts whose pages were there", usage.prompt_tokens_shared),
            ("new_tokens_total", "New tokens of requests that have ended", self.new_tokens),
        ):
            yield from _metric(name, "counter", what, [("", count)])
        yield from _summary("request_seconds", "Time of a request for texts", self.request_seconds)
        yield from _summary("first_token_seconds", "Time to a request's first token", self.first_token_seconds)


def _metric(name: str, kind: str, what: str, values: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP llmcli_{name} {what}."
    yield f"# TYPE llmcli_{name} {kind}"
    for labels, value in values:
        yield f"llmcli_{name}{labels} {value}"


def _summary(name: str, what: str, summary: Summary) -> Iterator[str]:
    ordered = sorted(summary.latest)
    values = [
        (f'{{quantile="{quantile}"}}', ordered[math.ceil(quantile * len(ordered)) - 1])
        for quantile in _QUANTILES
        if ordered
    ]
    yield from _metric(name, "summary", what, values)
    yield f"llmcli_{name}_sum {summary.total}"
    yield f"llmcli_{name}_count {summary.count}"
