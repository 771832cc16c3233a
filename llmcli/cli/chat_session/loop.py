"""Reads messages and commands and shows answers: on a terminal until the user leaves, else one for each message."""

import os
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from llmcli.cli import lazy
from llmcli.cli.chat_session.answer import NoWriter, TextWriter, View, Writer, reason_of_end, run_answer, run_several
from llmcli.cli.chat_session.commands import commands_of, is_command, run_command
from llmcli.cli.chat_session.message import CONTINUATION, PROMPT, is_open_block, unwrap
from llmcli.cli.chat_session.state import ChatSession, Outcome, Talk, TurnRecord
from llmcli.cli.constrained_texts import remedy_of
from llmcli.cli.terminal import terminal
from llmcli.engine.chat_events import ChatEvent
from llmcli.errors import LLMCliError, UnfinishedTextError, UsageError, foreign_errors_explained

TEXT_ONLY_TERMINALS = ("dumb", "unknown")  # Emacs' shell, the console of a build: control codes would show in the text


class PromptLine(Protocol):
    """Where a person types."""

    def read(self, draft: str, facts: str) -> str:
        """One message or command, of as many lines as were typed.

        `draft` is a text to change and send, `facts` a line about the conversation.
        Raises: KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D, each on an empty line
        """
        ...


class BareLine:
    """Reads lines from a terminal that only shows text. The prompt is on stderr: stdout is for the answers."""

    def read(self, draft: str, facts: str) -> str:
        """As `PromptLine`; `draft` is shown to be typed again, `facts` are left out."""
        if draft:
            terminal.info(f"change this and type it again: {draft}")
        text, prompt = "", PROMPT
        while True:
            terminal.show(prompt)
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            text += line.decode(errors="surrogateescape")
            if not is_open_block(text):
                return text.rstrip("\r\n")
            prompt = CONTINUATION


def open_prompt_line(history_path: Path, state: Talk) -> PromptLine:
    """The prompt line that this terminal allows; `history_path` keeps what was typed."""
    if os.environ.get("TERM", "").lower() in TEXT_ONLY_TERMINALS:
        return BareLine()
    return lazy.line_editor.LineEditor({command.name: command.help for command in commands_of(state)}, history_path)


class Results:
    """Takes what is typed after an answer with tool calls as their results, one after the other."""

    def __init__(self, state: Talk):
        self._state = state
        self._calls: tuple[dict[str, Any], ...] = ()
        self._typed: list[str] = []

    def ask(self) -> None:
        """Say whose result is typed next, if calls wait."""
        if call := self._next():
            function = call["function"]
            terminal.info(f"type the result of {function['name']}({function['arguments']})")

    def take(self, text: str) -> Iterator[ChatEvent] | None:
        """Answer a message, or the results once the last one is there; None before."""
        if self._next() is None:
            return self._state.chat.send(text)
        self._typed.append(text)
        return self._state.chat.report(self._typed) if self._next() is None else None

    def _next(self) -> dict[str, Any] | None:
        calls = self._state.chat.conversation.waiting_calls
        if calls is not self._calls:
            self._calls, self._typed = calls, []
        return calls[len(self._typed)] if len(self._typed) < len(calls) else None


def converse(state: Talk, editor: PromptLine, open_writer: Callable[[], Writer]) -> None:
    """Talk until Ctrl-D, /quit, or Ctrl-C twice at an empty prompt. An error ends an answer, not the conversation."""
    draft = ""
    is_leaving = False
    results = Results(state)
    while True:
        results.ask()
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
                outcome = run_command(state, text) if is_command(text) else Outcome(results.take(unwrap(text)))
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
                    if record is None:  # stopped before it began: the message is still there
                        draft = text
                if outcome.several is not None or outcome.events is not None:
                    terminal.show("\n")  # a text of many paragraphs ends here
        except LLMCliError as error:
            terminal.error(" ".join(str(error).split()))
        except KeyboardInterrupt:
            terminal.info("stopped")


def _keys_unseen() -> AbstractContextManager[None]:
    """Keep typed keys out of an answer. A Windows console echoes only while it is read."""
    is_posix = sys.platform != "win32"
    return lazy.key_echo.keys_unseen() if is_posix and sys.stdin.isatty() else nullcontext()


def read_messages() -> Iterator[str]:
    """The messages on standard input, as they come: a line each, or several lines between triple quotes.

    Raises: UsageError if it is closed or not UTF-8 text, or if a block does not end.
    """
    if sys.stdin is None:  # the caller closed it
        raise UsageError("no message: standard input is closed; give --message TEXT")
    text = ""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text += (line.removeprefix(BOM_UTF8) if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input is not UTF-8 text: byte {line[error.start]:#04x} in line {number}"
            ) from error
        if not is_open_block(text):
            if message := unwrap(text):
                yield message
            text = ""
    if text:
        raise UsageError('standard input ends inside a """ block; close it with """')


def answer_all(state: Talk, messages: Iterable[str], *, as_json: bool, require_complete: bool = False) -> bool:
    """Answer one message after the other; False if Ctrl-C stopped an answer, which is then the last.

    Raises: LLMCliError if one cannot be answered; earlier answers are written. UnfinishedTextError at the end,
            with `require_complete`, if an answer was cut before its schema was complete
    """
    records: list[TurnRecord] = []
    is_complete = True
    results = Results(state)
    try:
        for message in messages:
            if (events := results.take(message)) is None:
                continue
            view = View(NoWriter() if as_json else TextWriter(), state.thinking)
            record = run_answer(state, events, view)
            if record is not None:
                records.append(record)
                if reason := reason_of_end(record):
                    terminal.info(f"({reason})")
            if record is None or record.finished.answer.finish_reason == "interrupted":
                is_complete = False
                break
    except KeyboardInterrupt:  # while waiting for a line
        is_complete = False
    finally:
        if as_json:
            assert isinstance(state, ChatSession)
            terminal.write_json(_transcript(state, records))
    reasons = [record.finished.answer.finish_reason for record in records if record.finished.is_complete is False]
    if is_complete and require_complete and reasons:
        what = "an answer is" if len(reasons) == 1 else f"{len(reasons)} answers are"
        raise UnfinishedTextError(f"{what} unfinished; {remedy_of(reasons)}")
    return is_complete


def _transcript(state: ChatSession, records: list[TurnRecord]) -> dict[str, Any]:
    return {
        "model": state.model,
        "seed": state.seed,
        "system": state.chat.conversation.system,
        "context": state.chat.runner.limits.max_seq_len,
        "load_seconds": state.load_seconds,
        "turns": [_turn_json(record) for record in records],
    }


def _turn_json(record: TurnRecord) -> dict[str, Any]:
    started, finished = record.started, record.finished
    return {
        "message": record.message,
        "answer": finished.answer.content,
        "reasoning": finished.answer.reasoning,
        **({"tool_calls": list(finished.answer.calls)} if finished.answer.calls else {}),
        "prompt_token_ids": list(started.prompt_token_ids),
        "token_ids": list(finished.token_ids),
        "finish_reason": finished.answer.finish_reason,
        **({} if finished.is_complete is None else {"is_complete": finished.is_complete}),
        "num_kept_tokens": record.num_kept,
        "num_history_tokens_computed": started.num_history_computed,
        "num_dropped_turns": started.num_dropped,
        "timings": {
            **asdict(finished.timings),
            "prefill_tokens_per_second": finished.timings.prefill_tokens_per_second,
            "decode_tokens_per_second": finished.timings.decode_tokens_per_second,
        },
    }
