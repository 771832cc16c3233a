"""What a launcher module declares about its kernel: its name, its variants, and what a call moves and computes."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """One `.cu` file: `stem` names it, `op` says in a few words what it does.

    `variants` are the name expressions, such as `embedding<float, 4>`, that must compile for every architecture, or
    for the `only_arch` that the kernel is for.
    """

    stem: str
    op: str
    variants: tuple[str, ...]
    only_arch: str | None = None

    def runs_on(self, arch: str) -> bool:
        """Whether cards of architecture `arch`, such as `sm_90`, can run it."""
        return self.only_arch in (None, arch)


@dataclass(frozen=True)
class KernelCost:
    """What one call moves between memory and the card's multiprocessors, and what it computes.

    `stored_bytes` are the part of `read_bytes` that every step reads anew from memory: weights, tables and cached
    tokens. `element_bits` is the size of one weight or cached value, 0 where no rate depends on it.
    Units: bytes; floating-point operations (a multiply-add is two)
    """

    read_bytes: int
    written_bytes: int
    flops: int
    stored_bytes: int = 0
    element_bits: int = 0


# The cost of a launch, computed on demand: the running path makes the function and never calls it.
Cost = Callable[[], KernelCost]
