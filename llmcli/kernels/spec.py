"""What a launcher module says about its kernel: its name, its variants, and what a call moves and computes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """One `.cu` file: `stem` names it, `op` says in a few words what it does.

    `variants` are the name expressions, such as `rms_norm<float, 256>`, that must compile for every architecture.
    """

    stem: str
    op: str
    variants: tuple[str, ...]


@dataclass(frozen=True)
class KernelCost:
    """What one call moves between memory and the card's multiprocessors, and what it computes.

    Units: bytes; floating-point operations (a multiply-add is two)
    """

    read_bytes: int
    written_bytes: int
    flops: int

    def __add__(self, other: "KernelCost") -> "KernelCost":
        return KernelCost(
            self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes, self.flops + other.flops
        )
