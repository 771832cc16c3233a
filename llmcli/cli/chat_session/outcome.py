"""What a command asks of the loop that ran it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmcli.engine.chat_events import ChatEvent, SeveralEvent


@dataclass(frozen=True)
class Outcome:
    """An answer to run, or several to one message, a text to put on the prompt line for editing, or the end."""

    events: Iterator[ChatEvent] | None = None
    several: Iterator[SeveralEvent] | None = None
    draft: str | None = None
    is_over: bool = False


@dataclass(frozen=True)
class Command:
    """A command of a conversation: its name without the slash, its arguments and what it does, for people.

    `run` takes a `Talk`; one that `needs_model` takes a `ChatSession`.
    """

    name: str
    arguments: str
    help: str
    run: Callable[[Any, str], Outcome]
    needs_model: bool = False
