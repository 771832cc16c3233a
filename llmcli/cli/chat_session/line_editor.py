"""The prompt line: editing, history, several lines, completion of commands, and a line of facts below it."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from llmcli.cli.chat_session.message import is_open_block
from llmcli.cli.chat_session.outcome import Command

PROMPT = "> "
CONTINUATION = ". "


class LineEditor:
    """Reads messages and commands from a terminal. It draws on stderr: stdout is for the answers."""

    def __init__(self, commands: Sequence[Command], history_path: Path | None):
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
        """One message or command, of as many lines as were typed; `draft` stands there to be edited.

        Raises: KeyboardInterrupt for Ctrl-C on an empty line, EOFError for Ctrl-D on one.
        """
        return self._session.prompt(
            FormattedText([("bold", PROMPT)]),
            default=draft,
            bottom_toolbar=FormattedText([("fg:ansibrightblack", facts)]),
        )


class _CommandCompleter(Completer):
    """Completes the name of a command, and says what it does."""

    def __init__(self, commands: Sequence[Command]):
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The commands that begin with what was typed."""
        text = document.text_before_cursor
        for command in self._commands:
            if text.startswith("/") and f"/{command.name}".startswith(text):
                yield Completion(f"/{command.name}", -len(text), display_meta=command.help)


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


def _open_history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError:  # a folder that cannot be written must not keep anyone from talking
        return InMemoryHistory()
    return FileHistory(str(path))
