"""Opens a Hugging Face model folder: its JSON files and the place of every tensor, checked before weights are read.

Refuses by name what is not such a folder: GGUF, pickled weights, LoRA adapters, quantized models, incomplete downloads.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.checkpoint.safetensors_file import TensorInfo, printable, read_header
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import METHOD

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 1024**2  # far above any real config or index

_OTHER_WEIGHTS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch pickle",
    ".pt": "PyTorch pickle",
    ".pth": "PyTorch pickle",
    ".ckpt": "PyTorch pickle",
    ".onnx": "ONNX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
}
_ADAPTER_CONFIG_NAME = "adapter_config.json"
_ADAPTER_WEIGHTS = {"adapter_model.safetensors", "adapter_model.bin"}
_SHARD_NAME = re.compile(r"-\d+-of-\d+\.safetensors$")
# Where tools keep the method when config.json does not say it.
_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_MAX_NAMED = 4  # tensors named in one message; the rest are counted


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose files agree with one another; whether they agree with its config is not yet checked.

    `generation_config` is empty when the folder has none; `tensors` are those of all weight files, by name.
    """

    folder: Path
    config_json: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check everything about a model folder that its file names, JSON files and safetensors headers can tell.

    Symbolic links are followed wherever they lead, for the hub's cache is made of them; names inside the index may
    not leave the folder.
    Raises: CheckpointError when the folder is missing, incomplete or damaged; UnsupportedModelError when it holds
    something this program does not run.
    """
    names = _file_names(folder)
    refuse_adapter(folder, names)
    _refuse_other_kinds(folder, names)
    config_json = _read_json(folder / CONFIG_NAME)
    refuse_quantization(config_json, str(folder / CONFIG_NAME))
    refuse_quantization_files(folder, names)
    generation_config = _read_json(folder / GENERATION_CONFIG_NAME) if GENERATION_CONFIG_NAME in names else {}
    return Checkpoint(folder, config_json, generation_config, _read_tensors(folder, names))


def quantization_of(config_json: dict[str, Any]) -> Any | None:
    """What config.json says of quantized weights, or None if it says nothing; `compression_config` is an older name."""
    for key in ("quantization_config", "compression_config"):
        if config_json.get(key) is not None:
            return config_json[key]
    return None


def refuse_quantization(config_json: dict[str, Any], where: str) -> None:
    """Refuse weights that are quantized by another method than compressed-tensors, by name; `where` names the config.

    What compressed-tensors can say and this program cannot run is refused where it is read.
    Raises: UnsupportedModelError.
    """
    quantization = quantization_of(config_json)
    if quantization is None:
        return
    fields = quantization if isinstance(quantization, dict) else {}
    # bitsandbytes did not always write its method.
    is_bitsandbytes = not fields.keys().isdisjoint({"load_in_8bit", "load_in_4bit"})
    method = fields.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unknown")
    if method != METHOD:
        _refuse_method(method, where)


def _refuse_method(method: object, where: str) -> None:
    raise UnsupportedModelError(
        f"{where} says that the weights are quantized (method {printable(method)}), which is not supported; "
        f"use the original model in bf16, fp16 or fp32, or one quantized as {METHOD}"
    )


def _file_names(folder: Path) -> set[str]:
    """The names of the folder's entries, broken links included; refuses what is not a folder or is empty."""
    try:
        if folder.is_file():
            raise _not_a_folder(folder)
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"model folder {folder} does not exist; expected a folder with {CONFIG_NAME} and *.safetensors"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"model folder {folder} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error
    if not names:
        raise CheckpointError(
            f"model folder {folder} is empty, expected {CONFIG_NAME} and *.safetensors; incomplete download?"
        )
    return names


def _not_a_folder(file: Path) -> CheckpointError:
    if file.suffix in _OTHER_WEIGHTS:
        return UnsupportedModelError(
            f"{file} is a {_OTHER_WEIGHTS[file.suffix]} file, which is not supported; "
            f"give the Hugging Face folder of the original model, with {CONFIG_NAME} and *.safetensors"
        )
    if file.suffix == ".safetensors":
        return CheckpointError(f"{file} is a single file, expected the model's folder; give {file.parent}")
    return CheckpointError(
        f"{file} is a file, expected a folder with {CONFIG_NAME} and *.safetensors; give that folder"
    )


