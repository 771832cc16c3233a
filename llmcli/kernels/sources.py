"""Makes one text of each CUDA source: the compiler gets no folder to search, and equal texts mean equal kernels.

Every `#include "..."` is replaced by the file once, with `#line` so that messages name the original place.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from llmcli.resources import resource_folder

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_LINE = re.compile(r"^#line .*\n", re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def kernels_folder() -> Path:
    """Where the `.cu` files lie; includes are named from here."""
    return resource_folder("kernels")


def sources_digest(folder: Path | None = None) -> str:
    """The SHA-256 of the source of every kernel of the engine, in hexadecimal; studies are not among them."""
    folder = folder or kernels_folder()
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("common/*.cuh")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def text_digest(flattened: str) -> str:
    """The SHA-256 of a flattened text without the names of its files, in hexadecimal."""
    return hashlib.sha256(_LINE.sub("", flattened).encode()).hexdigest()


def flatten(stem: str, folder: Path | None = None) -> str:
    """The text of kernel `stem` with its own includes inlined, each once, where it is first named.

    Raises: ValueError for a missing file or a character that is not ASCII
    """
    return "".join(_inline(folder or kernels_folder(), f"{stem}.cu", "", set()))


def flatten_text(text: str, shown: str, folder: Path | None = None) -> str:
    """Flatten a text that is not among the kernels; it may include their headers. Messages name it `shown`.

    Raises: ValueError for an included file that is missing
    """
    return "".join(_inline_text(folder or kernels_folder(), text, shown, set()))


def _inline(folder: Path, name: str, included_from: str, seen: set[str]) -> Iterator[str]:
    seen.add(name)
    try:
        # Compilers read the text through the locale's encoding on some systems.
        text = (folder / name).read_text(encoding="ascii")
    except FileNotFoundError:
        raise ValueError(f"kernels/{name} does not exist{included_from}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"kernels/{name} is not ASCII at byte {error.start}") from None
    yield from _inline_text(folder, text, f"kernels/{name}", seen)


def _inline_text(folder: Path, text: str, shown: str, seen: set[str]) -> Iterator[str]:
    yield f'#line 1 "{shown}"\n'
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include:
            if include[1] not in seen:
                yield from _inline(folder, include[1], f", included from {shown}:{number}", seen)
            yield f'#line {number + 1} "{shown}"\n'
        elif _PRAGMA_ONCE.match(line):
            yield "\n"
        else:
            yield f"{line}\n"
