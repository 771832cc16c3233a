"""`llmcli` as a process of its own: start-up, pipes, Ctrl-C, terminals."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import write_tiny_llama

LLMCLI = [sys.executable, "-m", "llmcli"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*LLMCLI, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, **options)  # type: ignore[call-overload]


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; from llmcli.cli.main import run; run(['--help']); run(['generate', '--help'])\n"
        "heavy = {'torch', 'cupy', 'numpy', 'tokenizers', 'sentencepiece', 'transformers', 'huggingface_hub'}\n"
        "heavy |= {'safetensors'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout


def test_no_command_shows_the_help() -> None:
    result = run()
    assert (result.returncode, result.stdout) == (0, run("--help").stdout)


def test_version() -> None:
    from llmcli import __version__

    assert run("--version").stdout == f"llmcli {__version__}\n"


def test_piped_prompt(tiny_llama: Path) -> None:
    arguments = ("generate", "-m", tiny_llama, "--temperature", 0, "--max-new-tokens", 8, "--quiet")
    expected = run(*arguments, "Grüße, 世界").stdout
    assert run(*arguments, input="Grüße, 世界\n").stdout == expected
    assert run(*arguments, "-", input="Grüße, 世界").stdout == expected


def test_output_is_utf8_whatever_the_locale(tiny_llama: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ("generate", "Hi", "-m", tiny_llama, "--seed", 2, "--max-new-tokens", 60)
    assert run(*arguments, env=environment).stdout == run(*arguments).stdout


def test_a_closed_pipe_ends_quietly(tiny_llama: Path) -> None:
    command = [*LLMCLI, "generate", "Hi", "-m", str(tiny_llama), "--max-new-tokens", "400", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


@pytest.mark.parametrize("arguments", [[], ["--help"], ["generate", "--help"]])
def test_help_into_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    process = subprocess.Popen([*LLMCLI, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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


def test_a_message_that_cannot_be_written_costs_no_text(tiny_llama: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    command = [*LLMCLI, "generate", "Hi", "-m", str(tiny_llama), "--seed", "1", "--max-new-tokens", "8"]
    told = subprocess.run([*command, "--quiet"], capture_output=True, timeout=60, check=True)
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, told.stdout)


@pytest.mark.parametrize(
    ("redirection", "exit_code"),
    [("<&-", 2), ("hello >&-", 5), ("--help >&-", 5), ("hello 2>&-", 0), ("hello <&-", 0)],
)
def test_streams_that_the_caller_closed(tiny_llama: Path, redirection: str, exit_code: int) -> None:
    """A text that cannot be written is an error."""
    script = f'"{sys.executable}" -m llmcli generate -m "{tiny_llama}" --max-new-tokens 2 {redirection}'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_code, result.stderr
    assert "internal error" not in result.stderr


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.6, 1.0, 1.5])
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


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_shows_the_prompt_before_its_continuation(tiny_llama: Path, no_color: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    if no_color:
        environment["NO_COLOR"] = "1"
    master, slave = pty.openpty()
    command = [*LLMCLI, "generate", "Once upon", "-m", str(tiny_llama), "--seed", "1", "--max-new-tokens", "4"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            seen += os.read(master, 4096)
        except OSError:  # the other end is closed: the program has ended
            break
    os.close(master)
    assert process.wait(60) == 0
    assert (b"\x1b[2mOnce upon\x1b[0m" in seen) == (not no_color)
    assert b"Once upon" in seen


def test_a_pipe_joins_the_prompt() -> None:
    command = [sys.executable, "-m", "llmcli", "generate", "Tell this again:", "--max-new-tokens", "1", "--show-prompt"]
    run = subprocess.run(command, input="A fox.\n", capture_output=True, text=True, check=True, timeout=120)
    assert "Tell this again:\n\nA fox." in run.stderr
