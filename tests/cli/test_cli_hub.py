"""Models by hub id on the command line: `--model`, `pull`, `models`."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pexpect
import pytest
from docs_schemas import check_docs_schema
from hub_server import HubServer
from results import Llmcli

LLMCLI = [sys.executable, "-m", "llmcli"]


@pytest.fixture
def tiny_hub(hub: HubServer, tiny_llama: Path) -> HubServer:
    hub.add_model("org/tiny", tiny_llama, "v1")
    return hub


@pytest.fixture
def total_size(tiny_llama: Path) -> str:
    return f"{sum(path.stat().st_size for path in tiny_llama.iterdir()) / 1000:.1f} kB"


def read_terminal(command: list[str], typed: str = "") -> tuple[int | None, str]:
    """Run a command on a terminal of its own; its exit code and what it showed."""
    child = pexpect.spawn(command[0], command[1:], encoding="utf-8", timeout=60)
    child.send(typed)
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, child.before


def test_pull_prints_the_folder_and_nothing_else(tiny_hub: HubServer, llmcli: Llmcli) -> None:
    result = llmcli("pull", "org/tiny")
    assert result.exit_code == 0
    folder = Path(result.stdout.removesuffix("\n"))
    assert (folder / "model.safetensors").is_file()
    assert result.stderr == "downloading org/tiny: 680.7 kB of 680.7 kB\n"
    assert llmcli("pull", "org/tiny", "--quiet") == (0, result.stdout, "")
    assert llmcli("pull", "org/tiny@v1").stdout == result.stdout


def test_pull_of_a_branch_that_moved_on(tiny_hub: HubServer, llmcli: Llmcli, tiny_llama: Path) -> None:
    old = llmcli("pull", "org/tiny").stdout
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    commit = tiny_hub.repositories["org/tiny"].add({**files, "chat_template.jinja": b"new"}, "main")
    assert llmcli("pull", "org/tiny").stdout == old
    before = tiny_hub.sent_bytes.copy()
    result = llmcli("pull", "org/tiny", "--update")
    assert (Path(result.stdout.strip()).name, result.stderr) == (commit, "")
    assert (tiny_hub.sent_bytes - before).keys() == {"chat_template.jinja"}
    assert llmcli("pull", "org/tiny").stdout == result.stdout


def test_pull_of_what_is_no_model(tiny_hub: HubServer, llmcli: Llmcli) -> None:
    message = "error: './org/tiny' is not of the form ORG/NAME or ORG/NAME@REVISION\n"
    assert llmcli("pull", "./org/tiny") == (2, "", message)
    llmcli("pull", "org/none").expect_error(3, "error: org/none is neither a local folder nor a model on ")
    llmcli("pull", "llama3.2:1b").expect_error(2, "the hub id of that model is meta-llama/Llama-3.2-1B-Instruct")


def test_generate_from_a_hub_id(tiny_hub: HubServer, llmcli: Llmcli, tiny_llama: Path) -> None:
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


def test_models_list(tiny_hub: HubServer, llmcli: Llmcli, tiny_llama: Path, total_size: str) -> None:
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


def test_models_list_warns_of_damage(tiny_hub: HubServer, llmcli: Llmcli) -> None:
    llmcli("pull", "org/tiny")
    (Path(os.environ["HF_HOME"]) / "hub" / "models--org--empty").mkdir()
    result = llmcli("models", "list")
    assert result.stdout.count("\n") == 2
    assert result.stderr.startswith("warning: Snapshots dir doesn't exist")


def test_models_rm(tiny_hub: HubServer, llmcli: Llmcli, total_size: str) -> None:
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


def test_models_rm_asks_on_a_terminal(tiny_hub: HubServer, llmcli: Llmcli, total_size: str) -> None:
    folder = Path(llmcli("pull", "org/tiny").stdout.strip())
    command = [*LLMCLI, "models", "rm", "org/tiny"]
    exit_code, seen = read_terminal(command, "n\n")
    assert exit_code == 0
    assert f"Remove org/tiny (1 revision, {total_size})? [y/N]" in seen
    assert "nothing removed" in seen
    assert folder.exists()
    exit_code, seen = read_terminal(command, "y\n")
    assert exit_code == 0
    assert f"removed org/tiny, {total_size} freed" in seen
    assert not folder.exists()


def test_an_environment_that_huggingface_hub_cannot_import(tiny_hub: HubServer) -> None:
    environment = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "abc"}
    command = [*LLMCLI, "models", "list"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    message = "error: HF_HUB_DOWNLOAD_TIMEOUT is 'abc', expected whole seconds"
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert result.stderr.startswith(message)
