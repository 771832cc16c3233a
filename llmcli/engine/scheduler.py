"""`Scheduler`: generates many texts at once on one runner, step by step. Every command that runs a model uses it.

Texts get rows in the order of their requests, or in that of `FairOrder` if several clients ask. In a step every
running row chooses a token, and a few tokens of new prompts run, so that no row waits long. When pages run out, the
last row in that order gives its pages back and runs again later. Its text stays the same: a row's bits depend on its
tokens alone.

A Ctrl-C may come in any call. It is held back while a row changes hands, so no row is lost.
"""

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import takewhile

from llmcli.engine import steps
from llmcli.engine.drafts import Drafting
from llmcli.engine.request import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    Request,
    Scored,
    ScoreRequest,
    Token,
    prompt_scores,
)
from llmcli.engine.texts import (
    FairOrder,
    Queued,
    Sample,
    Score,
    Shared,
    SharedPrompts,
    Text,
    Usage,
    client_of,
    is_worth_a_row,
    number_of,
    open_row,
)
from llmcli.errors import LLMCliError
from llmcli.runners.base import AllLogits, Runner, Span, Step
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.tokenizer.base import Tokenizer

WAIT_SECONDS = 0.022  # a pause that a person hardly sees


class Scheduler:
    """See the module. For one thread."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        *,
        wait_seconds: float = WAIT_SECONDS,
        drafting: Drafting | None = None,
    ):
        """Texts need the tokenizer; scores do not. In a step, running rows wait `wait_seconds` for new prompts.

        Drafts are made only if the runner verifies them.
        """
        self.runner = runner
        self.usage = Usage(runner.limits.num_rows)
        self._tokenizer = tokenizer
        self._drafting = drafting if runner.limits.max_drafts else None
        self._waiting: list[Text | Score] = []  # sorted by `order`
        self._fills: list[steps.AnyFill] = []
        self._running: list[Text] = []
        self._prompts = SharedPrompts(runner)
        self._queued: deque[Queued] = deque()
        self._events: list[Event] = []  # from the latest step
        self._num_requests = 0
        self._order = FairOrder()
        self._budget = steps.FillBudget(wait_seconds)
        self._filled: list[tuple[Step, int]] = []  # spans of prompts since the latest choices, with their tokens

    @property
    def num_waiting(self) -> int:
        """Texts that have no row yet."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no text or score waits or runs."""
        return not (self._waiting or self._fills or self._running)

    def submit(self, request: Request | ScoreRequest) -> int:
        """Queue a request for texts or scores; return its number, which its events carry."""
        number = self._num_requests = self._num_requests + 1
        if isinstance(request, ScoreRequest):
            order = self._order.enter(request.client, len(request.token_ids), 0)
            insort(self._waiting, Score(order, request, number))
            return number
        if self._tokenizer is None:
            raise ValueError("texts need a tokenizer")
        if request.scores_prompt:  # before its texts
            order = self._order.enter(request.client, len(request.prompt_token_ids), 0)
            insort(self._waiting, Score(order, prompt_scores(request), number))
        is_shared = len(request.samples) > 1 and not request.said
        shared: Shared | None = None
        for index in request.samples:
            sample = Sample(number, request, index, self._tokenizer, self.runner.limits.max_seq_len)
            order = self._order.enter(request.client, len(request.prompt_token_ids), sample.max_tokens)
            if is_shared and shared is None:
                shared = Shared(order, request, number, len(request.samples))
            insort(self._waiting, Text(order, sample, shared))
        return number

    def cancel(self, request: int) -> None:
        """Drop a request. Its rows are free at once, and it has no further events."""
        with interrupts_held_back():
            self._events = [event for event in self._events if event.request != request]
            for one in [one for one in self._waiting if number_of(one) == request]:
                self._waiting.remove(one)
                self._leave(one)
            for fill in [fill for fill in self._fills if number_of(fill.owner) == request]:
                self._abandon(fill)
                self._leave(fill.owner)
            for text in [text for text in self._running if text.sample.number == request]:
                self._running.remove(text)
                self._close(text)
                self._leave(text)
            self._prompts.close(lambda shared: shared.number == request)

    def interrupt(self) -> list[Event]:
        """Finish running texts as interrupted, and drop all other requests. Also return the events not yet taken."""
        with interrupts_held_back():
            self._waiting.clear()
            for fill in list(self._fills):
                self._abandon(fill)
            self._queued.clear()
            self._prompts.close(lambda shared: True)
            for text in self._running:
                self._close(text)
            ended = [text.sample.finish("interrupted") for text in self._running]
            events, self._events = [*self._events, *ended], []
            self._running.clear()
            self._order = FairOrder()
            return events

    def step(self) -> list[Event]:
        """Run one step and return its events; there may be none.

        Take events out of the returned list one by one: `interrupt` then returns those left in it.
        Raises: DeviceError and what the runner raises; an error of one text alone is a `Failed` event
        """
        events: list[Event] = []
        self._events = events
        is_alone, num_earlier = not self._running, len(self._queued)
        self._fill(events)
        if not (is_alone and events):  # a lone prompt reports its progress at once
            # Wait only for the step before: the device runs this one while the host prepares the next.
            is_ahead = self._queue_choices() and self._works_ahead()
            for _ in range(num_earlier if is_ahead else len(self._queued)):
                self._collect(self._queued.popleft(), events)
            if not is_ahead and self._works_ahead():
                self._queue_choices()  # the device works while the client takes these events
        return events

    # Prompts

    def _fill(self, events: list[Event]) -> None:
        """Run spans of prompts, as many as running rows can wait for.

        If no row runs, run one span at most, and stop after an event: the user should see progress.
        """
        is_alone, seconds = not self._running, 0.0
        if self._fills and self._waiting and self._goes_first(self._waiting[0], self._fills[0].owner):
            self._start_next(events, ())
        while True:
            start = partial(self._start_next, events)
            together = steps.prompt_spans(self.runner, self._budget, self._fills, start, is_alone=is_alone)
            if not together or (is_alone and events) or not self._budget.has_room(seconds, steps.num_tokens(together)):
                return
            beside = [fill for fill, _ in together]
            together = list(takewhile(partial(self._reserve_fill, beside), together))
            if not together:
                return
            step = self._run_fills(together, events)
            if is_alone:
                return
            self._filled.append((step, steps.num_tokens(together)))
            seconds += self._budget.seconds(steps.num_tokens(together))

    def _start_next(self, events: list[Event], beside: Sequence[steps.AnyFill]) -> steps.AnyFill | None:
        """Give the first waiting text or score a row. Return the fill that must run first; None if none can start.

        A sample whose prompt has run needs no fill: it starts at once, and the next one is tried. `beside` are the
        other fills of the step.
        """
        with interrupts_held_back():
            return self._start_first(events, beside)

    def _start_first(self, events: list[Event], beside: Sequence[steps.AnyFill]) -> steps.AnyFill | None:
        while self._waiting:
            first = self._waiting[0]
            if beside and not steps.may_join(first, beside):
                return None
            try:
                if isinstance(first, Score):
                    return self._begin(first, self.runner.open(first.request.token_ids[:-1]), events)
                if any(
                    isinstance(one.owner, Score) and number_of(one.owner) == number_of(first) for one in self._fills
                ):
                    return None  # the scores of its prompt come before its end
                if first.sample.finish_reason or first.sample.max_tokens == 0:
                    self._forget_waiting(first)
                    self._leave(first)
                    events.append(first.sample.finish(first.sample.finish_reason or "context"))
                    continue
                shared = first.shared
                if shared is not None and not first.sample.token_ids:
                    if shared.row is None:
                        shared.start_time = shared.start_time or time.perf_counter()
                        return self._begin(shared, self.runner.open(shared.request.prompt_token_ids), events)
                    is_filling = any(fill.owner is shared for fill in self._fills)
                    if is_filling or not self._find_row(first, beside):
                        return None
                    self._fork(first, shared, shared.row)
                    continue
                if not self._find_row(first, beside):
                    return None
                return self._begin(first, open_row(self.runner, first.sample), events)
            except LLMCliError as error:
                if not isinstance(first, Text):
                    raise
                self._forget_waiting(first)
                self._leave(first)
                events.append(Failed(first.sample.index, error, first.sample.number))
        return None

    def _begin(self, owner: Text | Score | Shared, row: int, events: list[Event]) -> steps.AnyFill:
        owner.row = row
        said: Sequence[int] = ()
        if isinstance(owner, Score):
            self._waiting.remove(owner)
            self.runner.keep(row, 0)  # shared tokens would have no logits
            prompt: Sequence[int] = owner.request.token_ids[:-1]
        elif isinstance(owner, Shared):
            prompt = owner.request.prompt_token_ids
        else:
            self._forget_waiting(owner)
            prompt, said = owner.sample.request.prompt_token_ids, owner.sample.token_ids
            owner.turn += 1
            owner.num_queued = len(said)
            owner.sample.start_time = owner.sample.start_time or time.perf_counter()
        chooses, num_shared = isinstance(owner, Text), self.runner.num_tokens(row)
        first_read = (owner.request.first if isinstance(owner, Score) else len(prompt) + len(said)) - 1
        fill: steps.AnyFill = steps.Fill(owner, row, prompt, said, num_shared, first_read, chooses=chooses)
        insort(self._fills, fill, key=lambda one: one.owner.order)
        if not said:
            self.usage.prompt_tokens_shared += fill.num_shared
            if not isinstance(owner, Score):
                events.append(PrefillProgress(0, len(prompt), number_of(owner)))
        return fill

    def _fork(self, text: Text, shared: Shared, row: int) -> None:
        text.row = self.runner.fork(row, len(shared.request.prompt_token_ids), text.sample.sampler)
        text.turn += 1
        text.num_queued = 0
        sample = text.sample
        sample.start_time, sample.prefill_tokens = shared.start_time, shared.prefill_tokens
        sample.prefill_seconds = shared.prefill_seconds
        self._forget_waiting(text)
        insort(self._running, text)

    def _forget_waiting(self, text: Text) -> None:
        self._waiting.remove(text)
        if text.shared is not None and not text.sample.token_ids:  # one with tokens has been counted already
            text.shared.num_waiting -= 1

    def _run_fills(self, together: Sequence[steps.FillSpan], events: list[Event]) -> Step:
        step = self.runner.queue([span for _, span in together])
        for fill, span in together:
            self._take_span(fill, span, step, events)
        ended = [(fill, span) for fill, span in together if fill.is_done]
        if ended:
            self._end_fills(ended, step, events)
        return step

    def _take_span(self, fill: steps.AnyFill, span: Span, step: Step, events: list[Event]) -> None:
        owner = fill.owner
        is_said = fill.take(span)
        if not is_said:
            self.usage.prompt_tokens_computed += len(span.token_ids)
        if isinstance(owner, Score):
            begin = fill.num_run - len(span.token_ids)
            first = max(owner.request.first - 1 - begin, 0)
            if first < len(span.token_ids):
                events.append(owner.told(begin + first + 1, step.logits(0, first)))
        elif not is_said:
            events.append(PrefillProgress(fill.num_computed, len(fill.prompt), number_of(owner)))

    def _end_fills(self, ended: Sequence[steps.FillSpan], step: Step, events: list[Event]) -> None:
        """End fills; they are the first ones of their step."""
        for fill, span in ended:
            if isinstance(fill.owner, Shared):
                fill.owner.logits = step.logits(0, len(span.token_ids) - 1)[0]  # waits
        turns: list[tuple[Text, int]] = []
        with interrupts_held_back():
            for place, (fill, _) in enumerate(ended):
                owner = fill.owner
                self._fills.remove(fill)
                if isinstance(owner, Score):
                    self.runner.close(fill.row)
                    self._leave(owner)
                elif isinstance(owner, Shared):
                    self._prompts.add(owner)
                    owner.prefill_tokens = fill.num_computed
                    owner.prefill_seconds = time.perf_counter() - owner.start_time
                else:
                    owner.take_queued(step, place)
                    insort(self._running, owner)
                    turns.append((owner, owner.turn))
                    if not owner.sample.token_ids:
                        owner.sample.prefill_tokens = fill.num_computed
                        if not self.runner.limits.works_ahead:
                            owner.sample.prefill_seconds = time.perf_counter() - owner.sample.start_time
            if turns:
                self._queued.append(Queued(step, turns, [len(span.token_ids) - 1 for _, span in ended], []))
        if turns and not self._works_ahead():
            self._collect(self._queued.pop(), events)

    def _reserve_fill(self, beside: Sequence[steps.AnyFill], one: steps.FillSpan) -> bool:
        """Make room for a prompt's span. Rows that do not come after it keep their pages.

        If no row runs, shared prompts are closed, and fills outside `beside` start again later.
        """
        fill, span = one
        while not self.runner.reserve(fill.row, fill.num_run + len(span.token_ids)):
            if self._running and self._goes_first(fill.owner, self._running[-1]):
                self._preempt(self._running[-1])
            elif self._running:
                return False
            elif not self._prompts.release_latest():
                others = [other for other in self._fills if other not in beside]
                if not others:
                    return False
                self._abandon(others[-1], is_wanted=True)
        return True

    # Choices

    def _queue_choices(self) -> bool:
        """Queue the next token of every text that has room for one; False if no text has."""
        start_time = time.perf_counter()
        texts = [one for one in self._running if one.num_queued < one.sample.max_tokens]
        if steps.wait_for_choices(self.runner, texts, self._drafting):
            return False
        ready = [text for text in texts if text.row is not None and self._reserve_choice(text)]  # the oldest first
        ready = [text for text in ready if text.row is not None]  # an older text may have lost its pages since
        if not ready:
            return False
        spans = steps.next_spans(self.runner, ready, self._drafting)
        is_timed = not self._filled and all(span.logits is None for span in spans)
        step = self.runner.queue(spans)
        for place, (text, span) in enumerate(zip(ready, spans, strict=True)):
            text.take_queued(step, place, has_drafts=bool(span.drafts))
        turns = [(text, text.turn) for text in ready]
        drafts, begun = sum(len(span.drafts) for span in spans), start_time if is_timed else None
        self._queued.append(Queued(step, turns, [0] * len(ready), self._filled, drafts, begun))
        self._filled = []
        self._prompts.close(lambda shared: shared.num_waiting == 0)
        self._order.pass_time(len(ready))
        self.usage.steps += 1
        self.usage.row_steps += len(ready)
        self.usage.most_rows = max(self.usage.most_rows, len(ready))
        return True

    def _reserve_choice(self, text: Text) -> bool:
        """Make room for a token; younger texts lose their pages first. False if this text lost its own."""
        assert text.row is not None
        needed = self.runner.num_tokens(text.row) + 1
        while not self.runner.reserve(text.row, needed):
            youngest = self._running[-1]
            if self._fills and not self._goes_first(self._fills[-1].owner, youngest):
                self._abandon(self._fills[-1], is_wanted=True)
            elif youngest is not text:
                self._preempt(youngest)
            elif not self._prompts.release_latest():
                self._preempt(text)
                return False
        return True

    def _collect(self, queued: Queued, events: list[Event]) -> None:
        """Wait for a step, and take its choices."""
        chosen = queued.step.choices()
        if self._drafting is not None:
            steps.learn_drafts(self._drafting, queued, chosen)
        for step, num_filled in queued.fills:
            self._budget.learn(num_filled, step.prompt_seconds())
        with interrupts_held_back():
            # The last prompt of a step may continue in the next; then it has chosen nothing.
            for place, ((text, turn), of_text) in enumerate(zip(queued.texts, chosen, strict=False)):
                if text.turn == turn:  # it still has the row
                    events += steps.take_choices(self.runner, text, of_text, queued, place)
                    if text.sample.finish_reason is not None or isinstance(of_text, LLMCliError):
                        self._end(text, events)

    def _end(self, text: Text, events: list[Event]) -> None:
        """Free what an ended text holds."""
        sample = text.sample
        self._running.remove(text)
        self._leave(text)
        if sample.finish_reason is not None and sample.request.keeps_pages and text.row is not None:
            self.runner.offer(text.row)
        self._close(text)
        if sample.finish_reason is not None:
            events.append(sample.finish(sample.finish_reason))

    # Room

    @staticmethod
    def _goes_first(one: Text | Score | Shared, other: Text | Score | Shared) -> bool:
        """Whether `one` has another client than `other`, and goes before it."""
        return one.order < other.order and client_of(one) != client_of(other)

    def _leave(self, one: Text | Score | Shared) -> None:
        """Note in the order that a text or score has ended. A shared prompt does not count."""
        if not isinstance(one, Shared):
            unused = one.sample.max_tokens - len(one.sample.token_ids) if isinstance(one, Text) else 0
            self._order.leave(client_of(one), unused)

    def _find_row(self, first: Text, beside: Sequence[steps.AnyFill]) -> bool:
        """Whether there is a row for the first waiting text. Another client may have to give one up.

        The fills `beside`, which run in this step, keep theirs. Only texts take rows; scores and prompts take pages.
        """
        fillers = [(fill.owner, fill) for fill in self._fills if isinstance(fill.owner, Text)]
        holders: list[Text] = [*self._running, *(owner for owner, _ in fillers)]
        if len(holders) < self.runner.limits.num_rows:
            return True
        last = max(holders, key=lambda one: one.order)
        filling = next((fill for owner, fill in fillers if owner is last), None)
        if filling in beside or not self._goes_first(first, last):
            return False
        rows = Counter(map(client_of, holders))
        wanted, left = (one.sample.max_tokens - len(one.sample.token_ids) for one in (first, last))
        if not is_worth_a_row(wanted, left, rows[client_of(first)], rows[client_of(last)]):
            return False
        if filling is not None:
            self._abandon(filling, is_wanted=True)
        else:
            assert last.row is not None
            self.runner.offer(last.row)  # the text continues where it was if nobody needs these pages
            self._preempt(last)
        return True

    def _preempt(self, text: Text) -> None:
        """Take a text's row away. The text keeps its tokens and waits for another row."""
        with interrupts_held_back():
            self._running.remove(text)
            if text.shared is not None and not text.sample.token_ids:
                text.shared.num_waiting += 1
            kept = text.sample.request.kept_row
            if kept is not None and kept.row is not None:
                self.runner.close(kept.row)
                kept.row = text.row = None
            self._close(text)
            insort(self._waiting, text)
            self.usage.preemptions += 1

    def _abandon(self, fill: steps.AnyFill, is_wanted: bool = False) -> None:
        """Stop a fill and take its row away. With `is_wanted` its owner waits for another row."""
        owner = fill.owner
        with interrupts_held_back():
            self._fills.remove(fill)
            owner.row = None
            kept = owner.sample.request.kept_row if isinstance(owner, Text) else None
            if kept is None or is_wanted:
                self.runner.close(fill.row)
            if kept is not None and is_wanted:
                kept.row = None
            if is_wanted and not isinstance(owner, Shared):
                insort(self._waiting, owner)

    def _close(self, text: Text) -> None:
        if text.row is not None and text.sample.request.kept_row is None:
            self.runner.close(text.row)
        text.leave_row()

    def _works_ahead(self) -> bool:
        must_read = any(text.sample.request.must_read_choices for text in self._running)
        return self.runner.limits.works_ahead and not must_read


