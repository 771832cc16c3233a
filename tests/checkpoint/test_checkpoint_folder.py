"""Model folders: every accepted layout, and every refused folder with its message."""

import os
import re
from pathlib import Path

import pytest
from plain_checkpoints import read_values, refusal, save, write_json

from llmcli.checkpoint import ollama_names
from llmcli.checkpoint.folder import open_checkpoint, quantization_of
from llmcli.checkpoint.hub_library import find_hub_id
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.reading import CONFIG


def unsupported(folder: Path) -> str:
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(folder)
    return refusal(folder)


# Accepted


def test_single_file(folder):
    save(folder / "model.safetensors", a=1)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.folder == folder
    assert checkpoint.config_json == {"model_type": "llama"}
    assert checkpoint.generation_config == {}
    assert read_values(folder) == {"a": 1}


def test_generation_config(folder):
    save(folder / "model.safetensors", a=1)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 2], "top_p": float("nan")})
    assert open_checkpoint(folder).generation_config["eos_token_id"] == [1, 2]


def test_single_file_of_another_name(folder):
    save(folder / "tiny.safetensors", a=4)
    assert read_values(folder) == {"a": 4}


def test_other_files_beside_the_weights_do_not_matter(folder):
    save(folder / "model.safetensors", a=1)
    for name in ["pytorch_model.bin", "model.gguf", "training_args.bin", "adapter_config.json"]:
        (folder / name).write_bytes(b"{}")
    assert read_values(folder) == {"a": 1}


# Refused: not a folder, or not a model


def test_missing_folder(tmp_path):
    assert f"model folder {tmp_path / 'absent'} does not exist; expected a folder" in refusal(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3.2:1b", "; the hub id of that model is meta-llama/Llama-3.2-1B-Instruct"),
        ("Llama3.2", "; the hub id of that model is meta-llama/Llama-3.2-3B-Instruct"),
        ("llama3.2:latest", "; the hub id of that model is meta-llama/Llama-3.2-3B-Instruct"),
        ("qwen3:0.6b-q8_0", "; the hub id of that model is Qwen/Qwen3-0.6B"),
        (
            "llama3:400b",
            "are meta-llama/Meta-Llama-3-8B-Instruct, meta-llama/Meta-Llama-3-70B-Instruct",
        ),
        ("llama", "; expected a folder with config.json and *.safetensors"),
    ],
)
def test_a_name_of_ollamas_gets_the_hub_id(name: str, hint: str) -> None:
    message = refusal(Path(name))
    assert message.startswith(f"model folder {name} does not exist; ")
    assert message.endswith(hint)


def test_every_hub_id_is_one() -> None:
    for family in ollama_names._FAMILIES:
        for hub_id in ollama_names.hub_ids_of(f"{family}:of no size"):
            assert find_hub_id(hub_id) is not None


def test_an_address_is_not_a_folder():
    address = "https://huggingface.co/org/name"
    with pytest.raises(CheckpointError, match=f"^{address} is an address, expected a folder or a hub id"):
        open_checkpoint(Path(address))


def test_unreadable_folder(tmp_path):
    assert "cannot be read: File name too long" in refusal(tmp_path / ("x" * 300))


def test_empty_folder(tmp_path):
    assert "is empty, expected config.json and *.safetensors; download the model again" in refusal(tmp_path)


@pytest.mark.parametrize(("name", "kind"), [("m.gguf", "GGUF"), ("m.bin", "PyTorch pickle"), ("m.onnx", "ONNX")])
def test_file_of_another_kind(tmp_path, name, kind):
    (tmp_path / name).touch()
    assert f"is a {kind} file, which is not supported; give the Hugging Face folder" in unsupported(tmp_path / name)


def test_safetensors_file(tmp_path):
    (tmp_path / "m.safetensors").touch()
    assert f"is a single file, expected the model's folder; give {tmp_path}" in refusal(tmp_path / "m.safetensors")


def test_any_other_file(tmp_path):
    (tmp_path / "readme.txt").touch()
    assert "readme.txt is a file, expected a folder" in refusal(tmp_path / "readme.txt")


def test_folder_that_is_no_model(tmp_path):
    (tmp_path / "readme.txt").touch()
    assert "it has no config.json; give a folder with config.json and *.safetensors" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert "is not a model folder: it has no config.json; incomplete download?" in refusal(tmp_path)
    (tmp_path / "model_index.json").touch()
    assert "is a diffusers pipeline (model_index.json), which makes images" in unsupported(tmp_path)


@pytest.mark.parametrize("place", [".", "snapshots"])
def test_a_folder_above_models(tmp_path, place):
    models = [tmp_path / place / name for name in ("A", "B")]
    for model, count in zip(models, ("", "one of the models in it: "), strict=True):
        model.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (model / name).touch()
        (tmp_path / place / f"empty {model.name}").mkdir()
        listed = ", ".join(str(one) for one in models if one.exists())
        assert refusal(tmp_path) == (f"{tmp_path} is not a model folder: it has no config.json; give {count}{listed}")


