"""`HostDevice`: a model on the CPU, span by span. It computes a step inside `run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from llmcli.errors import DeviceError, LLMCliError, foreign_errors_explained
from llmcli.runners.base import MAX_SPAN, AllLogits, Arithmetic, Chosen, HiddenStates, Limits, pages_of
from llmcli.runners.host.llama import Hidden, Llama
from llmcli.runners.step_device import SINGLE, Work
from llmcli.sampling.chain import Choice, choose
from llmcli.sampling.params import Sampler

# A matrix product may round differently for another number of tokens, so the chunks of a prompt end at fixed positions:
# at multiples of 16 up to 64, of 64 up to 256, then of 256. Short beginnings can be shared, and long prompts make few
# passes over the weights. Where each chunk widens the weights anew, which takes as long as some 90 tokens, there are
# fewer: at multiples of 128 up to 256, then of 256.
PREFILL_CHUNK = 256
# There a span may have several chunks of up to this many tokens: weights are widened once, each chunk multiplied alone.
WIDENED_SPAN = 512
_CHUNKS = ((64, 16), (256, 64))
_WIDENED_CHUNKS = ((256, 128),)


@dataclass
class _Slot:
    """What a row that chooses has on the device.

    Everything is indexed by position, so a step can be run again if its row was rolled back or never learned of it.
    `token_ids` may hold more tokens than the row; the token chosen after n tokens is token_ids[n]. `mus` are
    mirostat's states, each with the number of tokens before it.
    """

    sampler: Sampler
    token_ids: list[int]
    mus: tuple[tuple[int, float | None], ...] = ()

    def sampler_at(self, position: int) -> Sampler:
        """The sampler as the choices up to `position` have left it."""
        known = [mu for place, mu in self.mus if place <= position]
        return replace(self.sampler, mirostat_mu=known[-1]) if known else self.sampler


class HostDevice:
    """The `StepDevice` of the CPU."""

    def __init__(
        self,
        model: Llama,
        limits: Limits,
        *,
        cache_type: str,
        description: str,
        arithmetic: Arithmetic,
        widens_prompts: bool = False,
    ):
        """With `widens_prompts` each chunk of a prompt widens the weights anew."""
        self.config = model.config
        self.description = description
        self.cache_type = cache_type
        self.arithmetic = arithmetic
        self.limits = limits
        self._model = model
        self._widens_prompts = widens_prompts
        self._slots: dict[int, _Slot] = {}

    def method(self, position: int, prompt_len: int) -> int:
        """The number of tokens in the token's chunk, as a product may depend on it."""
        begin = self.cut(position, prompt_len)
        return min(chunk_end(begin, self._widens_prompts), prompt_len) - begin

    def cut(self, position: int, prompt_len: int) -> int:
        """The beginning of the chunk that `position` is in."""
        size = chunk_size(position, self._widens_prompts)
        return position // size * size

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        """The end of the chunk, or of the last one that fits."""
        return span_end(position, most, prompt_len, self._widens_prompts)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        self._model.copy_page(source, target)

    def set_slot(self, slot: int, sampler: Sampler, token_ids: Sequence[int]) -> None:
        """Give a slot its sampler and the first tokens of its row."""
        self._slots[slot] = _Slot(sampler, list(token_ids))

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        """Give a slot another sampler."""
        this = self._slots[slot]
        this.mus, this.sampler = (), sampler

    def run(self, works: Sequence[Work]) -> HostStep:
        """Run and choose. A step that an interrupt ends is not recorded; it can be run again."""
        results, prompt_seconds = [], 0.0
        for work in works:
            begin = time.perf_counter()
            results.append(self._run(work))
            if work.token_ids:
                prompt_seconds += time.perf_counter() - begin
        for work, result in zip(works, results, strict=True):
            self._take(work, result)
        return HostStep(self._model, results, prompt_seconds)

    def hidden_states(self, work: Work, inputs: HiddenStates | None) -> HiddenStates:
        """Run a work layer by layer; see `StepDevice.hidden_states`."""
        parts = self._parts(work, work.num_tokens)
        token_ids = [work.token_ids[part] for part in parts]
        with foreign_errors_explained("running the model", DeviceError):
            states = self._model.hidden_states(token_ids, work.position, work.pages, inputs)
        self._take(work, _Result(work, work.token_ids, parts, states[-1], ()))
        return states

    def _run(self, work: Work) -> _Result:
        token_ids = self._token_ids(work)
        parts = self._parts(work, len(token_ids))
        hidden = self._forward(work, token_ids, parts) if token_ids else None
        if work.choose == "none":
            return _Result(work, token_ids, parts, hidden, ())
        assert work.slot is not None
        slot = self._slots[work.slot]
        history = [*slot.token_ids[: work.position], *token_ids]
        if work.drafts:
            assert hidden is not None
            chosen = self._verify(work, slot, history, hidden)
            num_kept = len(chosen) if isinstance(chosen, tuple) else 1
            return _Result(work, token_ids[:num_kept], parts, hidden, chosen)
        if work.logits is not None:
            logits = work.logits[None]
        else:
            assert hidden is not None
            logits = project(self._model, np.split(hidden, len(hidden)) if work.choose == "every" else [hidden[-1:]])
        choices: list[Choice] = []
        sampler = slot.sampler_at(work.position)
        try:
            masks = None if work.masks is None else work.masks()
            for index, of_token in enumerate(logits):
                place = len(history) - len(logits) + 1 + index
                mask = None if masks is None else masks[index]
                choices.append(choose(of_token, history[:place], sampler, mask=mask))
                sampler = replace(sampler, mirostat_mu=choices[-1].mirostat_mu)
        except LLMCliError as error:
            return _Result(work, token_ids, parts, hidden, error)
        return _Result(work, token_ids, parts, hidden, tuple(choices))

    def _verify(self, work: Work, slot: _Slot, history: list[int], hidden: Hidden) -> Chosen:
        """Choose after each draft whose predecessors were chosen; see `Span.drafts`."""
        choices: list[Choice] = []
        sampler = slot.sampler_at(work.position)
        try:
            masks = None if work.masks is None else work.masks()
        except LLMCliError as error:
            return error
        for place, draft in enumerate((*work.drafts, None)):
            (logits,) = project(self._model, [hidden[place : place + 1]])
            mask = None if masks is None else masks[place]
            try:
                choices.append(choose(logits, history[: work.position + place + 1], sampler, mask=mask))
            except LLMCliError as error:
                return tuple(choices) or error
            sampler = replace(sampler, mirostat_mu=choices[-1].mirostat_mu)
            if choices[-1].token_id != draft:
                break
        return tuple(choices)

    def _take(self, work: Work, result: _Result) -> None:
        if work.slot is None:
            return
        slot = self._slots[work.slot]
        chosen = result.chosen if isinstance(result.chosen, tuple) else ()
        slot.token_ids[work.position :] = [*result.token_ids, *(choice.token_id for choice in chosen[-1:])]
        if slot.sampler.params.mirostat_tau:
            first = work.position + len(result.token_ids) - len(chosen) + 1
            before = [(place, mu) for place, mu in slot.mus if place <= work.position]
            after = [(place, choice.mirostat_mu) for place, choice in enumerate(chosen, first)]
            slot.mus = (*before[-1:], *after)

    def _token_ids(self, work: Work) -> tuple[int, ...]:
        if work.token_ids or work.num_tokens == 0:
            return work.token_ids  # drafts follow a token that the slot knows
        known = [] if work.slot is None else self._slots[work.slot].token_ids
        if len(known) <= work.position:
            raise ValueError("the row has no chosen token to run next")
        return (known[work.position], *work.drafts)

    def _forward(self, work: Work, token_ids: Sequence[int], parts: Sequence[slice]) -> Hidden:
        with foreign_errors_explained("running the model", DeviceError):
            return self._model.forward([token_ids[part] for part in parts], work.position, work.pages)

    def _parts(self, work: Work, num_tokens: int) -> list[slice]:
        """The parts of a span that are computed alone: single tokens, or chunks of a prompt."""
        if work.method == SINGLE:
            return [slice(first, first + 1) for first in range(num_tokens)]
        sizes = chunks(work.position, work.position + num_tokens, self._widens_prompts)
        return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


