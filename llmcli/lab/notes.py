"""A device that takes notes: which kernels a rung would launch, with which blocks. Needs no card."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts, Launch
from llmcli.kernels.phantom import Phantom
from llmcli.lab.problem import Problem
from llmcli.runners.cuda.predict.dry_run import DryRun

_ALIGNMENT = 4096  # of the addresses that phantoms pretend to have


class Notes(DryRun):
    """Replaces a `Device` for any card, as the dry run of a model does."""

    def __init__(self, card: CardFacts = TYPICAL_CARD) -> None:
        super().__init__(card)

    @property
    def launches(self) -> list[Launch]:
        """The launches noted so far."""
        return [started.launch for started in self._started]

    def start(self, product: Any, addresses: Sequence[int]) -> None:
        """Leave out a product of the matrix library: what its kernels need is not known here."""


def phantoms_of(problem: Problem) -> dict[str, Phantom]:
    """All arrays of a problem without their memory."""
    shapes = {name: (array.shape, array.dtype) for name, array in problem.inputs.items()}
    shapes |= {name: (one.shape, np.dtype(one.dtype)) for name, one in {**problem.outputs, **problem.scratch}.items()}
    phantoms, address = {}, _ALIGNMENT
    for name, (shape, dtype) in shapes.items():
        phantoms[name] = Phantom(shape, dtype, address)
        address += -(-max(phantoms[name].nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return phantoms


# The matrix library as a solver: one handle for each device.


def matmul(device: Device, *, x: Any, weight: Any, out: Any) -> None:
    """out = x @ weight.T by the library.

    Shapes: x [num_tokens, num_inputs], weight [num_rows, num_inputs], alike; out float32 [num_tokens, num_rows]
    Raises: ValueError; DeviceError
    """
    _library(device).matmul(x=x, weight=weight, out=out)


_library = lru_cache(maxsize=2)(Cublas)
