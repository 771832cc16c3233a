"""Folders of several weight files: which are read, and contradictions between index and shards."""

import json
import re
import struct
import time
from pathlib import Path

import pytest
from plain_checkpoints import read_values, refusal, save, write_json

from llmcli.checkpoint.folder import open_checkpoint
from llmcli.errors import UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_shards(folder: Path, **changes: str | None) -> None:
    """Tensors a and b in the first shard, c in the second, and an index; `changes` alter its weight_map."""
    save(folder / SHARDS[0], a=1, b=2)
    save(folder / SHARDS[1], c=3)
    weight_map = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]} | changes
    weight_map = {name: shard for name, shard in weight_map.items() if shard is not None}
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": 24}, "weight_map": weight_map})


# Accepted


def test_shards_with_index(folder):
    write_shards(folder)
    assert read_values(folder) == {"a": 1, "b": 2, "c": 3}


def test_single_file_wins_over_an_index_as_in_transformers(folder):
    save(folder / "model.safetensors", a=7)
    write_json(folder / INDEX_NAME, {"weight_map": {"a": "absent.safetensors"}})
    assert read_values(folder) == {"a": 7}


def test_mistral_consolidated_file_is_never_read(folder):
    save(folder / "consolidated.safetensors", wrong=9)
    save(folder / "other.safetensors", a=1)
    assert read_values(folder) == {"a": 1}
    (folder / "other.safetensors").unlink()
    write_shards(folder)
    assert read_values(folder) == {"a": 1, "b": 2, "c": 3}


def test_tensor_that_the_index_leaves_out_is_kept(folder):
    write_shards(folder, b=None)
    assert read_values(folder) == {"a": 1, "b": 2, "c": 3}


def test_hub_cache_of_links_into_blobs(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_shards(snapshot)
    write_json(snapshot / "config.json", {})
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(Path("../../blobs") / f"{number:064x}")
    assert read_values(snapshot) == {"a": 1, "b": 2, "c": 3}

    # The cache's own folder is one level too high; a blob that has not arrived leaves a broken link.
    assert f"no config.json; give {snapshot}" in refusal(tmp_path / "models--org--name")
    (snapshot / SHARDS[1]).resolve().unlink()
    assert f"{SHARDS[1]} is missing, a broken link" in refusal(snapshot)


# Refused: several weight files


def test_shards_without_index(folder):
    write_shards(folder)
    (folder / INDEX_NAME).unlink()
    message = f"holds shards ({', '.join(SHARDS)}) but no {INDEX_NAME}; download it"
    assert message in refusal(folder)
    (folder / SHARDS[1]).unlink()
    assert f"holds shards ({SHARDS[0]}) but no {INDEX_NAME}" in refusal(folder)


def test_several_files_of_other_names(folder):
    for letter in "abcdef":
        save(folder / f"{letter}.safetensors", a=1)
    message = "holds 6 weight files (a.safetensors, b.safetensors, c.safetensors, d.safetensors and 2 more), expected"
    assert message in refusal(folder)


def test_mistral_consolidated_file_alone(folder):
    save(folder / "consolidated.safetensors", a=1)
    with pytest.raises(UnsupportedModelError, match=r"Mistral's own tensor names only \(consolidated.safetensors\)"):
        open_checkpoint(folder)


def test_missing_shards_are_all_named(folder):
    write_shards(folder, **{f"x{number}": f"x-{number}.safetensors" for number in range(6)})
    (folder / SHARDS[0]).unlink()
    missing = [SHARDS[0], *(f"x-{number}.safetensors" for number in range(6))]
    assert f"7 of 8 shards are missing in {folder}: {', '.join(missing)}; download the model again" in refusal(folder)


def test_truncated_shard(folder):
    write_shards(folder)
    shard = folder / SHARDS[1]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-3])
    assert f"{shard} is truncated: {size - 3} bytes of {size}; incomplete download?" in refusal(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "/etc/passwd.safetensors",
        "../model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "..",
        "",
        "config.json",
        "pytorch_model.bin",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_index_that_leaves_the_folder_or_names_no_safetensors_file(folder, shard):
    write_shards(folder)
    write_json(folder / INDEX_NAME, {"weight_map": {"a": SHARDS[0], "b": shard}})
    assert re.search(r"places b in .*, expected the name of a \.safetensors file in the same folder", refusal(folder))


def test_index_that_is_no_json(folder):
    write_shards(folder)
    (folder / INDEX_NAME).write_text("{")
    assert f"{INDEX_NAME} is not valid JSON: Expecting property name" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": ' + "[" * 100_000, "nested more than 64 levels deep"),
        ('{"metadata": {"total_size": 1' + "0" * 400 + "}}", "an integer has more than 100 digits"),
        ('{"metadata": {"total_size": ' + "1" * 5000 + "}}", "an integer has more than 100 digits"),
    ],
    ids=["deep", "10**400", "5,000 digits"],
)
def test_index_beyond_the_bounds(folder, content, message):
    write_shards(folder)
    (folder / INDEX_NAME).write_text(content)
    assert f"{INDEX_NAME} is not valid JSON: {message}" in refusal(folder)


