"""Says why the first start takes longer, and how far it is."""

import os

from llmcli.cli.terminal import terminal
from llmcli.resources import kernel_cache_folder


def say_compiling(done: int, total: int) -> None:
    """Tell of kernels that are compiled before they can run; later starts find them in the cache."""
    if done == 0:
        kernels, them = ("1 kernel", "it") if total == 1 else (f"{total} kernels", "them")
        folder = kernel_cache_folder()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if existing.is_dir() and os.access(existing, os.W_OK):
            terminal.info(f"compiling {kernels}; the next start finds {them} compiled")
        else:
            terminal.info(f"compiling {kernels}; {folder} cannot be written, so each start compiles {them}")
    terminal.doing = f"compiling kernels {done}/{total}" if done < total else ""
