"""The commands of a conversation, a line that begins with a slash, and how a line is recognized as one.

Some change the conversation, its settings or its files. Others show something, on stderr like everything but the
answers.
"""

import base64
import math
import os
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len

from llmcli.cli.chat_session.answer import describe
from llmcli.cli.chat_session.kept_chats import find_kept, first_line, names_file
from llmcli.cli.chat_session.state import (
    OVERFLOW,
    THINKING,
    ChatCommand,
    ChatSession,
    Outcome,
    Talk,
)
from llmcli.cli.command import FOREIGN_OPTIONS
from llmcli.cli.output.tokens import (
    as_many_as_fit,
    likelihood_level,
    percent,
    show_legend,
    show_piece,
    terminal_tints,
    tinted,
)
from llmcli.cli.prompt import chosen_word
from llmcli.cli.spelling import near_names
from llmcli.cli.terminal import columns_of, fact_lines, has_color, terminal, visible
from llmcli.cli.units import counted
from llmcli.engine.conversation import Conversation, load_conversation, save_conversation, save_markdown
from llmcli.errors import UsageError
from llmcli.resources import chat_folder
from llmcli.sampling.params import SPECS, check_param
from llmcli.tokenizer.base import StreamDecoder

MARKDOWN_SUFFIX = ".md"
MOST_ANSWERS = 16  # of /n: more than anyone reads

CODE_BLOCK = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n]*\n(.*?)^[ ]{0,3}\1", re.MULTILINE | re.DOTALL)

# Shown of a resumed conversation: enough to remember it.
SHOWN_TURNS, SHOWN_CHARACTERS = 2, 300

# Terminals that certainly have no clipboard to write to.
BARE_TERMINALS = ("", "dumb", "linux")

LISTED_TOKENS = 10  # the least likely ones
NUM_ALTERNATIVES = 4

SETTINGS = (*SPECS, "seed", "max_new_tokens", "overflow", "thinking", "markdown")

# Names of the same commands in other chat programs.
HABITS = {
    "?": "help",
    "bye": "quit",
    "clear": "reset",
    "exit": "quit",
    "export": "save",
    "new": "reset",
    "q": "quit",
    "redo": "regen",
    "retry": "regen",
    "regenerate": "regen",
}


def reset(state: Talk, argument: str) -> None:
    """Forget all turns; the system prompt stays."""
    state.begin(Conversation(state.chat.conversation.system))
    terminal.info("Started a new conversation")


def system(state: Talk, argument: str) -> None:
    """Show the system prompt, set another, or remove it with `-`."""
    conversation = state.chat.conversation
    if argument:
        state.chat.conversation = replace(conversation, system=None if argument == "-" else argument)
        state.keep()
    shown = state.chat.conversation.system
    terminal.info("no system prompt" if shown is None else f"system prompt: {shown}")


def regen(state: Talk, argument: str) -> Outcome:
    """Answer the last message again."""
    return Outcome(state.chat.regenerate())


def undo(state: Talk, argument: str) -> None:
    """Remove the last turn; without the only one there is nothing to resume, as after `/reset`."""
    taken = state.chat.conversation.last
    rest = state.chat.conversation.without_last()
    terminal.info(f"Removed: {first_line(taken.user)}")
    if not rest.turns:
        reset(state, argument)
        return
    state.chat.conversation = rest
    state.keep()


def answer_several(state: ChatSession, argument: str) -> Outcome:
    """Answer the last message again, several times, to choose from."""
    if not (argument.isascii() and argument.isdecimal() and 2 <= int(argument[:9]) <= MOST_ANSWERS):
        raise UsageError(f"/n needs a number of answers from 2 to {MOST_ANSWERS}, such as /n 3")
    return Outcome(several=state.chat.answer_several(int(argument)))


def choose(state: ChatSession, argument: str) -> None:
    """Choose another of several answers."""
    if not (argument.isascii() and argument.isdecimal()):
        raise UsageError("/choose needs the number of an answer, such as /choose 2")
    state.chat.choose(int(argument[:9]))
    state.keep()
    terminal.info(f"answer {int(argument)} is used")


def edit(state: Talk, argument: str) -> Outcome:
    """Replace the last message; without a text, put the old one up for editing."""
    if argument:
        return Outcome(state.chat.edit(argument))
    return Outcome(draft=f"/edit {state.chat.conversation.last.user}")


def edit_answer(state: ChatSession, argument: str) -> Outcome | None:
    """Replace the last answer; without a text, put the old one up for editing."""
    last = state.chat.conversation.last.answer
    if last is not None and not argument:
        return Outcome(draft=f"/edit-answer {last.content}")
    state.chat.edit_answer(argument)
    state.keep()
    terminal.info("answer changed; /continue continues it")
    return None


