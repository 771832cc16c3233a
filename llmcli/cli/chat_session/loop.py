"""`llmcli chat` on a terminal: reads messages and commands, and shows answers, until the user leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.chat_session.answer import reason_of_end, run_answer
from llmcli.cli.chat_session.commands import is_command, run_command
from llmcli.cli.chat_session.message import unwrap
from llmcli.cli.chat_session.outcome import Outcome
from llmcli.cli.chat_session.several import run_several
from llmcli.cli.chat_session.state import ChatSession, Talk
from llmcli.cli.chat_session.view import View, Writer
from llmcli.cli.terminal import terminal
from llmcli.errors import LLMCliError, UsageError
from llmcli.foreign_errors import foreign_errors_explained

if TYPE_CHECKING:
    from llmcli.cli.chat_session.prompt_line import PromptLine


def converse(state: Talk, editor: PromptLine, open_writer: Callable[[], Writer]) -> None:
    """Talk until Ctrl-D, /quit, or Ctrl-C twice at an empty prompt. An error ends an answer, not the conversation."""
    draft = ""
    is_leaving = False
    while True:
        try:
            text = editor.read(draft, f" {state.facts()}  /help")
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving:
                return
            is_leaving, draft = True, ""
            terminal.info("press Ctrl-C again, or Ctrl-D, to quit")
            continue
        is_leaving, draft = False, ""
        if not text.strip():
            continue
        if (clean := text.encode(errors="replace").decode()) != text:
            terminal.error("bytes that are not UTF-8 became question marks; edit the line or send it as it is")
            draft = clean
            continue
        try:
            # Whatever the system or a library cannot do ends this answer, as our own errors do.
            with foreign_errors_explained("cannot answer", UsageError):
                outcome = run_command(state, text) if is_command(text) else Outcome(state.chat.send(unwrap(text)))
                if outcome.is_over:
                    return
                draft = outcome.draft or ""
                if outcome.several is not None:
                    assert isinstance(state, ChatSession)
                    with _keys_unseen():
                        run_several(state, outcome.several, lambda: View(open_writer(), state.thinking))
                if outcome.events is not None:
                    with _keys_unseen():
                        record = run_answer(state, outcome.events, View(open_writer(), state.thinking))
                    if record and (reason := reason_of_end(record)):
                        resumes = "; /continue resumes it" if isinstance(state, ChatSession) else ""
                        terminal.info(f"({reason}{resumes})")
                    if record is None:  # stopped before it had begun: the message is still there
                        draft = text
                if outcome.several is not None or outcome.events is not None:
                    terminal.show("\n")  # a text of many paragraphs ends here
        except LLMCliError as error:
            terminal.error(" ".join(str(error).split()))
        except KeyboardInterrupt:
            terminal.info("stopped")


def _keys_unseen() -> AbstractContextManager[None]:
    """What keeps typed keys out of an answer. A console of Windows echoes only while it is read."""
    is_posix = sys.platform != "win32"
    return lazy.keys_unseen() if is_posix and sys.stdin.isatty() else nullcontext()
