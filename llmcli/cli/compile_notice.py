"""Says why the first start takes longer, and how far it is."""

from llmcli.cli.terminal import terminal
from llmcli.private_folder import folder_problem
from llmcli.resources import kernel_cache_folder


def say_compiling(done: int, total: int) -> None:
    """Tell of kernels that are compiled before they can run; later starts find them in the cache."""
    if done == 0:
        kernels, them = ("1 kernel", "it") if total == 1 else (f"{total} kernels", "them")
        problem = folder_problem(kernel_cache_folder())
        if problem is None:
            terminal.info(f"compiling {kernels}; the next start finds {them} compiled")
        else:
            terminal.info(f"compiling {kernels} at each start: {problem}")
    terminal.doing = f"compiling kernels {done}/{total}" if done < total else ""
