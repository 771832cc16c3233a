"""Opens a Hugging Face model folder: its JSON files, the place of every tensor, and whether a file changes.

Refuses by name what is not such a folder: pickled weights, LoRA adapters, unknown quantization, half a download.
"""

import gc
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.checkpoint.layout import HEAD
from llmcli.checkpoint.ollama_names import hub_hint
from llmcli.checkpoint.safetensors_file import TensorInfo, listed, printable, read_header
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import AWQ, GPTQ, Quantization, read_quantization, refuse_method
from llmcli.reading import CONFIG, COPIED_FILE, INDEX

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

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
ADAPTER_CONFIG_NAME = "adapter_config.json"
_ADAPTER_WEIGHTS = {"adapter_model.safetensors", "adapter_model.bin"}
MLX_ADAPTER_NAME = "adapters.safetensors"
SHARD_NAME = re.compile(r"-\d+-of-\d+\.safetensors$")
# compressed-tensors wrote the second at first, MLX the third.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
# Files in which tools keep the method, some of them only there.
_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_MAX_MISSING = 100  # files: a user who fetches them needs all the names


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
    """Check everything about a model folder that its file names, JSON files and safetensors headers can show.

    Symbolic links are followed wherever they lead, for the hub's cache is made of them; names inside the index may
    not leave the folder.
    Raises: CheckpointError when the folder is missing, incomplete or damaged; UnsupportedModelError when it holds
    something this program does not run.
    """
    names = _file_names(folder)
    refuse_adapter(folder, names)
    _refuse_other_kinds(folder, names)
    config_json = CONFIG.read_json_object(folder / CONFIG_NAME)
    quantization_of(config_json, str(folder / CONFIG_NAME))
    if _declared(config_json) is None:
        refuse_quantization_files(folder, names)
    generation_config: dict[str, Any] = {}
    if GENERATION_CONFIG_NAME in names:
        generation_config = CONFIG.read_json_object(folder / GENERATION_CONFIG_NAME)
    with _no_garbage_collection():
        tensors = _read_tensors(folder, names)
    return Checkpoint(folder, config_json, generation_config, tensors)


def quantization_of(config_json: Mapping[str, Any], where: str) -> Quantization | None:
    """What config.json says of quantized weights, or None if it says nothing; `where` names it in messages.

    Raises: UnsupportedModelError naming what this program cannot run; CheckpointError for values that mean nothing.
    """
    declared = _declared(config_json)
    return None if declared is None else read_quantization(declared, where)


def _declared(config_json: Mapping[str, Any]) -> Any | None:
    """The value of `quantization_config`, under any of its names."""
    return next((value for key in _QUANTIZATION_KEYS if (value := config_json.get(key)) is not None), None)


