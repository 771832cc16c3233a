"""The output of `generate`: text as it comes, or one JSON object, and the statistics."""

import json
from collections.abc import Mapping
from typing import Any

from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, Timings, Token
from llmcli.sampling.params import SPECS, ResolvedSampling

SEPARATOR = "--- sample {number} ---"  # between two samples on stdout, on a line of its own


class TextOutput:
    """Writes each sample's text as it comes, one sample after the other whatever order they are computed in."""

    def __init__(self, samples: tuple[int, ...]):
        self._waiting = list(samples)  # the first of them is being written
        self._pending: dict[int, str] = {sample: "" for sample in samples}
        self._finished: set[int] = set()

    def show(self, event: Event) -> None:
        """Write what the event adds, if it is its sample's turn."""
        if isinstance(event, Token):
            self._pending[event.sample] += event.text
        elif isinstance(event, Finished):
            self._pending[event.sample] += event.tail
            self._finished.add(event.sample)
        while self._waiting:
            sample = self._waiting[0]
            if text := self._pending[sample]:
                self._pending[sample] = ""
                terminal.write(text)
            if sample not in self._finished:
                return
            self._waiting.pop(0)
            separator = f"{SEPARATOR.format(number=self._waiting[0] + 1)}\n" if self._waiting else ""
            terminal.write(f"\n{separator}")


def result_json(
    finished: list[Finished], *, model: str, prompt_token_ids: list[int], seed: int, load_seconds: float, as_list: bool
) -> str:
    """One JSON object: a flat one for a single sample, a list under `samples` for several."""
    common: dict[str, Any] = {"prompt_token_ids": prompt_token_ids, "seed": seed, "model": model}
    samples = [
        {
            "text": item.text,
            "token_ids": list(item.token_ids),
            "finish_reason": item.finish_reason,
            "timings": _timings_json(item.timings, load_seconds),
        }
        for item in finished
    ]
    if as_list:
        numbered = [{"sample": item.sample + 1, **sample} for item, sample in zip(finished, samples, strict=True)]
        return json.dumps({**common, "samples": numbered}, ensure_ascii=False)
    return json.dumps({**samples[0], **common}, ensure_ascii=False)


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


def show_stats(finished: list[Finished], sampling: ResolvedSampling, seed: int, load_seconds: float) -> None:
    """Print times, rates, finish reasons and where each sampling value came from."""
    first = finished[0].timings
    decode_tokens = sum(item.timings.decode_tokens for item in finished)
    decode_seconds = sum(item.timings.decode_seconds for item in finished)
    rows: Mapping[str, str] = {
        "load": f"{load_seconds:.2f} s",
        "time to first token": f"{first.time_to_first_token_seconds:.3f} s",
        "prefill": _rate(first.prefill_tokens, first.prefill_seconds),
        "decode": _rate(decode_tokens, decode_seconds),
        "finish reason": ", ".join(item.finish_reason for item in finished),
        **{name: f"{getattr(sampling.params, name)} ({sampling.sources[name]})" for name in SPECS},
        "seed": str(seed),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        terminal.info(f"{name:<{width}}  {value}")


def _rate(num_tokens: int, seconds: float) -> str:
    if not num_tokens or not seconds:
        return f"{num_tokens} tokens"
    return f"{num_tokens / seconds:.1f} tokens/s ({num_tokens} tokens in {seconds:.3f} s)"
