"""Texts that are held to a schema: the schema in a model's tokens, made while the weights load; texts that are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.terminal import terminal
from llmcli.cli.token_tree import TokenTree
from llmcli.engine.events import Event, Finished
from llmcli.errors import UnfinishedTextError, UsageError

if TYPE_CHECKING:
    from llmcli.cli.session import Session
    from llmcli.engine.request import Request
    from llmcli.sampling.params import Sampler
    from llmcli.schema.grammar import Grammar
    from llmcli.schema.schema import Schema, Vocabulary

KEPT_SCHEMAS = 64  # the latest; the lines of a batch, and a server's requests, may each have their own


class Schemas:
    """Grammars in the tokens of a model.

    The tree of its tokens is made once, in a thread: that takes a while, as the weights do.
    """

    def __init__(self, session: Session):
        self._session = session
        self._tree = session.token_tree
        self._made = lru_cache(KEPT_SCHEMAS)(self._make)
        self._vocabulary = lru_cache(KEPT_SCHEMAS)(self._make_vocabulary)

    def prepare(self, grammar: Grammar | None, sampler: Sampler) -> None:
        """Begin to make the tree, if there is a grammar.

        Raises: UsageError for settings that keep a text from its end
        """
        if grammar is None:
            return
        if sampler.ignore_eos:
            raise UsageError(f"ignore_eos and {grammar.name} cannot be combined: the text could not end")
        if sampler.params.min_new_tokens:
            raise UsageError(
                f"min_new_tokens is {sampler.params.min_new_tokens}, and {grammar.name} says where a text may end; "
                "set min_new_tokens to 0"
            )
        if self._tree is None:
            self._tree = TokenTree(self._session.model.checkpoint.folder, self._session.model.config.vocab_size)
        self._tree.start(self._session.tokenizer)

    def schema(self, grammar: Grammar, sampler: Sampler) -> Schema:
        """Wait for the tree. Raises: UsageError, as `prepare` too"""
        self.prepare(grammar, sampler)
        return self._made(grammar, sampler.eos_token_ids)

    def hold(self, request: Request, grammar: Grammar | None) -> Request:
        """The request with its texts held to the grammar, if there is one. Raises: as `schema`"""
        return request if grammar is None else replace(request, schema=self.schema(grammar, request.sampler))

    def _make(self, grammar: Grammar, eos_token_ids: frozenset[int]) -> Schema:
        return lazy.Schema(grammar, self._vocabulary(eos_token_ids))

    def _make_vocabulary(self, eos_token_ids: frozenset[int]) -> Vocabulary:
        assert self._tree is not None
        vocab_size = self._session.model.config.vocab_size
        return lazy.Vocabulary(self._session.tokenizer, eos_token_ids, vocab_size, self._tree.tokens())


class CompletenessNotice:
    """Counts texts that were cut before they fitted their schema. As an `Output` it says so at the end, in one line."""

    def __init__(self) -> None:
        self._num_held = 0
        self._reasons: list[str] = []  # why texts were cut

    def show(self, event: Event) -> None:
        """Texts are not cut before they end."""

    def finish(self, finished: Sequence[Finished]) -> None:
        """Count all texts, and say how many are unfinished."""
        for one in finished:
            self.count(one)
        self.show_count()

    def count(self, finished: Finished) -> None:
        """Count a text that has ended."""
        self._num_held += finished.is_complete is not None
        if finished.is_complete is False:
            self._reasons.append(finished.finish_reason)

    def count_kept(self, cut: Sequence[str | None]) -> None:
        """Count texts of an earlier run that are held to a schema; of each the reason why it was cut, if it was."""
        self._num_held += len(cut)
        self._reasons += [reason for reason in cut if reason is not None]

    def show_count(self) -> None:
        """Say on stderr how many texts are unfinished, and why."""
        if self._reasons:
            reasons = ", ".join(sorted(set(self._reasons)))
            what = "the text is" if self._num_held == 1 else f"{len(self._reasons)} of {self._num_held} texts are"
            terminal.info(f"{what} unfinished ({reasons}): what the schema asks for is not complete")

    def require_complete(self) -> None:
        """Raises: UnfinishedTextError if a text was unfinished"""
        if self._reasons:
            what = "a text is" if len(self._reasons) == 1 else f"{len(self._reasons)} texts are"
            raise UnfinishedTextError(f"{what} unfinished; {remedy_of(self._reasons)}")


def remedy_of(reasons: Iterable[str]) -> str:
    """What helps against texts that were cut for these reasons."""
    is_short = not {"length", "context"}.isdisjoint(reasons)
    return "give more room with --max-new-tokens or --context" if is_short else "leave out --stop"
