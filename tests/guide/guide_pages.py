"""The pages of the docs: their commands, their links and headings, as Markdown has them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
# Pages of exports and cards are written by programs, into folders of their own.
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("README.md")]
    + [ROOT / "llmcli" / "resources" / "storyteller" / "README.md"]
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def indented_lines(text: str) -> list[str]:
    """The lines indented by four outside of fences: in tutorial and recipes these are commands for a shell."""
    return [line[4:] for line in _FENCE.sub("", text).splitlines() if line.startswith("    ")]


def fenced(text: str, language: str) -> list[str]:
    """The text in fences of a language."""
    return [content for name, content in _FENCE.findall(text) if name == language]


def prose(text: str) -> str:
    """A page without its code."""
    lines = _FENCE.sub("", text).splitlines()
    return "\n".join(_CODE.sub("", line) for line in lines if not line.startswith("    "))


def links(text: str) -> list[str]:
    """Targets of links and pictures, except other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text)) + re.findall(r"<img[^>]* src=\"([^\"]+)\"", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names under which GitHub shows a page's headings."""
    found: list[str] = []
    for title in re.findall(r"^#{1,6} +(.+?) *$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return set(found)
