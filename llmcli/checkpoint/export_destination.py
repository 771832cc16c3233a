"""Where an export may go: refuses a destination that must not be touched, and says what helps when one cannot be."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.checkpoint.export_plan import ExportPlan
from llmcli.checkpoint.folder import CONFIG_NAME
from llmcli.errors import OutputError, UsageError
from llmcli.foreign_errors import foreign_errors_explained, is_memory_error

_GO_ON = "run the same command again to resume"
_ANOTHER = "give another folder"
_REMEDIES = {
    errno.EACCES: "choose a folder that you can write to",
    errno.EPERM: "choose a folder that you can write to",
    errno.EROFS: "choose a folder that you can write to",
    errno.ENOSPC: f"free some space, then {_GO_ON}",
    errno.EDQUOT: f"free some space, then {_GO_ON}",
    errno.EFBIG: "a file would be too large there; give a smaller --shard-size",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSYS: "it cannot lock files; write to another disk and move the export",
    errno.ENOLCK: "it cannot lock files; write to another disk and move the export",
    errno.ENOTSUP: "it cannot lock files; write to another disk and move the export",
    errno.ENOENT: _ANOTHER,
    errno.ENOTDIR: _ANOTHER,
    errno.EEXIST: _ANOTHER,
    errno.ENOTEMPTY: _ANOTHER,
    errno.ELOOP: _ANOTHER,
    errno.EBUSY: _ANOTHER,
    errno.EINVAL: _ANOTHER,
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
    """Refuse a name that the cards of the export cannot hold.

    Raises: UsageError.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what}, {os.fsencode(name)!r}, is not UTF-8 text; give another name") from error


def refuse_existing(destination: Path, *, replace: bool) -> None:
    """Refuse a destination that exists; `replace` allows one that is a model folder.

    Raises: UsageError.
    """
    if not os.path.lexists(destination):
        return
    is_replaceable = _is_model_folder(destination)
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


def _is_model_folder(folder: Path) -> bool:
    """Other programs have a config.json too, so that it takes weights beside it."""
    return (
        not folder.is_symlink()
        and (folder / CONFIG_NAME).is_file()
        and any(path.is_file() for path in folder.glob("*.safetensors"))
    )


def refuse_overlap(plan: ExportPlan, destination: Path) -> None:
    """Refuse a destination that is the source, is inside it, or holds it.

    Raises: UsageError.
    """
    source = plan.model.checkpoint.folder.resolve()
    target = Path(os.path.realpath(destination))  # of a ring of links, too
    if target == source:
        raise UsageError(f"{destination} is the source itself; give another folder")
    if source in target.parents:
        raise UsageError(f"{destination} is inside the source {source}; give a folder outside it")
    # The hub's cache keeps the files themselves elsewhere than the folder that links to them.
    origins = {source} | {weight.info.path.resolve() for weight in plan.weights}
    if any(target in origin.parents for origin in origins):
        raise UsageError(f"{destination} holds the source {source}; give another folder")


@contextmanager
def destination_errors_explained(destination: Path) -> Iterator[None]:
    """Raise OutputError in place of what the system says of a destination inside the block, with what helps.

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
