"""The architecture page stays short, and names in it and in the decisions are in the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
MAX_WORDS = 1500
# A link to a file of the source, and the function in it.
PLACE = re.compile(r"\]\(\.\./(?P<path>llmcli/[\w/]+\.py)\)\s+`(?P<name>[\w.]+)`")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w-]+/)*[\w-]+\.(?:py|cu|cuh|cpp|toml)|(?:[\w-]+/)+")
# A name of ours in code: a class and perhaps its attribute, a constant, a function with an underscore.
NAME = re.compile(r"[A-Z]\w*(?:\.\w+)?|[a-z]+(?:_[a-z0-9]+)+")


def names_in(path: Path) -> set[str]:
    """The functions and classes of a module, and the methods of the classes."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def source_words() -> set[str]:
    """Every word of the Python and CUDA sources, and the names of the files."""
    words: set[str] = set()
    for folder in ("llmcli", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh", ".cpp"):
                words |= {path.stem, *re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return words


def test_the_architecture_page_is_short() -> None:
    assert len(ARCHITECTURE.read_text(encoding="utf-8").split()) <= MAX_WORDS


def test_a_tokens_way_leads_through_the_source() -> None:
    places = [(ROOT / found["path"], found["name"]) for found in PLACE.finditer(ARCHITECTURE.read_text("utf-8"))]
    assert len(places) >= 12
    assert [(path.name, name) for path, name in places if name not in names_in(path)] == []


@pytest.mark.parametrize("page", [ARCHITECTURE, *DECISIONS], ids=lambda page: page.name)
def test_what_is_named_is_there(page: Path) -> None:
    """Files, and names that look like ours; a foreign name of such a form would have to be an exception here."""
    words, missing = source_words(), []
    for text in CODE.findall(page.read_text(encoding="utf-8")):
        if PATH.fullmatch(text):
            is_there = any((ROOT / folder / text).exists() for folder in ("", "llmcli")) or bool(
                "/" not in text and list((ROOT / "llmcli").rglob(text))
            )
        else:
            is_there = not NAME.fullmatch(text) or set(text.split(".")) <= words
        if not is_there:
            missing.append(text)
    assert missing == []


def test_the_index_of_decisions_is_whole() -> None:
    index = ROOT / "docs" / "decisions" / "README.md"
    linked = set(re.findall(r"\]\((\w+\.md)\)", index.read_text(encoding="utf-8")))
    assert linked == {page.name for page in DECISIONS} - {index.name}


def test_missing_names_are_found() -> None:
    assert "Generation.events" in names_in(ROOT / "llmcli" / "engine" / "scheduler.py")
    assert "Generation.no_such" not in names_in(ROOT / "llmcli" / "engine" / "scheduler.py")
    assert PATH.fullmatch("runners/nowhere.py")
    assert NAME.fullmatch("NoSuchClass.method")
    assert not {"NoSuchClass", "method"} <= source_words()