def continue_answer(state: ChatSession, argument: str) -> Outcome:
    """Continue a stopped answer."""
    return Outcome(state.chat.continue_answer())


def save(state: Talk, argument: str) -> None:
    """Keep the conversation under a name, or save it to a file; without either, where it was saved last.

    A file that ends in `.md` is Markdown to read, which cannot be loaded.

    `--force` replaces another conversation in a file.
    """
    name, is_forced = _without_force(argument)
    if name.endswith(MARKDOWN_SUFFIX):
        save_markdown(_path(name), state.saved(), replace=is_forced)
        terminal.info(f"Saved to {_path(name)} as Markdown")
        return
    if not (name and names_file(name)) and not (state.files and not name):
        _keep(state, name)
        return
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


def _keep(state: Talk, name: str) -> None:
    """Keep the conversation under a name, or under the one it has. Raises: UsageError if it is not kept"""
    if not state.chat.conversation.turns:
        raise UsageError("there is nothing to keep yet; write a message first")
    if state.keeper is None:
        raise UsageError("this conversation is not kept; give the path of a file, such as ./talk.json")
    if name:
        state.keeper.keep_as(name, state.saved())
    else:
        state.keeper.save(state.saved())
        assert state.keeper.path is not None
        name = state.keeper.path.stem
    terminal.info(f"kept as {name}; `llmcli chat --resume {shlex.quote(name)}` continues it")


def load(state: Talk, argument: str) -> None:
    """Continue a copy of a saved conversation."""
    if not argument:
        raise UsageError("/load needs the name of a chat or a file, such as /load talk.json")
    path = _path(argument) if names_file(argument) else find_kept(chat_folder(), argument)
    saved = load_conversation(path)
    state.begin(saved.conversation, {path: saved} if names_file(argument) else {})
    names = saved.model, *saved.adapters
    held_with = f", made with {' + '.join(names)}" if names != (state.model, *state.adapters) else ""
    terminal.info(f"Loaded {counted(len(saved.conversation.turns), 'turn')} from {path}{held_with}")


def leave(state: Talk, argument: str) -> Outcome:
    """End the program."""
    return Outcome(is_over=True)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # not Path's own: that raises for the home of a user who is not there


def _refuse_kept(path: Path) -> None:
    """Raises: UsageError for a file among the kept chats, which another chat may be writing"""
    with suppress(OSError, ValueError):  # no such folder; the writer gives the reason
        if os.path.samefile(path.parent, chat_folder()):
            raise UsageError(f"{path} is in the folder of the kept chats; give a name, such as /save {path.stem}")


def _without_force(argument: str) -> tuple[str, bool]:
    words = argument.split()
    if "--force" in words[:1]:
        return argument.removeprefix("--force").strip(), True
    if "--force" in words[-1:]:
        return argument.removesuffix("--force").strip(), True
    return argument, False


def history(state: Talk, argument: str) -> None:
    """Show the conversation."""
    conversation = state.chat.conversation
    if conversation.system is not None:
        terminal.show(f"[system]\n{conversation.system}\n\n", wraps=True)
    for number, turn in enumerate(conversation.turns, start=1):
        unseen = ", no longer seen by the model" if number <= conversation.num_dropped else ""
        terminal.show(f"[{number}{unseen}]\n{turn.user}\n\n", wraps=True)
        if turn.answer is not None:
            terminal.show(f"[answer {number}]\n{turn.answer.shown}\n\n", wraps=True)
    if not conversation.turns:
        terminal.show("no messages yet\n")


def show_end(conversation: Conversation) -> None:
    """Show the last turns of a resumed conversation, on a terminal only."""
    for turn in conversation.turns[-SHOWN_TURNS:]:
        terminal.info(f"> {first_line(turn.user)}")
        if turn.answer is not None:
            text = turn.answer.shown.strip()
            start = "... " if len(text) > SHOWN_CHARACTERS else ""
            terminal.info(f"{start}{text[-SHOWN_CHARACTERS:]}\n")


def params(state: Talk, argument: str) -> None:
    """Show how answers are drawn and shown."""
    rows = state.settings()
    rows["thinking"] = state.thinking
    rows["markdown"] = "on" if state.is_markdown else "off"
    _show_table(rows)


def stats(state: ChatSession, argument: str) -> None:
    """Show what the last answer cost."""
    if state.last_turn is None:
        raise UsageError("no answer yet")
    terminal.show(f"{describe(state.last_turn)}\nmodel loaded in {state.load_seconds:.2f} s\n")


def tokens(state: ChatSession, argument: str) -> None:
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