def _file_names(folder: Path) -> set[str]:
    """The names of the folder's entries, broken links included; refuses what is not a folder or is empty."""
    try:
        if folder.is_file():
            raise _not_a_folder(folder)
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError as error:
        if folder.parts[0] in ("http:", "https:"):
            address = str(folder).replace(":/", "://", 1)
            raise CheckpointError(f"{address} is an address, expected a folder or a hub id such as ORG/NAME") from error
        hint = hub_hint(str(folder)) or f"; expected a folder with {CONFIG_NAME} and *.safetensors"
        raise CheckpointError(f"model folder {folder} does not exist{hint}") from error
    except OSError as error:
        raise CheckpointError(
            f"model folder {folder} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error
    except ValueError as error:  # a NUL in the path
        raise CheckpointError(f"model folder {str(folder)!r} is not a valid path: {error}") from error
    if not names:
        raise CheckpointError(
            f"model folder {folder} is empty, expected {CONFIG_NAME} and *.safetensors; download the model again"
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
    """Refuse a folder or repository `where` whose files `names` hold a LoRA adapter, even next to a full model.

    Without the adapter only half of what the folder holds would run; with --adapter the user names the base model.
    Raises: UnsupportedModelError.
    """
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    if MLX_ADAPTER_NAME in names and CONFIG_NAME not in names:
        raise mlx_adapter_error(where)
    if _ADAPTER_WEIGHTS.intersection(names) or (ADAPTER_CONFIG_NAME in names and not has_safetensors):
        raise UnsupportedModelError(
            f"{where} holds a LoRA adapter, not a whole model; "
            "run its base model with `--adapter`, which takes this folder or hub id"
        )


def mlx_adapter_error(where: object) -> UnsupportedModelError:
    """The error for an adapter that MLX wrote: its tensors have other names and shapes than peft's."""
    return UnsupportedModelError(
        f"{where} holds an adapter in MLX's format, expected peft's; merge it into its base model with "
        "`mlx_lm.fuse --model BASE --adapter-path FOLDER --save-path NEW`, and run NEW as the model"
    )


def refuse_quantization_files(where: object, names: Collection[str]) -> None:
    """Refuse a folder or repository whose config.json says nothing, with a file in which a tool notes how it quantized.

    Raises: UnsupportedModelError.
    """
    for name, method in _QUANTIZATION_FILES.items():
        if name not in names:
            continue
        if method not in (AWQ, GPTQ):
            refuse_method(method, f"{where}/{name}")
        raise UnsupportedModelError(
            f"{where}/{name} says that the weights are quantized (method {method}), and {CONFIG_NAME} does not; "
            f'add a "quantization_config" there, with the content of {name} and "quant_method": "{method}"'
        )


def _refuse_other_kinds(folder: Path, names: set[str]) -> None:
    """Refuse folders of another kind by name, before a missing config.json would hide what they are."""
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    others = sorted(name for name in names if Path(name).suffix in _OTHER_WEIGHTS)
    if others and not has_safetensors and others[0].endswith(".gguf"):
        raise UnsupportedModelError(
            f"{folder} holds GGUF files only ({listed(others)}); name one of them: {folder / others[0]}"
        )
    if others and not has_safetensors:
        raise UnsupportedModelError(
            f"{folder} holds {_OTHER_WEIGHTS[Path(others[0]).suffix]} weights only ({listed(others)}), expected "
            "*.safetensors; download the safetensors files, or convert with transformers' save_pretrained"
        )
    if "model_index.json" in names:
        raise UnsupportedModelError(
            f"{folder} is a diffusers pipeline (model_index.json), which makes images, expected a model that generates "
            "text; give another"
        )
    if CONFIG_NAME not in names:
        hint = _model_folders_in(folder)
        if hint is None:
            is_begun = has_safetensors or any(name.startswith("tokenizer") for name in names)
            hint = "incomplete download?" if is_begun else "give a folder with config.json and *.safetensors"
        raise CheckpointError(f"{folder} is not a model folder: it has no {CONFIG_NAME}; {hint}")


def _model_folders_in(folder: Path) -> str | None:
    """The advice for a folder that lies above model folders; None for any other."""
    found = [path.parent for pattern in ("", "snapshots/") for path in sorted(folder.glob(f"{pattern}*/{CONFIG_NAME}"))]
    inside = [str(path) for path in found if any(path.glob("*.safetensors"))]
    return f"give {'one of the models in it: ' if len(inside) > 1 else ''}{listed(inside)}" if inside else None


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
    if any(SHARD_NAME.search(name) for name in candidates):
        raise CheckpointError(f"{folder} holds shards ({listed(candidates)}) but no {INDEX_NAME}; download it")
    if len(candidates) == 1:
        return read_header(folder / candidates[0])
    if candidates:
        raise CheckpointError(
            f"{folder} holds {len(candidates)} weight files ({listed(candidates)}), expected {WEIGHTS_NAME}, "
            f"{INDEX_NAME} or a single file; keep the one to run"
        )
    if files:
        raise UnsupportedModelError(
            f"{folder} holds weights under Mistral's own tensor names only ({listed(files)}), expected "
            f"{WEIGHTS_NAME} or shards with {INDEX_NAME}; download those"
        )
    unfinished = [name for name in sorted(names) if ".safetensors." in name and not name.endswith(".json")]
    found = f"only unfinished downloads of weights ({listed(unfinished)})" if unfinished else "no weights"
    raise CheckpointError(f"{folder} has {found}, expected {WEIGHTS_NAME} or {INDEX_NAME}; download the model again")


def _read_shards(folder: Path, names: set[str]) -> dict[str, TensorInfo]:
    """The tensors of every shard that the index names, also those the index leaves out, as transformers loads them."""
    index = folder / INDEX_NAME
    weight_map = INDEX.read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names; download it again")
    shards = _shard_names(index, weight_map)
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards {'is' if len(missing) == 1 else 'are'} missing in {folder}: "
            f"{listed(missing, _MAX_MISSING)}; download the model again"
        )

    tensors: dict[str, TensorInfo] = {}
    places: dict[str, str] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{printable(name)} is in {tensors[name].path} and in {info.path}; "
                    "files of two downloads mixed? Download the folder again"
                )
            tensors[name] = info
            places[name] = shard
    misplaced = [
        name
        for name, shard in weight_map.items()
        # Some tools list the head of a tied model and store it as the embedding only. Whether it must be there
        # depends on the config.
        if places.get(name) != shard and not (name.endswith(HEAD) and name not in places)
    ]
    if misplaced:
        raise CheckpointError(
            f"{len(misplaced)} of {len(weight_map)} tensors are not in the shard where {index} places them: "
            f"{listed(misplaced)}; an index of another download? Download it again"
        )
    return tensors


