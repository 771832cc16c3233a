"""The table of commands, and how a line is told to be one."""

from llmcli.cli.chat_session import look_commands, probs_command, set_command, turn_commands
from llmcli.cli.chat_session.outcome import Command, Outcome
from llmcli.cli.chat_session.state import ChatSession
from llmcli.cli.chat_session.turn_commands import first_line
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError


def show_help(state: ChatSession, argument: str) -> Outcome:
    """List the commands and the keys."""
    rows = {f"/{command.name} {command.arguments}".rstrip(): command.help for command in COMMANDS}
    rows |= {
        '"""': "Begins and ends a message of several lines; a pasted block is one message too.",
        "Alt-Enter": "Starts a new line.",
        "Ctrl-C": "Stops the answer; at an empty prompt, twice leaves. Ctrl-D leaves.",
        "a space first": "A message that begins with a slash.",
    }
    width = max(map(len, rows))
    terminal.show("".join(f"{name:<{width}}  {text}\n" for name, text in rows.items()))
    return Outcome()


COMMANDS = (
    Command("help", "", "List the commands.", show_help),
    Command("reset", "", "Forget all turns; the system prompt stays.", turn_commands.reset),
    Command("system", "[TEXT]", "Show or set the system prompt; - removes it.", turn_commands.system),
    Command("regen", "", "Answer the last message again, in other words.", turn_commands.regen),
    Command("n", "COUNT", "Answer it again several times, to choose from.", turn_commands.answer_several),
    Command("choose", "NUMBER", "Take another one of those answers.", turn_commands.choose),
    Command("undo", "", "Take the last turn back.", turn_commands.undo),
    Command("edit", "[TEXT]", "Change the last message and answer it anew.", turn_commands.edit),
    Command("edit-answer", "[TEXT]", "Change the last answer, for what comes next.", turn_commands.edit_answer),
    Command("continue", "", "Go on with an answer that was stopped.", turn_commands.continue_answer),
    Command("save", "[--force] [NAME|FILE]", "Keep the conversation under a name, or in a file.", turn_commands.save),
    Command("load", "NAME|FILE", "Go on with a saved conversation.", turn_commands.load),
    Command("history", "", "Show what was said.", look_commands.history),
    Command("params", "", "Show how answers are drawn.", look_commands.params),
    Command("set", "NAME VALUE", "Change one of those: /set temperature 0.5.", set_command.set_value),
    Command("stats", "", "Show what the last answer cost.", look_commands.stats),
    Command("probs", "[COUNT]", "Show how likely the answer's tokens were.", probs_command.probs),
    Command("tokens", "", "Show how much of the context is used.", look_commands.tokens),
    Command("template", "", "Show the conversation as the model sees it.", look_commands.template),
    Command("copy-code", "", "Copy the last code block.", look_commands.copy_code),
    Command("quit", "", "Leave; so does Ctrl-D.", turn_commands.leave),
)


def is_command(text: str) -> bool:
    """Whether a line is meant as a command: it begins with a slash, and is one line or begins with a known name."""
    return text.startswith("/") and ("\n" not in text or _split(text)[0] in [command.name for command in COMMANDS])


def run_command(state: ChatSession, text: str) -> Outcome:
    """Run a line that `is_command`.

    Raises: UsageError for an unknown one, and whatever the command raises.
    """
    name, argument = _split(text)
    for command in COMMANDS:
        if command.name == name:
            return command.run(state, argument)
    raise UsageError(
        f"unknown command {first_line(f'/{name}')}; /help lists them, and a space before it sends it as a message"
    )


def _split(text: str) -> tuple[str, str]:
    """The name of a command without its slash, and the rest of the line."""
    name, *rest = text.split(maxsplit=1)
    return name[1:], rest[0].strip() if rest else ""
