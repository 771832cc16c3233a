"""`Schema`: a grammar in the tokens of a model's `Vocabulary`; `ConstrainedText`: one text's state in it."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from llmcli.differences import first_difference
from llmcli.errors import UsageError
from llmcli.sampling.candidates import TokenMask, mask_words, pack_mask, unpack_mask
from llmcli.schema.grammar import NO_TOKEN, Grammar, first_line
from llmcli.schema.library import Matcher, Tokens, byte_tokens
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.pieces import TokenPieces

# `Vocabulary`: a model's tokens for masks, made from our own tokenizer.
#
# Special tokens are never text; an end token is allowed only where the text is complete.

# The tokens at the start of a text that loses its first space: NOT_ALLOWED if no token is the rest of one, NOTHING if
# nothing is left of it, so that it changes nothing.
NOT_ALLOWED = -1
NOTHING = -2


class Vocabulary:
    """The tokens of a model with `vocab_size` logits; `eos_token_ids` end a text.

    Attributes: tokens: for llguidance; vocab_size: number of logits; eos_token_ids; ends: their mask;
    first_token_ids: int64 [vocab_size], None if a text keeps its first space. Otherwise it maps the first token of a
    text to the token without the leading space, or to one of the constants above.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int, tokens: Tokens | None = None
    ):
        """`tokens` are the tokenizer's, if made already: that takes half a second for 128,000 of them.

        Raises: UsageError for a model without an end token.
        """
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not self.eos_token_ids:
            raise UsageError("the model has no end-of-text token, so no text can end where a schema wants it to")
        self.tokens = tokens or Tokens(TokenPieces.of(tokenizer).first(vocab_size))
        self.vocab_size = vocab_size
        self.ends = pack_mask(np.isin(np.arange(vocab_size), [*self.eos_token_ids]))
        pieces = self.tokens.pieces
        self.first_token_ids = _first_token_ids(pieces, vocab_size) if tokenizer.strips_leading_space else None

    def as_masks(self, found: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """llguidance's masks, with the model's end tokens instead of its own. Changes `found`.

        Shapes: found [texts, num_words of the tokens], result [texts, ceil(vocab_size / 32)]
        """
        end_id, num_words = self.tokens.end_id, len(self.ends)
        bit = np.uint32(1 << end_id % 32)
        may_end = (found[:, end_id // 32] & bit) != 0
        found[:, end_id // 32] &= ~bit
        masks = found[:, :num_words]
        if masks.shape[1] < num_words:
            masks = np.pad(masks, ((0, 0), (0, num_words - masks.shape[1])))
        masks &= ~self.ends
        masks[may_end] |= self.ends
        return masks


def _first_token_ids(pieces: TokenPieces, vocab_size: int) -> NDArray[np.int64]:
    tokens = [pieces[token_id] for token_id in range(len(pieces))]
    ids = {piece: token_id for token_id, piece in reversed([*enumerate(tokens)]) if piece}
    first = np.arange(vocab_size)
    for token_id, piece in enumerate(tokens):
        if piece.startswith(b" "):
            first[token_id] = ids.get(piece[1:], NOT_ALLOWED) if piece != b" " else NOTHING
    return first


MAX_FORCED_BYTES = 64  # more than the drafts of a step


class Schema:
    """A grammar in a model's tokens.

    Attributes: grammar, vocabulary
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        """Raises: UsageError for a grammar that is too large."""
        self.grammar = grammar
        self.vocabulary = vocabulary
        self._matcher = Matcher(vocabulary.tokens, grammar.lark)
        if self._matcher.has_error:
            raise UsageError(f"{grammar.name}: {first_line(self._matcher.error)}")
        self._spelled = Matcher(byte_tokens(), grammar.lark)

    def behind(self, token_ids: Sequence[int]) -> "Schema":
        """What may follow the tokens of a text that has begun. Raises: UsageError if they do not fit"""
        held = self.begin(at_start=True)
        try:
            for token_id in token_ids:
                held.push(token_id)
        except ValueError:
            raise UsageError(f"the text so far does not fit {self.grammar.name}, so it cannot be continued") from None
        if held._given_up is not None:
            raise held._given_up
        rest = copy(self)
        rest._matcher, rest._spelled = held._matcher, held.spelled()
        return rest

    def begin(self, *, at_start: bool) -> "ConstrainedText":
        """An empty text. `at_start` means that nothing visible comes before it."""
        return ConstrainedText(self.grammar.name, self._matcher, self._spelled, self.vocabulary, at_start=at_start)


# A text, tokens that it has not taken yet (None if a choice has failed), and drafts after them.
Wanted = tuple["ConstrainedText", Sequence[int] | None, Sequence[int]]


class ConstrainedText:
    """One text, token by token."""

    def __init__(self, name: str, matcher: Matcher, spelled: Matcher, vocabulary: Vocabulary, *, at_start: bool):
        """`name` is the user's name for the schema. `matcher`, and `spelled` over bytes, are not changed."""
        self._name = name
        self._begin = matcher
        self._matcher = matcher.copy()
        self._spelled_begin = spelled
        self._spelled: Matcher | None = None  # only forced text needs it
        self._num_spelled = 0  # tokens that it has taken
        self._vocabulary = vocabulary
        self._first_token_ids = vocabulary.first_token_ids if at_start else None
        self._taken: list[int] = []  # the tokens that the matcher has taken
        self._num_told = 0  # those that `push` has taken; the others were taken ahead, for masks after them
        self._mask: TokenMask | None = None
        self._has_ended = False
        self._given_up: UsageError | None = None  # of llguidance, at a token of `push`; the next mask raises it

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        self._go_back(self._num_told)
        return self._has_ended or (self._given_up is None and self._matcher.is_accepting)

    def mask(self) -> TokenMask:
        """The tokens that may come next. Shapes: result [ceil(vocab_size / 32)] uint32

        Raises: UsageError if nothing may come, or llguidance gives up.
        """
        if self._given_up is not None:
            raise self._given_up
        if self._mask is None:
            self._go_back(self._num_told)
            self._mask = self._compute_mask()
        return self._mask

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow, one after the other. None of them ends the text.

        A token outside the tokenizer fits nowhere. A model may have logits for such tokens, and draft them.
        """
        if self._first_token_ids is not None or self._given_up is not None:
            return 0  # a text's first token may stand for another
        self._go_back(self._num_told)
        ends, num_tokens = self._vocabulary.eos_token_ids, len(self._vocabulary.tokens.pieces)
        told = takewhile(lambda token_id: token_id < num_tokens and token_id not in ends, token_ids)
        return self._matcher.num_fitting([*told])

    def forced_tokens(self) -> tuple[int, ...]:
        """The longest tokens of the characters that must come next; () if there is a choice."""
        if self._first_token_ids is not None or self._has_ended:
            return ()
        text = self.spelled().forced_bytes(MAX_FORCED_BYTES).decode(errors="ignore")  # it may end within a character
        return self._vocabulary.tokens.greedy_tokenize(text.encode())

    def spelled(self) -> Matcher:
        """A matcher over bytes in the state of the text. It follows the text from call to call."""
        if self._spelled is None:
            self._spelled = self._spelled_begin.copy()
        new = self._taken[self._num_spelled : self._num_told]
        for token_id in new:
            for byte in self._vocabulary.tokens.pieces[token_id]:
                self._spelled.consume(byte)
        self._num_spelled = self._num_told
        return self._spelled

    def masks(self, chosen: Sequence[int] | None = (), drafts: Sequence[int] = ()) -> NDArray[np.uint32]:
        """What may come after `chosen`, and after each of the fitting drafts that follow.

        `chosen` are tokens that the text has not taken yet, None if a choice has failed. After a text's end anything
        may come, since it will not be used. If a mask after a draft cannot be made, nothing may come: the text may
        never get there.

        Shapes: result [len(drafts) + 1, words]
        Raises: as `mask`, for the first of them
        """
        masks = np.zeros((len(drafts) + 1, mask_words(self._vocabulary.vocab_size)), np.uint32)
        if chosen is None or self._ends(chosen):
            return ~masks
        if self._given_up is not None:
            raise self._given_up
        first_token_ids = self._first_token_ids
        try:
            self._advance(chosen)
            masks[0] = self._compute_mask() if chosen else self.mask()
            with suppress(UsageError):  # the text may never come to what is after a draft
                for draft, mask in zip(drafts, masks[1:], strict=True):
                    self._take(draft)
                    mask[:] = self._compute_mask()
        finally:
            if first_token_ids is not None:
                self._go_back(self._num_told)
                self._first_token_ids = first_token_ids
        return masks

    @staticmethod
    def masks_of_all(wanted: Sequence[Wanted]) -> list[NDArray[np.uint32] | UsageError]:
        """The result of `masks` for each text, or its error. Masks after tokens without drafts are made together."""
        vocabulary = wanted[0][0]._vocabulary
        together: dict[int, ConstrainedText] = {}
        for index, (held, chosen, drafts) in enumerate(wanted):
            if chosen and not drafts and held._vocabulary is vocabulary and held._goes_on(chosen):
                with suppress(UsageError):  # the text alone raises it
                    held._advance(chosen)
                    together[index] = held
        masks = iter(_masks_together([*together.values()], vocabulary) if together else ())
        return [next(masks) if index in together else _made(*one) for index, one in enumerate(wanted)]

    def push(self, token_id: int) -> None:
        """Take the next token. Raises: ValueError for one that the mask does not allow"""
        self._mask = None
        if token_id in self._vocabulary.eos_token_ids:  # the matcher may have stopped, and takes none
            if not self.is_complete:
                raise ValueError(f"the schema does not allow token {token_id}")
            self._has_ended = True
        elif self._taken[self._num_told : self._num_told + 1] == [token_id]:
            self._num_told += 1
        else:
            self._go_back(self._num_told)
            try:
                self._take(token_id)
            except UsageError as error:
                self._given_up = error
            self._num_told = len(self._taken)

    def _goes_on(self, chosen: Sequence[int]) -> bool:
        """Whether the text has begun and does not end with `chosen`."""
        return self._first_token_ids is None and self._given_up is None and not self._ends(chosen)

    def _ends(self, chosen: Sequence[int]) -> bool:
        return not self._vocabulary.eos_token_ids.isdisjoint(chosen)

    def _advance(self, chosen: Sequence[int]) -> None:
        """Move the matcher to the end of `chosen`, after the text's own tokens. It goes back only when needed."""
        ahead = self._taken[self._num_told :]
        num_same = first_difference(ahead, chosen)
        self._go_back(self._num_told + num_same)
        for token_id in chosen[num_same:]:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        first_token_ids, self._first_token_ids = self._first_token_ids, None
        stands_for = token_id if first_token_ids is None else int(first_token_ids[token_id])
        if stands_for == NOTHING:
            return
        if stands_for == NOT_ALLOWED:
            raise ValueError(f"the schema does not allow token {token_id}")
        if not self._matcher.consume(stands_for):
            error = self._too_complex()
            self._go_back(len(self._taken))
            if not self._matcher.num_fitting([stands_for]):
                raise ValueError(f"the schema does not allow token {token_id}")
            if not self._matcher.consume(stands_for):
                self._go_back(len(self._taken))
                raise error
        self._taken.append(stands_for)

    def _go_back(self, num_taken: int) -> None:
        """Move the matcher to its state after `num_taken` tokens."""
        num_more = len(self._taken) - num_taken
        if num_more == 0 and not self._matcher.has_error:
            return
        del self._taken[num_taken:]
        if self._matcher.has_error or not self._matcher.rollback(num_more):
            self._matcher = self._begin.copy()
            for token_id in self._taken:
                self._matcher.consume(token_id)

    def _compute_mask(self) -> TokenMask:
        found = np.empty((1, self._vocabulary.tokens.num_words), np.uint32)
        if not self._matcher.fill_mask(found[0]):
            self._fill_anew(found[0])
        mask: TokenMask = self._vocabulary.as_masks(found)[0]
        if self._first_token_ids is not None:
            is_allowed = unpack_mask(mask)[: self._vocabulary.vocab_size]
            mask = pack_mask(
                (is_allowed[self._first_token_ids] & (self._first_token_ids >= 0)) | (self._first_token_ids == NOTHING)
            )
        if (error := self._fault(is_empty=not mask.any())) is not None:
            raise error
        return mask

    def _fill_anew(self, found: NDArray[np.uint32]) -> None:
        """Try once more with a new matcher: what a matcher keeps of its way has a limit, too."""
        self._go_back(len(self._taken))
        self._matcher.fill_mask(found)

    def _fault(self, *, is_empty: bool) -> UsageError | None:
        """The error of a mask that has no token or could not be made."""
        error = first_line(self._matcher.error) if self._matcher.has_error else ""
        if error and error != NO_TOKEN:
            return self._too_complex()
        if error or is_empty:
            return UsageError(f"no text fits {self._name}: this text is not complete, and nothing may follow it")
        return None

    def _too_complex(self) -> UsageError:
        said = first_line(self._matcher.error)
        return UsageError(
            f"{self._name} is too complex for the rest of this text ({said}); "
            "give one with smaller counts and lengths, or fewer alternatives"
        )


def _made(
    held: ConstrainedText, chosen: Sequence[int] | None, drafts: Sequence[int]
) -> NDArray[np.uint32] | UsageError:
    try:
        return held.masks(chosen, drafts)
    except UsageError as error:
        return error


def _masks_together(texts: Sequence[ConstrainedText], vocabulary: Vocabulary) -> list[NDArray[np.uint32] | UsageError]:
    """The mask of each text at its matcher's state, or the error. Shapes: each [1, words]"""
    found = np.empty((len(texts), vocabulary.tokens.num_words), np.uint32)
    Matcher.fill_masks([held._matcher for held in texts], found)
    for held, mask in zip(texts, found, strict=True):
        if held._matcher.has_error:
            held._fill_anew(mask)
    masks = vocabulary.as_masks(found)
    are_empty = (np.bitwise_or.reduce(masks, axis=1) == 0).tolist()
    faults = [held._fault(is_empty=is_empty) for held, is_empty in zip(texts, are_empty, strict=True)]
    return [mask[None] if fault is None else fault for mask, fault in zip(masks, faults, strict=True)]
