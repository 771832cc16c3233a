"""`Sample`: one text while it is generated: its tokens, the text that is certain so far, and how it ends."""

import time
from collections.abc import Callable
from dataclasses import replace

from llmcli.engine.events import Finished, FinishReason, Timings
from llmcli.engine.request import Request
from llmcli.engine.stop_strings import StopStrings
from llmcli.runners.base import Logits
from llmcli.sampling.inspect import Inspection, inspect_choice
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.stream import StreamDecoder


class Sample:
    """A sample of a request, with the tokens that the request gives it. It knows nothing of rows and steps.

    Attributes: finish_reason: set by the token that ends the sample; max_tokens: the most tokens it can have;
    held_text: how far it has come in its schema, None without one
    """

    def __init__(self, number: int, request: Request, index: int, tokenizer: Tokenizer, max_seq_len: int):
        """`number` is the request's, `index` the sample's."""
        room = max_seq_len - len(request.prompt_token_ids)
        limit = request.max_new_tokens
        self.number = number
        self.request = request
        self.index = index
        self.max_tokens = room if limit is None else min(limit, room)
        self.sampler = replace(
            request.sampler,
            sample_index=index,
            # A text held to a schema ends only where the schema lets it.
            forced_eos_position=None if request.schema else len(request.prompt_token_ids) + self.max_tokens - 1,
        )
        self.held_text = None if request.schema is None else request.schema.begin(at_start=request.at_start)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = "length" if limit == 0 else None
        self.start_time = 0.0  # of the request's prompt
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self._first_token_time = 0.0
        self._last_token_time = 0.0
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, at_start=request.at_start)
        self._stop_strings = StopStrings(request.stop_strings)
        for token_id in request.said:
            self.push(token_id, None)
        self._first_token_time = 0.0

    def push(self, token_id: int, mirostat_mu: float | None) -> str:
        """Take the next token; return the text that it makes certain. Set `finish_reason` if the sample is over."""
        self._last_token_time = time.perf_counter()
        self._first_token_time = self._first_token_time or self._last_token_time
        self.token_ids.append(token_id)
        if self.held_text is not None:
            self.held_text.push(token_id)
        if mirostat_mu is not None:
            self.sampler = replace(self.sampler, mirostat_mu=mirostat_mu)
        is_end = token_id in self.sampler.eos_token_ids
        text = "" if is_end else self._decoder.push(token_id)
        special = "" if text or self._stop_strings.is_empty else self._tokenizer.special_text(token_id)
        if is_end and not self._stop_strings.is_completed_by(special):
            self.finish_reason = "eos"
            return ""
        text, is_stopped = self._stop_strings.push(text, special)
        self.text += text
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length" if self.max_tokens == self.request.max_new_tokens else "context"
        return text

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The first drafts, as far as the text can go on with them."""
        return drafts if self.held_text is None else drafts[: self.held_text.num_fitting(drafts)]

    def inspection(self, logits: Logits) -> Callable[[int], Inspection] | None:
        """A function that inspects the choice made from these logits; None if the request wants no alternatives."""
        count = self.request.num_alternatives
        if count is None:
            return None
        history, sampler = [*self.request.prompt_token_ids, *self.token_ids], self.sampler
        mask = None if self.held_text is None else self.held_text.mask()
        return lambda token_id: inspect_choice(logits, history, sampler, token_id, count, mask)

    def finish(self, reason: FinishReason) -> Finished:
        """End the sample; flush held-back text: an unfinished character, or a possible start of a stop string.

        Of a text held to a schema an unfinished character is dropped: a replacement character may not be allowed there.
        """
        self.finish_reason = reason
        tail = ""
        if reason != "stop":
            text, is_stopped = self._stop_strings.push("" if self.held_text is not None else self._decoder.flush())
            tail = text if is_stopped else text + self._stop_strings.flush()
            self.text += tail
        num_chosen = len(self.token_ids) - len(self.request.said)
        timings = Timings(
            prefill_tokens=self.prefill_tokens,
            prefill_seconds=self.prefill_seconds,
            time_to_first_token_seconds=self._first_token_time - self.start_time if num_chosen else 0.0,
            decode_tokens=max(num_chosen - 1, 0),
            decode_seconds=self._last_token_time - self._first_token_time,
        )
        is_complete = None
        if self.held_text is not None:
            is_complete = reason != "stop" and self.held_text.is_complete
        return Finished(self.index, tail, self.text, tuple(self.token_ids), reason, timings, self.number, is_complete)