# `Generation`: one request on its own runner.


class Generation:
    """Runs a request; iterate over `events()`.

    A Ctrl-C may come at any point, here or in the caller: the caller then stops iterating, and calls `interrupt()` to
    end the samples under way.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, request: Request, drafting: Drafting | None = None):
        self._scheduler = Scheduler(runner, tokenizer, drafting=drafting)
        self._request = request

    def events(self) -> Iterator[Event]:
        """Prefill, then the tokens of all samples; each sample ends with its `Finished`.

        Raises: the first error of a sample
        """
        number = self._scheduler.submit(self._request)
        while not self._scheduler.is_idle:
            events = self._scheduler.step()
            while events:
                first = events[0]
                if isinstance(first, Failed):
                    self._scheduler.cancel(number)
                    raise first.error
                yield events.pop(0)  # in one line: a Ctrl-C before `yield` must find the event among those not taken

    def interrupt(self) -> list[Token | Finished]:
        """End the samples under way as interrupted; return the events not yet taken."""
        return [event for event in self._scheduler.interrupt() if isinstance(event, Token | Finished)]


# The logits of every position of a text, from one model or several, by a scheduler.


def scores(runner: Runner, token_ids: Sequence[int], first: int) -> Generator[AllLogits, None, None]:
    """The logits that predict token_ids[first:], some at a time. All tokens run again.

    Shapes: each item [n, vocab_size] float32, the items together [len(token_ids) - first, vocab_size]
    Raises: ValueError as `ScoreRequest` and `Runner.open`
    """
    scheduler = Scheduler(runner)
    number = scheduler.submit(ScoreRequest(tuple(token_ids), first))
    try:
        while not scheduler.is_idle:
            for event in scheduler.step():
                assert isinstance(event, Scored)
                yield event.logits
    finally:
        scheduler.cancel(number)


def scores_side_by_side(
    runners: Sequence[Runner], token_ids: Sequence[int], first: int
) -> Iterator[tuple[AllLogits, ...]]:
    """The logits of several models at the same positions, though each device cuts a text in its own way.

    Shapes: each item one array [n, vocab_size] for each runner, n the same for all; else as `scores`
    Raises: as `scores`
    """
    num_left = len(token_ids) - first
    waiting: list[AllLogits | None] = [None] * len(runners)
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(scores(runner, token_ids, first))) for runner in runners]
        while num_left:
            chunks = [next(stream) if rest is None else rest for stream, rest in zip(streams, waiting, strict=True)]
            count = min(map(len, chunks))
            yield tuple(chunk[:count] for chunk in chunks)
            waiting = [chunk[count:] if len(chunk) > count else None for chunk in chunks]
            num_left -= count