def template(state: ChatSession, argument: str) -> None:
    """Show where the chat template comes from, and the conversation as it renders it."""
    terminal.show(f"{state.chat.template.origin}\n")
    if state.chat.conversation.turns:
        terminal.show(f"{state.chat.prompt().text}\n")


def copy_code(state: Talk, argument: str) -> None:
    """Copy the last code block to the terminal's clipboard, or print it if there is none.

    Source: xterm control sequences, OSC 52.
    """
    code = _last_code(state)
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in BARE_TERMINALS:
        terminal.show(code)
        return
    terminal.show(f"\x1b]52;c;{base64.b64encode(code.encode()).decode()}\x07", is_drawn=True)
    terminal.info(
        f"copied {counted(len(code.splitlines()), 'line')}, if your terminal lets programs write to the clipboard"
    )


def _last_code(state: Talk) -> str:
    for turn in reversed(state.chat.conversation.turns):
        blocks = CODE_BLOCK.findall(turn.answer.content) if turn.answer else []
        if blocks:
            return str(blocks[-1][1])
    raise UsageError("no answer has a code block")


def _show_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    terminal.show(fact_lines(rows.items(), width + 2, sys.stderr))


def probs(state: ChatSession, argument: str) -> None:
    """Show the last answer tinted by probability, and its least likely tokens with the likeliest ones instead.

    The model runs over the answer once more; the probabilities are its own, before any sampling parameter.
    Raises: UsageError if there is no answer, or for anything but a number of tokens.
    """
    if argument and not (argument.isascii() and argument.isdecimal()):
        raise UsageError("/probs takes the number of tokens to list, such as /probs 20")
    num_shown = int(argument[:9]) if argument else LISTED_TOKENS
    tokenizer = state.session.tokenizer
    known = list(state.chat.logprobs(NUM_ALTERNATIVES))
    probabilities = [math.exp(chosen.logprob) for chosen, _ in known]
    if has_color(sys.stderr):
        _show_tinted(state, probabilities)

    rows = [("#", "token", "model", ["likeliest"])]
    least = sorted(range(len(known)), key=lambda index: probabilities[index])[:num_shown]
    for index in sorted(least):
        chosen, alternatives = known[index]
        likeliest = [f"{show_piece(tokenizer, one.token_id)} {percent(math.exp(one.logprob))}" for one in alternatives]
        piece = show_piece(tokenizer, chosen.token_id)
        rows.append((str(index + 1), piece, percent(probabilities[index]), likeliest))
    widths = [max(cell_len(str(row[column])) for row in rows) for column in range(3)]
    room = columns_of(sys.stderr) - sum(widths) - 2 * len(widths)
    for number, piece, probability, likeliest_tokens in rows:
        space = " " * (widths[1] - cell_len(piece))
        shown = as_many_as_fit(likeliest_tokens, room)
        terminal.show(f"{number:>{widths[0]}}  {piece}{space}  {probability:>{widths[2]}}  {shown}\n")
    if len(least) < len(known):
        terminal.info(f"the {len(least)} least likely of {len(known)} tokens; /probs N lists more")


def _show_tinted(state: ChatSession, probabilities: list[float]) -> None:
    tints = terminal_tints()
    show_legend(tints)
    answer = state.chat.conversation.last.answer
    assert answer is not None
    decoder = StreamDecoder(state.session.tokenizer, at_start=True)
    for token_id, probability in zip(answer.token_ids, probabilities, strict=True):
        text = tinted(visible(decoder.push(token_id)), tints[likelihood_level(probability)])
        terminal.show(text, is_drawn=True, wraps=True)
    terminal.show(f"{visible(decoder.flush())}\n\n", is_drawn=True)


def set_value(state: Talk, argument: str) -> None:
    """Change one setting for the answers from now on. Raises: UsageError for an unknown name or a value out of range"""
    name, _, value = argument.partition(" ")
    name, value = name.replace("-", "_").lower(), value.strip()
    if name not in SETTINGS:
        raise UsageError(f"/set {name or 'NAME VALUE'}: {_meant_setting(name)}")
    if name in SPECS:
        state.change(name, check_param(name, _number(name, value)))
    elif name == "seed":
        state.change(name, _integer(name, value))
    elif name == "max_new_tokens":
        limit = None if value == "none" else _integer(name, value)
        if limit is not None and limit < 1:
            raise UsageError(f"max_new_tokens is {limit}, expected 1 or more, or none")
        state.change(name, limit)
    elif name == "overflow":
        state.change(name, chosen_word("overflow", value, OVERFLOW))
    elif name == "thinking":
        state.thinking = chosen_word("thinking", value, THINKING)
    else:
        if value not in ("on", "off"):
            raise UsageError(f"markdown is {value!r}, expected on or off")
        state.is_markdown = value == "on"
    terminal.info(f"{name} is {value}")


