"""The matrix library as a solver: one handle for each device."""

from functools import lru_cache
from typing import Any

from llmcli.kernels.cublas import Cublas, DryCublas
from llmcli.kernels.device import Device
from llmcli.lab.notes import Notes


def matmul(device: Device, *, x: Any, weight: Any, out: Any) -> None:
    """out = x @ weight.T by the library, as the engine asks it: no algorithm that splits sums, no workspace.

    Shapes: x [num_tokens, num_inputs], weight [num_rows, num_inputs], alike; out float32 [num_tokens, num_rows]
    Raises: ValueError; DeviceError
    """
    _library(device).matmul(x=x, weight=weight, out=out)


@lru_cache(maxsize=2)
def _library(device: Device) -> Cublas:
    return DryCublas(device) if isinstance(device, Notes) else Cublas(device)
