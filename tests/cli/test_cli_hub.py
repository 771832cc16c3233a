"""Models by hub id on the command line: `--model`, `pull`, `models`."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from docs_schemas import check_docs_schema
from hub_server import HubServer

LLMCLI = [sys.executable, "-m", "llmcli"]


@pytest.fixture
def tiny_hub(hub: HubServer, tiny_llama: Path) -> HubServer:
    hub.add_model("org/tiny", tiny_llama, "v1")
    return hub


@pytest.fixture
def total_size(tiny_llama: Path) -> str:
    return f"{sum(path.stat().st_size for path in tiny_llama.iterdir()) / 1000:.1f} kB"


def read_terminal(command: list[str], typed: bytes = b"") -> tuple[int, str]:
    """Run a command on a terminal of its own; its exit code and what it showed."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, typed)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            seen += os.read(master, 4096)
        except OSError:  # the other end is closed: the program has ended
            break
    os.close(master)
    return process.wait(60), seen.decode()


def test_pull_prints_the_folder_and_nothing_else(tiny_hub: HubServer, llmcli: Callable[..., Any]) -> None:
    result = llmcli("pull", "org/tiny")
    assert result.exit_code == 0
    folder = Path(result.stdout.removesuffix("\n"))
    assert (folder / "model.safetensors").is_file()
    assert result.stderr == "downloading org/tiny: 680.7 kB of 680.7 kB\n"
    assert llmcli("pull", "org/tiny") == (0, result.stdout, "")
    assert llmcli("pull", "org/tiny@v1").stdout == result.stdout


def test_pull_quietly(tiny_hub: HubServer, llmcli: Callable[..., Any]) -> None:
    assert llmcli("pull", "org/tiny", "--quiet").stderr == ""


def test_pull_of_a_branch_that_moved_on(tiny_hub: HubServer, llmcli: Callable[..., Any], tiny_llama: Path) -> None:
    old = llmcli("pull", "org/tiny").stdout
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    commit = tiny_hub.repositories["org/tiny"].add({**files, "chat_template.jinja": b"new"}, "main")
    assert llmcli("pull", "org/tiny").stdout == old
    before = tiny_hub.sent_bytes.copy()
    result = llmcli("pull", "org/tiny", "--update")
    assert (Path(result.stdout.strip()).name, result.stderr) == (commit, "")
    assert (tiny_hub.sent_bytes - before).keys() == {"chat_template.jinja"}
    assert llmcli("pull", "org/tiny").stdout == result.stdout


@pytest.mark.parametrize("name", ["tiny", "./org/tiny", "org/tiny/", "/org/tiny"])
def test_pull_of_a_path(llmcli: Callable[..., Any], name: str) -> None:
    message = f"error: {name!r} is not of the form ORG/NAME or ORG/NAME@REVISION\n"
    assert llmcli("pull", name) == (2, "", message)


def test_pull_of_nothing(tiny_hub: HubServer, llmcli: Callable[..., Any]) -> None:
    exit_code, stdout, stderr = llmcli("pull", "org/none")
    assert (exit_code, stdout) == (3, "")
    assert stderr.startswith("error: org/none is neither a local folder nor a model on ")
    assert stderr.count("\n") == 1


def test_generate_from_a_hub_id(tiny_hub: HubServer, llmcli: Callable[..., Any], tiny_llama: Path) -> None:
    arguments = ("generate", "Hi", "--seed", 1, "--max-new-tokens", 8, "--model")
    expected = llmcli(*arguments, tiny_llama)
    first = llmcli(*arguments, "org/tiny")
    assert (first.exit_code, first.stdout) == (0, expected.stdout)
    assert first.stderr.startswith("downloading org/tiny: 680.7 kB of 680.7 kB\norg/tiny: CPU, float32")
    num_requests = len(tiny_hub.requests)
    second = llmcli(*arguments, "org/tiny@v1", "--json")
    assert second.stderr.startswith("downloading org/tiny@v1") is False
    assert json.loads(second.stdout)["model"] == "org/tiny@v1"
    assert len(tiny_hub.requests) >= num_requests  # the cache does not know the name v1 yet
    num_requests = len(tiny_hub.requests)
    assert llmcli(*arguments, "org/tiny").stdout == expected.stdout
    assert len(tiny_hub.requests) == num_requests