def _meant_setting(name: str) -> str:
    """The setting that was meant, by the spelling or by another program's name for it; else all of them."""
    option, known = f"--{name.replace('_', '-')}", {f"--{one.replace('_', '-')}": one for one in SETTINGS}
    for meant in (*FOREIGN_OPTIONS.get(option, ()), *near_names(option, known)):
        if meant in known:
            return f"did you mean {known[meant]}?"
    return f"expected one of {', '.join(SETTINGS)}, and a value"


def _number(name: str, text: str) -> int | float:
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    raise UsageError(f"{name} is {text!r}, expected {SPECS[name].expected}")


def _integer(name: str, text: str) -> int:
    with suppress(ValueError):
        return int(text)
    raise UsageError(f"{name} is {text!r}, expected an integer")


def show_help(state: Talk, argument: str) -> None:
    """List the commands and the keys."""
    rows = {f"/{command.name} {command.arguments}".rstrip(): command.help for command in commands_of(state)}
    rows |= {
        '"""': "Begins and ends a message of several lines; a pasted block is one message too.",
        "Alt-Enter": "Starts a new line.",
        "Ctrl-C": "Stops the answer; at an empty prompt, press it twice to quit. Ctrl-D quits.",
        "a space first": "Sends a message that begins with a slash.",
    }
    _show_table(rows)


COMMANDS = (
    ChatCommand("help", "", "List the commands.", show_help),
    ChatCommand("reset", "", "Start a new conversation with the same system prompt.", reset),
    ChatCommand("system", "[TEXT]", "Show or set the system prompt; - removes it.", system),
    ChatCommand("regen", "", "Answer the last message again.", regen),
    ChatCommand("n", "COUNT", "Answer it again several times, to choose from.", answer_several, needs_model=True),
    ChatCommand("choose", "NUMBER", "Choose one of those answers.", choose, needs_model=True),
    ChatCommand("undo", "", "Remove the last turn.", undo),
    ChatCommand("edit", "[TEXT]", "Edit the last message and answer it again.", edit),
    ChatCommand("edit-answer", "[TEXT]", "Edit the last answer.", edit_answer, needs_model=True),
    ChatCommand("continue", "", "Continue an answer that was stopped.", continue_answer, needs_model=True),
    ChatCommand(
        "save",
        "[--force] [NAME|FILE]",
        "Save the chat: under a name, to a file (.md: Markdown), or again.",
        save,
    ),
    ChatCommand("load", "NAME|FILE", "Load a copy of a saved conversation.", load),
    ChatCommand("history", "", "Show the conversation.", history),
    ChatCommand("params", "", "Show the settings.", params),
    ChatCommand("set", "NAME VALUE", "Change a setting: /set temperature 0.5.", set_value),
    ChatCommand("stats", "", "Show times and rates of the last answer.", stats, needs_model=True),
    ChatCommand("probs", "[COUNT]", "Show how likely the answer's tokens were.", probs, needs_model=True),
    ChatCommand("tokens", "", "Show how much of the context is used.", tokens, needs_model=True),
    ChatCommand("template", "", "Show the prompt that the model gets.", template, needs_model=True),
    ChatCommand("copy-code", "", "Copy the last code block.", copy_code),
    ChatCommand("quit", "", "Quit; so does Ctrl-D.", leave),
)


def commands_of(state: Talk) -> list[ChatCommand]:
    """The commands that there are in a chat: with a server, those that need no model."""
    has_model = isinstance(state, ChatSession)
    return [command for command in COMMANDS if has_model or not command.needs_model]


def is_command(text: str) -> bool:
    """Whether a line is meant as a command: it begins with a slash, and is one line or begins with a known name."""
    return text.startswith("/") and ("\n" not in text or _split(text)[0] in [command.name for command in COMMANDS])


def run_command(state: Talk, text: str) -> Outcome:
    """Run a line that `is_command`. Raises: UsageError for an unknown one, and the command's errors"""
    name, argument = _split(text)
    for command in COMMANDS:
        if command.name == name:
            if command not in commands_of(state):
                raise UsageError(
                    f"/{name} needs a model that runs here; this chat is with a server; /help lists what it has"
                )
            return command.run(state, argument) or Outcome()
    near = near_names(name, [command.name for command in commands_of(state)])
    meant = HABITS.get(name) or (near[0] if near else None)
    hint = f"did you mean /{meant}? /help lists all" if meant else "/help lists them"
    raise UsageError(
        f"unknown command {first_line(f'/{name}')}; {hint}; to send it as a message, put a space before it"
    )


def _split(text: str) -> tuple[str, str]:
    """The name of a command without its slash, and the rest of the line."""
    name, *rest = text.split(maxsplit=1)
    return name[1:], rest[0].strip() if rest else ""