def refuse_adapter(where: object, names: Collection[str]) -> None:
    """Refuse a folder or repository `where` whose files `names` hold a LoRA adapter, also beside a full model.

    Running the model without it would be half the work.
    Raises: UnsupportedModelError.
    """
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    if _ADAPTER_WEIGHTS.intersection(names) or (_ADAPTER_CONFIG_NAME in names and not has_safetensors):
        raise UnsupportedModelError(
            f"{where} holds a LoRA adapter, which is not applied; "
            "merge it into its base model and save that as safetensors, or give the base model's folder"
        )


def refuse_quantization_files(where: object, names: Collection[str]) -> None:
    """Refuse a folder or repository with a file in which a tool notes how it quantized, whatever config.json says.

    Raises: UnsupportedModelError.
    """
    for name, method in _QUANTIZATION_FILES.items():
        if name in names:
            _refuse_method(method, f"{where}/{name}")


def _refuse_other_kinds(folder: Path, names: set[str]) -> None:
    """Refuse folders of another kind by name, before a missing config.json would hide what they are."""
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    others = sorted(name for name in names if Path(name).suffix in _OTHER_WEIGHTS)
    if others and not has_safetensors:
        raise UnsupportedModelError(
            f"{folder} holds {_OTHER_WEIGHTS[Path(others[0]).suffix]} weights only ({_listed(others)}), expected "
            "*.safetensors; download the safetensors files, or convert with transformers' save_pretrained"
        )
    if CONFIG_NAME not in names:
        hint = "give one of the folders in its snapshots/" if "snapshots" in names else "incomplete download?"
        raise CheckpointError(f"{folder} is not a model folder: it has no {CONFIG_NAME}; {hint}")


def _read_tensors(folder: Path, names: set[str]) -> dict[str, TensorInfo]:
    """The tensors of the weight files, chosen as transformers does: model.safetensors wins over an index.

    Without either, a single file of any other name is taken. consolidated*.safetensors hold the same model under
    Mistral's own tensor names and are never read.
    """
    if WEIGHTS_NAME in names:
        return read_header(folder / WEIGHTS_NAME)
    if INDEX_NAME in names:
        return _read_shards(folder, names)
    files = sorted(name for name in names if name.endswith(".safetensors"))
    candidates = [name for name in files if not name.startswith("consolidated")]
    if any(_SHARD_NAME.search(name) for name in candidates):
        raise CheckpointError(
            f"{folder} holds shards ({_listed(candidates)}) but no {INDEX_NAME}; incomplete download? Download it"
        )
    if len(candidates) == 1:
        return read_header(folder / candidates[0])
    if candidates:
        raise CheckpointError(
            f"{folder} holds {len(candidates)} weight files ({_listed(candidates)}), expected {WEIGHTS_NAME}, "
            f"{INDEX_NAME} or a single file; keep the one to run"
        )
    if files:
        raise UnsupportedModelError(
            f"{folder} holds weights under Mistral's own tensor names only ({_listed(files)}), expected "
            f"{WEIGHTS_NAME} or shards with {INDEX_NAME}; download those"
        )
    raise CheckpointError(f"{folder} has no weights, expected {WEIGHTS_NAME} or {INDEX_NAME}; incomplete download?")


def _read_shards(folder: Path, names: set[str]) -> dict[str, TensorInfo]:
    """The tensors of every shard that the index names, also those the index leaves out, as transformers loads them."""
    index = folder / INDEX_NAME
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or re.search(r"[/\\:]", shard):
            raise CheckpointError(
                f"{index} places {printable(name)} in {printable(shard)}, expected the name of a .safetensors file "
                "in the same folder; download it again"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shards)} shards named in {INDEX_NAME}: "
            f"{', '.join(map(printable, missing))}; incomplete download? Download them"
        )

    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{printable(name)} is in {tensors[name].path} and in {info.path}; "
                    "files of two downloads mixed? Download the folder again"
                )
            tensors[name] = info
    misplaced = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].path.name != shard]
    if misplaced:
        raise CheckpointError(
            f"{len(misplaced)} of {len(weight_map)} tensors are not in the shard where {index} places them: "
            f"{_listed(misplaced)}; an index of another download? Download it again"
        )
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object; NaN and Infinity are allowed, as Python writes them."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is over {MAX_JSON_BYTES} bytes long; it is not what its name says")
        value = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; incomplete download?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object; download it again")
    return value


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(printable, names[:_MAX_NAMED]))
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
