"""Where an export goes: its destination, and the hidden folder in which it grows."""

import errno
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from llmcli import __version__
from llmcli.checkpoint.export_plan import ExportPlan, Shard
from llmcli.checkpoint.folder import CARD_NAME, CONFIG_NAME, INDEX_NAME, MODEL_CARD_NAME
from llmcli.errors import CheckpointError, OutputError, UsageError, foreign_errors_explained, is_memory_error
from llmcli.quantization.rounding import TensorQuality
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.reading import EXPORT_JOURNAL, QUALITY_CARD
from llmcli.writing import whole_file

# The small files of an export that this program writes: config, index, and the quality card as JSON and as text.

CARD_FORMAT_VERSION = 1

_NUM_WORST = 5


def small_files(
    plan: ExportPlan, qualities: Mapping[str, TensorQuality], source_name: str, name: str
) -> dict[str, str]:
    """The text of every file that is written rather than copied, config.json last."""
    if plan.options is None:
        files = {MODEL_CARD_NAME: conversion_card(plan, qualities, source_name, name)}
    else:
        card = quality_card(plan, plan.options, qualities, source_name)
        files = {CARD_NAME: _json(card), MODEL_CARD_NAME: model_card(plan, plan.options, qualities, source_name, name)}
    if len(plan.shards) > 1:
        weight_map = {
            tensor.name: shard.file_name
            for shard in plan.shards
            for weight in shard.weights
            for tensor in weight.outputs
        }
        index = {"metadata": {"total_size": plan.total.bytes_after}, "weight_map": dict(sorted(weight_map.items()))}
        files[INDEX_NAME] = _json(index)
    return {**files, CONFIG_NAME: _json(plan.config_json)}


def quality_card(
    plan: ExportPlan, options: ExportOptions, qualities: Mapping[str, TensorQuality], source_name: str
) -> dict[str, Any]:
    """Choices, sizes and errors as JSON.

    Units: sizes in bytes; errors relative root mean squares, as `TensorQuality` has them.
    """
    total = plan.total
    return {
        "format_version": CARD_FORMAT_VERSION,
        "llmcli_version": __version__,
        "source": source_name,
        "num_bits": options.scheme.num_bits,
        "group_size": options.scheme.group_size,
        "symmetric": options.scheme.is_symmetric,
        "head_bits": options.head_bits,
        "skip": list(options.skip),
        "adapters": [
            {"name": adapter.name, "weight": adapter.weight, "sha256": adapter.sha256}
            for adapter in plan.model.adapters
        ],
        "kept_layers": list(plan.skipped),
        "channel_layers": list(plan.channel_layers),
        "bytes_before": total.bytes_before,
        "bytes_after": total.bytes_after,
        "sizes": {kind: asdict(sizes) for kind, sizes in plan.sizes.items()},
        "tensors": {
            weight.module: {"scheme": str(weight.scheme), **asdict(qualities[weight.module])}
            for weight in plan.weights
            if weight.scheme is not None
        },
    }


def model_card(
    plan: ExportPlan, options: ExportOptions, qualities: Mapping[str, TensorQuality], source_name: str, name: str
) -> str:
    """README.md of the export."""
    total = plan.total
    head = f"int{options.head_bits}" if options.head_bits else "as in the source"
    if plan.unties_head:
        head += ", no longer shared with the embedding"
    lines = [
        *_heading(name),
        f"{source_name} with its linear layers quantized by llmcli {__version__}, without calibration, "
        "in the compressed-tensors format `pack-quantized`.",
        "",
        "| | |",
        "|---|---|",
        f"| linear layers | {options.scheme} |",
        f"| output head | {head} |",
        "| embedding, norms, biases | as in the source |",
        f"| weights | {total.bytes_before / 1e6:,.1f} MB before, {total.bytes_after / 1e6:,.1f} MB now |",
    ]
    lines += _list_row("LoRA adapters added before", [adapter.shown_name for adapter in plan.model.adapters])
    lines += _list_row("one scale a row, since the group does not divide the input size", plan.channel_layers)
    lines += _list_row("kept as in the source", plan.skipped)
    lines += ["", "## Loading", "", *_loading(plan), *_error_tables(qualities), "", "All layers: `quantization.json`."]
    return "\n".join(lines) + "\n"


