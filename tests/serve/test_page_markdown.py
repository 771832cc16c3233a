"""The page's Markdown: as markdown-it draws it where both know it, safe, quick, and the same while it grows."""

import json
import random
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, Browser
from markdown_it import MarkdownIt

from llmcli.serve.app import render_page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

# As elements with their texts; our own bar over code and boxes around tables are left out.
SHAPE = """(node) => {
  const shape = (one) => {
    if (one.nodeType === 3) return one.data;
    if (one.classList.contains("bar")) return [];
    const inner = [...one.childNodes].map(shape);
    if (one.matches("div, .t")) return inner;
    const name = one.localName.replace(/^h(\\d)$/, (_, level) => `h${level - 2}`);
    return [{ name, href: one.getAttribute("href"), start: one.localName === "ol" ? one.start : null, inner }];
  };
  return [...node.childNodes].map(shape);
}"""
WHOLE = f"""(text) => {{
  const body = document.createElement("div");
  new Drawing({{ text, tokens: [], reasoning: "" }}, "text", body).draw();
  return ({SHAPE})(body);
}}"""
GROWING = f"""(text, steps) => {{
  const body = document.createElement("div"), turn = {{ text: "", tokens: [], reasoning: "" }};
  const drawing = new Drawing(turn, "text", body);
  for (const step of steps) {{
    turn.text = text.slice(0, step);
    drawing.draw();
  }}
  return ({SHAPE})(body);
}}"""
VOID = ("hr", "br")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("page")
    page = folder / "page.html"
    page.write_text(render_page("storyteller")[0], encoding="utf-8")
    browser = Browser(folder / "profile")
    browser.call("Page.navigate", url=page.as_uri())
    browser.wait_for("document.readyState === 'complete' && document.title === 'storyteller'")
    yield browser
    browser.close()


