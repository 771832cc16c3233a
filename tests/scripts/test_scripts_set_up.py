"""The first command's environment, with a fake venv and pip that print what the real ones print."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SECONDS_TO_END = "SECONDS_TO_END = 10  # for a pip that was interrupted"

# A stand-in for the module venv. The environment's python records its arguments and runs the pip below.
VENV = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
site_packages = folder / f"lib/python3.{sys.version_info.minor}/site-packages"
site_packages.mkdir(parents=True, exist_ok=True)
(folder / "bin").mkdir(exist_ok=True)
python = folder / "bin/python"
python.write_text(f"#!{sys.executable}\\n" + pathlib.Path(os.environ["FAKE_PIP"]).read_text())
python.chmod(0o755)
"""

PIP = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[0]).parents[1]
(site_packages,) = folder.glob("lib/*/site-packages")
with (folder.parent / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
pace = float(os.environ["FAKE_PACE"])
def say(text, seconds=0.4):
    print(text, flush=True)
    time.sleep(seconds * pace)
def install(name):
    description = site_packages / f"{name}.dist-info"
    description.mkdir()
    (description / "INSTALLER").write_text("pip")
    (description / "RECORD").write_text("")
    time.sleep(0.6 * pace)
if "--editable" not in sys.argv:
    sys.exit()
"""

WORKS = (
    PIP
    + """
say("Collecting small>=1.0 (from llmcli==0.1.0)", 0)
say("  Downloading small-1.0-py3-none-any.whl (20 kB)", 0)
say("Processing /opt/wheels/local-2.0-py3-none-any.whl (from llmcli==0.1.0)", 0)
say("WARNING: Location 'file:///elsewhere' is ignored", 0)
say("Collecting torch<3,>=2.11 (from llmcli==0.1.0)", 0)
say("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)", 0)
say("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (906.4 MB)", 0)
say("Progress 0 of 906400000")
say("Progress 120000000 of 906400000")
say("Progress 906400000 of 906400000", 0)
say("Collecting big", 0)
say("  Downloading big-3.tar.gz (20.0 MB)", 0)
say("Progress 20000000 of 20000000", 0)
say("Installing collected packages: small, local, torch, big, llmcli")
for name in ("small-1.0", "local-2.0", "torch-2.13.0", "big-3", "llmcli-0.1.0"):
    install(name)
say("Successfully installed small-1.0 local-2.0 torch-2.13.0 big-3 llmcli-0.1.0")
"""
)
FAILS = (
    PIP
    + """
for number in range(100):
    say(f"Collecting package{number}", 0)
say("Progress 1 of 2", 0)
say("ERROR: Could not find a version that satisfies the requirement torch==2.13.0", 0)
sys.exit(1)
"""
)
HANGS = (
    PIP
    + """
say("Collecting torch", 0)
(folder.parent / "hangs").touch()
try:
    time.sleep(300)
except KeyboardInterrupt:
    print("ERROR: Operation cancelled by user")
    sys.exit(1)
"""
)


class Tree:
    """A source tree with nothing but the scripts, and a function that runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        for name in ("pyproject.toml", "scripts/environment.sh", "scripts/set_up.py", "scripts/constraints.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text((ROOT / name).read_text())
        set_up = folder / "scripts/set_up.py"
        assert set_up.read_text().count(SECONDS_TO_END) == 1
        set_up.write_text(set_up.read_text().replace(SECONDS_TO_END, "SECONDS_TO_END = 1"))
        (folder / "fake").mkdir()
        (folder / "fake" / "venv.py").write_text(VENV)
        self.environ = {
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(folder / "fake"),
            "FAKE_PIP": str(folder / "fake" / "pip"),
            "FAKE_PACE": "0",
        }

    def start(self, pip: str, **options: object) -> "subprocess.Popen[str]":
        (self.folder / "fake" / "pip").write_text(pip)
        script = 'set -euo pipefail; source scripts/environment.sh; ensure_environment; echo "the command"'
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environ,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def run(self, pip: str) -> tuple[int, str, list[str]]:
        """Exit code, stdout, and the lines of stderr."""
        process = self.start(pip)
        stdout, stderr = process.communicate(timeout=120)
        return process.returncode, stdout, stderr.splitlines()

    def calls(self) -> int:
        """How often pip was run."""
        return len((self.folder / "calls").read_text().splitlines())

    def stamps(self) -> list[str]:
        return sorted(path.name for path in self.venv.glob("ready-*"))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_a_terminal_a_few_plain_lines(tree: Tree) -> None:
    exit_code, stdout, lines = tree.run(WORKS)
    assert (exit_code, stdout) == (0, "the command\n")
    assert lines[:-1] == [
        f"setting up {tree.venv} (once, a few minutes)",
        "finding and downloading packages",
        "  torch 2.13.0, 906 MB",
        "  big 3, 20 MB",
        "installing 5 packages, 926 MB downloaded",
    ]
    assert lines[-1].startswith("set up in ")
    pip, install = (tree.folder / "calls").read_text().splitlines()
    assert pip.endswith("pip>=24.1")
    assert f"--constraint {tree.folder}/scripts/constraints.txt --editable {tree.folder}" in install
    # And no message when it is there.
    assert tree.run(FAILS) == (0, "the command\n", [])
    assert tree.calls() == 2


def test_on_a_terminal_a_line_tells_what_goes_on(tree: Tree) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    tree.environ["FAKE_PACE"] = "1"
    process = tree.start(WORKS, stderr=slave)
    os.close(slave)
    drawn = b""
    try:
        while piece := os.read(master, 10_000):
            drawn += piece
    except OSError:  # the end of a terminal
        pass
    assert process.wait(timeout=60) == 0
    assert b"\x1b" not in drawn
    told = drawn.decode().replace("\n", "\r").split("\r")
    downloading = "3 packages found, 120 MB downloaded; torch 2.13.0: 120 of 906 MB ("
    assert any(line.startswith(downloading) for line in told), told
    installing = re.findall(r"installing (\d) of 5: (\S+)", drawn.decode())
    names = ["small", "local", "torch", "big", "llmcli"]
    assert {name for _, name in installing} & set(names[1:])
    assert all(name == names[int(number) - 1] for number, name in installing)
    assert max(len(line) for line in told[1:]) < 72
    assert "  big 3, 20 MB" not in told  # the live line showed it


def test_a_failure_shows_the_end_of_the_output_and_says_how_to_go_on(tree: Tree) -> None:
    tree.run(WORKS)
    (tree.folder / "pyproject.toml").write_text("changed")
    exit_code, stdout, lines = tree.run(FAILS)
    assert (exit_code, stdout) == (1, "")
    assert lines[2:4] == ["Collecting package81", "Collecting package82"]
    assert lines[-2] == "ERROR: Could not find a version that satisfies the requirement torch==2.13.0"
    assert lines[-1].startswith(
        f"error: setting up {tree.venv} failed; the lines above say why. Once that is fixed, run"
    )
    assert tree.stamps() == []  # what is left of the old environment is unknown


def test_the_stamps_of_the_same_inputs_stay(tree: Tree) -> None:
    tree.run(WORKS)
    (stamp,) = tree.stamps()
    (tree.venv / f"{stamp}-other-extra").touch()
    (tree.venv / "ready-123-456-base").touch()
    (tree.venv / stamp).unlink()
    for description in tree.venv.glob("lib/*/site-packages/*"):
        for file in description.iterdir():
            file.unlink()
        description.rmdir()
    tree.run(WORKS)
    assert tree.stamps() == [stamp, f"{stamp}-other-extra"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes in /proc")
@pytest.mark.parametrize("whole_group", [True, False])
def test_a_ctrl_c_ends_it_and_the_next_run_goes_on(tree: Tree, whole_group: bool) -> None:
    """On a terminal pip is interrupted, too."""
    process = tree.start(HANGS, start_new_session=True)
    wait_for(tree.folder / "hangs")
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (helper,) = Path(f"/proc/{child}/task/{child}/children").read_text().split()
        os.kill(int(helper), signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.splitlines()[-1] == "stopped; run the same command again to continue: downloads are kept"
    assert tree.stamps() == []
    assert tree.run(WORKS)[:2] == (0, "the command\n")


def test_a_package_that_was_half_installed_is_installed_again(tree: Tree) -> None:
    site_packages = tree.venv / f"lib/python3.{sys.version_info.minor}/site-packages"
    for name, files in (("half-1.0", ["METADATA"]), ("whole-1.0", ["METADATA", "INSTALLER", "RECORD"])):
        (site_packages / f"{name}.dist-info").mkdir(parents=True)
        for file in files:
            (site_packages / f"{name}.dist-info" / file).write_text("")
    (site_packages / "half.py").write_text("")
    assert tree.run(WORKS)[0] == 0
    left = {path.name for path in site_packages.iterdir()}
    assert {"whole-1.0.dist-info", "half.py"} <= left
    assert "half-1.0.dist-info" not in left


def test_the_second_of_two_first_commands_waits_and_says_so(tree: Tree) -> None:
    with (tree.folder / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = tree.start(WORKS)
        assert process.stderr is not None
        assert process.stderr.readline() == f"waiting: another command is setting up {tree.venv}\n"
        assert not tree.venv.exists()
    process.communicate(timeout=120)
    assert process.returncode == 0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
