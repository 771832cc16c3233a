"""Hashes of files that other threads compute: the right ones, of the files as they were at the beginning."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError
from llmcli.receipt import describe
from llmcli.receipt.describe import FileDigests, commit_of, model_files
from llmcli.receipt.receipt import FileFacts


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    contents = {"empty": b"", "small": b"abc", "large": os.urandom(3 * 2**20 + 17), "other": bytes(2**20)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


def test_they_are_the_hashes_of_the_contents(files: dict[str, Path]) -> None:
    found = FileDigests(files)
    found.start()
    seen: list[tuple[int, int]] = []
    total = sum(path.stat().st_size for path in files.values())
    facts = found.wait(lambda done, size: seen.append((done, size)))
    contents = {name: path.read_bytes() for name, path in files.items()}
    expected = {name: FileFacts(len(b), hashlib.sha256(b).hexdigest()) for name, b in contents.items()}
    assert facts == expected
    assert list(facts) == list(files)
    assert all(0 <= done <= size == total for done, size in seen)


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    """As in the hub's cache, where a blob's name is a hash that may be wrong by now."""
    blob = tmp_path / hashlib.sha256(b"as it was downloaded").hexdigest()
    blob.write_bytes(b"as it is now")
    (tmp_path / "model.safetensors").symlink_to(blob)
    found = FileDigests({"model.safetensors": tmp_path / "model.safetensors"})
    found.start()
    (facts,) = found.wait(lambda done, total: None).values()
    assert facts.sha256 == hashlib.sha256(b"as it is now").hexdigest()


def test_a_file_that_changes_is_refused(files: dict[str, Path]) -> None:
    found = FileDigests(files)
    files["small"].write_bytes(b"abd")
    os.utime(files["small"], ns=(1, 1))
    found.start()
    with pytest.raises(CheckpointError, match="small changed while the model ran; run again"):
        found.wait(lambda done, total: None)


def test_a_file_that_is_gone_is_refused(files: dict[str, Path]) -> None:
    found = FileDigests(files)
    files["small"].unlink()
    found.start()
    with pytest.raises(CheckpointError, match="small cannot be read: No such file"):
        found.wait(lambda done, total: None)
    with pytest.raises(CheckpointError, match="small cannot be read: No such file"):
        FileDigests(files)


def test_who_stops_it_waits_for_nothing(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "_CHUNK_BYTES", 1)  # three million steps
    found = FileDigests(files)
    found.start()
    found.stop()
    deadline = time.monotonic() + 20
    while any(thread.name == "digests" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "digests")


# Which files a text depends on: those that are read, and no others.


OTHERS = ("README.md", "quantization.json", "consolidated.safetensors", "tokenizer.model", "vocab.json")


def names_of(folder: Path, *, with_template: bool = False) -> set[str]:
    files = model_files(open_model(folder), with_template=with_template)
    assert all(path == folder / name for name, path in files.items())
    return set(files)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


def test_files_that_are_read(folder: Path) -> None:
    expected = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= expected
    for name in OTHERS:
        (folder / name).write_text("{}")
    assert names_of(folder) == expected
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
        expected.add(name)
        assert names_of(folder) == expected
    (folder / "chat_template.jinja").write_text("")
    assert names_of(folder) == expected
    assert names_of(folder, with_template=True) == {*expected, "chat_template.jinja"}


def test_shards_and_their_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    shards = {"a-1.safetensors": sorted(tensors)[::2], "a-2.safetensors": sorted(tensors)[1::2]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    assert index.name not in names_of(folder)  # a whole file goes first
    (folder / "model.safetensors").unlink()
    assert names_of(folder) >= {index.name, *shards}


def test_the_commit_of_a_folder_in_the_cache() -> None:
    commit = "0123456789" * 4
    assert commit_of(Path("/c/models--org--name/snapshots") / commit) == commit
    for other in (f"/c/models--org--name/{commit}", f"/c/name/snapshots/{commit}", "/c/models--a--b/snapshots/main"):
        assert commit_of(Path(other)) is None
