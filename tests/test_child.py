"""Child processes use their parent's llmcli, and none of our files gets the number of a closed standard stream."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.child import child_program

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def other_llmcli(tmp_path: Path) -> Path:
    """A folder that holds another package of the same name, which does not run."""
    package = tmp_path / "installed" / "llmcli"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the other llmcli')\n")
    return package.parent


def test_a_child_runs_its_parents_tree(other_llmcli: Path) -> None:
    program = child_program("llmcli.pattern_child")
    environment = {**os.environ, "PYTHONPATH": str(other_llmcli)}
    request = '{"patterns": ["b+"], "names": ["abb", "bba"], "anywhere": false}'
    result = subprocess.run(
        [sys.executable, "-c", program], input=request, capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == '{"matched": [1]}\n'


def test_its_folder_stays_out_of_the_childs_search_path(tmp_path: Path) -> None:
    program = child_program("llmcli.pattern_child", "print(sys.path)")
    command = [sys.executable, "-I", "-S", "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert repr(str(ROOT)) not in shown


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_never_gets_the_number_of_a_closed_stream(number: int) -> None:
    program = (
        "import os\n"
        "from llmcli import __main__\n"
        f"os.close({number})\n"
        "__main__._hold_closed_streams()\n"
        f"assert os.open(os.devnull, os.O_RDONLY) != {number}\n"
        f"try: os.read(0, 1) if {number} == 0 else os.write({number}, b'x')\n"
        "except OSError: os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 7
