"""The progress bar on a terminal: its text before anything is done."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRAWN = """
import time
from llmcli.cli.progress import progress
with progress("loading x", {unit!r}, first="importing torch") as on_progress:
    time.sleep(0.5)
    on_progress(1, 4)
    time.sleep(0.5)
"""


def drawn_by(program: str, columns: int = 100, **options: Any) -> str:
    """The output of a program on its terminal, without the control sequences."""
    master, slave = pty.openpty()
    environment = {"COLUMNS": str(columns)}
    process = subprocess.Popen([sys.executable, "-c", program], stderr=slave, env=environment, **options)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError), open(master, "rb", buffering=0) as terminal:  # its end is an error on Linux
        while piece := terminal.read(100_000):
            drawn += piece
    assert process.wait(timeout=60) == 0
    return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", drawn).decode()


@pytest.mark.parametrize(("unit", "done"), [("bytes", "1/4 bytes"), ("prompts", "1/4")])
def test_nothing_is_counted_before_the_total_is_known(unit: str, done: str) -> None:
    told = drawn_by(DRAWN.format(unit=unit))
    before, _, after = told.partition(done)
    assert "loading x" in before
    assert "importing torch" in before
    assert "?" not in before
    assert "importing torch" not in after


COMPILED = """
import time
from llmcli.cli.progress import say_compiling
from llmcli.cli.progress import progress
with progress("loading x", first="starting the card") as on_progress:
    for done in range(3):
        say_compiling(done, 2)
        time.sleep(0.5)
"""


def test_the_bar_counts_what_is_compiled() -> None:
    told = drawn_by(COMPILED)
    assert told.count("compiling 2 kernels; the next start finds them compiled") == 1
    seen = re.findall(r"compiling kernels \d/\d|starting the card", told)
    assert list(dict.fromkeys(seen)) == ["starting the card", "compiling kernels 0/2", "compiling kernels 1/2"]
    assert seen[-1] == "starting the card"  # compiled, and nothing is read yet


def test_without_a_terminal_one_line_tells_of_compiling() -> None:
    process = subprocess.run([sys.executable, "-c", COMPILED], stderr=subprocess.PIPE, text=True, check=True)
    assert process.stderr == "compiling 2 kernels; the next start finds them compiled\n"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    home = tmp_path / "a file"
    home.write_text("not a folder")
    environment = {**os.environ, "LLMCLI_HOME": str(home)}
    process = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, stderr=subprocess.PIPE, text=True, check=True
    )
    assert process.stderr == f"compiling 2 kernels at each start: {home} is not a folder\n"


NARROW = """
import time
from llmcli.cli.progress import progress
with progress("loading a-model-of-some-name") as on_progress:
    on_progress(15 << 20, 21 << 20)
    time.sleep(0.3)
"""


def test_figures_stay_on_one_line_of_a_narrow_terminal() -> None:
    assert "15.0/21.0 MiB" in drawn_by(NARROW, columns=60)


PRINTED = """
import sys
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal
with progress("telling", "prompts") as on_progress:
    on_progress(0, 2)
    terminal.write("a line of stdout that is longer than the terminal is wide\\n")
    on_progress(1, 2)
"""


def test_what_is_printed_beside_it_goes_to_stdout(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        told = drawn_by(PRINTED, columns=30, stdout=stdout)
    assert out.read_text() == "a line of stdout that is longer than the terminal is wide\n"
    assert "a line" not in told