def _shard_names(index: Path, weight_map: dict[str, Any]) -> list[str]:
    """The files that the index names, each checked once."""
    shards: set[str] = set()
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in shards:
            continue
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or re.search(r"[/\\:]", shard):
            raise CheckpointError(
                f"{index} places {printable(name)} in {printable(shard)}, expected the name of a .safetensors file "
                "in the same folder; download it again"
            )
        shards.add(shard)
    return sorted(shards)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the collector for work that makes very many objects and no cycles: collecting doubles its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# The files of a source that an export reads: which they are, and that none changes while it is at work.
#
# A change shows in size, time or inode. A file of the same size whose old time was restored goes unnoticed.

CARD_NAME = "quantization.json"
MODEL_CARD_NAME = "README.md"
SOURCE_MODEL_CARD_NAME = "README.source.md"

# Where tools note how they quantized; the export says it in config.json.
_QUANTIZATION_NAMES = {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".md"}
_OWN_NAMES = {CONFIG_NAME, CARD_NAME, *_QUANTIZATION_NAMES}
_LEGAL_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY")
_TEMPLATES_FOLDER = "additional_chat_templates"
_WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class FileState:
    """Identifies one state of a file. Units: size in bytes, mtime in nanoseconds."""

    size: int
    mtime: int
    inode: int


@dataclass(frozen=True)
class SourceState:
    """A source's folder as it was when `record` looked. `files` holds config, index, weights and what is copied."""

    folder: Path
    files: Mapping[str, FileState]

    @classmethod
    def record(cls, folder: Path) -> "SourceState":
        """The folder as it is now; to be called before anything in it is opened.

        A folder that cannot be read has no files: opening the model says why.
        Raises: CheckpointError for something to copy that is not a regular file.
        """
        names = (CONFIG_NAME, INDEX_NAME)
        of_model = [path for path in _entries(folder) if path.name in names or path.suffix == _WEIGHTS_SUFFIX]
        states = {}
        for path in [*of_model, *files_to_copy(folder).values()]:
            with suppress(OSError):  # a link to nothing, or just gone
                info = path.stat()
                states[path.relative_to(folder).as_posix()] = FileState(info.st_size, info.st_mtime_ns, info.st_ino)
        return cls(folder, states)

    @property
    def weight_files(self) -> dict[str, FileState]:
        """Those of `files` that hold weights."""
        return {name: state for name, state in self.files.items() if name.endswith(_WEIGHTS_SUFFIX)}

    def check(self) -> None:
        """Refuse a folder that is not as it was.

        Raises: CheckpointError naming a file that has changed, appeared or vanished.
        """
        now = SourceState.record(self.folder).files
        for name in sorted(self.files.keys() | now.keys()):
            if self.files.get(name) != now.get(name):
                what = "appeared" if name not in self.files else "vanished" if name not in now else "changed"
                raise CheckpointError(
                    f"{self.folder / name} has {what} while the model was being read, so nothing was written; "
                    "run the same command again once the model no longer changes"
                )


def files_to_copy(folder: Path) -> dict[str, Path]:
    """Files of the source that an export copies, by their name there: tokenizer, templates, settings, licences.

    Weights, hidden files, files too long to be any of these, and what this program writes itself are left out.
    Raises: CheckpointError for what has such a name and is not a regular file.
    """
    files = {}
    for path in [*_entries(folder), *sorted(folder.glob(f"{_TEMPLATES_FOLDER}/*.jinja"))]:
        name = path.relative_to(folder).as_posix()
        is_index = name.endswith(".index.json")
        is_wanted = path.suffix in _SUFFIXES or path.name.upper().startswith(_LEGAL_NAMES)
        if not is_wanted or is_index or name.startswith(".") or name in _OWN_NAMES or path.is_dir():
            continue
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file and cannot be copied; move it out of the model folder")
        with suppress(FileNotFoundError):  # just gone
            if path.stat().st_size > COPIED_FILE.max_bytes:
                continue
            files[SOURCE_MODEL_CARD_NAME if name == MODEL_CARD_NAME else name] = path
    return files


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # opening the model says why
        return []
