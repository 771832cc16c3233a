"""`CardFacts`: what a plan or a prediction must know of a card, whether the card is here or not. Needs no CuPy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CardFacts:
    """The facts of a card that decide about sizes, launches and times.

    Units: bytes, hertz (the highest clock). can_cluster: blocks can form clusters, from sm_90 on. can_wgmma: four warps
    can multiply together, on sm_90 only.
    """

    num_multiprocessors: int
    shared_bytes_per_block: int
    can_cluster: bool
    can_wgmma: bool
    clock_hertz: float
    l2_bytes: int


# An H200. Used for a card that is not here, if the user gives only memory and bandwidth.
TYPICAL_CARD = CardFacts(
    num_multiprocessors=132,
    shared_bytes_per_block=227 * 1024,
    can_cluster=True,
    can_wgmma=True,
    clock_hertz=1.98e9,
    l2_bytes=50 * 2**20,
)
