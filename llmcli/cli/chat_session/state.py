"""The state of one `llmcli chat`: the conversation, who answers, its settings; and the result of a command."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from llmcli.cli import lazy
from llmcli.cli.chat_session.kept_chats import Keeper
from llmcli.cli.prompt import SamplerFlags
from llmcli.cli.session import EncodedPrompt, Session
from llmcli.cli.terminal import terminal
from llmcli.engine.chat_events import ChatEvent, SeveralEvent, TurnFinished, TurnStarted
from llmcli.engine.conversation import Conversation, SavedConversation
from llmcli.errors import LLMCliError
from llmcli.sampling.params import SPECS, ResolvedSampling


@dataclass(frozen=True)
class Outcome:
    """One or several answers to run, a text to edit on the prompt line, or the end."""

    events: Iterator[ChatEvent] | None = None
    several: Iterator[SeveralEvent] | None = None
    draft: str | None = None
    is_over: bool = False


@dataclass(frozen=True)
class ChatCommand:
    """A command of a conversation: its name without the slash, its arguments and what it does, for people.

    `run` takes a `Talk`; one that `needs_model` takes a `ChatSession`.
    """

    name: str
    arguments: str
    help: str
    run: Callable[[Any, str], Outcome | None]
    needs_model: bool = False


Thinking = Literal["show", "fold", "hide"]
Overflow = Literal["stop", "drop-oldest"]
THINKING: tuple[Thinking, ...] = ("show", "fold", "hide")
OVERFLOW: tuple[Overflow, ...] = ("stop", "drop-oldest")


@dataclass(frozen=True)
class TurnRecord:
    """One answer as it was computed, and the message it answers."""

    message: str
    started: TurnStarted
    finished: TurnFinished

    @property
    def num_kept(self) -> int:
        """How many of the prompt's tokens had been computed before."""
        if self.finished.token_ids:
            return len(self.started.prompt_token_ids) - self.finished.timings.prefill_tokens
        return self.started.num_kept  # the prefill was stopped


class Answerer(Protocol):
    """Who answers: a model that runs here, or a server. See `engine.chat.Chat` for what each of them does."""

    conversation: Conversation

    def send(self, message: str) -> Iterator[ChatEvent]:
        """Answer a new message."""

    def report(self, results: Sequence[str]) -> Iterator[ChatEvent]:
        """Answer the results of the last answer's calls."""

    def edit(self, message: str) -> Iterator[ChatEvent]:
        """Replace the last message and answer it."""

    def regenerate(self) -> Iterator[ChatEvent]:
        """Answer the last message again."""

    def interrupt(self) -> Iterable[ChatEvent]:
        """End the answer in progress; return its last events."""


@dataclass(kw_only=True)
class Talk(ABC):
    """What the commands look at and change, with a local model or a server.

    `model` and `adapters` are as the command line names them. `keeper` keeps the conversation as it goes, None for not
    at all; `files` are those that this conversation was loaded from or saved to, the latest last, and what they held
    then.
    """

    chat: Answerer
    model: str
    thinking: Thinking
    is_markdown: bool
    adapters: tuple[str, ...] = ()
    is_verbose: bool = False
    keeper: Keeper | None = None
    files: dict[Path, SavedConversation] = field(default_factory=dict)
    last_turn: TurnRecord | None = None

    @abstractmethod
    def facts(self) -> str:
        """Who answers, for the line below the prompt."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """The settings of answers by name, as text."""

    @abstractmethod
    def change(self, name: str, value: Any) -> None:
        """Change a setting for the answers from now on: a sampling parameter, seed, max_new_tokens or overflow.

        Raises: UsageError where a server decides it
        """

    def saved(self) -> SavedConversation:
        """The conversation as it is written to a file."""
        return SavedConversation(self.model, self.chat.conversation, self.adapters)

    def begin(self, conversation: Conversation, files: dict[Path, SavedConversation] | None = None) -> None:
        """Switch to another conversation with a file of its own; the old file stays as it is."""
        if self.keeper is not None:
            self.keeper.begin_new()
        self.chat.conversation, self.files = conversation, files or {}

    def keep(self) -> None:
        """Save the conversation for `--continue`; if that fails, warn once and go on."""
        if self.keeper is None:
            return
        try:
            self.keeper.save(self.saved())
        except LLMCliError as error:
            terminal.warn(f"{error}; this conversation is no longer saved")
            self.keeper = None


@dataclass(kw_only=True)
class ChatSession(Talk):
    """A conversation with a model that runs here."""

    session: Session
    chat: lazy.chat.Chat
    sampling: ResolvedSampling
    sampler_flags: SamplerFlags
    turn_end_token_ids: frozenset[int]
    load_seconds: float

    @property
    def seed(self) -> int:
        """The seed of the answers from now on."""
        return self.chat.settings.sampler.seed

    def facts(self) -> str:
        """The model, and the share of the context that the conversation takes."""
        context = self.chat.runner.limits.max_seq_len
        try:
            used = f"{self.chat.num_tokens() / context:.0%} of {context} tokens"
        except LLMCliError:  # a template that refuses; the next message will say so
            used = f"{context} tokens"
        return f"{self.session.name}  {used}"

    def settings(self) -> dict[str, str]:
        """As for `Talk`, and where each value comes from."""
        settings = self.chat.settings
        rows = {name: f"{value} ({source})" for name, value, source in self.sampling.rows()}
        rows["seed"] = str(self.seed)
        rows["max_new_tokens"] = str(settings.max_new_tokens or "until the context is full")
        rows["overflow"] = settings.overflow
        return rows

    def change(self, name: str, value: Any) -> None:
        """As for `Talk`."""
        if name in SPECS:
            params, sources = replace(self.sampling.params, **{name: value}), {**self.sampling.sources, name: "/set"}
            self._set_sampling(replace(self.sampling, params=params, sources=sources), self.seed)
        elif name == "seed":
            self._set_sampling(self.sampling, value)
        else:
            self.chat.settings = replace(self.chat.settings, **{name: value})

    def _set_sampling(self, sampling: ResolvedSampling, seed: int) -> None:
        prompt = EncodedPrompt("", (), at_start=True, turn_end_token_ids=self.turn_end_token_ids)
        sampler = self.session.sampler(sampling.params, seed, prompt, self.sampler_flags)
        self.sampling = sampling
        self.chat.settings = replace(self.chat.settings, sampler=sampler)
