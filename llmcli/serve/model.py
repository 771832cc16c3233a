"""`ServedModel`: what the server needs to know of a model. The command line makes one of its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from llmcli.engine.request import Request
from llmcli.schema.held_to import HeldTo
from llmcli.serve.bodies import ChatBody, CompletionBody
from llmcli.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

Messages = Sequence[Mapping[str, str]]


class ServedModel(Protocol):
    """A model's way from a body to a request. Methods may take long, and one thread at a time calls each.

    Each raises UsageError or TokenizerError for what this model cannot do; Refusal where the wrong key is known.
    """

    @property
    def names(self) -> Sequence[str]:
        """The names that a request may call it by; the first is its own."""

    @property
    def context(self) -> int:
        """Tokens of prompt and new text together."""

    @property
    def seed(self) -> int | None:
        """The seed of requests that give none; None for a random one each."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def answer(self, body: ChatBody) -> Request:
        """Texts that answer a conversation."""

    def completion(self, body: CompletionBody, prompt: str | Sequence[int]) -> Request:
        """Texts that continue one of the prompts of a body. Token ids are taken as they are."""

    def grammar(self, held_to: HeldTo) -> Grammar:
        """What texts are held to, for the engine. For a thread of its own: a schema may take seconds."""

    def encode(self, prompt: str | Messages) -> Sequence[int]:
        """The token ids of a prompt, or of a conversation as the chat template writes it."""
