"""The user's kernel of docs/kernels-lab.md, as a file; and faults planted in it."""

import re
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernels-lab.md"
_HEADING = "## Try your own kernel in the live model"

NAME = "add_parts"
FAULTS = {
    "a sign": ("sum += parts", "sum -= parts"),
    "the last number": ("i < end;", "i < end - 1;"),
    "a part": ("part = 0;", "part = 1;"),
}


def example() -> str:
    """The text of the file."""
    section = _PAGE.read_text(encoding="utf-8").split(_HEADING)[1]
    found = re.search(r"```cuda\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def write_example(folder: Path, fault: str | None = None) -> Path:
    """The file, with one of FAULTS if it is named."""
    text = example()
    if fault is not None:
        right, wrong = FAULTS[fault]
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    path = folder / "mine.cu"
    path.write_text(text, encoding="ascii")
    return path
