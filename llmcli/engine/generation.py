"""Generation of one or more samples of one prompt on a runner."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from llmcli.engine.events import Event, Finished, FinishReason, PrefillProgress, Timings, Token
from llmcli.engine.stop_strings import StopStrings
from llmcli.runners.base import Runner
from llmcli.sampling.inspect import Inspection, inspect_choice
from llmcli.sampling.sampler import Sampler
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.stream import StreamDecoder


@dataclass(frozen=True)
class Request:
    """What to generate. `samples` are sample indices: index k draws the same text whichever others are asked for.

    Without `max_new_tokens` a text goes on until it ends or the context is full. `at_start` says that the generated
    text stands alone: then the leading space that some tokenizers put before a text's first word is dropped.
    `sampler` serves every sample, each with its own index. With `num_alternatives`, each token comes with the model's
    and the chain's view of it, listing that many other tokens; this costs some passes over the vocabulary a token.
    """

    prompt_token_ids: tuple[int, ...]
    sampler: Sampler
    samples: tuple[int, ...]
    max_new_tokens: int | None
    stop_strings: tuple[str, ...] = ()
    at_start: bool = False
    num_alternatives: int | None = None


class _Sample:
    """One sample while it is drawn."""

    def __init__(self, index: int, row: int, request: Request, tokenizer: Tokenizer, last_position: int):
        self.index = index
        self.row = row
        self.sampler = replace(request.sampler, sample_index=index, forced_eos_position=last_position)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self._request = request
        self._decoder = StreamDecoder(tokenizer, at_start=request.at_start)
        self._stop_strings = StopStrings(request.stop_strings)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now. Sets `finish_reason` when the sample is over."""
        self.last_token_time = time.perf_counter()
        if not self.token_ids:
            self.first_token_time = self.last_token_time
        self.token_ids.append(token_id)
        if token_id in self.sampler.eos_token_ids:
            self.finish_reason = "eos"
            return ""
        text, is_stopped = self._stop_strings.push(self._decoder.push(token_id))
        self.text += text
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self._request.max_new_tokens:
            self.finish_reason = "length"
        return text

    def flush(self) -> str:
        """Text still held back at the end: an unfinished character, or what might have become a stop string."""
        if self.finish_reason == "stop":
            return ""
        text, is_stopped = self._stop_strings.push(self._decoder.flush())
        tail = text if is_stopped else text + self._stop_strings.flush()
        self.text += tail
        return tail


class Generation:
    """Runs a request; iterate over `events()`.

    Prefill happens once, in row 0. Samples are then decoded side by side, as many as the runner has rows.
    A Ctrl-C may strike anywhere, in here or in the caller: the caller stops iterating and asks `interrupt()` for the
    end of the samples under way.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, request: Request):
        self._runner = runner
        self._tokenizer = tokenizer
        self._request = request
        self._running: list[_Sample] = []
        self._start_time = 0.0
        self._prefill_tokens = 0
        self._prefill_seconds = 0.0

    def events(self) -> Iterator[Event]:
        """Prefill, then the tokens of every sample, each sample closed by its `Finished`."""
        prompt = self._request.prompt_token_ids
        self._start_time = time.perf_counter()
        for num_computed in self._runner.prefill(0, prompt):
            self._prefill_tokens = num_computed
            yield PrefillProgress(num_computed, len(prompt))
        self._prefill_seconds = time.perf_counter() - self._start_time
        num_rows = self._runner.num_rows
        for begin in range(0, len(self._request.samples), num_rows):
            group = self._request.samples[begin : begin + num_rows]
            self._runner.truncate(0, len(prompt))
            for row in range(1, len(group)):
                self._runner.copy_row(0, row)
            self._running = [
                _Sample(index, row, self._request, self._tokenizer, self._last_position())
                for row, index in enumerate(group)
            ]
            while self._running:
                yield from self._decode_until_one_ends()

    def interrupt(self) -> list[Finished]:
        """Close the samples under way, as interrupted where they had not ended by themselves."""
        return [self._finish(sample, sample.finish_reason or "interrupted") for sample in list(self._running)]

    def _last_position(self) -> int:
        """The position of the last token that the limit of new tokens and the context allow."""
        limit = self._request.max_new_tokens
        context = self._runner.max_seq_len
        return (context if limit is None else min(len(self._request.prompt_token_ids) + limit, context)) - 1

    def _decode_until_one_ends(self) -> Iterator[Event]:
        """Decode the running samples side by side; return as soon as fewer are running."""
        running = list(self._running)
        steps = self._runner.decode([sample.row for sample in running], [sample.sampler for sample in running])
        while True:
            before = [self._before_choice(sample) for sample in running]
            token_ids = next(steps, None)
            if token_ids is None:
                break
            for sample, token_id, view in zip(running, token_ids, before, strict=True):
                inspection = view(token_id) if view else None
                if sample.sampler.params.mirostat_tau:
                    # For the next inspection, and for the next stream when another sample ends this one.
                    sample.sampler = replace(sample.sampler, mirostat_mu=self._runner.mirostat_mu(sample.row))
                yield Token(sample.index, token_id, sample.push(token_id), inspection)
            ended = [sample for sample in running if sample.finish_reason is not None]
            if ended:
                steps.close()
                for sample in ended:
                    assert sample.finish_reason is not None
                    yield self._finish(sample, sample.finish_reason)
                return
        for sample in running:
            yield self._finish(sample, "context")

    def _before_choice(self, sample: _Sample) -> Callable[[int], Inspection] | None:
        """What is needed to inspect the sample's next choice, taken before it is made; None if nobody asked."""
        count = self._request.num_alternatives
        if count is None or len(self._runner.token_ids(sample.row)) == self._runner.max_seq_len:
            return None
        logits, sampler = self._runner.logits(sample.row), sample.sampler
        history = list(self._runner.token_ids(sample.row))
        return lambda token_id: inspect_choice(logits, history, sampler, token_id, count)

    def _finish(self, sample: _Sample, reason: FinishReason) -> Finished:
        sample.finish_reason = reason
        self._running.remove(sample)
        tail = sample.flush()
        first_token_seconds = sample.first_token_time - self._start_time if sample.token_ids else 0.0
        timings = Timings(
            prefill_tokens=self._prefill_tokens,
            prefill_seconds=self._prefill_seconds,
            time_to_first_token_seconds=first_token_seconds,
            decode_tokens=max(len(sample.token_ids) - 1, 0),
            decode_seconds=sample.last_token_time - sample.first_token_time,
        )
        return Finished(sample.index, tail, sample.text, tuple(sample.token_ids), reason, timings)
