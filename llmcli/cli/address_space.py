"""Whether there is address space for torch. Needs `resource`, which Windows lacks."""

import resource

import psutil

from llmcli.errors import InsufficientMemoryError

# Address space that importing torch takes (2.13: 483 MiB), and some to spare.
_TORCH_MIB = 512


def require_room_for_torch() -> None:
    """Refuse a `ulimit -v` under which importing torch ends the process, by C++ code that no one can catch.

    Raises: InsufficientMemoryError.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    left_mib = (limit - psutil.Process().memory_info().vms) // 2**20
    if left_mib < _TORCH_MIB:
        raise InsufficientMemoryError(
            f"torch takes {_TORCH_MIB} MiB of address space and `ulimit -v` leaves {max(left_mib, 0)} MiB; "
            "raise the limit"
        )
