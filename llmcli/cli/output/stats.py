"""`--stats`: times, rates, and where each setting came from, on stderr."""

from collections.abc import Iterable

from llmcli.cli.output.base import RunFacts
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, Timings


class StatsOutput:
    """A table at the end; nothing if nothing was generated."""

    def __init__(self, facts: RunFacts):
        self._facts = facts

    def show(self, event: Event) -> None:
        """The end says it all."""

    def finish(self, finished: list[Finished]) -> None:
        """Print the table."""
        if not finished:
            return
        facts, first = self._facts, finished[0].timings
        decode_tokens = sum(item.timings.decode_tokens for item in finished)
        rows = {
            "load": f"{facts.load_seconds:.2f} s",
            "time to first token": f"{first.time_to_first_token_seconds:.3f} s",
            "prefill": _rate(first.prefill_tokens, first.prefill_seconds),
            "decode": _rate(decode_tokens, decode_wall_seconds([item.timings for item in finished])),
            "finish reason": ", ".join(item.finish_reason for item in finished),
        }
        for name, value in vars(facts.sampling.params).items():
            rows[name] = f"{value} ({facts.sampling.sources[name]})"
        rows["seed"] = str(facts.seed)
        width = max(map(len, rows))
        for name, text in rows.items():
            terminal.info(f"{name:<{width}}  {text}")


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
