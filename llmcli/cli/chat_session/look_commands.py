"""Commands that show something and change nothing. What they show goes to stderr, like everything but the answers."""

import base64
import os
import re
import sys

from llmcli.cli.chat_session.answer import describe
from llmcli.cli.chat_session.outcome import Outcome
from llmcli.cli.chat_session.state import ChatSession, Talk
from llmcli.cli.chat_session.turn_commands import first_line
from llmcli.cli.facts import fact_lines
from llmcli.cli.terminal import terminal
from llmcli.engine.conversation import Conversation
from llmcli.errors import UsageError

CODE_BLOCK = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n]*\n(.*?)^[ ]{0,3}\1", re.MULTILINE | re.DOTALL)

# Of a conversation that goes on: enough to remember it by.
SHOWN_TURNS, SHOWN_CHARACTERS = 2, 300

# Terminals that certainly have no clipboard to write to.
BARE_TERMINALS = ("", "dumb", "linux")


def history(state: Talk, argument: str) -> Outcome:
    """Show what was said."""
    conversation = state.chat.conversation
    if conversation.system is not None:
        terminal.show(f"[system]\n{conversation.system}\n\n", wraps=True)
    for number, turn in enumerate(conversation.turns, start=1):
        unseen = ", no longer seen by the model" if number <= conversation.num_dropped else ""
        terminal.show(f"[{number}{unseen}]\n{turn.user}\n\n", wraps=True)
        if turn.answer is not None:
            terminal.show(f"[answer {number}]\n{turn.answer.content}\n\n", wraps=True)
    if not conversation.turns:
        terminal.show("no messages yet\n")
    return Outcome()


def show_end(conversation: Conversation) -> None:
    """Show how a conversation that goes on has ended, on a terminal; a script knows it."""
    for turn in conversation.turns[-SHOWN_TURNS:]:
        terminal.info(f"> {first_line(turn.user)}")
        if turn.answer is not None:
            text = turn.answer.content.strip()
            start = "... " if len(text) > SHOWN_CHARACTERS else ""
            terminal.info(f"{start}{text[-SHOWN_CHARACTERS:]}\n")


def params(state: Talk, argument: str) -> Outcome:
    """Show how answers are drawn and shown."""
    rows = state.settings()
    rows["thinking"] = state.thinking
    rows["markdown"] = "on" if state.is_markdown else "off"
    _show_table(rows)
    return Outcome()


def stats(state: ChatSession, argument: str) -> Outcome:
    """Show what the last answer cost."""
    if state.last_turn is None:
        raise UsageError("no answer yet")
    terminal.show(f"{describe(state.last_turn)}\nmodel loaded in {state.load_seconds:.2f} s\n")
    return Outcome()


def tokens(state: ChatSession, argument: str) -> Outcome:
    """Show how much of the context the conversation takes."""
    conversation = state.chat.conversation
    rows = {}
    for number, turn in enumerate(conversation.turns, start=1):
        answer_tokens = len(turn.answer.token_ids) if turn.answer else 0
        unseen = ", no longer seen" if number <= conversation.num_dropped else ""
        rows[f"turn {number}"] = f"{answer_tokens} tokens in the answer{unseen}: {first_line(turn.user)}"
    num_tokens, context = state.chat.num_tokens(), state.chat.runner.limits.max_seq_len
    rows["all"] = f"{num_tokens} of {context} tokens ({num_tokens / context:.0%})"
    _show_table(rows)
    return Outcome()


def template(state: ChatSession, argument: str) -> Outcome:
    """Show where the chat template comes from, and the conversation in its words."""
    terminal.show(f"{state.chat.template.origin}\n")
    if state.chat.conversation.turns:
        terminal.show(f"{state.chat.prompt().text}\n")
    return Outcome()


def copy_code(state: Talk, argument: str) -> Outcome:
    """Copy the last code block to the terminal's clipboard, or print it where there is none.

    Source: xterm control sequences, OSC 52.
    """
    code = _last_code(state)
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in BARE_TERMINALS:
        terminal.show(code)
        return Outcome()
    terminal.show(f"\x1b]52;c;{base64.b64encode(code.encode()).decode()}\x07", is_drawn=True)
    count = len(code.splitlines())
    lines = "1 line" if count == 1 else f"{count} lines"
    terminal.info(f"copied {lines}, if your terminal lets programs write to the clipboard")
    return Outcome()


def _last_code(state: Talk) -> str:
    for turn in reversed(state.chat.conversation.turns):
        blocks = CODE_BLOCK.findall(turn.answer.content) if turn.answer else []
        if blocks:
            return str(blocks[-1][1])
    raise UsageError("no answer has a code block")


def _show_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    terminal.show(fact_lines(rows.items(), width + 2, sys.stderr))
