"""The processor's cores in two halves, so that the measured program and its clients share no core."""

from pathlib import Path

_LEAST_CORES = 4  # fewer are not worth halving
_TOPOLOGY = Path("/sys/devices/system/cpu")


def core_halves(logical: set[int], topology: Path = _TOPOLOGY) -> tuple[set[int], set[int]]:
    """These logical processors in two halves. Threads of one core are in one half if the system lists them.

    With fewer than four cores both halves are all of them.
    """
    cores = sorted({frozenset(_siblings(one, topology) & logical) for one in logical}, key=min)
    if len(cores) < _LEAST_CORES:
        return logical, logical
    middle = len(cores) // 2
    return set().union(*cores[:middle]), set().union(*cores[middle:])


def _siblings(logical: int, topology: Path) -> set[int]:
    """The logical processors of the same core, itself among them; written `0,8` or `0-1`."""
    file = topology / f"cpu{logical}/topology/thread_siblings_list"
    if not file.is_file():
        return {logical}
    found = {logical}
    for part in file.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