class Elements(HTMLParser):
    """The shape of markdown-it's HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[list[Any]] = [[]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        start = int(given.get("start") or 1) if tag == "ol" else None
        href = given.get("href")
        if href and re.fullmatch("https?://[^/]+", href):
            href += "/"  # as browsers write it
        element = {"name": tag, "href": href, "start": start, "inner": []}
        self.open[-1].append(element)
        if tag not in VOID:
            self.open.append(element["inner"])

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].append(data)


def plain(shape: Any, name: str = "") -> Any:
    """A shape with joined texts, without paragraphs in items (both tight and loose) and spaces where none show."""
    parts: list[Any] = []

    def take(items: Any) -> None:
        for item in items:
            if isinstance(item, list):
                take(item)
            elif isinstance(item, dict) and item["name"] == "p" and name == "li":
                take([" ", item["inner"], " "])
            elif isinstance(item, dict):
                parts.append({**item, "inner": plain(item["inner"], item["name"])})
            elif parts and isinstance(parts[-1], str):
                parts[-1] += item
            else:
                parts.append(item)

    take(shape)
    if name == "code":
        return [one.rstrip("\n") if isinstance(one, str) else one for one in parts if one != ""]
    told = [" ".join(one.split()) if isinstance(one, str) else one for one in parts]
    return [one for one in told if one != ""]


def theirs(text: str) -> Any:
    parser = Elements()
    markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.feed(markdown.render(text))
    return plain(parser.open[0])


def ours(browser: Browser, text: str) -> Any:
    return plain(browser.run(f"({WHOLE})({json.dumps(text)})"))


ANSWERS = [
    "Plain words, 3 * 4 * 5, snake_case_name and a_b, 2 ** 3.\n\nNext paragraph\nwith a second line.",
    "# Title\n\nText\n## Part *two* ##\nmore\n### Three\n#hash is no heading\n",
    "Here is **bold**, *leaning*, ***both***, __bold__, _leaning_, ~~gone~~ and `code`.",
    "**bold *in* bold** and *a **b** c* and **a*b*c**, un*frigging*believable, foo**bar**",
    "*not closed, **neither, `tick and [bracket and ]( end\n\n** a ** and * b *",
    "Use `` a ` b `` and ` `` ` and `**no**`; \\*escaped\\*, \\`ticks\\`, \\[x\\](y), a\\\\b",
    "- one\n- two\n  - two a\n    - deep\n  - two b\n- three\n\nAfter.",
    "* star\n* star\n+ plus\n\n1. one\n2. two\n   - inner\n   more of it\n3. three\n\n7) seven\n8) eight",
    "1. First:\n\n   ```python\n   def f(x):\n       return x\n\n   print(f(1))\n   ```\n\n2. Second\n\n   paragraph",
    'Look:\n```js\nconst a = "**x**" < 3;\n\n\n  b();\n```\nand\n~~~\n```\n~~~\n',
    "````\n```\ninner\n```\n````",
    "> quoted **text**\n> goes on\nlazily\n>\n> - a list\n> - in it\n\nout",
    "a\n\n---\n\nb\n***\nc\n\n- - -\n",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n| x \\| y | `z` |\n| short |\n\nafter",
    "Before\n\na | b\n--|--\n1 | 2",
    'See [the docs](https://example.com/a_(b)?x=1&y=2 "title"), <https://example.com>.',
    "[**bold** link](http://example.com) and [a](<http://example.com/b>) and [none] and [no](x y)",
    "Dogs & cats < 3 > 2, \"quotes\" and 'these'. 5 > 4\n> quote",
    "- item\n\n  second paragraph\n\n- next\n\n\n- last",
    "Steps:\n1. one\n1. two\n\n2024. A year\nin 1999. Another",
    "* a\n\n  > quote in item\n\n  # heading in item\n* **b**: text",
    "one  two\n   three",
    "café — “naïve” **«ja»** 中文**粗体**字 *😀*",
]


@pytest.mark.parametrize("text", ANSWERS)
def test_it_draws_what_markdown_it_draws(browser: Browser, text: str) -> None:
    assert ours(browser, text) == theirs(text)


def test_emphasis_is_that_of_commonmark(browser: Browser) -> None:
    """Random texts of a few words and marks: CommonMark's rules for delimiters, all of them."""
    draw = random.Random(5)
    parts = ["*", "*", "**", "_", "__", "***", "a", "b", " ", ".", "(", "~~", "`"]
    texts = ["x" + "".join(draw.choices(parts, k=draw.randint(3, 14))) + "y" for _ in range(2000)]
    texts = [text for text in texts if "~~~" not in text]  # which GitHub leaves, and markdown-it does not
    shapes = browser.run(f"({json.dumps(texts)}).map({WHOLE})")
    wrong = [text for text, shape in zip(texts, shapes, strict=True) if plain(shape) != theirs(text)]
    assert wrong == []


def test_what_others_write_too(browser: Browser) -> None:
    """Not CommonMark, but what models write: addresses as they are, items indented by two, quoted images."""

    def links(text: str) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []

        def take(items: Any) -> None:
            for item in items:
                if isinstance(item, dict):
                    if item["name"] == "a":
                        found.append((item["href"], item["inner"]))
                    take(item["inner"])

        take(ours(browser, text))
        return found

    assert links("At https://example.com/a_b, or (http://example.com/x).") == [
        ("https://example.com/a_b", ["https://example.com/a_b"]),
        ("http://example.com/x", ["http://example.com/x"]),
    ]
    assert links("**https://example.com/w_(x)**") == [("https://example.com/w_(x)", ["https://example.com/w_(x)"])]
    assert links("![a cat](https://example.com/cat.png)") == [("https://example.com/cat.png", ["a cat"])]
    assert ours(browser, "1. a\n  - b\n2. c\n\t- d") == theirs("1. a\n   - b\n2. c\n   - d")


DANGEROUS = [
    "<script>alert(1)</script> <img src=x onerror=alert(1)> <b>b</b>",
    "[x](javascript:alert(1)) [y](JaVaScRiPt:alert(1)) [z](data:text/html,x) [v](vbscript:x) [f](file:///etc/passwd)",
    "[x](\tjavascript:alert(1)) [x]( javascript:alert(1)) <javascript:alert(1)> [x](//example.com) [x](/v1/models)",
    "[x](https://a\"onmouseover=\"alert(1)) [x](https://a 'onclick=1') ![x](javascript:alert(1))",
    "```html onload=alert(1)\n<script>alert(1)</script>\n```",
    "| <b> | [x](javascript:1) |\n|--|--|\n| <img src=x> | `<i>` |",
    "[a]: javascript:alert(1)\n\n[a] [a][a] &lt;script&gt; &#106;avascript:",
]
ELEMENTS = "p h1 h2 h3 h4 ul ol li blockquote pre code table thead tbody tr th td hr a em strong s"


