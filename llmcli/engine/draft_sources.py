"""Where drafts come from: the text itself, and a smaller model."""

from collections.abc import Sequence

from llmcli.engine.drafts import Guesses
from llmcli.errors import LLMCliError
from llmcli.runners.base import MAX_SPAN, Choose, Runner, Span
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler

# Drafts from the text itself: where it has said the same before, it may continue in the same way.

# The last tokens of the text are looked up, longer runs first; then the places found are compared.
_SIZES = (6, 2)
_MOST_PLACES = 16  # the latest places that are compared
_LONGEST = 32  # longer matches count as equal
# Matches of up to this many tokens are of one kind: drafts of a kind are right about equally often.
_KINDS = (2, 3, 5, 8, 16)


class NgramIndex:
    """Finds the earlier place after the longest copy of the text's last tokens; the latest such place.

    Each place names the previous one with the same hash of the last few tokens, as in LZ77. A token takes constant
    time, however long the text is.
    """

    def __init__(self, token_ids: Sequence[int] = ()):
        self.token_ids: list[int] = []
        self._latest: dict[int, dict[int, int]] = {size: {} for size in _SIZES}  # by hash: the latest place
        self._earlier: dict[int, list[int]] = {size: [] for size in _SIZES}  # the previous place; -1 if none
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the text."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            place = len(self.token_ids) - 1
            for size in _SIZES:
                key = self._key(size, place)
                self._earlier[size].append(self._latest[size].get(key, -1))
                self._latest[size][key] = place

    def shorten(self, num_tokens: int) -> None:
        """Forget all but the first tokens."""
        for place in range(len(self.token_ids) - 1, num_tokens - 1, -1):
            for size in _SIZES:
                self._latest[size][self._key(size, place)] = self._earlier[size].pop()
            self.token_ids.pop()

    def match(self) -> tuple[int, int]:
        """The place after the best match, and its length; length 0 if less than the last two tokens match."""
        last = len(self.token_ids) - 1
        best, longest = 0, 0
        for size in _SIZES:
            if last < 0 or longest:
                break
            place = self._earlier[size][last]
            for _ in range(_MOST_PLACES):
                if place < 0 or longest == _LONGEST:
                    break
                length = self._common(place, last)
                if length >= size and length > longest:
                    best, longest = place + 1, length
                place = self._earlier[size][place]
        return best, longest

    def behind(self, place: int, count: int) -> tuple[int, ...]:
        """The tokens from `place` on; after the text's end they repeat, as in a loop."""
        found = self.token_ids[place : place + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return tuple(found)

    def _key(self, size: int, place: int) -> int:
        return hash(tuple(self.token_ids[max(place - size + 1, 0) : place + 1]))

    def _common(self, place: int, last: int) -> int:
        """How many tokens up to `place` equal those up to `last`."""
        token_ids, length = self.token_ids, 0
        while length < _LONGEST and length <= place and token_ids[place - length] == token_ids[last - length]:
            length += 1
        return length


class NgramSource:
    """A `DraftSource`. The next text of a conversation reuses the index of the one before."""

    is_free = True

    def __init__(self) -> None:
        self._idle = NgramIndex()

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> Guesses:
        """The guesses for a text after its prompt."""
        index, self._idle = self._idle, NgramIndex()
        num_common = next(
            (place for place, (a, b) in enumerate(zip(index.token_ids, prompt, strict=False)) if a != b),
            min(len(index.token_ids), len(prompt)),
        )
        index.shorten(num_common)
        index.extend(prompt[num_common:])
        return _NgramGuesses(index, self)

    def take_back(self, index: NgramIndex) -> None:
        """Keep the index of a text that has ended."""
        self._idle = index


class _NgramGuesses:
    def __init__(self, index: NgramIndex, source: NgramSource):
        self._index = index
        self._source = source
        self._place = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """See `Guesses.extend`."""
        self._index.extend(token_ids)

    def kind(self) -> int | None:
        """The length of the match, coarsely."""
        self._place, length = self._index.match()
        return sum(length > most for most in _KINDS) if length else None

    def guess(self, count: int) -> tuple[int, ...]:
        """What followed the match."""
        return self._index.behind(self._place, count)

    def close(self) -> None:
        """Give the index back."""
        self._source.take_back(self._index)


# Drafts by a smaller model with the same vocabulary, which draws with the text's noise.
#
# The noise of a draw depends on (seed, sample, position, token id). So two models that agree on the likely tokens
# mostly draw the same one, at any temperature.

_SPAN_TOKENS = 512  # of a prompt, roughly


class DraftModel:
    """A `DraftSource` with its own runner. Each text has a row there; texts without a row get no drafts.

    The row of the latest text stays open: the next text may begin alike.
    """

    is_free = False

    def __init__(self, runner: Runner):
        self._runner = runner
        self._num_open = 0
        self._idle: int | None = None

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> Guesses:
        """The guesses for a text after its prompt. Nothing runs yet."""
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
        """Keep the row of a text that has ended; close it if another row is kept."""
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
        """None: there are no guesses."""

    def guess(self, count: int) -> tuple[int, ...]:
        """Nothing."""
        return ()

    def close(self) -> None:
        """See `Guesses.close`."""


class _ModelGuesses:
    def __init__(self, runner: Runner, row: int, prompt: Sequence[int], model: DraftModel):
        self._runner = runner
        self._row = row
        self._token_ids = list(prompt)
        self._num_prompt_tokens = len(prompt)
        self._knows_all = True  # a model may have embeddings for more tokens than its tokenizer has
        self._model = model

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that the text has chosen; remove wrong guesses from the row."""
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
        """One kind, while the row has room and this model knows all tokens of the text."""
        return 0 if len(self._token_ids) < self._runner.limits.max_seq_len and self._knows_all else None

    def guess(self, count: int) -> tuple[int, ...]:
        """What the model says next, drawn with the text's noise."""
        count = min(count, self._runner.limits.max_seq_len - len(self._token_ids))
        guessed = [self._catch_up()]
        while len(guessed) < count:
            guessed.append(self._choice(Span(self._row)).token_id)
        return tuple(guessed)

    def close(self) -> None:
        """Give the row back."""
        self._model.take_back(self._row)

    def _catch_up(self) -> int:
        """Run the tokens of the text that the row lacks; return the token chosen after them."""
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
