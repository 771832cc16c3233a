"""`llmcli chat` without a terminal: messages from flags or lines of standard input, one answer each."""

import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from llmcli.cli.chat_session.answer import reason_of_end, run_answer
from llmcli.cli.chat_session.message import is_open_block, unwrap
from llmcli.cli.chat_session.state import ChatSession, Talk, TurnRecord
from llmcli.cli.chat_session.view import NoWriter, TextWriter, View
from llmcli.cli.held_texts import remedy_of
from llmcli.cli.terminal import terminal
from llmcli.errors import UnfinishedTextError, UsageError


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

    Raises: LLMCliError if one cannot be answered; what was answered before is written. UnfinishedTextError at the end,
            with `require_complete`, if an answer was cut before it was all that its schema asks for
    """
    records: list[TurnRecord] = []
    is_complete = True
    try:
        for message in messages:
            view = View(NoWriter() if as_json else TextWriter(), state.thinking)
            record = run_answer(state, state.chat.send(message), view)
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
