"""Theoretical occupancy: how many blocks of a kernel one multiprocessor holds at a time, and what limits it.

Source: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications; cuda_occupancy.h, which the CUDA
toolkit ships, for how registers and shared memory are allocated.
"""

from dataclasses import dataclass

WARP = 32
_MAX_BLOCK = 1024
_MAX_REGISTERS = 255
_REGISTERS = 65536  # of a multiprocessor, and the most for one block
_REGISTER_UNIT = 256  # a warp's registers are allocated in multiples of this
_PARTITIONS = 4  # a multiprocessor's quarters, each with a quarter of the registers and its own warps
_SHARED_UNIT = 128  # bytes
_RESERVED_SHARED = 1024  # bytes of every block that CUDA keeps for itself, from sm_80 on


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor of an architecture holds.

    Units: threads; blocks; bytes of shared memory, and of the largest block, both as CUDA publishes them
    """

    max_threads: int
    max_blocks: int
    shared_bytes: int
    shared_bytes_per_block: int


_KIB = 1024
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(2048, 32, 164 * _KIB, 163 * _KIB),
    "sm_86": Multiprocessor(1536, 16, 100 * _KIB, 99 * _KIB),
    "sm_87": Multiprocessor(1536, 16, 164 * _KIB, 163 * _KIB),
    "sm_89": Multiprocessor(1536, 24, 100 * _KIB, 99 * _KIB),
    "sm_90": Multiprocessor(2048, 32, 228 * _KIB, 227 * _KIB),
    "sm_100": Multiprocessor(2048, 32, 228 * _KIB, 227 * _KIB),
    "sm_103": Multiprocessor(2048, 32, 228 * _KIB, 227 * _KIB),
    "sm_110": Multiprocessor(1536, 24, 228 * _KIB, 227 * _KIB),
    "sm_120": Multiprocessor(1536, 24, 100 * _KIB, 99 * _KIB),
    "sm_121": Multiprocessor(1536, 24, 100 * _KIB, 99 * _KIB),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that one multiprocessor holds, the share of its warps, and what limits them.

    `limits` are "warps", "blocks", "registers" and "shared memory": those at which one more block would fail.
    """

    blocks: int
    warps: int
    share: float
    limits: tuple[str, ...]


def occupancy(arch: str, *, block: int, registers: int, shared_bytes: int) -> Occupancy:
    """The occupancy of a kernel on an architecture such as `sm_86`; 0 blocks if not even one fits.

    Units: block in threads; registers a thread; shared_bytes of a block, static and dynamic together
    Raises: ValueError for an architecture with unknown limits, or a block of no size
    """
    limits = MULTIPROCESSORS.get(arch)
    if limits is None:
        raise ValueError(f"the limits of {arch} are not known; known are {', '.join(MULTIPROCESSORS)}")
    if block < 1:
        raise ValueError(f"a block of {block} threads; at least 1 is needed")
    warps = -(-block // WARP)
    most = {
        "warps": limits.max_threads // WARP // warps if block <= _MAX_BLOCK else 0,
        "blocks": limits.max_blocks,
        "registers": _blocks_by_registers(warps, registers),
        "shared memory": _blocks_by_shared_memory(limits, shared_bytes),
    }
    blocks = min(most.values())
    return Occupancy(
        blocks=blocks,
        warps=blocks * warps,
        share=blocks * warps * WARP / limits.max_threads,
        limits=tuple(name for name, number in most.items() if number == blocks),
    )


def _blocks_by_registers(warps: int, registers: int) -> int:
    warp_registers = _round_up(max(registers, 1) * WARP, _REGISTER_UNIT)
    # CUDA checks a launch as if every quarter had as many warps as the fullest.
    if registers > _MAX_REGISTERS or warp_registers * _round_up(warps, _PARTITIONS) > _REGISTERS:
        return 0
    return _REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS // warps


def _blocks_by_shared_memory(limits: Multiprocessor, shared_bytes: int) -> int:
    if shared_bytes > limits.shared_bytes_per_block:
        return 0
    return limits.shared_bytes // _round_up(shared_bytes + _RESERVED_SHARED, _SHARED_UNIT)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
