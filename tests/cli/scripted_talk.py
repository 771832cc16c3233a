"""Conversations of `llmcli chat` in this process: the real loop, with lines that a script types."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chat_terminal import LETTERS_ONLY
from results import Llmcli, Result

from llmcli.cli import chat as chat_module


class ScriptedEditor:
    """Plays what is typed; a draft is typed over by joining the two."""

    def __init__(self, lines: Sequence[str | type[BaseException]]):
        self.lines = list(lines)
        self.drafts: list[str] = []
        self.facts: list[str] = []

    def read(self, draft: str, facts: str) -> str:
        self.drafts.append(draft)
        self.facts.append(facts)
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return draft + line
        raise line


Line = str | type[BaseException]
Talk = Callable[..., tuple[Result, ScriptedEditor]]


def open_talk(llmcli: Llmcli, talker: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Type lines; the streams stand in for a terminal as far as chat asks."""
    monkeypatch.setenv("LLMCLI_HOME", str(home))
    monkeypatch.setattr(chat_module.ConversationOptions, "is_interactive", property(lambda options: True))
    monkeypatch.setattr(chat_module, "refuse_without_terminal", lambda options, as_json: None)

    def call(*lines: Line, flags: Sequence[object] = ()) -> tuple[Result, ScriptedEditor]:
        editor = ScriptedEditor(lines)
        monkeypatch.setattr(chat_module, "open_prompt_line", lambda path, state: editor)
        result = llmcli("chat", talker, "--seed", 1, "--max-new-tokens", 8, *LETTERS_ONLY, *flags)
        assert result.exit_code == 0, result.stderr
        return result, editor

    return call


def answers(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line]
