"""Makes the pictures of the docs from real runs of the storyteller: python -m scripts.pictures

Pictures of the terminal are SVG, drawn by rich. The page is a PNG, photographed in a browser: at first use PySide6 is
installed into an environment of its own, `build/browser`. A picture holds no time and no path, and is made on the CPU,
so the same program and model make the same one; the figures of the progress line are given. `page.json` next to the PNG
records its sources, so that tests check without a browser whether it is current.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import pexpect
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from llmcli.cli.bar import columns

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "guide" / "pictures"
BROWSER = ROOT / "build" / "browser"
BROWSER_PACKAGE = "PySide6==6.12.0"
COLUMNS = 88

PAGE = FOLDER / "page.png"
PAGE_RECORD = FOLDER / "page.json"
PAGE_COMMAND = ("generate", "Once upon a time", "--seed", "1", "--html", "story.html")
PAGE_FRAGMENT = "token-20"
PAGE_SIZE = (1200, 720)

_BAR = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h(\r?\x1b\[[0-9]*[A-K])*", re.DOTALL)  # a bar wipes itself away at its end
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # they would come from the network
_PROGRAM_OF_PAGE = re.compile(r"(<style>.*?</style>|<script>.*?</script>)", re.DOTALL)
_MEASURED = re.compile(r"\d+\.\d+(e-?\d+)?|\d+e-?\d+|(?<= d=\")[^\"]*")  # and the lines drawn from it


def command_line(arguments: tuple[str, ...]) -> str:
    """The command as typed, and as in the docs."""
    return " ".join(f'"{word}"' if " " in word else word for word in ("llmcli", *arguments))


@dataclass(frozen=True)
class TerminalPicture:
    """A picture of a terminal: its file's name, and the command line that it shows."""

    name: str
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file's path."""
        return FOLDER / f"{self.name}.svg"

    def draw(self) -> str:
        """Run the command in a terminal, and return what it shows as SVG."""
        return self._draw(Text.from_ansi(run_in_terminal(self.arguments)))

    def _draw(self, shown: RenderableType) -> str:
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(shown)
        svg = console.export_svg(title=command_line(self.arguments), theme=DEFAULT_TERMINAL_THEME, unique_id=self.name)
        return "\n".join(line.rstrip() for line in _FONTS.sub("", svg).splitlines()) + "\n"


class ProgressPicture(TerminalPicture):
    """The progress line of a batch on Ray, with the figures below."""

    seconds = (10.0, 20.0)
    done = (200_000, 204_000)
    total = 1_000_000
    note = "4 workers, 41260.3 tokens/s"
    time_left = "0:33:10"

    def draw(self) -> str:
        """What the command shows once the bar has seen two moments, as SVG."""
        now = 0.0
        bar = Progress(*columns("my-model", "prompts"), get_time=lambda: now)
        task = bar.add_task("", total=self.total, note=self.note)
        for now, done in zip(self.seconds, self.done, strict=True):  # noqa: B007
            bar.update(task, completed=done)
        return self._draw(bar.get_renderable())


_STORY = ("generate", "Once upon a time", "--seed", "1", "--quiet")
TERMINAL_PICTURES = (
    TerminalPicture("color", (*_STORY, "--max-new-tokens", "70", "--color", "prob")),
    TerminalPicture("why", (*_STORY, "--max-new-tokens", "4", "--why")),
)
PROGRESS = ProgressPicture(
    "progress",
    ("batch", "prompts.jsonl", "results.jsonl", "-m", "my-model", "--seed", "1", "--ray", "10.0.0.1:6379"),
)


def _environment() -> dict[str, str]:
    """Colours, no card, and nothing of the user's own."""
    settings = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "CUDA_VISIBLE_DEVICES": "-1"}
    return {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | settings


def run_in_terminal(arguments: tuple[str, ...]) -> str:
    """The output of `llmcli ARGUMENTS` on a terminal of `COLUMNS` columns, colours included.

    Raises: RuntimeError if the command fails.
    """
    child = pexpect.spawn(
        sys.executable,
        ["-m", "llmcli", *arguments],
        env=_environment(),
        encoding="utf-8",
        timeout=300,
        dimensions=(50, COLUMNS),
    )
    child.expect(pexpect.EOF)
    child.close()
    if child.exitstatus:
        raise RuntimeError(f"llmcli {arguments} ended with {child.exitstatus}:\n{child.before}")
    return _BAR.sub("", child.before).replace("\r\n", "\n")


def write_page(folder: Path) -> Path:
    """Run the command of the page's picture in a folder, and return the page."""
    command = [sys.executable, "-m", "llmcli", *PAGE_COMMAND]
    subprocess.run(command, check=True, cwd=folder, env=_environment(), capture_output=True)
    return folder / PAGE_COMMAND[-1]


def record_of(page: Path) -> dict[str, str]:
    """The sources of a page's picture: the command, the picture's own hash, and that of the page.

    The page's hash covers texts, style and script, not measured numbers, since another CPU rounds differently.
    """
    parts = _PROGRAM_OF_PAGE.split(page.read_text(encoding="utf-8"))
    parts[::2] = [_MEASURED.sub("0", part) for part in parts[::2]]
    return {
        "command": command_line(PAGE_COMMAND),
        "page": hashlib.sha256("".join(parts).encode()).hexdigest(),
        "picture": hashlib.sha256(PAGE.read_bytes()).hexdigest(),
    }


def photograph(page: Path) -> None:
    """Photograph a page in the browser's environment, which is created if missing."""
    python = BROWSER / "bin" / "python"
    if not python.exists():
        venv.create(BROWSER, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", BROWSER_PACKAGE], check=True)
    script = Path(__file__).with_name("photograph.py")
    subprocess.run([python, script, page, PAGE_FRAGMENT, PAGE, *map(str, PAGE_SIZE)], check=True)


def main() -> None:
    """Make every picture again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture in (*TERMINAL_PICTURES, PROGRESS):
        picture.path.write_text(picture.draw(), encoding="utf-8")
        print(picture.path)
    with tempfile.TemporaryDirectory() as folder:
        page = write_page(Path(folder))
        photograph(page)
        PAGE_RECORD.write_text(json.dumps(record_of(page), indent=2) + "\n", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
