"""The state of one `llmcli chat`: the conversation on its runner, and what was set for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcli.cli.sampler_flags import SamplerFlags
from llmcli.cli.session import EncodedPrompt, Session
from llmcli.cli.terminal import terminal
from llmcli.engine.chat_events import TurnFinished, TurnStarted
from llmcli.engine.conversation import Conversation
from llmcli.engine.conversation_file import SavedConversation
from llmcli.errors import LLMCliError, UsageError
from llmcli.sampling.params import ResolvedSampling

if TYPE_CHECKING:
    from llmcli.cli.chat_session.keeping import Keeper
    from llmcli.engine.chat import Chat

Thinking = Literal["show", "fold", "hide"]
Overflow = Literal["stop", "drop-oldest"]


@dataclass(frozen=True)
class TurnRecord:
    """One answer as it was computed, and the message it answers."""

    message: str
    started: TurnStarted
    finished: TurnFinished

    @property
    def num_kept(self) -> int:
        """How many of the prompt's tokens were not computed, as they had been before."""
        if self.finished.token_ids:
            return len(self.started.prompt_token_ids) - self.finished.timings.prefill_tokens
        return self.started.num_kept  # the prefill was stopped


@dataclass
class ChatSession:
    """What the commands look at and change.

    `model` and `adapters` are as the command line names them. `keeper` keeps the conversation as it goes, None for not
    at all; `files` are those it was loaded from or saved to by name, the latest last.
    """

    session: Session
    chat: Chat
    model: str
    adapters: tuple[str, ...]
    sampling: ResolvedSampling
    sampler_flags: SamplerFlags
    turn_end_token_ids: frozenset[int]
    thinking: Thinking
    is_markdown: bool
    is_verbose: bool
    load_seconds: float
    keeper: Keeper | None = None
    files: list[Path] = field(default_factory=list)
    last_turn: TurnRecord | None = None

    @property
    def seed(self) -> int:
        """The seed of the answers from now on."""
        return self.chat.settings.sampler.seed

    def set_sampling(self, sampling: ResolvedSampling, seed: int) -> None:
        """Draw the answers from now on with these parameters and this seed."""
        prompt = EncodedPrompt("", (), at_start=True, turn_end_token_ids=self.turn_end_token_ids)
        sampler = self.session.sampler(sampling.params, seed, prompt, self.sampler_flags)
        self.sampling = sampling
        self.chat.settings = replace(self.chat.settings, sampler=sampler)

    def saved(self) -> SavedConversation:
        """The conversation as it is written to a file."""
        return SavedConversation(self.model, self.chat.conversation, self.adapters)

    def keep(self) -> None:
        """Save the conversation for `--continue`; where that fails it is said once, and the conversation goes on."""
        if self.keeper is None:
            return
        try:
            self.keeper.save(self.saved())
        except LLMCliError as error:
            terminal.warn(f"{error}; this conversation is no longer saved")
            self.keeper = None


def thinking_view(name: str, value: str) -> Thinking:
    """What is shown of reasoning, from a word; `name` is what the word was given for.

    Raises: UsageError for another word.
    """
    views: dict[str, Thinking] = {"show": "show", "fold": "fold", "hide": "hide"}
    if value not in views:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(views)}")
    return views[value]


def overflow_policy(name: str, value: str) -> Overflow:
    """What happens when the context is full, from a word; `name` is what the word was given for.

    Raises: UsageError for another word.
    """
    policies: dict[str, Overflow] = {"stop": "stop", "drop-oldest": "drop-oldest"}
    if value not in policies:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(policies)}")
    return policies[value]


def replace_system(conversation: Conversation, system: str | None) -> Conversation:
    """The conversation with another system prompt; the turns stay."""
    return replace(conversation, system=system)


def with_source(sampling: ResolvedSampling, name: str, value: float | int) -> ResolvedSampling:
    """The parameters with one value changed by `/set`."""
    values: dict[str, Any] = {name: value}
    params, sources = replace(sampling.params, **values), {**sampling.sources, name: "/set"}
    return replace(sampling, params=params, sources=sources)