def check_safe(items: Any) -> None:
    for item in items:
        if isinstance(item, dict):
            assert item["name"] in ELEMENTS.split(), item
            assert item["href"] is None or item["href"].startswith(("http://", "https://")), item
            check_safe(item["inner"])
        elif isinstance(item, list):
            check_safe(item)


def test_nothing_dangerous_is_drawn(browser: Browser) -> None:
    for text in DANGEROUS:
        check_safe(browser.run(f"({WHOLE})({json.dumps(text)})"))
    shown = browser.run(
        """(() => {
        const body = document.createElement("div");
        new Drawing({ text: "[x](https://a.b) <b>", tokens: [], reasoning: "" }, "text", body).draw();
        const link = body.querySelector("a");
        return [body.textContent, link.rel, link.target, link.getAttributeNames().sort().join()];
    })()"""
    )
    assert shown == ["x <b>", "noopener noreferrer", "_blank", "href,rel,target"]
    assert browser.problems == []


PIECES = [*"*_`~[]()!<>#-+|\\ \n\t:.1a", "\n\n", "```", "](http://a.b)", "](javascript:x)", "1. ", "- ", "> ", "|-|-|"]
PIECES += ["<script>", "https://x.y/z", "    ", "**bold**", "\u2028", "é"]


def test_random_texts_are_safe_and_the_same_while_they_grow(browser: Browser) -> None:
    """Drawn in any steps, a text ends as it is drawn at once; and no letter of it is lost."""
    draw = random.Random(7)
    for _ in range(30):
        texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 60))) for _ in range(20)]
        steps = [[*sorted(draw.sample(range(len(text) + 1), min(8, len(text)))), len(text)] for text in texts]
        whole = browser.run(f"({json.dumps(texts)}).map({WHOLE})")
        pairs = json.dumps(list(zip(texts, steps, strict=True)))
        growing = browser.run(f"({pairs}).map(([text, steps]) => ({GROWING})(text, steps))")
        for text, once, grown in zip(texts, whole, growing, strict=True):
            check_safe(once)
            assert plain(once) == plain(grown), text
            assert "```" in text or told(once).count("é") == text.count("é"), text  # a fence's first line is a label


def told(items: Any) -> str:
    return "".join(
        one if isinstance(one, str) else told(one["inner"] if isinstance(one, dict) else one) for one in items
    )


@pytest.mark.parametrize(
    "part",
    ["*", "**a ", "*a_b", "`", "` ``", "[", "[a](", "](", "![", "> ", ">", "- ", "  - ", "|", "a|", "<", "<https://",
     "https://", "a*", "*a **b ", "~~", "~~a", "\\", "#", "```\n", "1. ", "\n", "- a\n", "[a](http://b) ", "_a_", "(",
     "https://a)", "](http://a\"", "|-|\n", " ", "\t", "**", "a**b", "*a* "],
)  # fmt: skip
def test_no_text_takes_long(browser: Browser, part: str) -> None:
    text = part * (40_000 // len(part))
    start_time = time.monotonic()
    browser.run(f"({WHOLE})({json.dumps(text)}).length")
    assert time.monotonic() - start_time < 5


def test_deep_nesting_is_left_as_written(browser: Browser) -> None:
    def depth(items: Any) -> int:
        return max((depth(one["inner"]) + 1 if isinstance(one, dict) else depth(one)
                    for one in items if not isinstance(one, str)), default=0)  # fmt: skip

    for text in (">" * 200 + "x", "- " * 200 + "x", "*a **b " * 200 + "x" + " b** a*" * 200):
        assert depth(browser.run(f"({WHOLE})({json.dumps(text)})")) < 60


def test_the_page_stays_small() -> None:
    assert sum(len(path.read_bytes()) for path in (Path(__file__).parents[2] / "llmcli/serve/page").iterdir()) < 48_000
