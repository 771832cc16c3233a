"""What one launch of a kernel takes of a multiprocessor: registers, shared memory, spills, theoretical occupancy."""

import math
from dataclasses import dataclass

from llmcli.errors import UsageError
from llmcli.kernels.cache import CachedKernels
from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.launches import Launch
from llmcli.kernels.occupancy import MULTIPROCESSORS, Occupancy, occupancy


@dataclass(frozen=True)
class KernelUse:
    """What one launch of a kernel takes of a multiprocessor. `shared_bytes` of a block are static and dynamic ones."""

    name: str
    num_blocks: int
    block: int
    shared_bytes: int
    resources: KernelResources
    occupancy: Occupancy

    @property
    def spill_bytes(self) -> int:
        """Bytes that a thread writes to memory and reads again for lack of registers."""
        return self.resources.spill_store_bytes + self.resources.spill_load_bytes


def require_architecture(arch: str) -> None:
    """Refuse an architecture whose multiprocessors are not known.

    Raises: UsageError
    """
    if arch not in MULTIPROCESSORS:
        raise UsageError(f"the architecture {arch!r} is not known; known are {', '.join(MULTIPROCESSORS)}")


def use_of(launch: Launch, kernels: CachedKernels, arch: str) -> KernelUse:
    """What a launch takes of a multiprocessor, as compiled for an architecture."""
    resources, block = kernels.resources[launch.name], math.prod(launch.block_shape)
    shared_bytes = resources.shared_bytes + launch.shared_bytes
    return KernelUse(
        launch.name,
        math.prod(launch.grid),
        block,
        shared_bytes,
        resources,
        occupancy(arch, block=block, registers=resources.registers, shared_bytes=shared_bytes),
    )
