"""Markdown on a terminal: colours that read on a light background and on a dark one."""

import re

import pytest

from llmcli.cli.chat_session.markdown import MarkdownWriter

TEXT = """# Title
## Smaller

Some *words*, `code`, [a link](http://example.org) and ~~more~~.

> quoted

1. one
   ```python
   def f(x): return "a" + 1  # why
   ```

    indented code

| a | b |
|---|---|
| 1 | `2` |

```python
@decorator
class A(Exception):
    def f(self, x: int = 1) -> str:
        return f"a{x!r}\\n" and None  # why
```
```c
#include <x.h>
int main(void) { return 0x1; }
```
```html
<a href="x">y</a>
```
```diff
- a
+ b
```
"""

# Bold, dim, italic, underline, strike; red, green, magenta, cyan. None is a background, an absolute colour, or one
# that is near white or near black in the usual themes.
ON_ANY_BACKGROUND = {"0", "1", "2", "3", "4", "9", "31", "32", "35", "36"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    writer = MarkdownWriter()
    writer.write(TEXT)
    writer.close()
    return capsys.readouterr().out


def test_no_colour_assumes_a_background(drawn: str) -> None:
    codes = {code for codes in re.findall(r"\x1b\[([\d;]*)m", drawn) for code in codes.split(";")}
    assert codes <= ON_ANY_BACKGROUND | {"39"}
    assert {"32", "35", "36"} <= codes  # there is some colour


def test_lines_are_not_filled_up_with_spaces(drawn: str) -> None:
    plain = re.sub(r"\x1b(\[[\d;]*m|\]8;[^\\]*\\)", "", drawn)
    assert "quoted\n" in plain
    assert not [line for line in plain.splitlines() if line != line.rstrip()]
