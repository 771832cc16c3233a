"""Makes the virtual environment of this source tree and shows the progress on stderr. Run by environment.sh.

    python3 set_up.py VENV EXTRAS        for example .venv dev,cuda13; EXTRAS may be empty

It needs nothing but Python. It reads pip's output with `--progress-bar raw`, pip's form for programs: pip's own bars
scroll by one after another, and show nothing through a pipe. Until pip has every package it reports neither number
nor size, so the script counts both as they come.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Older versions lack raw progress; Python 3.11 and 3.12 came with such.
PIP = "pip>=24.1"

LARGE_BYTES = 10_000_000  # without a terminal such packages have a line of their own
TAIL_LINES = 20  # of the output of what failed
SECONDS_TO_END = 10  # for a pip that was interrupted
EXIT_INTERRUPTED = 130

_FOUND = re.compile(r"(?:Collecting|Processing) (?:.*/)?([^\s;<>=!~\[]+)")
_DOWNLOAD = re.compile(r"  Downloading (\S+)-(\d\S*?)(?:-\S+\.whl|\.tar\.gz|\.zip) \(")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_INSTALL = re.compile(r"Installing collected packages: (.+)")


class Display:
    """Lines on stderr, and on a terminal one more that changes: the current step."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._shown = 0

    def say(self, line: str) -> None:
        """Write a line that stays."""
        with self._lock:
            self._write("\r" + " " * self._shown + "\r" if self._shown else "")
            self._shown = 0
            self._write(f"{line}\n")

    def show(self, text: str) -> None:
        """Change the live line; without a terminal do nothing."""
        if self.is_live:
            with self._lock:
                text = text[: self._width() - 1]
                self._write("\r" + text.ljust(self._shown))
                self._shown = len(text)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or 80
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class Packages:
    """What pip has reported so far."""

    def __init__(self, display: Display, site_packages: Path) -> None:
        self._display = display
        self._site_packages = site_packages
        self._found: set[str] = set()
        self._now = ""
        self._finished_bytes = 0  # of the downloads before the current one
        self._done_bytes = self._size = 0  # of the current one
        self._to_install: list[str] = []
        self._install_start = 0.0

    def read(self, line: str) -> bool:
        """Read a line of pip's output; return whether it only counts bytes."""
        if progress := _PROGRESS.match(line):
            if self._size == 0 and int(progress[2]) >= LARGE_BYTES and not self._display.is_live:
                self._display.say(f"  {self._now}, {megabytes(int(progress[2]))}")
            self._done_bytes, self._size = int(progress[1]), int(progress[2])
            return True
        if found := _FOUND.match(line):
            self._found.add(found[1])
            self._now = found[1]
        elif download := _DOWNLOAD.match(line):
            self._begin(f"{download[1]} {download[2]}")
        elif install := _INSTALL.match(line):
            self._begin("")
            self._to_install = install[1].split(", ")
            self._install_start = time.time()
            self._display.say(f"installing {len(self._to_install)} packages{self._downloaded()}")
        return False

    def _begin(self, name: str) -> None:
        self._finished_bytes += self._done_bytes
        self._done_bytes = self._size = 0
        self._now = name

    def describe(self) -> str:
        """What pip does now; nothing before the first package."""
        if not self._found:
            return ""
        if self._to_install:
            installed = min(self._num_installed(), len(self._to_install) - 1)
            return f"installing {installed + 1} of {len(self._to_install)}: {self._to_install[installed]}"
        size = f": {self._done_bytes / 1e6:,.0f} of {megabytes(self._size)}" if self._size else ""
        return f"{len(self._found)} packages found{self._downloaded()}; {self._now}{size}"

    def _num_installed(self) -> int:
        """How many packages have all their files, by the INSTALLER that pip writes last."""
        installers = self._site_packages.glob("*.dist-info/INSTALLER")
        return sum(installer.stat().st_mtime >= self._install_start for installer in installers)

    def _downloaded(self) -> str:
        num_bytes = self._finished_bytes + self._done_bytes
        return f", {megabytes(num_bytes)} downloaded" if num_bytes else ""


def megabytes(num_bytes: int) -> str:
    """A size as pip writes it."""
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 9.5e6 else f"{num_bytes / 1e6:.1f} MB"


class StepFailedError(Exception):
    """A command failed; its last lines have been shown."""


def run(display: Display, command: list[str], what: str, packages: Packages | None = None) -> None:
    """Run one command and show `what`, or what `packages` reports; if it fails, show the end of its output.

    Raises: StepFailedError
    """
    start = time.monotonic()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.25):
            now = packages.describe() if packages is not None else ""
            display.show(f"{now or what} ({time.monotonic() - start:.0f} s)")

    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        for line in process.stdout:
            if packages is None or not packages.read(line):
                tail.append(line)
        failed = process.wait() != 0
    except KeyboardInterrupt:
        # A terminal sends the Ctrl-C to the command, too, and a second one would disturb its cleaning up.
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise
    finally:
        ended.set()
        ticker.join()
    if failed:
        display.say("".join(tail).rstrip())
        raise StepFailedError


def forget_unfinished(site_packages: Path) -> None:
    """Remove the descriptions of packages whose installation was interrupted: pip would take them for complete.

    It writes INSTALLER when all files of a package are there.
    """
    for folder in site_packages.glob("*.dist-info"):
        if not (folder / "INSTALLER").exists():
            shutil.rmtree(folder)


def set_up(display: Display, venv: Path, extras: str) -> None:
    """Make the environment, or complete it.

    Raises: StepFailedError
    """
    start = time.monotonic()
    display.say(f"setting up {venv} (once, a few minutes)")
    run(display, [sys.executable, "-m", "venv", str(venv)], "creating the environment")
    python = venv / "bin" / "python"
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
    forget_unfinished(site_packages)
    # Modules are compiled when they are first used; all of torch would take 10 s now.
    pip = [str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    run(display, [*pip, PIP], "preparing pip")
    display.say("finding and downloading packages")
    constraints = ROOT / "scripts" / "constraints.txt"
    editable = f"{ROOT}[{extras}]" if extras else str(ROOT)
    command = [*pip, "--progress-bar", "raw", "--constraint", str(constraints), "--editable", editable]
    run(display, command, "finding packages", Packages(display, site_packages))
    display.say(f"set up in {time.monotonic() - start:.0f} s")


def main() -> int:
    """Set up, and say how to resume if that ends early."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that leaves ends this, as anything in a pipe
    venv, extras = Path(sys.argv[1]), sys.argv[2]
    display = Display()
    try:
        set_up(display, venv, extras)
    except StepFailedError:
        display.say(
            f"error: setting up {venv} failed; the lines above say why. Once that is fixed, run the same command "
            "again: downloads are kept"
        )
        return 1
    except KeyboardInterrupt:
        display.say("stopped; run the same command again to continue: downloads are kept")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
