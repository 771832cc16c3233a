"""Which files a text depends on: those that are read, and no others."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.receipt.describe import commit_of, model_files

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