@dataclass(frozen=True)
class _Result:
    """The result of a span.

    `token_ids` are those that the row keeps. `hidden` is None if nothing ran, else that of all tokens that ran; its
    `parts` were computed alone.
    """

    work: Work
    token_ids: tuple[int, ...]
    parts: Sequence[slice]
    hidden: Hidden | None
    chosen: Chosen


class HostStep:
    """A step that has been computed."""

    def __init__(self, model: Llama, results: Sequence[_Result], prompt_seconds: float):
        self._model = model
        self._results = results
        self._prompt_seconds = prompt_seconds

    def choices(self) -> list[Chosen]:
        """What each span has chosen."""
        return [result.chosen for result in self._results]

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """The logits after the tokens from `first` on."""
        result = self._results[span]
        if result.work.logits is not None:
            return result.work.logits[None]
        assert result.hidden is not None
        parts = [slice(max(part.start, first), part.stop) for part in result.parts if part.stop > first]
        return project(self._model, [result.hidden[part] for part in parts])

    def prompt_seconds(self) -> float:
        """The time of spans that name their tokens."""
        return self._prompt_seconds


def limits_of(num_rows: int, max_seq_len: int, *, weight_bytes: int, cache_bytes: int) -> Limits:
    """The limits of a device that has pages for all its rows at full length."""
    return Limits(
        num_rows,
        max_seq_len,
        num_rows * pages_of(max_seq_len),
        works_ahead=False,
        max_drafts=MAX_SPAN - 1,
        takes_masks=True,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
    )


def project(model: Llama, hidden: Sequence[Hidden]) -> AllLogits:
    """Scores of every vocabulary entry, part by part; parts of one token have the bits of single steps.

    Shapes: result [num_tokens, vocab_size]
    """
    with foreign_errors_explained("running the model", DeviceError):
        parts = [model.logits(part) for part in hidden]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def chunk_size(position: int, widens_prompts: bool) -> int:
    """The size of the chunk that a position is in, where each chunk widens the weights or not."""
    chunks = _WIDENED_CHUNKS if widens_prompts else _CHUNKS
    return next((size for end, size in chunks if position < end), PREFILL_CHUNK)


def chunk_end(position: int, widens_prompts: bool) -> int:
    """Where the chunk that a position is in ends."""
    size = chunk_size(position, widens_prompts)
    return (position // size + 1) * size


def chunks(begin: int, end: int, widens_prompts: bool) -> list[int]:
    """The sizes of the chunks from `begin` to `end`; the last one may be cut short."""
    sizes = []
    while begin < end:
        sizes.append(min(chunk_end(begin, widens_prompts), end) - begin)
        begin += sizes[-1]
    return sizes


def span_end(position: int, most: int, prompt_len: int, widens_prompts: bool) -> int:
    """Where a span of a prompt ends: with its first chunk, or with the last one that fits into `most` tokens."""
    end = min(chunk_end(position, widens_prompts), prompt_len)
    farthest = min(position + min(most, WIDENED_SPAN), prompt_len)
    while widens_prompts and end < farthest and (next_end := min(chunk_end(end, True), prompt_len)) <= farthest:
        end = next_end
    return end