def test_a_long_list_of_missing_shards_is_cut(folder):
    write_json(folder / INDEX_NAME, {"weight_map": {f"x{n}": f"x-{n:03}.safetensors" for n in range(300)}})
    assert "x-099.safetensors and 200 more; download the model again" in refusal(folder)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": None}, {"weight_map": []}, {"weight_map": ["a"]}, {"weight_map": {}}]
)
def test_index_without_weight_map(folder, index):
    write_shards(folder)
    write_json(folder / INDEX_NAME, index)
    assert f"{INDEX_NAME} has no weight_map of tensor names to file names" in refusal(folder)


@pytest.mark.parametrize(("name", "shard"), [("absent", SHARDS[0]), ("c", SHARDS[0]), ("a", SHARDS[1])])
def test_stale_index(folder, name, shard):
    write_shards(folder, **{name: shard})
    assert re.search(rf"1 of [34] tensors are not in the shard where .* places them: {name}; an index", refusal(folder))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight"])
def test_a_head_that_only_the_index_knows(folder, name):
    write_shards(folder, **{name: SHARDS[1]})
    assert read_values(folder) == {"a": 1, "b": 2, "c": 3}
    save(folder / SHARDS[0], a=1, b=2, **{name: 4})  # it is there, but elsewhere
    assert f"1 of 4 tensors are not in the shard where {folder / INDEX_NAME} places them: {name}; an" in refusal(folder)


def write_many(path: Path, names: list[str]) -> str:
    """A sparse file of tensors of four bytes each; its header."""
    entries = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    header = json.dumps(entries)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + 4 * len(names))
    return header


@pytest.mark.long
def test_200000_tensors_take_little_more_than_their_json(folder):
    names = [f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.up_proj.weight" for i in range(200_000)]
    texts = [write_many(folder / shard, part) for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True)]
    texts.append(json.dumps({"weight_map": dict(zip(names, SHARDS * 100_000, strict=True))}))
    (folder / INDEX_NAME).write_text(texts[-1])

    def seconds(work):
        start = time.process_time()
        assert work()
        return time.process_time() - start

    # The least of three: other processes may slow a single run.
    json_seconds = min(seconds(lambda: list(map(json.loads, texts))) for _ in range(3))
    assert min(seconds(lambda: len(open_checkpoint(folder).tensors) == 200_000) for _ in range(3)) < 2 * json_seconds


def test_tensor_in_two_shards(folder):
    write_shards(folder)
    save(folder / SHARDS[1], c=3, a=9)
    message = f"a is in {folder / SHARDS[0]} and in {folder / SHARDS[1]}; files of two downloads mixed?"
    assert message in refusal(folder)


def test_names_from_an_index_cannot_break_the_line_or_the_terminal(folder):
    write_shards(folder)
    write_json(folder / INDEX_NAME, {"weight_map": {"a\n\x1b[2J": "\n\x1b[2J.safetensors"}})
    assert r"'\n\x1b[2J.safetensors'" in refusal(folder)
    write_json(folder / INDEX_NAME, {"weight_map": {"a": "\ud800.safetensors"}})
    assert "is not valid JSON: weight_map.a has the lone surrogate U+D800" in refusal(folder)
    write_shards(folder, **{"b\n\x1b[2J": SHARDS[0]})
    assert r"places them: 'b\n\x1b[2J'; an index" in refusal(folder)
