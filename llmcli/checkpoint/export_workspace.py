"""The hidden folder beside its destination in which an export grows, and the journal that lets a later run go on.

Both are named after the destination and the plan's fingerprint. The folder gets its config.json last, and takes the
destination's name only when it is complete: what a killed run leaves looks like no model and is in nobody's way.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from llmcli.checkpoint.export_plan import ExportPlan
from llmcli.checkpoint.folder import CONFIG_NAME
from llmcli.checkpoint.planned_weight import Shard
from llmcli.errors import OutputError, UsageError
from llmcli.quantization.quality import TensorQuality

_SPARE_BYTES = 64 * 1024**2  # headers, small files, and what the file system itself needs


def refuse_existing(destination: Path, *, replace: bool) -> None:
    """Refuse a destination that exists; `replace` allows one that is a model folder.

    Raises: UsageError.
    """
    if not destination.exists() and not destination.is_symlink():
        return
    is_replaceable = not destination.is_symlink() and (destination / CONFIG_NAME).is_file()
    if not replace:
        also = ", or --force to replace it" if is_replaceable else ""
        raise UsageError(f"{destination} exists; give another folder{also}")
    if not is_replaceable:
        raise UsageError(f"{destination} is not a model folder, and --force replaces nothing else; remove it yourself")


def refuse_overlap(plan: ExportPlan, destination: Path) -> None:
    """Refuse a destination that is the source, is inside it, or holds it.

    Raises: UsageError.
    """
    source = plan.model.checkpoint.folder.resolve()
    target = destination.resolve()
    if target == source:
        raise UsageError(f"{destination} is the source itself; give another folder")
    if source in target.parents:
        raise UsageError(f"{destination} is inside the source {source}; give a folder outside it")
    # The hub's cache keeps the files themselves elsewhere than the folder that links to them.
    origins = {source} | {weight.info.path.resolve() for weight in plan.weights}
    if any(target in origin.parents for origin in origins):
        raise UsageError(f"{destination} holds the source {source}; give another folder")


class ExportWorkspace:
    """The growing export. `finished` holds the qualities of each finished shard's weights, by shard and by weight.

    `num_resumed` shards were finished by an earlier run; `has_cleaned` says that an earlier run with another source,
    other choices or another version of the program had left a folder, which is gone now.
    Raises: OSError from every method.
    """

    def __init__(self, plan: ExportPlan, destination: Path):
        self._plan = plan
        self._destination = destination
        self.folder = destination.parent / f".{destination.name}.partial-{plan.fingerprint}"
        self._journal = self.folder.with_name(f"{self.folder.name}.journal")
        self.has_cleaned = False
        destination.parent.mkdir(parents=True, exist_ok=True)
        for path in self._siblings("partial"):
            if path not in (self.folder, self._journal):
                self.has_cleaned |= path.is_dir()
                _remove(path)
        self.folder.mkdir(exist_ok=True)
        self.finished = self._read_journal()
        self.num_resumed = len(self.finished)
        for path in self.folder.iterdir():
            if path.name not in self.finished:
                _remove(path)

    def check_disk(self) -> None:
        """Refuse a disk without room for the shards that are missing.

        Raises: OutputError with the figures.
        """
        missing = [shard for shard in self._plan.shards if shard.file_name not in self.finished]
        needed = sum(weight.num_bytes for shard in missing for weight in shard.weights) + _SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            self.discard_if_empty()
            raise OutputError(
                f"the disk of {self._destination} has {free / 1e9:.2f} GB free, the export needs "
                f"{needed / 1e9:.2f} GB; free some space or give another disk"
            )

    def torso(self, shard: Shard) -> Path:
        """Where a shard is written until it is whole; two runs at a time do not write into one file."""
        return self.folder / f"{shard.file_name}.{os.getpid()}"

    def keep(self, shard: Shard, qualities: dict[str, TensorQuality]) -> None:
        """Give a shard, which must be on the disk, its name, and note it in the journal."""
        os.replace(self.torso(shard), self.folder / shard.file_name)
        self.finished[shard.file_name] = qualities
        journal = {
            name: {
                "num_bytes": (self.folder / name).stat().st_size,
                "qualities": {weight: asdict(quality) for weight, quality in shard_qualities.items()},
            }
            for name, shard_qualities in self.finished.items()
        }
        _write_durably(self._journal, json.dumps(journal))

    def write(self, name: str, text: str) -> None:
        """Add a small file, whole or not at all, and on the disk."""
        _write_durably(self.folder / name, text)

    def publish(self) -> None:
        """Give the folder its final name; what had that name before is removed once it is safe to do so."""
        _sync_folder(self.folder)
        if self._destination.exists():
            os.rename(self._destination, self.folder.with_name(self.folder.name.replace(".partial-", ".replaced-")))
        os.rename(self.folder, self._destination)
        _sync_folder(self._destination.parent)
        for path in (self._journal, *self._siblings("replaced")):
            _remove(path)

    def discard(self) -> None:
        """Remove everything that was written."""
        _remove(self.folder)
        _remove(self._journal)

    def discard_if_empty(self) -> None:
        """Remove the folder if no run has finished a shard in it."""
        if not self.finished:
            self.discard()

    def _siblings(self, what: str) -> list[Path]:
        """The hidden folders and journals of all exports to this destination, whatever their plan."""
        pattern = re.compile(rf"\.{re.escape(self._destination.name)}\.{what}-[0-9a-f]+(\.journal.*)?")
        return [path for path in self._destination.parent.iterdir() if pattern.fullmatch(path.name)]

    def _read_journal(self) -> dict[str, dict[str, TensorQuality]]:
        """The shards that the journal and the folder agree on; none if the journal is not what `keep` writes."""
        finished = {}
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            journal = json.loads(self._journal.read_text(encoding="utf-8"))
            for name, entry in journal.items():
                if (self.folder / name).stat().st_size == entry["num_bytes"]:
                    finished[name] = {key: TensorQuality(**value) for key, value in entry["qualities"].items()}
        return finished


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_durably(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    torso = path.with_name(f"{path.name}.{os.getpid()}")
    with torso.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(torso, path)


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can: Windows opens no folders."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
