"""The progress bar on a terminal: what it says before anything is done."""

import pty
import re
import subprocess
import sys

import pytest

DRAWN = """
import time
from llmcli.cli.progress import progress
with progress("loading x", {unit!r}, first="importing torch") as on_progress:
    time.sleep(0.5)
    on_progress(1, 4)
    time.sleep(0.5)
"""


@pytest.mark.parametrize(("unit", "done"), [("bytes", "1/4 bytes"), ("prompts", "1/4")])
def test_nothing_is_counted_before_the_total_is_known(unit: str, done: str) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", DRAWN.format(unit=unit)], stderr=slave, env={"COLUMNS": "100"})
    assert process.wait(timeout=60) == 0
    with open(master, "rb", buffering=0) as drawn:
        told = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", drawn.read(100_000)).decode()
    before, _, after = told.partition(done)
    assert "loading x" in before
    assert "importing torch" in before
    assert "?" not in before
    assert "importing torch" not in after
