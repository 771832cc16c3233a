"""JSON for programs: one object at the end, or one line for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcli.cli.output.base import RunFacts
from llmcli.cli.output.start import start_json
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, Timings, Token

if TYPE_CHECKING:
    from llmcli.sampling.inspect import Inspection, TokenLogprob


class JsonOutput:
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
        samples = [self._sample_json(item) for item in finished]
        if len(facts.samples) > 1:
            numbered = [{"sample": item.sample + 1, **values} for item, values in zip(finished, samples, strict=True)]
            terminal.write_json({**common, "samples": numbered})
        else:
            terminal.write_json({**samples[0], **common})

    def _sample_json(self, item: Finished) -> dict[str, Any]:
        values = sample_json(item, self._facts.load_seconds)
        return values if self._logprobs is None else {**values, "logprobs": self._logprobs[item.sample]}


class JsonLinesOutput:
    """One object a line: first the run, then each token as it comes, and for each sample its end."""

    def __init__(self, facts: RunFacts):
        self._facts = facts
        terminal.write_json(
            {
                "type": "run",
                "model": facts.model,
                "seed": facts.seed,
                "prompt_token_ids": list(facts.prompt_token_ids),
            }
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
                    "text": event.tail,  # what was held back: all texts of a sample in a row are its whole text
                    "finish_reason": event.finish_reason,
                    **_completeness(event),
                    "timings": _timings_json(event.timings, self._facts.load_seconds),
                }
            )

    def finish(self, finished: list[Finished]) -> None:
        """Write where the time to the first token went, for whoever asked; everything else has been written."""
        if self._facts.timeline is not None:
            terminal.write_json({"type": "start", **(start_json(self._facts.timeline) or {})})


def sample_json(item: Finished, load_seconds: float) -> dict[str, Any]:
    """What there is to say about one text."""
    return {
        "text": item.text,
        "token_ids": list(item.token_ids),
        "finish_reason": item.finish_reason,
        **_completeness(item),
        "timings": _timings_json(item.timings, load_seconds),
    }


def _completeness(item: Finished) -> dict[str, bool]:
    """Whether a text that is held to a schema is complete; nothing for any other."""
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
