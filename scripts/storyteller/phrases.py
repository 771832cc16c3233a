"""The shared pools of words, phrases and sentences, read from the text files of `text/pools`."""

from pathlib import Path

from .grammar import Pools

_TEXT = Path(__file__).parent / "text"


def read_text(name: str) -> str:
    """One of the text files that hold the words of the grammar."""
    return (_TEXT / name).read_text(encoding="utf-8")


def text_names(folder: str) -> list[str]:
    """Names of the text files of a folder, in a fixed order."""
    return [f"{folder}/{path.name}" for path in sorted((_TEXT / folder).glob("*.txt"))]


POOLS = Pools()
for _name in text_names("pools"):
    POOLS.add(read_text(_name))
