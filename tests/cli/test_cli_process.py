"""`llmcli` as a process of its own: start-up, pipes, Ctrl-C, terminals, little memory, no torch."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from results import Llmcli
from tiny_models import write_tiny_llama

from llmcli import __version__
from llmcli.cli import device_choice
from llmcli.cli.device_choice import choose_waiting

LLMCLI = [sys.executable, "-m", "llmcli"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*LLMCLI, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, **options)  # type: ignore[call-overload]


# One process after the other command: what none of them so far may have imported.
HEAVY = {"torch", "cupy", "tokenizers", "sentencepiece", "transformers", "prompt_toolkit", "jinja2", "llguidance"}
HEAVIER = HEAVY | {"numpy", "huggingface_hub", "safetensors"}
STARTS = [
    (["--help"], HEAVIER),
    (["generate", "--help-all"], HEAVIER),
    (["chat", "--help"], HEAVIER),
    (["chat", "--list"], HEAVY),
    (["generate", "a", "--max-new-tokens", "1"], {"torch", "transformers", "llguidance"}),
]


def test_nothing_is_imported_that_a_command_does_not_need(tmp_path: Path) -> None:
    code = (
        "import json, sys; from llmcli.cli.main import run\n"
        "for command, unwanted in json.loads(sys.argv[1]):\n"
        "    assert run(command) == 0\n"
        "    assert not {*unwanted} & {*sys.modules}, (command, {*unwanted} & {*sys.modules})\n"
        "run(['generate', 'a', '--choice', 'b'])\n"
        "assert 'llguidance' in sys.modules\n"
    )
    starts = json.dumps([(command, sorted(unwanted)) for command, unwanted in STARTS])
    environment = {**os.environ, "LLMCLI_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code, starts], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout


def test_the_help_is_for_no_command_too_and_a_version_is_told(llmcli: Llmcli) -> None:
    assert llmcli() == llmcli("--help")
    assert llmcli("--version").stdout == f"llmcli {__version__}\n"


def test_pipes_have_utf8_whatever_the_locale_and_join_the_prompt(llmcli: Llmcli, tiny_llama: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ("generate", "-m", tiny_llama, "--seed", 2, "--max-new-tokens", 60, "--quiet")
    told = run(*arguments, "Hi,", input="世界\n", env=environment)
    assert told.stdout == llmcli(*arguments, "Hi,\n\n世界").stdout


def test_a_closed_pipe_ends_quietly(tiny_llama: Path) -> None:
    command = [*LLMCLI, "generate", "Hi", "-m", str(tiny_llama), "--max-new-tokens", "400", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_help_into_a_closed_pipe_ends_quietly() -> None:
    process = subprocess.Popen([*LLMCLI, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_a_full_disk_is_an_error_in_one_line(tiny_llama: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    command = [*LLMCLI, "generate", "Hi", "-m", str(tiny_llama), "--quiet"]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        help_text = subprocess.run([*LLMCLI, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (5, "error: <stdout> cannot be written: No space left on device\n")
    assert (help_text.returncode, help_text.stderr) == (
        5,
        "error: the output cannot be written: No space left on device\n",
    )


def test_a_message_that_cannot_be_written_costs_no_text(llmcli: Llmcli, tiny_llama: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    arguments = ["generate", "Hi", "-m", str(tiny_llama), "--seed", "1", "--max-new-tokens", "8"]
    with open("/dev/full", "wb") as full:
        result = subprocess.run([*LLMCLI, *arguments], stdout=subprocess.PIPE, stderr=full, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, llmcli(*arguments).stdout.encode())


@pytest.mark.parametrize(("redirection", "exit_code"), [("<&-", 2), ("hello >&-", 5), ("hello <&- 2>&-", 0)])
def test_streams_that_the_caller_closed(tiny_llama: Path, redirection: str, exit_code: int) -> None:
    """A text that cannot be written is an error."""
    script = f'"{sys.executable}" -m llmcli generate -m "{tiny_llama}" --max-new-tokens 2 {redirection}'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_code, result.stderr
    assert "internal error" not in result.stderr


@pytest.mark.parametrize("delay", [0.3, 1.0, *(pytest.param(one, marks=pytest.mark.long) for one in (0.1, 0.6, 1.5))])
def test_ctrl_c_at_any_moment_of_the_start(endless: Path, delay: float) -> None:
    """Imports, tokenizer, loading: an interrupt is handled from our first import on."""
    command = [*LLMCLI, "generate", "Hi", "-m", str(endless), "--max-new-tokens", "8000", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(delay)  # the moment matters; on any machine it falls within the start
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    is_pythons = process.returncode == -signal.SIGINT or stderr.startswith(b"Could not import runpy")
    if is_pythons and b"llmcli/cli" not in stderr:
        pytest.skip("Python had not come to our code yet")
    assert (process.returncode, stderr) == (130, b"")


def test_ctrl_c_in_an_import_that_drops_it(tmp_path: Path) -> None:
    """As callbacks of import locks do; C++ code aborts."""
    (tmp_path / "dropping.py").write_text(
        "import signal, time\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
        "time.sleep(30)\n"
    )
    program = (
        "import llmcli.__main__, llmcli.cli.main\n"
        "llmcli.cli.main.main = lambda: __import__('dropping')\n"
        "llmcli.__main__.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=20, check=False, env=environment
    )
    assert (result.returncode, result.stderr) == (130, b"")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on for thousands of tokens."""
    sizes = {"num_hidden_layers": 6, "max_position_embeddings": 8192}
    folder = write_tiny_llama(tmp_path_factory.mktemp("endless") / "model", eos_token_id=None, **sizes)
    (folder / "tokenizer_config.json").unlink()
    return folder


