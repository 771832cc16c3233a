"""A prompt line with editing, history, several lines, completion of commands, and a line of facts below it."""

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.screen import Char
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from llmcli.cli.chat_session.kept_chats import make_chat_folder
from llmcli.cli.chat_session.message import CONTINUATION, PROMPT, is_open_block
from llmcli.cli.terminal import terminal, visible
from llmcli.errors import LLMCliError, UsageError
from llmcli.reading import SmallFile

# Where Unicode has characters that reorder or hide text. prompt_toolkit itself shows control characters escaped.
UNSEEN_BLOCKS = (range(0x600, 0x2100), range(0xFE00, 0x10000), range(0xE0000, 0xE0080))
HISTORY = SmallFile("a history of what was typed", 64 * 1024**2, UsageError, "remove it")


class LineEditor:
    """Reads messages and commands from a terminal. It draws on stderr: stdout is for the answers.

    `commands` are names without the slash, and what they do.
    """

    def __init__(self, commands: Mapping[str, str], history_path: Path):
        characters = [chr(code) for block in UNSEEN_BLOCKS for code in block]
        Char.display_mappings.update({one: visible(one) for one in characters if visible(one) != one})
        self._session: PromptSession[str] = PromptSession(
            history=_open_history(history_path),
            completer=_CommandCompleter(commands),
            complete_while_typing=True,
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation=CONTINUATION,
            enable_open_in_editor=False,
            output=create_output(stdout=sys.stderr if sys.stderr.isatty() else sys.stdout),
            reserve_space_for_menu=4,
            style=Style([("bottom-toolbar", "noreverse")]),
        )

    def read(self, draft: str, facts: str) -> str:
        """One message or command, of as many lines as were typed; `draft` is there to edit.

        Raises: KeyboardInterrupt for Ctrl-C on an empty line, EOFError for Ctrl-D on one.
        """
        return self._session.prompt(
            FormattedText([("bold", PROMPT)]),
            default=draft,
            bottom_toolbar=FormattedText([("fg:ansibrightblack", facts)]),
        )


class _CommandCompleter(Completer):
    """Completes the name of a command, and says what it does."""

    def __init__(self, commands: Mapping[str, str]):
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The commands that begin with what was typed."""
        text = document.text_before_cursor
        for name, summary in self._commands.items():
            if text.startswith("/") and f"/{name}".startswith(text):
                yield Completion(f"/{name}", -len(text), display_meta=summary)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _accept(event: KeyPressEvent) -> None:
        buffer: Buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _discard(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


class _FileHistory(FileHistory):
    """A history whose file may vanish or disk fill up while somebody types."""

    def store_string(self, string: str) -> None:
        """Add what was typed, if that is possible."""
        with suppress(OSError):
            super().store_string(string)


def _open_history(path: Path) -> History:
    """What was typed in earlier conversations too, or in this one alone if the file cannot be kept."""
    try:
        make_chat_folder(path.parent)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        HISTORY.read_bytes(path)  # refuses irregular and oversized files
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
    except LLMCliError as error:
        reason = str(error)
    else:
        return _FileHistory(str(path))
    terminal.warn(f"the input history is not saved: {reason}")
    return InMemoryHistory()