def _error_tables(qualities: Mapping[str, TensorQuality]) -> list[str]:
    lines = [
        "",
        "## Quantization error",
        "",
        "Root mean square of the change of the weights, relative to the weights.",
        "",
        "| layers | mean error | largest | where | worst row there |",
        "|---|---|---|---|---|",
    ]
    by_type: dict[str, list[str]] = {}
    for module in qualities:
        by_type.setdefault(module.rsplit(".", 1)[-1], []).append(module)
    for layer_type, modules in by_type.items():
        worst = max(modules, key=lambda module: qualities[module].relative_rms_error)
        mean = sum(qualities[module].relative_rms_error for module in modules) / len(modules)
        lines.append(f"| {layer_type} | {mean:.3%} | {_row(worst, qualities[worst])} |")
    lines += ["", f"The {_NUM_WORST} worst:", "", "| layer | error | worst row |", "|---|---|---|"]
    for module in sorted(qualities, key=lambda module: -qualities[module].relative_rms_error)[:_NUM_WORST]:
        quality = qualities[module]
        error = f"{quality.worst_row_error:.3%} (row {quality.worst_row})"
        lines.append(f"| {module} | {quality.relative_rms_error:.3%} | {error} |")
    return lines


def conversion_card(plan: ExportPlan, qualities: Mapping[str, TensorQuality], source_name: str, name: str) -> str:
    """README.md of a conversion. `qualities` are those of layers that have other codes than in the source."""
    formats = sorted({weight.layer.format.name for weight in plan.weights if weight.layer is not None})
    text = f"{source_name}, converted by llmcli {__version__}"
    if formats:
        text += (
            f" from {' and '.join(formats)} into the compressed-tensors format `pack-quantized`. Codes, scales and "
            "zero points are those of the source"
        )
    rest = f"; {len(qualities)} layers of other types were rounded." if qualities else "; nothing was quantized again."
    lines = [*_heading(name), text + rest, ""]
    lines += ["| | |", "|---|---|", *(f"| {count} layers | {scheme} |" for scheme, count in _schemes(plan).items())]
    lines += _list_row("kept as in the source", plan.skipped)
    lines += ["", "## Loading", "", *_loading(plan)]
    return "\n".join([*lines, *(_error_tables(qualities) if qualities else [])]) + "\n"


def _heading(name: str) -> list[str]:
    return ["---", "library_name: transformers", "tags: [compressed-tensors, llmcli]", "---", f"# {name}", ""]


def _schemes(plan: ExportPlan) -> Mapping[WeightScheme, int]:
    """How many layers have each scheme."""
    return Counter(weight.scheme for weight in plan.weights if weight.scheme is not None)


