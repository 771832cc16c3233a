"""`Schema`: what texts are held to, in the tokens of a model; `HeldText`: how far one text has come in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from itertools import takewhile

import llguidance
import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.sampling.mask import TokenMask, mask_words, pack_mask, unpack_mask
from llmcli.schema.grammar import Grammar, first_line
from llmcli.schema.vocabulary import NOT_ALLOWED, NOTHING, Vocabulary


class Schema:
    """A grammar in the tokens of a model.

    Attributes: grammar, vocabulary
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        """Raises: UsageError for a grammar that is too large."""
        self.grammar = grammar
        self.vocabulary = vocabulary
        self._matcher = llguidance.LLMatcher(vocabulary.library, grammar.lark, log_level=0)
        if self._matcher.is_error():
            raise UsageError(f"{grammar.name}: {first_line(self._matcher.get_error())}")

    def behind(self, token_ids: Sequence[int]) -> Schema:
        """What may follow the tokens of a text that has begun. Raises: UsageError if it does not fit"""
        held = self.begin(at_start=True)
        try:
            for token_id in token_ids:
                held.push(token_id)
        except ValueError:
            raise UsageError(f"the text so far does not fit {self.grammar.name}, so it cannot be continued") from None
        rest = copy(self)
        rest._matcher = held._matcher
        return rest

    def begin(self, *, at_start: bool) -> HeldText:
        """A text that is still empty. `at_start` says that nothing visible comes before it."""
        return HeldText(self._matcher, self.vocabulary, at_start=at_start)


# A text, tokens that it has not taken yet (None if a choice has failed), and drafts behind them.
Wanted = tuple["HeldText", Sequence[int] | None, Sequence[int]]


