"""A device that takes notes: which kernels a rung would launch, with which blocks. Needs no card."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.launches import Launch
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.spec import Cost
from llmcli.lab.problem import Problem

_ALIGNMENT = 4096  # of the addresses that phantoms pretend to have


class Notes:
    """Stands in for a `Device`. `launches` are those that were asked for."""

    def __init__(self, card: CardFacts = TYPICAL_CARD) -> None:
        self.num_multiprocessors = card.num_multiprocessors
        self.shared_bytes_per_block = card.shared_bytes_per_block
        self.can_cluster = card.can_cluster
        self.launches: list[Launch] = []

    def launch(
        self,
        stem: str,
        name: str,
        *,
        grid: tuple[int, ...],
        block: int | tuple[int, ...],
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        overlaps: bool = False,
        cost: Cost | None = None,
    ) -> None:
        """Note a launch."""
        self.launches.append(Launch(stem, name, grid, block, arguments, shared_bytes, overlaps, cost))

    def start(self, product: Any, addresses: Sequence[int]) -> None:
        """Leave out a product of the matrix library: what its kernels take is not known here."""


def phantoms_of(problem: Problem) -> dict[str, Phantom]:
    """All arrays of a problem without their memory."""
    shapes = {name: (array.shape, array.dtype) for name, array in problem.inputs.items()}
    shapes |= {name: (one.shape, np.dtype(one.dtype)) for name, one in {**problem.outputs, **problem.scratch}.items()}
    phantoms, address = {}, _ALIGNMENT
    for name, (shape, dtype) in shapes.items():
        phantoms[name] = Phantom(shape, dtype, address)
        address += -(-max(phantoms[name].nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return phantoms