def add_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Put what an evaluation measured into both cards of a finished export.

    `evaluation` has text, num_tokens, window, stride, perplexity_before, perplexity_after, mean_kl, top1_agreement.
    Raises: OSError.
    """
    card = json.loads((folder / CARD_NAME).read_text(encoding="utf-8"))
    _replace(folder / CARD_NAME, _json({**card, "evaluation": dict(evaluation)}))
    model_card = (folder / MODEL_CARD_NAME).read_text(encoding="utf-8")
    lines = [
        "",
        "## Effect on text",
        "",
        f"Measured on {evaluation['num_tokens']} tokens of {evaluation['text']}, windows of {evaluation['window']}, "
        f"stride {evaluation['stride']}, in float32.",
        "",
        "| | before | now |",
        "|---|---|---|",
        f"| perplexity | {evaluation['perplexity_before']:.4f} | {evaluation['perplexity_after']:.4f} |",
        f"| mean KL divergence, nats per token | | {evaluation['mean_kl']:.3g} |",
        f"| same likeliest token | | {evaluation['top1_agreement']:.2%} |",
    ]
    _replace(folder / MODEL_CARD_NAME, model_card + "\n".join(lines) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    with whole_file(path) as file:
        file.write(text.encode())


def read_card(folder: Path) -> Mapping[str, Any] | None:
    """The quality card of an export by this program, or None if there is none or it is damaged."""
    try:
        card = QUALITY_CARD.read_json_object(folder / CARD_NAME)
    except CheckpointError:
        return None
    return card if _is_card(card) else None


def _is_card(card: Mapping[str, Any]) -> bool:
    """Whether a card has every field that is shown, with the right types."""
    tensors, evaluation = card.get("tensors"), card.get("evaluation")
    return (
        card.get("format_version") == CARD_FORMAT_VERSION
        and isinstance(card.get("source"), str)
        and isinstance(tensors, dict)
        and bool(tensors)
        and all(isinstance(tensor, dict) and _are_numbers(tensor, "relative_rms_error") for tensor in tensors.values())
        and (evaluation is None or (isinstance(evaluation, dict) and _is_evaluation(evaluation)))
    )


def _is_evaluation(evaluation: Mapping[str, Any]) -> bool:
    figures = ("perplexity_before", "perplexity_after", "mean_kl", "top1_agreement")
    return isinstance(evaluation.get("text"), str) and _are_numbers(evaluation, *figures)


def _are_numbers(values: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(values.get(name), float | int) for name in names)


def _loading(plan: ExportPlan) -> list[str]:
    run = ["- llmcli: `llmcli generate -m FOLDER`"]
    if plan.stores_order:
        run.append("- transformers with compressed-tensors 0.15.0: `AutoModelForCausalLM.from_pretrained(FOLDER)`")
    elif all(scheme.is_symmetric for scheme in _schemes(plan)):
        run.append("- transformers with compressed-tensors installed: `AutoModelForCausalLM.from_pretrained(FOLDER)`")
    else:
        run.append(
            "- transformers with compressed-tensors installed: `AutoModelForCausalLM.from_pretrained(FOLDER, "
            "quantization_config=CompressedTensorsConfig(dequantize=True))`, since it loads zero points in no other way"
        )
    return run + [f"- {concern}" for concern in plan.concerns or ("vLLM: in its format, but not run with it",)]


def _list_row(what: str, names: Iterable[str]) -> list[str]:
    listed = ", ".join(names)
    return [f"| {what} | {listed} |"] if listed else []


def _row(module: str, quality: TensorQuality) -> str:
    return f"{quality.relative_rms_error:.3%} | {module} | {quality.worst_row_error:.3%}"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# Where an export may go: refuses a destination that must not be touched, and says what helps when one cannot be.

_GO_ON = "run the same command again to resume"
_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a folder that you can write to"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free some space, then {_GO_ON}"),
    **dict.fromkeys(
        (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP), "it cannot lock files; write to another disk and move the export"
    ),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), "give another folder"),
    **dict.fromkeys((errno.ELOOP, errno.EBUSY, errno.EINVAL), "give another folder"),
    errno.EFBIG: "a file would be too large there; give a smaller --shard-size",
    errno.ENAMETOOLONG: "give a shorter name",
}


def resolve_destination(destination: Path) -> Path:
    """The one spelling of a destination: its parent has no links; it may be a link itself, which must stay one.

    Raises: UsageError for a path that cannot be one.
    """
    try:
        is_plain = destination.name not in ("", "..")
        resolved = destination.parent.resolve() / destination.name if is_plain else destination.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # the working folder is gone; a ring of links; a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{str(destination)!r} cannot be written: {reason}; give another folder") from error
    require_text(resolved.name, "the name of the destination")
    return resolved


def require_text(name: str, what: str) -> None:
    """Refuse a name that the cards of the export cannot hold. Raises: UsageError."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what}, {os.fsencode(name)!r}, is not UTF-8 text; give another name") from error


