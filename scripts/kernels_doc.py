"""Writes docs/kernels.md from the first comments of the CUDA sources: python -m scripts.kernels_doc."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from llmcli.lab.engine import KERNELS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
WIDTH = 110

# The fields of a source's first comment, in their order; what comes before them is the formula and its source.
FIELDS = ("Shapes", "Requires", "Launch", "Traffic", "Numerics", "Choice")

INTRODUCTION = """\
# Kernels

Written by `python -m scripts.kernels_doc` from the first comment of each source. Kernel NAME is `kernels/NAME.cu`, its
test `tests/kernels/test_NAME.py`; `grep -r '"NAME"' llmcli/kernels` shows its launcher. No model launches those of
`studies/rows`: studies compare with them. Traffic is what one launch moves. Shapes, requirements, and why it is made
this way and not another, stand in the source.

| kernel | what it does |
|---|---|
"""


@dataclass(frozen=True)
class Header:
    """The first comment of a `.cu` file."""

    stem: str
    formula: str
    source: str
    fields: dict[str, str]


def read_header(path: Path) -> Header:
    """The fields of a CUDA source's first comment.

    Raises: ValueError naming the file and what is missing
    """
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        comment.append(line.removeprefix("//").strip())
    labels = "|".join(FIELDS)
    parts = re.split(rf"(?:^|\n)({labels}):", "\n".join(comment))
    texts = [" ".join(part.split()) for part in parts]
    first, found = texts[0], dict(zip(texts[1::2], texts[2::2], strict=True))
    if tuple(texts[1::2]) != FIELDS:
        raise ValueError(f"{path.name}: the header has {', '.join(texts[1::2])}; expected {', '.join(FIELDS)}")
    empty = [name for name, text in found.items() if not text]
    match = re.fullmatch(r"(\w+): (.+?) Source: (.+)", first)
    if empty or match is None:
        missing = ", ".join(empty) or "the first line `stem: formula   Source: ...`"
        raise ValueError(f"{path.name}: the header lacks {missing}")
    return Header(match[1], match[2], match[3], found)


def page() -> str:
    """docs/kernels.md as it should be."""
    stems = sorted(KERNELS)
    rows = [f"| [{stem}](#{stem.replace('/', '')}) | {KERNELS[stem].op} |\n" for stem in stems]
    return INTRODUCTION + "".join(rows) + "".join(map(_section, stems))


def _section(stem: str) -> str:
    header = read_header(ROOT / "kernels" / f"{stem}.cu")
    shown = {"Source": header.source, **{name: header.fields[name] for name in ("Launch", "Traffic", "Numerics")}}
    lines = [line for name, text in shown.items() for line in _wrap(f"{name:8}  {text}")]
    return "\n".join(["", f"## {stem}", "", "```text", *_wrap(header.formula), "", *lines, "```", ""])


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
