"""Puts into a Markdown file what its own commands tell: a quotation below an indented llmcli command is its output.

Run on files it refreshes the quotations in them, so that nothing told there was ever edited by hand. A quotation whose
last line is `> ...` shows the beginning only: the first paragraphs that have `WORDS_OF_A_BEGINNING` words or more.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llmcli.resources import STORYTELLER

# One indented line that ends in an llmcli command, an empty line, and a quotation.
_TOLD = re.compile(r"^(    (?:\S*/)?llmcli ((?:generate|chat) .*)\n\n)((?:>.*\n)+)", re.MULTILINE)

WORDS_OF_A_BEGINNING = 100
_BEGINNING = "> ...\n"

# What a command with --json prints.
Run = Callable[[list[str]], dict[str, object]]


def run_llmcli(words: list[str]) -> dict[str, object]:
    """Run llmcli in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "llmcli", *words, "--quiet"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def quotations(text: str) -> list[tuple[str, str]]:
    """Commands without the program's name, and the quotation after each."""
    return [(match[2], match[3]) for match in _TOLD.finditer(text)]


def quote(command: str, run: Run = run_llmcli, model: str = STORYTELLER) -> str:
    """A command's output as a Markdown quotation with the user's words in bold type."""
    words = shlex.split(command)
    answer = run([*words, "--model", model, "--json"])
    if words[0] == "chat":
        turns = [(turn["message"], turn["answer"]) for turn in answer["turns"]]  # type: ignore[attr-defined]
        told = "\n\n".join(f"**{message}**\n\n{reply}" for message, reply in turns)
    elif "--chat" in words:
        told = str(answer["text"])
    else:
        told = f"**{words[1]}**{answer['text']}"
    return "".join(f"> {line}".rstrip() + "\n" for line in told.strip().split("\n"))


def beginning(quotation: str) -> str:
    """The first paragraphs of a quotation, with `> ...` below them if there are more."""
    paragraphs = quotation.split(">\n")
    shown: list[str] = []
    while paragraphs and len(" ".join(shown).split()) < WORDS_OF_A_BEGINNING:
        shown.append(paragraphs.pop(0))
    return ">\n".join([*shown, _BEGINNING] if paragraphs else shown)


def refresh(text: str, run: Run = run_llmcli, model: str = STORYTELLER) -> str:
    """A Markdown text with every quotation made again."""

    def tell(match: re.Match[str]) -> str:
        told = quote(match[2], run, model)
        return match[1] + (beginning(told) if match[3].endswith(_BEGINNING) else told)

    return _TOLD.sub(tell, text)


def main() -> None:
    """Refresh files in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    for path in parser.parse_args().files:
        path.write_text(refresh(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
