"""Doors of `llmcli chat` to rooms whose import is slow: each function imports what it needs when it is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli.chat_session.state import ChatSession, Overflow
from llmcli.cli.chat_session.view import TextWriter, Writer
from llmcli.cli.session import Session
from llmcli.engine.conversation import Conversation

if TYPE_CHECKING:
    from llmcli.cli.chat_session.keeping import Keeper
    from llmcli.cli.chat_session.line_editor import LineEditor
    from llmcli.engine.chat import Chat
    from llmcli.runners.base import Runner
    from llmcli.sampling.sampler import Sampler
    from llmcli.tokenizer.chat_template import ChatTemplate


def open_template(session: Session, choice: str | None) -> tuple[ChatTemplate, frozenset[int]]:
    """The chat template of a model, or the chosen one, and the tokens that end a turn in it.

    Raises: UsageError if there is none, TokenizerError if it is malformed.
    """
    from llmcli.tokenizer.chat_encoding import turn_end_token_ids
    from llmcli.tokenizer.chat_template import load_chat_template

    template = load_chat_template(session.model.checkpoint.folder, session.tokenizer, choice)
    return template, turn_end_token_ids(session.tokenizer, template)


def open_chat(
    session: Session,
    runner: Runner,
    template: ChatTemplate,
    sampler: Sampler,
    conversation: Conversation,
    *,
    max_new_tokens: int | None,
    stop_strings: tuple[str, ...],
    overflow: Overflow,
) -> Chat:
    """A conversation on a loaded model."""
    from llmcli.engine.chat import Chat, ChatSettings

    settings = ChatSettings(sampler, max_new_tokens, stop_strings, overflow)
    return Chat(runner, session.tokenizer, template, settings, conversation)


def open_keeper(folder: Path) -> Keeper:
    """What keeps the conversation in the user's chat folder."""
    from llmcli.cli.chat_session.keeping import Keeper

    return Keeper(folder)


def open_line_editor(history_path: Path) -> LineEditor:
    """The prompt line of a terminal."""
    from llmcli.cli.chat_session.commands import COMMANDS
    from llmcli.cli.chat_session.line_editor import LineEditor

    return LineEditor(COMMANDS, history_path)


def open_writer(state: ChatSession) -> Writer:
    """What shows the next answer: Markdown is rendered only where stdout is a terminal."""
    if not (state.is_markdown and sys.stdout.isatty()):
        return TextWriter()
    from llmcli.cli.chat_session.markdown import MarkdownWriter

    return MarkdownWriter()
