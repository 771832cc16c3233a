"""Models by hub id: what is downloaded, what comes from the cache, what resumes after a fault."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import HubServer, Reply
from huggingface_hub import constants
from safetensors.torch import load_file, save

from llmcli.checkpoint.hub import resolve_model
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError

SMALL_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json"}
JUNK = (
    *("README.md", "LICENSE", ".gitattributes", "modeling_llama.py", "pytorch_model.bin", "model.gguf", "figure.png"),
    *("consolidated.safetensors", "consolidated.00.pth", "original/params.json", "original/model.safetensors"),
)
NOTHING = [0] * 5  # answers after which nothing more is requested


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


@pytest.mark.usefixtures("impatient")
def test_a_broken_connection_continues(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [100_000, 1, 200_000]
    progress = Progress()
    folder = resolve_model("org/tiny", on_progress=progress)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes["model.safetensors"] == len(weights)
    assert progress.calls == sorted(progress.calls)


@pytest.mark.usefixtures("impatient")
def test_a_later_call_continues(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [300_000, *NOTHING]
    with pytest.raises(CheckpointError, match="check the network.* partial downloads resume$"):
        resolve("org/tiny")
    assert hub.sent_bytes["model.safetensors"] == 300_000
    progress = Progress()
    folder = resolve_model("org/tiny", on_progress=progress)
    assert progress.calls[0] == (300_000, len(weights))
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes["model.safetensors"] == len(weights)
    assert not list(folder.parents[1].glob("blobs/*.incomplete"))


@pytest.mark.parametrize(
    ("cuts", "waits"),
    [
        ([0] * 9, [2, 4, 8, 16]),
        ([0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], [2, 4, 8, 16, 1, 2, 4, 8, 16]),
        ([1, 1, 1, 1, 1, 1, 1, *[0] * 9], [1] * 7 + [2, 4, 8, 16]),
    ],
)
def test_five_failures_in_a_row_that_bring_nothing_end_it(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int], waits: list[int]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("llmcli.checkpoint.hub_client.time.sleep", waited.append)
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = cuts
    with pytest.raises(CheckpointError, match="partial downloads resume$"):
        resolve("org/tiny")
    assert waited == waits
    assert len(hub.ranges) == len(waits) + 1


@pytest.mark.parametrize("num_cuts", [4, 5])
def test_the_fifth_attempt_may_bring_it(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, num_cuts: int
) -> None:
    monkeypatch.setattr("llmcli.checkpoint.hub_client.time.sleep", lambda seconds: None)
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [0] * num_cuts
    if num_cuts == 4:
        open_model(resolve("org/tiny"))
    else:
        with pytest.raises(CheckpointError):
            resolve("org/tiny")
    assert len(hub.ranges) == 5


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("llmcli.checkpoint.hub_client.time.sleep", waited.append)
    hub.add_model("org/tiny", tiny_llama)
    asked: list[str] = []

    def change(method: str, path: str, reply: Reply) -> None:
        if path.endswith("model.safetensors"):
            asked.append(method)
            if asked.count(method) < 4:
                reply.status, reply.headers["Retry-After"] = status, "1000000"

    hub.change = change
    open_model(resolve("org/tiny"))
    assert waited == [2, 4, 8] * 2


@pytest.mark.usefixtures("impatient")
def test_a_server_without_ranges_sends_all_again(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.knows_ranges = False
    hub.cuts = [300_000]
    progress = Progress()
    folder = resolve_model("org/tiny", on_progress=progress)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes["model.safetensors"] == 300_000 + len(weights)
    assert (0, len(weights)) in progress.calls[1:]


def test_damaged_content_is_not_kept(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.is_damaged = True
    with pytest.raises(
        CheckpointError, match="model.safetensors arrived damaged, its SHA-256 is .*run the command again"
    ):
        resolve("org/tiny")
    hub.is_damaged = False
    assert (resolve("org/tiny") / "model.safetensors").read_bytes() == weights


def test_two_at_once_download_once(hub: HubServer, tiny_llama: Path, weights: bytes) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.pause.clear()
    threading.Timer(0.5, hub.pause.set).start()
    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(resolve, ["org/tiny"] * 2)
    assert first == second
    assert (first / "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes["model.safetensors"] == len(weights)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_token_opens_private_and_gated_models(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, is_gated: bool
) -> None:
    repository = hub.add_model("org/tiny", tiny_llama)
    repository.token, repository.is_gated = "hf_right", is_gated
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    open_model(resolve("org/tiny"))  # the host of large files refuses requests with the token


def test_over_fifty_gigabytes_are_refused(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes
) -> None:
    """The hub sends them only by its own protocol, which only huggingface_hub speaks."""
    repository = hub.add_model("org/tiny", tiny_llama)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(weights) - 1)
    message = f"run `hf download org/tiny --revision {repository.refs['main']}`, which fills the same cache"
    with pytest.raises(CheckpointError, match=message):
        resolve("org/tiny")
    assert hub.sent_bytes["model.safetensors"] == 0
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(weights))
    open_model(resolve("org/tiny"))


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


@pytest.mark.usefixtures("impatient")
def test_what_is_there_needs_no_space(
    hub: HubServer, tiny_llama: Path, weights: bytes, free: Callable[[int], None]
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [300_000, *NOTHING]
    with pytest.raises(CheckpointError):
        resolve("org/tiny")
    free(len(weights) - 300_000)
    open_model(resolve("org/tiny"))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of bytes that the disk has free."""
    import shutil

    usage = shutil.disk_usage("/")
    return lambda num_bytes: monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes))
