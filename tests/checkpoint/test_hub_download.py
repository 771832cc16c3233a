"""Models by hub id: what is downloaded, what comes from the cache, what happens after a fault."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_server import HubServer, Reply
from huggingface_hub import constants
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from safetensors.torch import load_file, save

from llmcli.checkpoint.hub import list_cached_models, resolve_model
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, LLMCliError

SMALL_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json"}
JUNK = (
    *("README.md", "LICENSE", ".gitattributes", "modeling_llama.py", "pytorch_model.bin", "model.gguf", "figure.png"),
    *("consolidated.safetensors", "consolidated.00.pth", "original/params.json", "original/model.safetensors"),
)
REPORT = (  # of Xet's progress
    *("total_bytes", "total_bytes_completed", "total_bytes_completion_rate"),
    *("total_transfer_bytes_completed", "total_transfer_bytes_completion_rate"),
)
NOTHING = [0] * 6  # answers after which nothing more is requested


class Progress:
    """Records the reports to a progress bar."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


def resolve(name: str) -> Path:
    return resolve_model(name, on_progress=Progress())


@pytest.fixture
def weights(tiny_llama: Path) -> bytes:
    return (tiny_llama / "model.safetensors").read_bytes()


@pytest.fixture
def sharded(tiny_llama: Path) -> dict[str, bytes]:
    """The files of the tiny model in two shards, and a third that the index does not name."""
    tensors = load_file(tiny_llama / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    files = {name: (tiny_llama / name).read_bytes() for name in SMALL_FILES}
    files |= {shard: save({name: tensors[name] for name in names}) for shard, names in shards.items()}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files | {"model-00003-of-00002.safetensors": b"unused"}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_only_the_files_needed(hub: HubServer, tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add_model("org/tiny", tiny_llama, **dict.fromkeys(JUNK, b"junk"))
    progress = Progress()
    folder = resolve_model("org/tiny", on_progress=progress)
    assert hub.requested_files() == {*SMALL_FILES, "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == hub.requested_files()
    for path in folder.iterdir():
        assert path.read_bytes() == (tiny_llama / path.name).read_bytes()
    size = (tiny_llama / "model.safetensors").stat().st_size
    assert progress.calls == sorted(progress.calls)
    assert (progress.calls[0], progress.calls[-1]) == ((0, size), (size, size))
    assert capfd.readouterr() == ("", "")
    open_model(folder)


def test_the_shards_of_the_index(hub: HubServer, tiny_llama: Path, sharded: dict[str, bytes]) -> None:
    hub.add_model("org/tiny", tiny_llama).add(sharded, "main")
    progress = Progress()
    folder = resolve_model("org/tiny", on_progress=progress)
    assert hub.requested_files() == {*sharded} - {"model-00003-of-00002.safetensors"}
    total = sum(len(content) for name, content in sharded.items() if "of-00002.s" in name and "00003" not in name)
    assert progress.calls == sorted(progress.calls)
    assert (progress.calls[0], progress.calls[-1]) == ((0, total), (total, total))
    open_model(folder)
    # One shard is lost: only that one is downloaded again.
    lost = folder / "model-00002-of-00002.safetensors"
    lost.resolve().unlink()
    lost.unlink()
    before = hub.sent_bytes.copy()
    progress.calls.clear()
    assert resolve_model("org/tiny", on_progress=progress) == folder
    assert hub.sent_bytes - before == {lost.name: len(sharded[lost.name])}
    assert progress.calls[0] == (total - len(sharded[lost.name]), total)
    open_model(folder)


def test_a_complete_model_needs_no_network(hub: HubServer, tiny_llama: Path) -> None:
    hub.add_model("org/tiny", tiny_llama)
    folder = resolve("org/tiny")
    num_requests = len(hub.requests)
    progress = Progress()
    for name in ("org/tiny", "org/tiny@main", f"org/tiny@{folder.name}"):
        assert resolve_model(name, on_progress=progress) == folder
    assert len(hub.requests) == num_requests
    assert not progress.calls


@pytest.mark.parametrize("download", ["snapshot", "files"])
def test_a_model_downloaded_by_another_tool_is_found(hub: HubServer, tiny_llama: Path, download: str) -> None:
    hub.add_model("org/tiny", tiny_llama)
    if download == "snapshot":
        expected = huggingface_hub.snapshot_download("org/tiny")
    else:
        names = (*SMALL_FILES, "model.safetensors")
        expected = str(Path(*{Path(huggingface_hub.hf_hub_download("org/tiny", name)).parent for name in names}))
    num_requests = len(hub.requests)
    assert resolve("org/tiny") == Path(expected)
    assert len(hub.requests) == num_requests


def test_another_tool_finds_what_was_downloaded_here(hub: HubServer, tiny_llama: Path) -> None:
    hub.add_model("org/tiny", tiny_llama)
    folder = resolve("org/tiny")
    assert huggingface_hub.snapshot_download("org/tiny", local_files_only=True) == str(folder)


def test_revisions(hub: HubServer, tiny_llama: Path) -> None:
    repository = hub.add_model("org/tiny", tiny_llama)
    changed = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    changed["tokenizer_config.json"] = b"{}"
    commit = repository.add(changed, "v2", "refs/pr/1")
    first = resolve("org/tiny")
    second = resolve("org/tiny@v2")
    assert (first.name, second.name) == (repository.refs["main"], commit)
    assert (second / "tokenizer_config.json").read_bytes() == b"{}"
    assert resolve("org/tiny@refs/pr/1") == resolve(f"org/tiny@{commit}") == second
    assert hub.sent_bytes["model.safetensors"] == len(changed["model.safetensors"])  # the same content comes once


def test_a_broken_connection_continues(impatient: None, hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [100_000, 1, 200_000]
    progress = Progress()
    folder = resolve_model("org/tiny", on_progress=progress)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert progress.calls == sorted(progress.calls)


def test_a_later_call_begins_the_unfinished_file_anew(
    impatient: None, hub: HubServer, tiny_llama: Path, weights: bytes
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [300_000, *NOTHING]
    with pytest.raises(CheckpointError, match="check the network.* finished files are kept$"):
        resolve("org/tiny")
    blobs = Path(constants.HF_HUB_CACHE, "models--org--tiny", "blobs")
    assert len(list(blobs.iterdir())) == 3
    for name in (hashlib.sha256(weights).hexdigest(), f"{hashlib.sha256(weights).hexdigest()}.0a1b2c3d"):
        (blobs / f"{name}.incomplete").write_bytes(b"left by a kill, of an earlier version too")
    before = hub.sent_bytes.copy()
    assert (resolve("org/tiny") / "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes - before == {"model.safetensors": len(weights)}
    assert len(list(blobs.iterdir())) == 4


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    hub.add_model("org/tiny", tiny_llama)
    asked: list[str] = []

    def change(method: str, path: str, reply: Reply) -> None:
        if path.endswith("model.safetensors"):
            asked.append(method)
            if asked.count(method) < 4:
                reply.status, reply.headers["Retry-After"] = status, "1000000"

    hub.change = change
    open_model(resolve("org/tiny"))
    assert 0 < sum(waited) < 60


def test_damaged_content_is_not_kept(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.is_damaged = True
    with pytest.raises(CheckpointError, match="model.safetensors arrived damaged: .*; run the command again"):
        resolve("org/tiny")
    hub.is_damaged = False
    assert (resolve("org/tiny") / "model.safetensors").read_bytes() == weights


def test_two_at_once_download_once(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.pause.clear()
    command = [sys.executable, "-m", "llmcli", "pull", "org/tiny"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    deadline = time.monotonic() + 60
    while sum("model.safetensors" in request for request in hub.requests) < 5:  # each asks twice, and one begins
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hub.pause.set()
    first, second = (process.communicate(timeout=60)[0] for process in processes)
    assert first == second
    assert Path(first.strip(), "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes["model.safetensors"] == len(weights)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_token_opens_private_and_gated_models(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, is_gated: bool
) -> None:
    repository = hub.add_model("org/tiny", tiny_llama)
    repository.token, repository.is_gated = "hf_right", is_gated
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    open_model(resolve("org/tiny"))  # the host of large files refuses requests with the token


@pytest.mark.timeout(0)
def test_kills(hub: HubServer, tiny_llama: Path, request: pytest.FixtureRequest) -> None:
    """Killed after any request, in the weights too, a download is complete and right at the next call, which cleans."""
    draw = random.Random(1)
    hub.add_model("org/tiny", tiny_llama)
    true = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    command = [sys.executable, "-m", "llmcli", "pull", "org/tiny"]
    num_kept = 0
    for index in range(request.config.getoption("--hub-kills")):
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        hub.pause.clear()  # in the middle of the weights
        before, wanted = len(hub.requests), 10**9 if index % 2 else draw.randint(1, 8)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            while len(hub.requests) < before + wanted and not any(Path(constants.HF_HUB_CACHE).rglob("*.incomplete")):
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        hub.pause.set()
        num_kept += any(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
        list_cached_models()
        again = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert again.returncode == 0, again.stderr
        folder = Path(again.stdout.removesuffix("\n"))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == true
        assert not any(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
        assert not list_cached_models().unreadable
    assert num_kept


def xet(hub: HubServer, monkeypatch: pytest.MonkeyPatch, content: bytes | Exception, route: str) -> list[int]:
    """Let the hub keep weights in Xet, which sends `content` or fails; returns the sizes of what it was asked for."""
    asked: list[int] = []

    def get(*, incomplete_path: Path, expected_size: int, tqdm_class: type, **options: object) -> None:
        asked.append(expected_size)
        with XetDownloadProgressReporter(
            reconstruction_desc="", total=expected_size, log_level=0, tqdm_class=tqdm_class
        ) as reporter:
            if isinstance(content, Exception):
                raise content
            for done in (0, len(content) // 2, len(content)):
                reporter.update_progress(SimpleNamespace(**dict.fromkeys(REPORT, done)))
            incomplete_path.write_bytes(content)

    def change(method: str, path: str, reply: Reply) -> None:
        if path.endswith(".safetensors"):
            reply.headers |= {"X-Xet-Hash": "0a" * 32, "X-Xet-Refresh-Route": route.format(url=hub.url)}

    hub.change = change
    monkeypatch.setattr("huggingface_hub.file_download.xet_get", get)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    return asked


@pytest.mark.parametrize("route", ["{url}/api/x", "https://huggingface.co/api/x"])
def test_files_over_the_limit_of_plain_http_come_by_xet(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes, route: str
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    asked = xet(hub, monkeypatch, weights, route)
    progress = Progress()
    assert (resolve_model("org/tiny", on_progress=progress) / "model.safetensors").read_bytes() == weights
    assert (asked, hub.sent_bytes["model.safetensors"]) == ([len(weights)], 0)
    size = len(weights)
    assert progress.calls == [(0, size), (size // 2, size), (size, size), (size, size)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", "arrived damaged: 1 of 680680 bytes"),
        (b"x" * 680_680, "arrived damaged: 680680 of 680680 bytes"),
        (b"x" * 700_000, "arrived damaged: 700000 of 680680 bytes"),
        (RuntimeError("Task error: CAS Client Error"), "cannot reach .* for org/tiny .Task error: CAS"),
        (RuntimeError("Task error: No space left on device (os error 28)"), "the disk of .* is full; free some space"),
        (RuntimeError("can't start new thread"), "out of memory"),
        (PermissionError("Authentication Error"), "does not send org/tiny as it announced it .Authentication Error"),
    ],
)
def test_what_xet_does_wrong(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | Exception, message: str
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    xet(hub, monkeypatch, content, "{url}/api/x")
    with pytest.raises(LLMCliError, match=message):
        resolve("org/tiny")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_large_files_without_xet(hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_model("org/tiny", tiny_llama)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    with pytest.raises(CheckpointError, match="sends large files of org/tiny only by Xet; run `.*pip install hf_xet`"):
        resolve("org/tiny")


@pytest.mark.parametrize("route", ["http://localhost:1/x", "{url}.net/x", "{url}@h/x", "https://huggingface.co.net/x"])
def test_xet_does_not_take_the_token_elsewhere(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes, route: str
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    asked = xet(hub, monkeypatch, weights, route)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(weights))
    resolve("org/tiny")
    assert (asked, hub.sent_bytes["model.safetensors"]) == ([], len(weights))


def test_disk_space_is_asked_for_first(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes, free: Callable[[int], None]
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    free(len(weights) - 1)
    cache = constants.HF_HUB_CACHE
    message = rf"org/tiny needs 680.7 kB more; {cache} has 680.7 kB free; remove models .*HF_HOME"
    with pytest.raises(CheckpointError, match=message):
        resolve("org/tiny")
    assert hub.sent_bytes["model.safetensors"] == 0
    free(100)
    with pytest.raises(CheckpointError, match="has 100 bytes free"):
        resolve("org/tiny")
    free(len(weights))
    open_model(resolve("org/tiny"))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of bytes that the disk has free."""
    usage = shutil.disk_usage("/")
    return lambda num_bytes: monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes))
