"""The places of files that are not Python code: those shipped with the program, and the user's own.

`kernels` and `configs` are at the top of the source tree, and in the wheel under llmcli/resources, where the built-in
model always is. The environment variable LLMCLI_HOME moves all of the user's files into one folder.
"""

import json
import os
import shutil
import stat
import sys
import tempfile
from errno import EACCES, ENOENT, EPERM
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import platformdirs

_PACKAGE = Path(__file__).resolve().parent

# The built-in model, and the same in 16 bits for quantize, diff and eval: folders, and names on the command line.
STORYTELLER = "storyteller"
STORYTELLER_BF16 = "storyteller-bf16"
BUILT_IN_MODELS = (STORYTELLER, STORYTELLER_BF16)


def built_in_model(name: str) -> Path | None:
    """The folder of a built-in model; None if this program has no model of this name."""
    if name not in BUILT_IN_MODELS:
        return None
    folder = resource_folder(name)
    return folder if folder.is_dir() else None


def resource_folder(name: str) -> Path:
    """The folder `kernels`, `configs` or of a built-in model, from the package or from the source tree around it."""
    installed = _PACKAGE / "resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def install_command(package: str) -> str:
    """The command that installs a package, or an extra such as `llmcli[serve]`, for the Python that runs this program.

    An extra is named by the source tree if llmcli was installed from one.
    """
    pip = shutil.which("pip")
    is_ours = pip is not None and Path(pip).parent == Path(sys.executable).parent
    if package.startswith("llmcli[") and (tree := _source_tree()) is not None:
        package = package.replace("llmcli", "." if tree == Path.cwd().resolve() else str(tree), 1)
    quoted = f'"{package}"' if "[" in package else package
    return f"{'pip' if is_ours else f'{sys.executable} -m pip'} install {quoted}"


def _source_tree() -> Path | None:
    """The folder from which this program runs or was installed; None for a package from an index, or if it is gone."""
    from importlib import metadata

    trees = [_PACKAGE.parent]
    try:
        origin = json.loads(metadata.distribution("llmcli").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    address = urlsplit(origin.get("url", ""))
    if address.scheme == "file":
        trees.append(Path(url2pathname(address.path)))
    return next((tree.resolve() for tree in trees if (tree / "pyproject.toml").is_file()), None)


def config_file() -> Path | None:
    """The file of the user's settings; it need not exist. LLMCLI_CONFIG names another one, or none if it is empty."""
    named = os.environ.get("LLMCLI_CONFIG")
    if named is not None:
        return Path(named) if named else None
    return _user_home(platformdirs.user_config_path("llmcli")) / "config.toml"


def user_presets_folder() -> Path:
    """The folder of the user's presets; it need not exist."""
    return _user_home(platformdirs.user_config_path("llmcli")) / "presets"


def chat_folder() -> Path:
    """The folder where `llmcli chat` keeps the last conversation and the user's input; it need not exist."""
    return _user_home(platformdirs.user_state_path("llmcli")) / "chat"


def kernel_cache_folder() -> Path:
    """The folder of compiled kernels; it need not exist, and may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "kernels"


def token_cache_folder() -> Path:
    """The folder of the bytes of tokenizers' tokens; it need not exist, and may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "tokens"


def gguf_cache_folder() -> Path:
    """Where the folders lie that were made of GGUF files; may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "gguf"


def bench_folder() -> Path:
    """The folder where `llmcli bench` writes random models; it need not exist, and may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "bench"


def _user_home(default: Path) -> Path:
    home = os.environ.get("LLMCLI_HOME")
    return Path(home) if home else default


# Folders and files that decide what runs: only the user and root may change them.
#
# Anybody who can write to a folder, or to one above it, can put a library there. Windows has no owners and mode bits of
# this kind; nothing is checked there.

_HAS_OWNERS = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(folder: Path, *, make: bool = True) -> Path:
    """The folder without links in its path, once it is certain that nobody else can change its contents.

    Missing folders are made, for the user alone; without `make` the check ends there.
    Raises: OSError; its `strerror` names the bad folder and what to do
    """
    if folder.parts[:1] == ("~",):  # platformdirs returns this for a user without a home
        raise FileNotFoundError(ENOENT, "there is no home folder; set HOME or LLMCLI_HOME", str(folder))
    real = Path(os.path.realpath(folder))
    # From the root on: what is in a folder that only the user can change stays as it was when checked.
    for path in (*reversed(real.parents), real):
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            if not make:
                break
            path.mkdir(mode=0o700, exist_ok=True)
            info = os.lstat(path)  # in a folder such as /tmp somebody may have been faster
        # In a sticky folder everybody can make files, but nobody can move those of others.
        is_shared = path != real and bool(info.st_mode & stat.S_ISVTX)
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(EACCES, f"{path} is not a folder", str(path))
        _refuse_others(path, info, may_share=is_shared or (path != real and _has_private_group(path, info)))
    return real


def folder_problem(folder: Path) -> str | None:
    """Why nothing can be kept in a private folder, and what to do about it; None if it can. Nothing is made."""
    try:
        private_folder(folder, make=False)
    except OSError as error:
        reason = str(error.strerror)
        return reason if str(error.filename) in reason else f"{error.filename}: {reason}"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def read_private(path: Path) -> bytes:
    """The content of a regular file in a private folder. Raises: OSError, also if others can change the file"""
    # Neither a link nor a pipe, which may have been put there while the folder was open to others.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise PermissionError(EPERM, f"{path} is not a regular file", str(path))
        _refuse_others(path, info)
        return file.read()


def temporary_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process alone. Raises: OSError, also if others could put another in its place"""
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    try:
        private_folder(Path(folder.name))
    except OSError:
        folder.cleanup()
        raise
    return folder


def _refuse_others(path: Path, info: os.stat_result, *, may_share: bool = False) -> None:
    if not _HAS_OWNERS:
        return
    if info.st_uid not in (0, os.geteuid()):
        owner = _name_of(info.st_uid)
        raise PermissionError(EPERM, f"{path} belongs to {owner}; set LLMCLI_HOME to a folder of your own", str(path))
    if info.st_mode & _OTHERS_WRITE and not may_share:
        raise PermissionError(EPERM, f"others can write to {path}; run `chmod go-w {path}`", str(path))


def _has_private_group(path: Path, info: os.stat_result) -> bool:
    """Whether only the group of the user's name may write, which has no other members, as on many systems."""
    if not _HAS_OWNERS or info.st_uid == 0 or info.st_mode & stat.S_IWOTH:
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(info.st_uid), grp.getgrgid(info.st_gid)
    except KeyError:
        return False
    has_list = hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(path)
    return user.pw_gid == info.st_gid and user.pw_name == group.gr_name and not group.gr_mem and not has_list


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
