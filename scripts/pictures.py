"""Makes the pictures of the docs from real runs of the storyteller.

    python -m scripts.pictures            # pictures of the terminal (SVG), and of the page (PNG)

The PNG needs a browser: `pip install PySide6`. What a picture of the page was made from is kept by its hash beside it,
so that tests find out without a browser whether it is current.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pexpect
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

FOLDER = Path(__file__).parents[1] / "docs" / "guide" / "pictures"
PAGE = FOLDER / "page.png"
PAGE_HASH = FOLDER / "page.sha256"
PAGE_ARGUMENTS = ("generate", "Once upon a time", "--seed", "1", "--quiet", "--html")
PAGE_SIZE = (900, 640)
COLUMNS = 88

_BAR = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h(\r?\x1b\[[0-9]*[A-K])*", re.DOTALL)  # a bar wipes itself away at its end
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # they would come from the network


@dataclass(frozen=True)
class TerminalPicture:
    """A picture of a terminal: its file's name, and the command line that it shows."""

    name: str
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return FOLDER / f"{self.name}.svg"

    def draw(self) -> str:
        """Run the command in a terminal, and return what it shows as SVG."""
        shown = Text.from_ansi(run_in_terminal(self.arguments))
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(shown)
        title = " ".join(f'"{word}"' if " " in word else word for word in ("llmcli", *self.arguments))
        return _FONTS.sub("", console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME, unique_id=self.name))


TERMINAL_PICTURES = (
    TerminalPicture(
        "color", ("generate", "Once upon a time", "--seed", "1", "--max-new-tokens", "70", "--color", "prob")
    ),
    TerminalPicture("why", ("generate", "Once upon a time", "--seed", "1", "--max-new-tokens", "4", "--why")),
)


def run_in_terminal(arguments: tuple[str, ...]) -> str:
    """What `llmcli ARGUMENTS` leaves on a terminal of `COLUMNS` columns, colours included.

    Raises: RuntimeError if the command fails.
    """
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    child = pexpect.spawn(
        sys.executable,
        ["-m", "llmcli", *arguments],
        env=environment,
        encoding="utf-8",
        timeout=300,
        dimensions=(50, COLUMNS),
    )
    child.expect(pexpect.EOF)
    child.close()
    if child.exitstatus:
        raise RuntimeError(f"llmcli {arguments} ended with {child.exitstatus}:\n{child.before}")
    return _BAR.sub("", child.before).replace("\r\n", "\n")


def write_page(path: Path) -> None:
    """Have the page of `PAGE_ARGUMENTS` written."""
    subprocess.run([sys.executable, "-m", "llmcli", *PAGE_ARGUMENTS, str(path)], check=True, stdout=subprocess.DEVNULL)


def hash_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def photograph(page: Path, picture: Path) -> None:
    """Show a page in Qt's browser, without a screen, and keep a picture of its upper part."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu --hide-scrollbars"
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    application = QApplication([])
    view = QWebEngineView()
    view.resize(*PAGE_SIZE)
    view.show()

    def keep() -> None:
        view.grab().save(str(picture))
        application.quit()

    view.loadFinished.connect(lambda _: QTimer.singleShot(1000, keep))  # it draws a little later than it loads
    view.load(QUrl.fromLocalFile(str(page)))
    application.exec()


def main() -> None:
    """Make every picture anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture in TERMINAL_PICTURES:
        picture.path.write_text(picture.draw(), encoding="utf-8")
        print(picture.path)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_page(page)
        photograph(page, PAGE)
        PAGE_HASH.write_text(f"{hash_of(page)}\n", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