def test_ctrl_c_keeps_the_text_and_exits_130(endless: Path) -> None:
    command = [*LLMCLI, "generate", "Hi", "-m", str(endless), "--max-new-tokens", "8000", "--seed", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    begin = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(begin) == 20
    assert rest.endswith(b"\n")
    assert b"Traceback" not in stderr
    assert stderr.count(b"\n") == 1


def test_ctrl_c_during_a_long_prefill(endless: Path) -> None:
    command = [*LLMCLI, "generate", "x" * 8000, "-m", str(endless), "--max-new-tokens", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()  # the line about the run comes just before prefill
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == b""


# Errors that can occur anywhere end in one line and a documented exit code.


def test_a_folder_that_was_removed_under_the_shell(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"cd {folder} && rmdir {folder} && exec {sys.executable} -m llmcli generate Once"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 2
    assert result.stderr == (
        "error: the current folder cannot be used (No such file or directory); change to another folder\n"
    )


GENERATE = "generate Once --max-new-tokens 3"


@pytest.mark.parametrize(
    ("mib", "command"),
    [
        *((280, "plan"), (540, GENERATE)),  # torch, imported, aborts below 550
        *((190, GENERATE), (215, "plan")),  # without torch
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in ((400, GENERATE), (500, "plan"), (140, "plan"), (250, GENERATE))
        ),
    ],
)
def test_too_little_memory_is_one_line(mib, command):
    command += " --dtype float32" if mib > 250 else ""
    limits = (mib * 1024**2,) * 2
    result = run(*command.split(), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
    assert result.returncode == 4, result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("Using the built-in storyteller")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ")
    assert "out of memory" in errors[0] or "`ulimit -v` leaves" in errors[0] or "is available: use" in errors[0]


def test_show_completion_succeeds():
    result = run("--show-completion", "bash")
    assert result.returncode == 0, result.stderr
    assert "_LLMCLI_COMPLETE" in result.stdout


# A small model on the CPU needs no torch: every command runs if importing it fails.


ROOT = Path(__file__).resolve().parents[2]
TEXT = "Once upon a time there was a dog. " * 4
COMMANDS = {
    "generate": "generate Once --max-new-tokens 2",
    "samples": "generate Once --max-new-tokens 2 -n 2 --stats=start",
    "why": "generate Once --max-new-tokens 2 --why",
    "chat": "chat --max-new-tokens 2",
    "batch": "batch lines.txt out.jsonl --text --max-new-tokens 2",
    "tokenize": "tokenize Once",
    "info": "info storyteller",
    "plan": "plan",
    "bench": "bench --prompt 4 --depth 4 --tokens 2 --repeats 1",
    "eval": "eval --file text.txt",
    "diff": "diff storyteller storyteller Once --max-new-tokens 2",
    "doctor": "doctor",
}


LACKED_FLAGS = ["--dtype float32", "--dtype bfloat16", "--kv-cache int8", "--threads 2"]
NEEDS_TORCH = {flags: f"generate Once --max-new-tokens 2 --device cpu {flags}" for flags in LACKED_FLAGS}
# One process for all commands, which starts once; an import that has failed is tried again.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from llmcli.cli.main import run

results = {}
for name, command in json.loads(sys.argv[1]).items():
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"Hello\\n/quit\\n"), "utf-8")
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        results[name] = [run(command.split()), out, err]
print(json.dumps({name: [code, out.getvalue(), err.getvalue()] for name, (code, out, err) in results.items()}))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The exit code, stdout and stderr of every command where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text("raise ImportError('somebody imports torch')\n")
    (folder / "lines.txt").write_text("Once upon a time\nThe dog\n")
    (folder / "text.txt").write_text(TEXT)
    path = os.pathsep.join([str(folder / "broken"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS | NEEDS_TORCH)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "LLMCLI_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list[Any]] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", COMMANDS)
def test_the_storyteller_runs(results: dict[str, list[Any]], name: str) -> None:
    exit_code, out, err = results[name]
    assert exit_code == 0, err
    assert out or name == "batch"


@pytest.mark.parametrize("flags", LACKED_FLAGS)
def test_a_flag_for_what_numpy_lacks_asks_for_torch(results: dict[str, list[Any]], flags: str) -> None:
    exit_code, _, err = results[flags]
    assert "somebody imports torch" in err
    assert exit_code != 0


@pytest.mark.parametrize("chosen", [None, "3"])
def test_numpy_computes_with_one_thread_unless_the_user_says_otherwise(chosen: str | None) -> None:
    """The variable is set before numpy is imported, which reads it then."""
    program = (
        "import os, sys\n"
        "from llmcli.cli.main import main\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.argv = ['llmcli', '--version']\n"
        "main()\n"
        "assert 'numpy' not in sys.modules\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if chosen is not None:
        environment["OPENBLAS_NUM_THREADS"] = chosen
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == (chosen or "1")


# How torch's threads wait: asleep at once if others compute, after a moment if cores are free.


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the system's file. The machine has four cores, and nothing is set."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    path = tmp_path / "loadavg"
    monkeypatch.setattr(device_choice, "_LOAD", path)
    return path


# Running threads count the one that asks.
@pytest.mark.parametrize(
    ("running", "num_threads", "expected"),
    [(1, None, "10000"), (2, None, "0"), (9, None, "0"), (3, 2, "10000"), (4, 2, "0"), (4, 1, "10000"), (1, 6, "0")],
)
def test_threads_sleep_at_once_if_others_need_the_cores(
    running: int, num_threads: int | None, expected: str, load: Path
) -> None:
    load.write_text(f"0.56 1.91 1.52 {running}/834 15581\n")
    choose_waiting(num_threads)
    assert os.environ["GOMP_SPINCOUNT"] == expected


@pytest.mark.parametrize("content", [None, "", "0.5 0.5 0.5 x/7 8"])
def test_where_nothing_tells_the_cores_are_taken_to_be_free(content: str | None, load: Path) -> None:
    if content is not None:
        load.write_text(content)
    choose_waiting(None)
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_a_user_has_set_stays(name: str, load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    choose_waiting(None)
    assert dict(os.environ) == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has GNU's OpenMP on Linux")
@pytest.mark.parametrize("command", [GENERATE.split(), pytest.param(["plan"], marks=pytest.mark.long)])
def test_openmp_reads_it(command: list[str]) -> None:
    """OpenMP itself reports what it has read: a late setting would leave 300000."""
    environment = {name: value for name, value in os.environ.items() if name not in device_choice._WAITING_VARIABLES}
    run = subprocess.run(
        [sys.executable, "-m", "llmcli", *command, "--device", "cpu", "--dtype", "float32"],
        cwd=ROOT,
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    counts = [line.split("'")[1] for line in run.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert counts[-1] in ("0", "10000"), run.stderr
