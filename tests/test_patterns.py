"""Names and regular expressions: the results of `re`, and an end for endless ones."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmcli.errors import CheckpointError, UsageError
from llmcli.patterns import MAX_LENGTH, TIME_LIMIT_SECONDS, child_program, match_names

LAYERS = [
    f"model.layers.{index}.{part}"
    for index in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]
NAMES = [*LAYERS, "lm_head", "model.embed_tokens"]
# As in llm-compressor's recipes and published configs.
REAL = [
    ".*lm_head",
    ".*self_attn.(q|k|v|o)_proj$",
    r"model\.layers\.(0|1)\..*",
    r".*\.mlp\.(gate|up|down)_proj.*",
    "vision_tower.*",
    ".*mlp.gate$",
    r"(?!.*(lm_head|embed)).*",
    r".*layers\.1[0-9]\..*down_proj",
    "",
]


@pytest.mark.parametrize("anywhere", [False, True])
def test_patterns_match_as_re_does(anywhere: bool) -> None:
    find = re.search if anywhere else re.match
    expected = {pattern: {name for name in NAMES if find(pattern, name)} for pattern in REAL}
    assert match_names(REAL, NAMES, "ignore", CheckpointError, anywhere=anywhere) == expected


@pytest.mark.parametrize("endless", [r"(.+)+$^", r"(?:a|model|.|.)*$^", r"(.*.*.*.*.*.*.*.*.*.*.*.*)*x"])
def test_a_pattern_without_an_end_is_named(endless: str) -> None:
    start = time.monotonic()
    with pytest.raises(UsageError) as caught:
        match_names([".*", endless, "b"], NAMES, "--skip", UsageError)
    assert time.monotonic() - start < TIME_LIMIT_SECONDS + 2
    assert str(caught.value).startswith(f"--skip {endless!r} takes longer than 3 s to match; ")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing )"),
        ("a{99999999999999999999}", "too large"),
        ("(" * 2000, "nested too deeply"),
        ("(?P<a>x)(?P<a>y)", "redefinition"),
    ],
)
def test_what_is_not_a_pattern_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config.json: the pattern '.* is not a regular expression: ") as caught:
        match_names([pattern], NAMES, "config.json: the pattern", CheckpointError)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_is_too_long_is_refused() -> None:
    with pytest.raises(CheckpointError, match="longer than 4000 characters"):
        match_names(["a" * (MAX_LENGTH + 1)], NAMES, "ignore", CheckpointError)


def test_no_pattern_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    assert match_names([], NAMES, "ignore", CheckpointError) == {}


# Child processes use their parent's llmcli, and none of our files gets the number of a closed standard stream.


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
