"""`llmcli batch` as a process of its own: pipes, kills, Ctrl-C, two at once."""

import json
import shlex
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pexpect
import pytest
from results import Llmcli
from tiny_models import write_tiny_llama

# One thread: tiny matrices gain nothing from more, and waiting for a busy core costs far more.
LLMCLI = [sys.executable, "-m", "llmcli", "batch", "--threads", "1"]
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that take a while: the model ends none of them."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("slow") / "model", eos_token_id=None)
    (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(NUM_PROMPTS)))
    return path


def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*LLMCLI, *map(str, arguments)], **pipes)  # type: ignore[call-overload,no-any-return]


def texts(content: bytes) -> dict[object, str]:
    values = [json.loads(line) for line in content.splitlines()]
    assert len({value["id"] for value in values}) == len(values)
    return {value["id"]: value["text"] for value in values}


@cache
def expected(source: Path, model: Path, *flags: object) -> dict[object, str]:
    process = start(source, "-", "-m", model, "--seed", 1, "-q", *flags)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, b"")
    return texts(stdout)


def wait_for_lines(path: Path, process: subprocess.Popen[bytes], count: int) -> None:
    """Wait until the output has this many lines, or the process ends."""
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        threading.Event().wait(0.005)


def test_an_end_at_any_moment_is_gone_on_from(slow_model: Path, source: Path, tmp_path: Path) -> None:
    flags = ("--max-new-tokens", 40)
    output = tmp_path / "out"
    arguments = (source, output, "-m", slow_model, "--seed", 1, *flags)
    for how, count in ((signal.SIGKILL, 1), (signal.SIGINT, 3)):
        process = start(*arguments)
        wait_for_lines(output, process, count)
        process.send_signal(how)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode in (0, -9 if how == signal.SIGKILL else 130), stderr
        if process.returncode == 130:
            assert stderr.splitlines()[-1].endswith(b" prompts are done; run the same command again to resume")
        assert output.read_bytes().count(b"\n") >= count
    process = start(*arguments)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert texts(output.read_bytes()) == expected(source, slow_model, *flags)
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "out.run.json", ".out.lock"}


def test_a_second_run_is_refused_while_the_first_one_is_at_work(
    llmcli: Llmcli, slow_model: Path, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = (source, output, "-m", slow_model, "--seed", 1, "--max-new-tokens", 400)
    first = start(*arguments)
    wait_for_lines(output, first, 1)
    first.send_signal(signal.SIGSTOP)  # or it could end before the second begins
    (tmp_path / "link").symlink_to(output)
    for name in (output, tmp_path / "link"):
        refused = llmcli("batch", source, name, *arguments[2:], "-q")
        refused.expect_error(
            2, f"out is being written by process {first.pid} on ", "wait until that has ended, or give"
        )
    first.kill()
    first.communicate(timeout=60)
    # A lock dies with its holder: the settings are checked again.
    llmcli("batch", *arguments, "--temperature", 9, "-q").expect_error(2, " was made with temperature 0.8, now 9.0: ")


def test_a_reader_that_goes_away_ends_the_run_quietly(slow_model: Path, source: Path) -> None:
    process = start(source, "-", "-m", slow_model, "--max-new-tokens", 50, "-q")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_a_full_disk_is_an_error_in_one_line(slow_model: Path, source: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        process = start(source, "-", "-m", slow_model, "--max-new-tokens", 2, "-q", stdout=full)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (5, b"error: <stdout> cannot be written: No space left on device\n")


def test_a_file_that_may_not_grow(slow_model: Path, source: Path, tmp_path: Path) -> None:
    """The limit strikes within a line, which is removed; a later run resumes."""
    output = tmp_path / "out"
    flags = ("--seed", 1, "--max-new-tokens", 100, "--quiet")
    command = " ".join(map(str, (*LLMCLI, source, output, "-m", slow_model, *flags)))
    limited = subprocess.run(["bash", "-c", f"ulimit -f 3; {command}"], capture_output=True, check=False, timeout=60)
    assert limited.returncode == 5
    assert limited.stderr == f"error: {output} cannot be written: File too large\n".encode()
    assert output.read_bytes().endswith(b"\n")
    process = start(source, output, "-m", slow_model, *flags)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert texts(output.read_bytes()) == expected(source, slow_model, "--max-new-tokens", 100)


@pytest.mark.parametrize("out_is_terminal", [False, True])
def test_on_a_terminal_results_are_whole_lines_of_stdout(
    source: Path, slow_model: Path, tmp_path: Path, out_is_terminal: bool
) -> None:
    """With a bar on stderr; if both are one terminal there is no bar, which would overdraw them."""
    flags = (source, "-", "-m", slow_model, "--seed", 1, "--max-new-tokens", 40)
    command = shlex.join(map(str, (*LLMCLI, *flags))) + ("" if out_is_terminal else f" > {tmp_path / 'out'}")
    child = pexpect.spawn("/bin/sh", ["-c", f"exec {command}"], timeout=120, dimensions=(24, 40))
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    if out_is_terminal:
        lines = [line for line in child.before.splitlines() if line.startswith(b"{")]
        assert texts(b"\n".join(lines)).keys() == set(range(1, NUM_PROMPTS + 1))
        assert b"\x1b" not in child.before[child.before.index(b"{") :]
    else:
        assert texts((tmp_path / "out").read_bytes()) == expected(source, slow_model, "--max-new-tokens", 40)
        assert b'"text"' not in child.before
