"""Drafts by a smaller model with the same vocabulary, which draws with the dice of the text.

The noise of a draw belongs to (seed, sample, position, token id), so two models that agree on the likely tokens mostly
draw the same one, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.engine.drafts import Guesses
from llmcli.errors import LLMCliError
from llmcli.runners.base import MAX_SPAN, Choose, Runner, Span
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.sampling.chain import Choice
from llmcli.sampling.sampler import Sampler

_SPAN_TOKENS = 512  # of a prompt, about


class DraftModel:
    """A `DraftSource` over a runner of its own. Each text has a row there; texts beyond its rows have no drafts.

    The row of the latest text stays open for the next one, which may begin alike.
    """

    is_free = False

    def __init__(self, runner: Runner):
        self._runner = runner
        self._num_open = 0
        self._idle: int | None = None

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> Guesses:
        """The guesses of a text behind its prompt. Nothing runs yet."""
        runner = self._runner
        is_full = self._idle is None and self._num_open == runner.limits.num_rows
        if is_full or len(prompt) >= runner.limits.max_seq_len or max(prompt) >= runner.config.vocab_size:
            return _NoGuesses()
        with interrupts_held_back():
            if self._idle is None:
                row = runner.open(prompt, sampler)
                self._num_open += 1
            else:
                row = self._idle
                runner.change_prompt(row, prompt, sampler)
                self._idle = None
        return _ModelGuesses(runner, row, prompt, self)

    def take_back(self, row: int) -> None:
        """Keep the row of a text that is over, or close it if there is another one."""
        with interrupts_held_back():
            if self._idle is None:
                self._idle = row
            else:
                self._runner.close(row)
                self._num_open -= 1


class _NoGuesses:
    def extend(self, token_ids: Sequence[int]) -> None:
        """See `Guesses.extend`."""

    def kind(self) -> None:
        """None: there are none."""

    def guess(self, count: int) -> tuple[int, ...]:
        """None, too."""
        return ()

    def close(self) -> None:
        """See `Guesses.close`."""


class _ModelGuesses:
    def __init__(self, runner: Runner, row: int, prompt: Sequence[int], model: DraftModel):
        self._runner = runner
        self._row = row
        self._token_ids = list(prompt)
        self._num_prompt_tokens = len(prompt)
        self._knows_all = True  # models may have embeddings for more tokens than their tokenizer has
        self._model = model

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what the text has said; wrong guesses are taken out of the row."""
        num_known = len(self._token_ids)
        self._token_ids += token_ids
        self._knows_all = self._knows_all and max(token_ids, default=0) < self._runner.config.vocab_size
        held = self._runner.token_ids(self._row)[num_known:]
        num_right = next(
            (place for place, (a, b) in enumerate(zip(held, token_ids, strict=False)) if a != b),
            min(len(held), len(token_ids)),
        )
        num_kept = min(num_known + num_right, len(self._token_ids) - 1)
        if self._runner.num_tokens(self._row) > num_kept:
            self._runner.keep(self._row, num_kept)

    def kind(self) -> int | None:
        """One kind, while the row has room and the text has tokens that this model knows."""
        return 0 if len(self._token_ids) < self._runner.limits.max_seq_len and self._knows_all else None

    def guess(self, count: int) -> tuple[int, ...]:
        """What the model says next, with the dice of the text."""
        count = min(count, self._runner.limits.max_seq_len - len(self._token_ids))
        guessed = [self._catch_up()]
        while len(guessed) < count:
            guessed.append(self._choice(Span(self._row)).token_id)
        return tuple(guessed)

    def close(self) -> None:
        """Give the row back."""
        self._model.take_back(self._row)

    def _catch_up(self) -> int:
        """Run what the row lacks of the text; return the token chosen behind it."""
        runner, row, end = self._runner, self._row, len(self._token_ids)
        while True:
            begin = runner.num_tokens(row)
            in_prompt = begin < self._num_prompt_tokens
            to = runner.span_end(row, _SPAN_TOKENS) if in_prompt else min(begin + MAX_SPAN, end)
            choose: Choose = "last" if to == end else "none"
            span = Span(row, tuple(self._token_ids[begin:to]), choose, logits_from=to - begin - (to == end))
            if to == end:
                return self._choice(span).token_id
            runner.queue([span]).choices()

    def _choice(self, span: Span) -> Choice:
        (chosen,) = self._runner.queue([span]).choices()
        if isinstance(chosen, LLMCliError):
            raise chosen
        return chosen[-1]
