"""Distinguishes a hub id, `ORG/NAME` or `ORG/NAME@REVISION`, from the path of a folder, without importing a library."""

import os
import re
from dataclasses import dataclass

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^\s@]+))?", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """A model on the hub. `revision` is a branch, a tag or a commit hash; None is the main branch."""

    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def find_hub_id(name: str) -> HubId | None:
    """The hub id that `name` is, or None for a path: anything that exists here or does not look like an id.

    An id has one slash, and no `.`, `/`, `~` or drive letter in front; so `models/llama`, if there is no such folder,
    folder, looks like one.
    """
    match = _HUB_ID.fullmatch(name)
    if match is None or os.path.exists(name):  # Path.exists() raises for a name that is too long
        return None
    return HubId(match[1], match[2])
