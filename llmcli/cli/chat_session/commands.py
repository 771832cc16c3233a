"""The table of commands, and how a line is told to be one."""

import sys

from llmcli.cli.chat_session import look_commands, probs_command, set_command, turn_commands
from llmcli.cli.chat_session.outcome import Command, Outcome
from llmcli.cli.chat_session.state import ChatSession, Talk
from llmcli.cli.chat_session.turn_commands import first_line
from llmcli.cli.facts import fact_lines
from llmcli.cli.near_names import near_names
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError


def show_help(state: Talk, argument: str) -> Outcome:
    """List the commands and the keys."""
    rows = {f"/{command.name} {command.arguments}".rstrip(): command.help for command in commands_of(state)}
    rows |= {
        '"""': "Begins and ends a message of several lines; a pasted block is one message too.",
        "Alt-Enter": "Starts a new line.",
        "Ctrl-C": "Stops the answer; at an empty prompt, press it twice to quit. Ctrl-D quits.",
        "a space first": "Sends a message that begins with a slash.",
    }
    width = max(map(len, rows))
    terminal.show(fact_lines(rows.items(), width + 2, sys.stderr))
    return Outcome()


COMMANDS = (
    Command("help", "", "List the commands.", show_help),
    Command("reset", "", "Start a new conversation with the same system prompt.", turn_commands.reset),
    Command("system", "[TEXT]", "Show or set the system prompt; - removes it.", turn_commands.system),
    Command("regen", "", "Answer the last message again.", turn_commands.regen),
    Command(
        "n", "COUNT", "Answer it again several times, to choose from.", turn_commands.answer_several, needs_model=True
    ),
    Command("choose", "NUMBER", "Choose one of those answers.", turn_commands.choose, needs_model=True),
    Command("undo", "", "Remove the last turn.", turn_commands.undo),
    Command("edit", "[TEXT]", "Edit the last message and answer it again.", turn_commands.edit),
    Command("edit-answer", "[TEXT]", "Edit the last answer.", turn_commands.edit_answer, needs_model=True),
    Command("continue", "", "Continue an answer that was stopped.", turn_commands.continue_answer, needs_model=True),
    Command("save", "[--force] [NAME|FILE]", "Keep the chat under a name, or save it to a file.", turn_commands.save),
    Command("load", "NAME|FILE", "Load a copy of a saved conversation.", turn_commands.load),
    Command("history", "", "Show the conversation.", look_commands.history),
    Command("params", "", "Show the settings.", look_commands.params),
    Command("set", "NAME VALUE", "Change a setting: /set temperature 0.5.", set_command.set_value),
    Command("stats", "", "Show times and rates of the last answer.", look_commands.stats, needs_model=True),
    Command("probs", "[COUNT]", "Show how likely the answer's tokens were.", probs_command.probs, needs_model=True),
    Command("tokens", "", "Show how much of the context is used.", look_commands.tokens, needs_model=True),
    Command("template", "", "Show the prompt that the model gets.", look_commands.template, needs_model=True),
    Command("copy-code", "", "Copy the last code block.", look_commands.copy_code),
    Command("quit", "", "Quit; so does Ctrl-D.", turn_commands.leave),
)

# What the same commands are called in other chat programs.
HABITS = {
    "?": "help",
    "bye": "quit",
    "clear": "reset",
    "exit": "quit",
    "new": "reset",
    "q": "quit",
    "redo": "regen",
    "retry": "regen",
    "regenerate": "regen",
}


def commands_of(state: Talk) -> list[Command]:
    """The commands that there are in a chat: with a server, those that need no model."""
    has_model = isinstance(state, ChatSession)
    return [command for command in COMMANDS if has_model or not command.needs_model]


def is_command(text: str) -> bool:
    """Whether a line is meant as a command: it begins with a slash, and is one line or begins with a known name."""
    return text.startswith("/") and ("\n" not in text or _split(text)[0] in [command.name for command in COMMANDS])


def run_command(state: Talk, text: str) -> Outcome:
    """Run a line that `is_command`.

    Raises: UsageError for an unknown one, and whatever the command raises.
    """
    name, argument = _split(text)
    for command in COMMANDS:
        if command.name == name:
            if command not in commands_of(state):
                raise UsageError(
                    f"/{name} needs a model that runs here; this chat is with a server; /help lists what it has"
                )
            return command.run(state, argument)
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
