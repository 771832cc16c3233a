"""Writes huggingface_hub's cache as huggingface_hub does: the folder of one commit, its links into blobs, its ref.

Every name that comes here has passed `hub_names`.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from llmcli.checkpoint.hub_library import hub_settings

_TAG_NAME = "CACHEDIR.TAG"  # of the cache directory tagging standard: backups leave the folder out
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file is a cache directory tag created by huggingface_hub.\n"
    "# For information about cache directory tags, see:\n"
    "#\thttps://bford.info/cachedir/\n"
)


def create_snapshot(repository: Path, commit: str, revision: str) -> Path:
    """The folder of a commit, which `revision` names from now on; both are made if they are not there."""
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "blobs").mkdir(exist_ok=True)
    tag = repository.parent / _TAG_NAME
    if not tag.exists():
        tag.write_text(_TAG)
    if revision != commit:
        _write_ref(repository, revision, commit)
    return snapshot


def link_file(snapshot: Path, name: str, blob: Path) -> None:
    """Give a blob its name in a snapshot; where links are not possible, the blob itself becomes the file."""
    file = snapshot / name
    if file.exists():
        return
    file.unlink(missing_ok=True)  # a link to a blob that is gone
    if hub_settings().has_links:
        try:
            file.symlink_to(os.path.relpath(blob, snapshot))
        except FileExistsError:  # another process was faster
            return
        except OSError:  # a file system without links
            pass
        else:
            return
    blob.replace(file)


def _write_ref(repository: Path, revision: str, commit: str) -> None:
    ref = repository / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    # Beside refs/, not in it: whatever lies there is a ref, also what a kill leaves.
    descriptor, temporary = tempfile.mkstemp(prefix=".ref-", dir=repository)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(commit)
        os.chmod(temporary, 0o644)
        os.replace(temporary, ref)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
