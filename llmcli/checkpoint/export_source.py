"""The files of a source that an export reads: which they are, and that none changes while it is at work.

A change is seen by size, time and inode. What sets the old time again on a file of the same size is not.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmcli.checkpoint.folder import CONFIG_NAME, INDEX_NAME
from llmcli.errors import CheckpointError
from llmcli.reading import COPIED_FILE

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
    """What tells a file from what it was or will be. Units: size in bytes, mtime in nanoseconds."""

    size: int
    mtime: int
    inode: int


@dataclass(frozen=True)
class SourceState:
    """A source's folder as it was when `record` looked. `files` holds config, index, weights and what is taken over."""

    folder: Path
    files: Mapping[str, FileState]

    @classmethod
    def record(cls, folder: Path) -> "SourceState":
        """The folder as it is now; to be called before anything in it is opened.

        A folder that cannot be read has no files: opening the model says why.
        Raises: CheckpointError for what would be taken over and is not a regular file.
        """
        wanted = [path for path in _entries(folder) if _is_of_model(path)] + list(files_to_copy(folder).values())
        states = {}
        for path in wanted:
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
    """Files of the source that an export takes over, by their name there: tokenizer, templates, settings, licences.

    Weights, hidden files, files too long to be any of these, and what this program writes itself stay behind.
    Raises: CheckpointError for what has such a name and is not a regular file.
    """
    files = {}
    for path in [*_entries(folder), *_templates(folder)]:
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
    except OSError:  # whoever opens the model says why
        return []


def _templates(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_TEMPLATES_FOLDER}/*.jinja"))


def _is_of_model(path: Path) -> bool:
    return path.name in (CONFIG_NAME, INDEX_NAME) or path.suffix == _WEIGHTS_SUFFIX