class HeldText:
    """One text, token by token."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, *, at_start: bool):
        """`matcher` is at the text's beginning, and stays there."""
        self._begin = matcher
        self._matcher = matcher.deep_copy()
        self._vocabulary = vocabulary
        self._first_token_ids = vocabulary.first_token_ids if at_start else None
        self._taken: list[int] = []  # the tokens that the matcher has had
        self._num_told = 0  # those of them that `push` was told; masks were made behind the others, ahead of it
        self._mask: TokenMask | None = None
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        self._go_back(self._num_told)
        return self._has_ended or self._matcher.is_accepting()

    def mask(self) -> TokenMask:
        """What the next token may be. Shapes: result [ceil(vocab_size / 32)] uint32

        Raises: UsageError if nothing may come, or llguidance gives up.
        """
        if self._mask is None:
            self._go_back(self._num_told)
            self._mask = self._compute_mask()
        return self._mask

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow, one behind the other. None of them ends the text."""
        if self._first_token_ids is not None:
            return 0  # a text's first token may stand for another one
        self._go_back(self._num_told)
        ends = self._vocabulary.eos_token_ids
        return self._matcher.validate_tokens([*takewhile(lambda token_id: token_id not in ends, token_ids)])

    def forced_tokens(self) -> tuple[int, ...]:
        """Tokens of the characters that must come next, as long ones as there are; () where there is a choice."""
        if self._first_token_ids is not None:
            return ()
        self._go_back(self._num_told)
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")  # it may end within a character
        return tuple(self._vocabulary.library.greedy_tokenize(text))

    def masks(self, chosen: Sequence[int] | None = (), drafts: Sequence[int] = ()) -> NDArray[np.uint32]:
        """What may come behind `chosen`, and behind each of the fitting drafts that follow.

        `chosen` are tokens that the text has not taken yet, None if a choice has failed. Behind a text's end anything
        may come, since nobody will see it. Where a mask behind a draft cannot be made, nothing may: the text may never
        come there.

        Shapes: result [len(drafts) + 1, words]
        Raises: as `mask`, for the first of them
        """
        masks = np.zeros((len(drafts) + 1, mask_words(self._vocabulary.vocab_size)), np.uint32)
        if chosen is None or self._ends(chosen):
            return ~masks
        first_token_ids = self._first_token_ids
        try:
            self._advance(chosen)
            masks[0] = self._compute_mask() if chosen else self.mask()
            with suppress(UsageError):  # behind a draft the text may never come
                for draft, mask in zip(drafts, masks[1:], strict=True):
                    self._take(draft)
                    mask[:] = self._compute_mask()
        finally:
            if first_token_ids is not None:
                self._go_back(self._num_told)
                self._first_token_ids = first_token_ids
        return masks

    @staticmethod
    def masks_side_by_side(wanted: Sequence[Wanted]) -> list[NDArray[np.uint32] | UsageError]:
        """What `masks` gives for each text, made in llguidance's threads; or what it raises."""
        made: dict[int, NDArray[np.uint32] | UsageError] = {}
        together = []
        for index, (held, chosen, drafts) in enumerate(wanted):
            is_alone = len(wanted) == 1 or held._num_found_words != wanted[0][0]._num_found_words
            if chosen is None or held._ends(chosen) or drafts or held._first_token_ids is not None or is_alone:
                try:
                    made[index] = held.masks(chosen, drafts)
                except UsageError as error:
                    made[index] = error
            else:
                together.append(index)
        if together:
            made |= _masks_together({index: wanted[index] for index in together})
        return [made[index] for index in range(len(wanted))]

    def push(self, token_id: int) -> None:
        """Take the next token. Raises: ValueError for one that the mask does not allow"""
        self._mask = None
        if self._taken[self._num_told : self._num_told + 1] == [token_id]:
            self._num_told += 1
        else:
            self._go_back(self._num_told)
            self._take(token_id)
            self._num_told = len(self._taken)
        self._has_ended = token_id in self._vocabulary.eos_token_ids

    def _ends(self, chosen: Sequence[int]) -> bool:
        return not self._vocabulary.eos_token_ids.isdisjoint(chosen)

    def _advance(self, chosen: Sequence[int]) -> None:
        """Have the matcher behind `chosen`, which follow what the text was told. It stays there until it must not."""
        ahead = self._taken[self._num_told :]
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ahead, chosen, strict=False)))
        self._go_back(self._num_told + num_same)
        for token_id in chosen[num_same:]:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        first_token_ids, self._first_token_ids = self._first_token_ids, None
        stands_for = token_id if first_token_ids is None else int(first_token_ids[token_id])
        if stands_for == NOTHING:
            return
        if stands_for == NOT_ALLOWED or not self._matcher.consume_token(stands_for):
            raise ValueError(f"the schema does not allow token {token_id}")
        self._taken.append(stands_for)

    def _go_back(self, num_taken: int) -> None:
        """Have the matcher where it was behind so many tokens."""
        num_more = len(self._taken) - num_taken
        if num_more == 0 and not self._matcher.is_error():
            return
        del self._taken[num_taken:]
        if self._matcher.is_error() or not self._matcher.rollback(num_more):
            self._matcher = self._begin.deep_copy()
            self._matcher.consume_tokens(self._taken)

    @property
    def _num_found_words(self) -> int:
        return mask_words(self._vocabulary.library.vocab_size)

    def _compute_mask(self) -> TokenMask:
        found = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        return self._checked(found, is_empty=not found.any())

    def _checked(self, found: NDArray[np.uint32], *, is_empty: bool) -> TokenMask:
        """What llguidance has found as a mask of the model's tokens, `found` itself if it can be. Raises: as `mask`"""
        if self._matcher.is_error():
            raise UsageError(f"the schema is too complex: {first_line(self._matcher.get_error())}")
        num_words = mask_words(self._vocabulary.vocab_size)
        if len(found) < num_words:
            found = np.concatenate([found, np.zeros(num_words - len(found), "<u4")])
        mask = found[:num_words].astype(np.uint32, copy=False)
        if self._first_token_ids is not None:
            is_allowed = unpack_mask(mask)[: self._vocabulary.vocab_size]
            mask = pack_mask(
                (is_allowed[self._first_token_ids] & (self._first_token_ids >= 0)) | (self._first_token_ids == NOTHING)
            )
            is_empty = not mask.any()
        if is_empty:
            raise UsageError("the schema lets nothing follow, and the text is not complete: no text fits the schema")
        return mask


@cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()


def _masks_together(wanted: Mapping[int, Wanted]) -> dict[int, NDArray[np.uint32] | UsageError]:
    """The masks of texts without drafts, by the same numbers. All masks have one size."""
    texts = [held for held, _, _ in wanted.values()]
    for held, chosen, _ in wanted.values():
        held._advance(chosen or ())
    found = np.empty((len(texts), texts[0]._num_found_words), "<u4")
    matchers = [(held._matcher, place) for place, held in enumerate(texts)]
    _executor().unsafe_compute_mask_ptr(matchers, found.ctypes.data, found.strides[0], len(found))
    are_empty = np.logical_not(np.logical_or.reduce(found, axis=1)).tolist()
    made: dict[int, NDArray[np.uint32] | UsageError] = {}
    for index, held, mask, is_empty in zip(wanted, texts, found, are_empty, strict=True):
        try:
            made[index] = held._checked(mask, is_empty=is_empty)[None]
        except UsageError as error:
            made[index] = error
    return made
