"""What all pages of llmcli are made of: skeleton, style, script, escaping, and the file that a page may replace.

Text from prompt, model or path is in a page only as escaped text or JSON. A page loads nothing and, by its
own content security policy, runs nothing but its own script.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from llmcli.cli.output.tokens import LEVEL_LIMITS, Share, level_names, show_piece
from llmcli.writing import OutputFile

if TYPE_CHECKING:
    from llmcli.tokenizer.base import Tokenizer

PAGE_MARK = b'<meta name="generator" content="llmcli">'
PAGE = OutputFile("a page of llmcli", lambda head: PAGE_MARK in head, "replace it with --force, or name another file")

SKYLINE_UNIT = 6  # pixels a token if the window has room

# Control characters are not valid in a page: those with a picture in Unicode are shown by it, the others as unknown.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
}


@dataclass(frozen=True)
class PageParts:
    """What one kind of page adds to the skeleton. All but `title`, `eyebrow` and `legend` is markup, escaped already.

    `panel` is a file of markup in this folder, shown for a chosen token; `scripts` are files that run after report.js;
    `data` is their input as JSON.
    """

    title: str
    eyebrow: str
    head: str
    legend: str
    main: str
    panel: str
    scripts: Sequence[str]
    data: object
    first_level: int = 0  # of the legend


def render(parts: PageParts) -> str:
    """The whole page."""
    style, skeleton, panel = (_read(name) for name in ("report.css", "report.html", parts.panel))
    script = "".join(_read(name) for name in ("report.js", *parts.scripts))
    return Template(skeleton).substitute(
        title=html_text(parts.title),
        style=style,
        style_hash=_content_hash(style),
        script=script,
        script_hash=_content_hash(script),
        eyebrow=html_text(parts.eyebrow),
        head=parts.head,
        legend=html_text(parts.legend),
        levels="".join(
            f'<li class="l{level}">{name}</li>'
            for level, name in enumerate(level_names())
            if level >= parts.first_level
        ),
        main=parts.main,
        panel=panel,
        # Nothing in it can end it early: inside a script element only "<" begins anything.
        data=json.dumps(parts.data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def html_text(text: str) -> str:
    """Text for an element or a quoted attribute."""
    return escape(text.translate(_PICTURES))


def story(content: str, attributes: str = "") -> str:
    """Running text; both arguments are markup."""
    return f'<div class="story" dir="auto"{attributes}>{content}</div>'


def split_ink(text: str) -> tuple[str, str, str]:
    """The white space before a text, the text, and the white space after; white space alone counts as text."""
    word = text.strip() or text
    begin = text.index(word)
    return text[:begin], word, text[begin + len(word) :]


def token_spans(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    shares: Sequence[Share],
    prefix: str,
    look: Callable[[Sequence[int]], tuple[str, str]],
) -> Iterator[str]:
    """The text in an element for each token, and a chip for a token that is no part of the text.

    `look` gives the classes and the title of an element from the numbers of the tokens that wrote it. An element's id
    is `prefix`, a hyphen and the number of its last token, from 1.
    """
    texts: dict[tuple[int, ...], str] = {}
    for share in shares:
        texts[share.token_numbers] = texts.get(share.token_numbers, "") + share.text
    writers = {numbers[-1]: numbers for numbers in texts if numbers}
    seen = {number for numbers in texts for number in numbers}
    for number, token_id in enumerate(token_ids):
        numbers = writers.get(number, (number,))
        if number in seen and number not in writers:
            continue  # part of a character, shown at its last part
        classes, title = look(numbers)
        names, text = f"t {classes}".rstrip(), texts.get(numbers)
        if text is None:
            names, text = f"{names} unseen", show_piece(tokenizer, token_id)
        elif text.strip(" ") and not text.strip():
            names = f"{names} break"
        place = f'id="{prefix}-{number + 1}" data-n="{number + 1}"'
        # The white space around a word stays outside the tint.
        begin, word, end = map(html_text, split_ink(text))
        yield f'{begin}<span class="{names}" {place} title="{html_text(title)}">{word}</span>{end}'


def skyline(heights: Sequence[float], levels: Sequence[int], label: str) -> str:
    """A bar for each token, of a height from 0 to 1, in the tint of its level; nothing if there are no tokens."""
    if not heights:
        return ""
    paths = [""] * (len(LEVEL_LIMITS) + 1)
    for index, (height, level) in enumerate(zip(heights, levels, strict=True)):
        units = max(100 * min(height, 1), 2)
        paths[level] += f"M{index} 100v-{units:.0f}h.8v{units:.0f}z"
    drawn = "".join(f'<path class="l{level}" d="{path}"/>' for level, path in enumerate(paths) if path)
    return (
        f'<svg class="skyline" role="img" aria-label="{html_text(label)}" viewBox="0 0 {len(heights)} 100" '
        f'preserveAspectRatio="none" width="{SKYLINE_UNIT * len(heights)}" height="48">{drawn}</svg>'
    )


def rounded(probability: float) -> float:
    """A probability with four significant digits."""
    return float(f"{probability:.4g}")


def write_page(path: Path, page: str, *, replace: bool) -> None:
    """Write a page, whole or not at all.

    Raises: OutputError if the disk is full; UsageError if the folder is gone, or something else is there now.
    """
    PAGE.write(path, page.encode(errors="replace"), replace=replace)  # a path may not be UTF-8


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _content_hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
