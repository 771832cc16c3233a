"""A strict reader of HTML: the tree of a page whose every element is closed, in order; and the contrast of colours."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "img", "br", "hr", "input", "path"}


class Element:
    def __init__(self, name: str, attributes: dict[str, str | None], parent: "Element | None"):
        self.name, self.attributes, self.parent = name, attributes, parent
        self.children: list[Element | str] = []
        self.classes = (attributes.get("class") or "").split()

    def __iter__(self) -> "Iterator[Element]":
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str) -> list["Element"]:
        return [element for element in self if name in (element.name, *element.classes)]


class Parser(HTMLParser):
    """Builds the tree; every element must be closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.current = Element("", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> stands there twice"
        element = Element(tag, dict(attrs), self.current)
        self.current.children.append(element)
        if tag not in VOID:
            self.current = element

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert tag == self.current.name, f"</{tag}> closes <{self.current.name}>"
        assert self.current.parent is not None
        self.current = self.current.parent

    def handle_data(self, data: str) -> None:
        self.current.children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"comment {data!r}")


def parse(text: str) -> Element:
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert parser.current is parser.root
    return parser.root


def data_of(root: Element) -> Any:
    """The data of a page's script."""
    (script,) = (item for item in root.all("script") if item.attributes.get("type") == "application/json")
    return json.loads(script.text)


def luminance(red: int, green: int, blue: int) -> float:
    """Source: WCAG 2.2, relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
