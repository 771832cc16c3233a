"""One term for one thing, in the usual words: over help, errors, and the pages for users and developers."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from llmcli.cli.main import COMMANDS, load_command

ROOT = Path(__file__).resolve().parents[2]

# The term, and what it is not to be called; every one is a regular expression.
GLOSSARY = {
    "context limit": r"context (length|size|window)|(maximum|longest) context|max(imum)? sequence length",
    "prompt": r"input (text|prompt)|text prompt",
    "new tokens": r"(output|completion) tokens|tokens to generate",
    "seed": r"random seed|seed value|\brng\b",
    "sample": r"sampled (text|continuation)|\bgenerations\b",
    "token id": r"token[- ]ID\b|token index|ids? of (a )?tokens?\b",
    "end-of-text token": r"\bend tokens?\b|\bEOS tokens?\b|end-of-sequence|end of sequence",
    "hub id": r"\b(model|repo|repository)[- ]ids?\b|hub name",
    "model folder": r"(model|checkpoint|local) director(y|ies)|checkpoint folder",
    "chat template": r"(prompt|conversation) template|template of the chat",
    "KV cache": r"(?<!-)\bkv[- ]caches?|\bKv cache|key[- ]value[- ]cache",
    "tokens/s": r"\btok/s|tokens (per|a) second|\bt/s\b",
    "standard input": r"\bstdin\b",
    "to resume": r"\b(go|goes|going|gone) on\b|pick(s|ed)? up where|taken up by|takes? up again",
    "sampling step": r"sampler steps?",
}
# Turns of phrase that nobody uses, each with a better one.
HABITS = {
    "is not an X": r"(?<!there )\b(is|was) no (?!longer|more|bigger)|\bare no [a-z]+ (id|token)",
    "how to fix it": r"\bmends?\b",
    "N free": r"\bthat (is|are) free\b",
    "choose another with --X": r"takes? another\b",
    "cannot be combined": r"exclude each other",
    "the context limit is N": r"was made for",
    "removed": r"(taken|take|takes) back|(taken|cut) off and",
    "again": r"\banew\b",
    "the conversation": r"what was said",
    "not found": r"\bis nowhere\b|cannot be had",
    "N files, or 1 file": r"\w\(s\)",
}
# Old habits of the pages for developers, each with a better one.
OLD_WORDS = {
    "after": r"\bbehind\b",
    "next to, or besides": r"\bbeside\b",
    "since, dated and in a log": r"\bsince then\b",
}
CASE_MATTERS = {"KV cache", "token id"}


@cache
def code_strings() -> list[tuple[str, str]]:
    """Every text of the program that is not a docstring: its place and its words."""
    return [*_code_strings()]


def _code_strings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "llmcli").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
            id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
        }
        for node in ast.walk(tree):
            if id(node) in statements | parts:
                continue
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(value.value) if isinstance(value, ast.Constant) else "X" for value in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if " " in text.strip():  # a key or a name has none
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def help_texts() -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        loaded = load_command(command)
        commands = (
            [item.callback for item in loaded.registered_commands] if isinstance(loaded, typer.Typer) else [loaded]
        )
        for function in commands:
            yield f"help of {command.name}", inspect.getdoc(function) or ""


def pages() -> Iterator[tuple[str, str]]:
    """The pages for users."""
    yield from prose_of(
        [ROOT / "README.md", ROOT / "docs" / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    )


def house_pages() -> Iterator[tuple[str, str]]:
    """The pages for developers. The logs are left as they were written."""
    named = ("CHANGELOG.md", "docs/architecture.md", "docs/performance.md", "docs/log/README.md")
    yield from prose_of([*(ROOT / name for name in named), *sorted((ROOT / "docs" / "decisions").glob("*.md"))])


def prose_of(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Their lines without the text between backticks: names, and output of other programs."""
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.startswith(("    ", ">")):
                yield f"{path.relative_to(ROOT)}:{number}", re.sub(r"`[^`]*`", "`X`", line)


def offences(texts: Iterable[tuple[str, str]], rules: dict[str, str]) -> list[str]:
    found = []
    for place, text in texts:
        for term, pattern in rules.items():
            flags = 0 if term in CASE_MATTERS else re.IGNORECASE
            if match := re.search(pattern, text, flags):
                found.append(f"{place}: {match[0]!r}, say {term!r}: {text.strip()[:100]}")
    return found


@pytest.mark.parametrize(
    "texts", [code_strings, help_texts, pages, house_pages], ids=lambda function: function.__name__
)
def test_one_term_for_one_thing(texts) -> None:
    assert offences(texts(), GLOSSARY) == []


@pytest.mark.parametrize(
    "texts", [code_strings, help_texts, pages, house_pages], ids=lambda function: function.__name__
)
def test_no_riddles(texts) -> None:
    assert offences(texts(), HABITS) == []


def test_the_house_speaks_plainly() -> None:
    assert offences(house_pages(), OLD_WORDS) == []


def test_the_texts_are_found() -> None:
    """Without it the tests above could not fail."""
    strings = dict(code_strings())
    assert len(strings) > 700
    assert any("the context holds" in text for text in strings.values())
    assert len(list(help_texts())) > len(COMMANDS)
    assert len({place.partition(":")[0] for place, _ in pages()}) > 6
    assert len({place.partition(":")[0] for place, _ in house_pages()}) > 6


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("the context length is 5", "context limit"),
        ("17 tok/s", "tokens/s"),
        ("no EOS token", "end-of-text token"),
        ("the KV-cache, or kv cache", "KV cache"),
        ("The conversation goes on", "to resume"),
        ("'foo' is no hub id", "is not an X"),
        ("3 GiB that are free", "N free"),
        ("2 layer(s)", "N files, or 1 file"),
        ("the token behind it", "after"),
    ],
)
def test_other_words_are_found(text: str, term: str) -> None:
    found = offences(iter([("here", text)]), GLOSSARY | HABITS | OLD_WORDS)
    assert any(f"say {term!r}" in line for line in found)


@pytest.mark.parametrize(
    "text", ["there is no chat template", "is no longer saved", "--kv-cache int8", "KV cache", "the folder exists"]
)
def test_good_words_pass(text: str) -> None:
    assert offences(iter([("here", text)]), GLOSSARY | HABITS) == []
