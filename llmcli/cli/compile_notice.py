"""Says why the first start on a card takes longer."""

from llmcli.cli.terminal import terminal


def say_compiling(num_kernels: int) -> None:
    """Tell of kernels that are compiled before they can run; later starts find them in the cache."""
    terminal.info(f"compiling {num_kernels} kernels for this card, once")
