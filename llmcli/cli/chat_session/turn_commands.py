"""Commands that change the conversation: what was said, and its files."""

import os
import shlex
from contextlib import suppress
from pathlib import Path

from llmcli.cli.chat_session.kept_names import find_kept, names_file
from llmcli.cli.chat_session.outcome import Outcome
from llmcli.cli.chat_session.state import ChatSession, Talk, replace_system
from llmcli.cli.terminal import terminal
from llmcli.engine.conversation import Conversation, load_conversation, save_conversation
from llmcli.errors import UsageError
from llmcli.resources import chat_folder

MOST_ANSWERS = 16  # of /n: more than anyone reads


def reset(state: Talk, argument: str) -> Outcome:
    """Forget all turns; the system prompt stays."""
    state.begin(Conversation(state.chat.conversation.system))
    terminal.info("Started a new conversation")
    return Outcome()


def system(state: Talk, argument: str) -> Outcome:
    """Show the system prompt, set another, or remove it with `-`."""
    conversation = state.chat.conversation
    if argument:
        state.chat.conversation = replace_system(conversation, None if argument == "-" else argument)
        state.keep()
    shown = state.chat.conversation.system
    terminal.info("no system prompt" if shown is None else f"system prompt: {shown}")
    return Outcome()


def regen(state: Talk, argument: str) -> Outcome:
    """Answer the last message again."""
    return Outcome(state.chat.regenerate())


def undo(state: Talk, argument: str) -> Outcome:
    """Take the last turn back; without the only one there is nothing to go on with, as after `/reset`."""
    taken = state.chat.conversation.last
    rest = state.chat.conversation.without_last()
    terminal.info(f"Removed: {first_line(taken.user)}")
    if not rest.turns:
        return reset(state, argument)
    state.chat.conversation = rest
    state.keep()
    return Outcome()


def answer_several(state: ChatSession, argument: str) -> Outcome:
    """Answer the last message again, several times, to choose from."""
    if not (argument.isascii() and argument.isdecimal() and 2 <= int(argument[:9]) <= MOST_ANSWERS):
        raise UsageError(f"/n needs a number of answers from 2 to {MOST_ANSWERS}, such as /n 3")
    return Outcome(several=state.chat.answer_several(int(argument)))


def choose(state: ChatSession, argument: str) -> Outcome:
    """Take another one of several answers."""
    if not (argument.isascii() and argument.isdecimal()):
        raise UsageError("/choose needs the number of an answer, such as /choose 2")
    state.chat.choose(int(argument[:9]))
    state.keep()
    terminal.info(f"answer {int(argument)} is used")
    return Outcome()


def edit(state: Talk, argument: str) -> Outcome:
    """Put another message in the place of the last; without a text the old one comes up for editing."""
    if argument:
        return Outcome(state.chat.edit(argument))
    return Outcome(draft=f"/edit {state.chat.conversation.last.user}")


def edit_answer(state: ChatSession, argument: str) -> Outcome:
    """Put another text in the place of the last answer; without a text the old one comes up for editing."""
    last = state.chat.conversation.last.answer
    if last is not None and not argument:
        return Outcome(draft=f"/edit-answer {last.content}")
    state.chat.edit_answer(argument)
    state.keep()
    terminal.info("answer changed; /continue continues it")
    return Outcome()


def continue_answer(state: ChatSession, argument: str) -> Outcome:
    """Go on with an answer that was stopped."""
    return Outcome(state.chat.continue_answer())


def save(state: Talk, argument: str) -> Outcome:
    """Keep the conversation under a name, or save it to a file, or to the one it came from.

    `--force` replaces another conversation in a file.
    """
    name, is_forced = _without_force(argument)
    if not (name or state.files):
        raise UsageError("/save needs a name or a file, such as /save talk.json")
    if name and not names_file(name):
        if not state.chat.conversation.turns:
            raise UsageError("there is nothing to keep yet; write a message first")
        if state.keeper is None:
            raise UsageError("this conversation is not kept; give the path of a file, such as ./talk.json")
        state.keeper.keep_as(name, state.saved())
        terminal.info(f"kept as {name}; `llmcli chat --resume {shlex.quote(name)}` continues it")
        return Outcome()
    path = _path(name) if name else list(state.files)[-1]
    _refuse_kept(path)
    known = state.files.get(path)
    if known is not None and not is_forced and os.path.lexists(path) and load_conversation(path) != known:
        raise UsageError(
            f"{path} was changed since this chat read it; replace it with /save --force FILE, or name another file"
        )
    save_conversation(path, state.saved(), replace=is_forced or known is not None)
    state.files.pop(path, None)
    state.files[path] = load_conversation(path)
    terminal.info(f"Saved to {path}")
    return Outcome()


def load(state: Talk, argument: str) -> Outcome:
    """Go on with a copy of a saved conversation."""
    if not argument:
        raise UsageError("/load needs the name of a chat or a file, such as /load talk.json")
    path = _path(argument) if names_file(argument) else find_kept(chat_folder(), argument)
    saved = load_conversation(path)
    state.begin(saved.conversation, {path: saved} if names_file(argument) else {})
    names = saved.model, *saved.adapters
    held_with = f", made with {' + '.join(names)}" if names != (state.model, *state.adapters) else ""
    terminal.info(f"Loaded {count_turns(saved.conversation)} from {path}{held_with}")
    return Outcome()


def leave(state: Talk, argument: str) -> Outcome:
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


def _refuse_kept(path: Path) -> None:
    """Raises: UsageError for a file among the kept chats, which another chat may be writing"""
    with suppress(OSError, ValueError):  # no such folder; the writer says what is wrong with it
        if os.path.samefile(path.parent, chat_folder()):
            raise UsageError(f"{path} is in the folder of the kept chats; give a name, such as /save {path.stem}")


def _without_force(argument: str) -> tuple[str, bool]:
    words = argument.split()
    if "--force" in words[:1]:
        return argument.removeprefix("--force").strip(), True
    if "--force" in words[-1:]:
        return argument.removesuffix("--force").strip(), True
    return argument, False