def refuse_existing(destination: Path, *, replace: bool) -> None:
    """Refuse a destination that exists; `replace` allows one that is a model folder. Raises: UsageError."""
    if not os.path.lexists(destination):
        return
    is_replaceable = (  # other programs have a config.json, too
        not destination.is_symlink()
        and (destination / CONFIG_NAME).is_file()
        and any(path.is_file() for path in destination.glob("*.safetensors"))
    )
    if not replace:
        also = ", or --force to replace it" if is_replaceable else ""
        raise UsageError(f"{destination} exists; give another folder{also}")
    if not is_replaceable:
        raise UsageError(
            f"{destination} is not a model folder, and --force replaces only model folders; remove it yourself"
        )
    if Path.cwd().is_relative_to(destination.resolve()):
        raise UsageError(
            f"cannot replace {destination}: it is, or holds, the current folder; run llmcli from another one"
        )


def refuse_overlap(plan: ExportPlan, destination: Path) -> None:
    """Refuse a destination that is the source, is inside it, or holds it. Raises: UsageError."""
    source = plan.model.checkpoint.folder.resolve()
    target = Path(os.path.realpath(destination))  # of a ring of links, too
    if target == source:
        raise UsageError(f"{destination} is the source itself; give another folder")
    if source in target.parents:
        raise UsageError(f"{destination} is inside the source {source}; give a folder outside it")
    # The hub's cache keeps the files outside the folder that links to them.
    origins = {source} | {weight.info.path.resolve() for weight in plan.weights}
    if any(target in origin.parents for origin in origins):
        raise UsageError(f"{destination} holds the source {source}; give another folder")


@contextmanager
def destination_errors_explained(destination: Path) -> Iterator[None]:
    """Turn the system's errors about a destination inside the block into OutputError, with a remedy.

    Raises: OutputError; InsufficientMemoryError where memory ran out.
    """
    with foreign_errors_explained(f"the export to {destination}", OutputError):
        try:
            yield
        except OSError as error:
            if is_memory_error(error):
                raise
            remedy = _REMEDIES.get(error.errno or 0, f"check the disk, then {_GO_ON}")
            raise OutputError(
                f"the export to {destination} stopped: {error.strerror or error} ({error.filename or 'a file of it'}); "
                f"{remedy}"
            ) from error


# The hidden folder next to the destination, in which an export grows, and the journal that lets a later run resume.
#
# Both are named after the destination and the plan's fingerprint. The folder gets its config.json last, and takes the
# destination's name only when it is complete, so a killed run leaves nothing that looks like a model.
# A replaced folder gets a hidden name first, and its own back if the run is killed before the new one has it.

# Room for what names a tensor: its entry in header, index, journal and card; and for the rest of these files.
_TENSOR_ENTRY_BYTES, _OTHER_BYTES = 1024, 1024**2


def room_for_entries(num_tensors: int) -> int:
    """The bytes to have free for the headers and small files of an export, but for those that are copied."""
    return num_tensors * _TENSOR_ENTRY_BYTES + _OTHER_BYTES