def test_a_local_folder_goes_before_the_hub(
    tiny_hub: HubServer, llmcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    result = llmcli("generate", "Hi", "-m", "org/tiny")
    assert (result.exit_code, result.stderr.startswith("error: model folder org/tiny is empty")) == (3, True)
    assert not tiny_hub.requests


def test_a_process_of_its_own(tiny_hub: HubServer) -> None:
    """huggingface_hub's own environment variables count."""
    result = subprocess.run([*LLMCLI, "pull", "org/tiny"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "downloading org/tiny: 680.7 kB of 680.7 kB\n")
    assert result.stdout.startswith(os.environ["HF_HOME"])
    num_requests = len(tiny_hub.requests)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    again = subprocess.run([*LLMCLI, "pull", "org/tiny"], capture_output=True, text=True, timeout=60, env=offline)
    assert (again.returncode, again.stdout, again.stderr) == (0, result.stdout, "")
    other = subprocess.run([*LLMCLI, "pull", "org/other"], capture_output=True, text=True, timeout=60, env=offline)
    assert (other.returncode, other.stdout) == (3, "")
    assert "HF_HUB_OFFLINE forbids downloads; unset HF_HUB_OFFLINE" in other.stderr
    assert other.stderr.count("\n") == 1
    assert len(tiny_hub.requests) == num_requests


def test_ctrl_c_leaves_the_files_that_are_whole(tiny_hub: HubServer) -> None:
    tiny_hub.pause.clear()
    process = subprocess.Popen([*LLMCLI, "pull", "org/tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    blobs = Path(os.environ["HF_HOME"], "hub", "models--org--tiny", "blobs")
    deadline = time.monotonic() + 60
    while not tiny_hub.sent_bytes["model.safetensors"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"downloading org/tiny: 680.7 kB of 680.7 kB\n")
    assert len(list(blobs.iterdir())) == 3
    assert not list(blobs.glob("*.incomplete"))
    tiny_hub.pause.set()
    before = tiny_hub.sent_bytes.copy()
    again = subprocess.run([*LLMCLI, "pull", "org/tiny"], capture_output=True, text=True, timeout=60)
    assert (again.returncode, again.stderr) == (0, "downloading org/tiny: 680.7 kB of 680.7 kB\n")
    assert (tiny_hub.sent_bytes - before).keys() == {"model.safetensors"}


def test_a_terminal_shows_a_bar_of_ours(tiny_hub: HubServer) -> None:
    exit_code, seen = read_terminal([*LLMCLI, "pull", "org/tiny"])
    assert exit_code == 0
    assert "downloading org/tiny" in seen.split("\n", 1)[1]  # after the line that announces it
    assert "it/s" not in seen  # as huggingface_hub's bars say
    exit_code, seen = read_terminal([*LLMCLI, "pull", "org/tiny"])
    assert "downloading" not in seen


def test_models_list(tiny_hub: HubServer, llmcli: Callable[..., Any], tiny_llama: Path, total_size: str) -> None:
    assert llmcli("models", "list") == (0, "", f"no models in {os.environ['HF_HOME']}/hub\n")
    assert llmcli("models", "list", "--json").stdout == "[]\n"
    folder = llmcli("pull", "org/tiny").stdout.strip()
    llmcli("pull", "org/tiny@v1")
    header, row = llmcli("models", "list").stdout.splitlines()
    assert header.split() == ["ID", "REVISION", "SIZE", "LAST", "USED", "TYPE", "STATE"]
    today = f"{datetime.now():%Y-%m-%d}"
    assert row.split() == ["org/tiny", "main,", "v1", *total_size.split(), today, "llama", "complete"]
    (model,) = models = json.loads(llmcli("models", "list", "--json").stdout)
    check_docs_schema("models-list", models)
    assert datetime.fromisoformat(model.pop("last_used")).utcoffset() is not None
    assert model == {
        "id": "org/tiny",
        "revision": Path(folder).name,
        "refs": ["main", "v1"],
        "size_bytes": sum(path.stat().st_size for path in tiny_llama.iterdir()),
        "complete": True,
        "model_type": "llama",
        "folder": folder,
    }


def test_models_list_warns_of_damage(tiny_hub: HubServer, llmcli: Callable[..., Any]) -> None:
    llmcli("pull", "org/tiny")
    (Path(os.environ["HF_HOME"]) / "hub" / "models--org--empty").mkdir()
    result = llmcli("models", "list")
    assert result.stdout.count("\n") == 2
    assert result.stderr.startswith("warning: Snapshots dir doesn't exist")


def test_models_rm(tiny_hub: HubServer, llmcli: Callable[..., Any], total_size: str) -> None:
    folder = Path(llmcli("pull", "org/tiny").stdout.strip())
    message = f"error: cannot ask whether to remove org/tiny ({total_size}): no terminal; add --yes\n"
    assert llmcli("models", "rm", "org/tiny") == (2, "", message)
    assert folder.exists()
    assert llmcli("models", "rm", "org/tiny", "--yes") == (0, "", f"removed org/tiny, {total_size} freed\n")
    assert not folder.exists()
    exit_code, stdout, stderr = llmcli("models", "rm", "org/tiny", "--yes")
    assert (exit_code, stdout) == (3, "")
    assert stderr.startswith("error: org/tiny is not in the cache ")
    assert llmcli("models", "rm", "./tiny").exit_code == 2


def test_models_rm_asks_on_a_terminal(tiny_hub: HubServer, llmcli: Callable[..., Any], total_size: str) -> None:
    folder = Path(llmcli("pull", "org/tiny").stdout.strip())
    command = [*LLMCLI, "models", "rm", "org/tiny"]
    exit_code, seen = read_terminal(command, b"n\n")
    assert exit_code == 0
    assert f"Remove org/tiny (1 revision, {total_size})? [y/N]" in seen
    assert "nothing removed" in seen
    assert read_terminal(command, b"\x04")[0] == 130  # Ctrl-D
    assert folder.exists()
    exit_code, seen = read_terminal(command, b"y\n")
    assert exit_code == 0
    assert f"removed org/tiny, {total_size} freed" in seen
    assert not folder.exists()


@pytest.mark.parametrize(
    ("variable", "value", "expected", "command"),
    [
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc", "whole seconds", ("pull", "org/tiny")),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc", "whole seconds", ("models", "list")),
        ("HF_ENDPOINT", "http://[::1", "an address", ("doctor",)),
        ("HF_ENDPOINT", "http://[::1", "an address", ("pull", "org/tiny")),
    ],
)
def test_an_environment_that_huggingface_hub_cannot_import(
    tiny_hub: HubServer, variable: str, value: str, expected: str, command: tuple[str, ...]
) -> None:
    environment = {**os.environ, variable: value}
    result = subprocess.run([*LLMCLI, *command], capture_output=True, text=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith(f"error: {variable} is {value!r}, expected {expected}")
    assert result.stderr.count("\n") == 1


def test_a_token_that_is_not_ascii(tiny_hub: HubServer) -> None:
    environment = {**os.environ, "HF_TOKEN": "hé"}
    result = subprocess.run([*LLMCLI, "pull", "org/tiny"], capture_output=True, text=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith("error: the token in HF_TOKEN or of `hf auth login` has an invalid character")


def test_models_list_of_odd_times(tiny_hub: HubServer, llmcli: Callable[..., Any]) -> None:
    folder = Path(llmcli("pull", "org/tiny").stdout.strip())
    for path in folder.iterdir():
        os.utime(path, (2**40, 2**40))
    assert llmcli("models", "list").exit_code == 0
    assert llmcli("models", "list", "--json").exit_code == 0