@pytest.mark.parametrize("name", ["model.safetensors.part", "model.safetensors.crdownload"])
def test_an_unfinished_download(folder, name):
    (folder / name).touch()
    assert f"has only unfinished downloads of weights ({name}), expected model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs(folder, name):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull` in {folder}" in refusal(folder)


def test_folder_without_weights(folder):
    assert "has no weights, expected model.safetensors or model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pytorch_model.bin", "PyTorch pickle"),
        ("model.pt", "PyTorch pickle"),
        ("consolidated.00.pth", "PyTorch pickle"),
        ("model.onnx", "ONNX"),
    ],
)
def test_weights_of_another_kind_only(folder, name, kind, has_config):
    (folder / name).touch()
    if not has_config:
        (folder / "config.json").unlink()
    assert f"holds {kind} weights only ({name}), expected *.safetensors; download" in unsupported(folder)


@pytest.mark.parametrize("has_config", [True, False])
def test_a_folder_of_gguf_files(folder, has_config):
    for name in ("b.gguf", "a.gguf"):
        (folder / name).touch()
    if not has_config:
        (folder / "config.json").unlink()
    message = f"holds GGUF files only (a.gguf, b.gguf); name one of them: {folder / 'a.gguf'}"
    assert message in unsupported(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["adapter_config.json"],
        ["adapter_config.json", "adapter_model.safetensors"],
        ["adapter_config.json", "adapter_model.bin"],
        ["adapter_model.safetensors", "model.safetensors"],
    ],
)
def test_lora_adapter(folder, names):
    for name in names:
        (folder / name).touch()
    assert "holds a LoRA adapter, not a whole model; run its base model with `--adapter`" in unsupported(folder)
    (folder / "config.json").unlink()
    assert "LoRA adapter" in unsupported(folder)


# Refused: the JSON files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON: Expecting property name"),
        (b"", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON: 'utf-8' codec"),
        (b'{"a": ' * 100_000, "is not valid JSON: nested more than 64 levels deep"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "is not valid JSON: nested more than 64 levels deep"),
        (b'{"a": 1' + b"0" * 400 + b"}", "is not valid JSON: an integer has more than 100 digits"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON: an integer has more than 100 digits"),
        (b'{"a": "\\ud800"}', "is not valid JSON: a has the lone surrogate U+D800"),
        (b"[]", "holds a JSON list, expected an object"),
        (b" " * (CONFIG.max_bytes + 1), "is longer than 16 MiB, too long for a config"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_damaged_json_file(folder, name, content, message):
    save(folder / "model.safetensors", a=1)
    (folder / name).write_bytes(content)
    assert f"{folder / name} {message}" in refusal(folder)


def test_config_that_is_a_broken_link(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "absent")
    assert "config.json cannot be read: No such file or directory" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors", "a-1.safetensors"],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_not_a_regular_file_is_not_waited_for(folder, name, kind):
    save(folder / "a-1.safetensors", a=1)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "a-1.safetensors"}})
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    message = refusal(folder)
    assert f"{path} " in message
    assert re.search("is not a regular file|or not a file|Too many levels of symbolic links", message)


def test_a_folder_without_permission(folder):
    if os.geteuid() == 0:
        pytest.skip("root may read any folder")
    folder.chmod(0)
    try:
        assert "cannot be read: Permission denied; check the path and its permissions" in refusal(folder)
    finally:
        folder.chmod(0o700)


def test_odd_paths(tmp_path):
    with pytest.raises(CheckpointError, match="is not a valid path: embedded null byte"):
        open_checkpoint(Path("a\0b"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read: Too many levels of symbolic links" in refusal(loop)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / os.fsdecode(b"m\xff"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "cannot be read: Not a directory" in refusal(pipe)


def test_names_that_are_not_utf8(folder):
    save(folder / "model.safetensors", a=1)
    (folder / os.fsdecode(b"x\xff.json")).write_text("{}")
    assert read_values(folder) == {"a": 1}


@pytest.mark.parametrize(
    ("config_json", "method"),
    [
        ({"quantization_config": {"quant_method": "exl3", "bits": 4}}, "exl3"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {}}, "unknown"),
        ({"quantization_config": "int8"}, "unknown"),
    ],
)
def test_quantized_model(folder, config_json, method):
    save(folder / "model.safetensors", a=1)
    write_json(folder / "config.json", config_json)
    message = f"{folder / 'config.json'} says that the weights are quantized (method {method}), which is not supported"
    assert message in unsupported(folder)


def test_null_quantization_is_none():
    assert quantization_of({"quantization_config": None}, "config.json") is None


@pytest.mark.parametrize(
    ("name", "method"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")],
)
def test_quantized_model_whose_config_does_not_say_so(folder, name, method):
    save(folder / "model.safetensors", a=1)
    write_json(folder / name, {})
    assert f"{name} says that the weights are quantized (method {method})" in unsupported(folder)