class ExportWorkspace:
    """The growing export. `finished` holds the qualities of each finished shard's weights, by shard and by weight.

    `num_resumed` shards were finished by an earlier run; `has_cleaned`: an earlier run with another source, other
    choices or another version of the program had left a folder, now removed. The caller holds the destination's lock
    while it uses this.
    Raises: UsageError for a destination that exists, unless `replace` allows it; OSError from every method.
    """

    def __init__(self, plan: ExportPlan, destination: Path, *, replace: bool):
        self._plan = plan
        self._destination = destination
        self._replace = replace
        self.folder = self._hidden("partial")
        self._journal = self.folder.with_name(f"{self.folder.name}.journal")
        self.has_cleaned = False
        self._restore_replaced()
        refuse_existing(destination, replace=replace)
        for path in self._siblings("partial"):
            if path not in (self.folder, self._journal) or path.is_symlink():
                self.has_cleaned |= path.is_dir()
                _remove(path)
        self.folder.mkdir(exist_ok=True)
        self.finished = self._read_journal()
        self.num_resumed = len(self.finished)
        for path in self.folder.iterdir():
            if path.name not in self.finished:
                _remove(path)

    def check_disk(self) -> None:
        """Refuse a disk without room for the shards that are missing. Raises: OutputError with the figures."""
        missing = [shard for shard in self._plan.shards if shard.file_name not in self.finished]
        source = self._plan.source
        needed = sum(weight.num_bytes for shard in missing for weight in shard.weights)
        needed += sum(state.size for name, state in source.files.items() if name not in source.weight_files)
        needed += room_for_entries(sum(len(weight.outputs) for weight in self._plan.weights))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            if not self.finished:
                self.discard()
            raise OutputError(
                f"the disk of {self._destination} has {decimal(free)} free; the export needs "
                f"{decimal(needed)}; free some space or choose another disk"
            )

    def torso(self, shard: Shard) -> Path:
        """Where a shard is written until it is whole."""
        return self.folder / f"{shard.file_name}.torso"

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
        self._write_durably(self._journal, json.dumps(journal).encode())

    def write(self, name: str, content: bytes) -> None:
        """Add a small file, whole or not at all, and on the disk."""
        self._write_durably(self.folder / name, content)

    def publish(self) -> None:
        """Give the folder its final name; what had that name before is removed once it is safe to do so.

        Raises: UsageError if a destination has appeared that may not be replaced.
        """
        _sync_folder(self.folder)
        refuse_existing(self._destination, replace=self._replace)
        if self._destination.exists():
            os.rename(self._destination, self._hidden("replaced"))
        try:
            os.rename(self.folder, self._destination)
        except OSError:
            self._restore_replaced()
            raise
        _sync_folder(self._destination.parent)
        for path in (self._journal, *self._siblings("replaced")):
            _remove(path)

    def discard(self) -> None:
        """Remove everything that was written."""
        _remove(self.folder)
        _remove(self._journal)

    def _restore_replaced(self) -> None:
        """Undo the first half of a `publish` that was killed before its second; remove what a later one has left."""
        for path in self._siblings("replaced"):
            if os.path.lexists(self._destination):
                _remove(path)
            else:
                os.rename(path, self._destination)

    def _hidden(self, what: str) -> Path:
        return self._destination.with_name(f".{self._destination.name}.{what}-{self._plan.fingerprint}")

    def _siblings(self, what: str) -> list[Path]:
        """The hidden folders and journals of all exports to this destination, for any plan."""
        pattern = re.compile(rf"\.{re.escape(self._destination.name)}\.{what}-[0-9a-f]{{16}}(\.journal.*)?")
        return [path for path in self._destination.parent.iterdir() if pattern.fullmatch(path.name)]

    def _read_journal(self) -> dict[str, dict[str, TensorQuality]]:
        """The shards that the journal and the folder agree on; none if the journal is not what `keep` writes."""
        finished = {}
        with suppress(CheckpointError, OSError, KeyError, TypeError, AttributeError):
            for name, entry in EXPORT_JOURNAL.read_json_object(self._journal).items():
                if (self.folder / name).stat().st_size == entry["num_bytes"]:
                    finished[name] = {key: TensorQuality(**value) for key, value in entry["qualities"].items()}
        return finished

    def _write_durably(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        torso = self.folder / ".torso"  # not next to the destination, where others may be able to write
        with torso.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(torso, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can: Windows opens no folders."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
