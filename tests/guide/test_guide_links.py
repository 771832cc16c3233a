"""Links between the pages lead to existing pages and headings, and the index reaches every page."""

from pathlib import Path

import pytest
from guide_pages import PAGES, ROOT, anchors, links


def problems(page: Path, text: str) -> list[str]:
    found = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert problems(page, page.read_text(encoding="utf-8")) == []


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in links(index.read_text(encoding="utf-8"))}
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")} - {index}
    assert pages - linked == set()
    assert links((ROOT / "README.md").read_text(encoding="utf-8")).count("docs/README.md") == 1


def test_broken_links_are_found() -> None:
    page = ROOT / "docs" / "README.md"
    text = (
        "# A `b` & c, (d)\n## Twice\n## Twice\n[x](nowhere.md) [y](guide/models.md#no-such) `[z](code)`\n    [z](code)"
    )
    assert problems(page, text) == ["nowhere.md: no such file", "guide/models.md#no-such: no such heading"]
    assert problems(page, "[x](guide/models.md#offline) [y](https://example.org/#x) ![p](guide/pictures/why.svg)") == []
    assert anchors(text) == {"a-b--c-d", "twice", "twice-1"}
