"""Commands that change the conversation: what was said, and its files."""

import os
from pathlib import Path

from llmcli.cli.chat_session.outcome import Outcome
from llmcli.cli.chat_session.state import ChatSession, replace_system
from llmcli.cli.terminal import terminal
from llmcli.engine.conversation import Conversation
from llmcli.engine.conversation_file import load_conversation, save_conversation
from llmcli.errors import UsageError


def reset(state: ChatSession, argument: str) -> Outcome:
    """Forget all turns; the system prompt stays."""
    state.chat.conversation = Conversation(state.chat.conversation.system)
    state.keep()
    terminal.info("Started a new conversation")
    return Outcome()


def system(state: ChatSession, argument: str) -> Outcome:
    """Show the system prompt, set another, or remove it with `-`."""
    conversation = state.chat.conversation
    if argument:
        state.chat.conversation = replace_system(conversation, None if argument == "-" else argument)
        state.keep()
    shown = state.chat.conversation.system
    terminal.info("no system prompt" if shown is None else f"system prompt: {shown}")
    return Outcome()


def regen(state: ChatSession, argument: str) -> Outcome:
    """Answer the last message again."""
    return Outcome(state.chat.regenerate())


def undo(state: ChatSession, argument: str) -> Outcome:
    """Take the last turn back."""
    taken = state.chat.conversation.last
    state.chat.conversation = state.chat.conversation.without_last()
    state.keep()
    terminal.info(f"Removed: {first_line(taken.user)}")
    return Outcome()


def edit(state: ChatSession, argument: str) -> Outcome:
    """Put another message in the place of the last; without a text the old one comes up for editing."""
    if argument:
        return Outcome(state.chat.edit(argument))
    return Outcome(draft=f"/edit {state.chat.conversation.last.user}")


def continue_answer(state: ChatSession, argument: str) -> Outcome:
    """Go on with an answer that was stopped."""
    return Outcome(state.chat.continue_answer())


def save(state: ChatSession, argument: str) -> Outcome:
    """Save the conversation to a file, or to the one it came from; `--force` replaces another conversation."""
    name, is_forced = _without_force(argument)
    if not (name or state.files):
        raise UsageError("/save needs a file name, such as /save talk.json")
    path = _path(name) if name else state.files[-1]
    save_conversation(path, state.saved(), replace=is_forced or path in state.files)
    state.files.append(path)
    terminal.info(f"Saved to {path}")
    return Outcome()


def load(state: ChatSession, argument: str) -> Outcome:
    """Go on with a saved conversation."""
    if not argument:
        raise UsageError("/load needs a file name, such as /load talk.json")
    path = _path(argument)
    saved = load_conversation(path)
    state.chat.conversation = saved.conversation
    state.files.append(path)
    state.keep()
    held_with = f", made with {saved.model}" if saved.model != state.model else ""
    terminal.info(f"Loaded {count_turns(saved.conversation)} from {path}{held_with}")
    return Outcome()


def leave(state: ChatSession, argument: str) -> Outcome:
    """End the program."""
    return Outcome(is_over=True)


def count_turns(conversation: Conversation) -> str:
    """The number of turns in words."""
    count = len(conversation.turns)
    return "1 turn" if count == 1 else f"{count} turns"


def first_line(text: str) -> str:
    """The beginning of a text, to recognize it by."""
    line = text.strip().split("\n")[0]
    return line if len(line) <= 60 and line == text.strip() else f"{line[:60]}..."


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # not Path's own: that raises for the home of a user who is not there


def _without_force(argument: str) -> tuple[str, bool]:
    words = argument.split()
    if "--force" in words[:1]:
        return argument.removeprefix("--force").strip(), True
    if "--force" in words[-1:]:
        return argument.removesuffix("--force").strip(), True
    return argument, False
