"""Cores in two halves: threads of one core stay together, in any way that the system lists them."""

from pathlib import Path

import pytest

from scripts.core_halves import core_halves


def write_topology(folder: Path, lists: dict[int, str]) -> Path:
    for logical, text in lists.items():
        file = folder / f"cpu{logical}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("lists", "logical", "halves"),
    [
        ({n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(8)}, set(range(8)), ({0, 1, 2, 3}, {4, 5, 6, 7})),
        ({n: f"{n % 4},{n % 4 + 4}" for n in range(8)}, set(range(8)), ({0, 1, 4, 5}, {2, 3, 6, 7})),
        ({n: f"{n % 4},{n % 4 + 4}" for n in range(8)}, {0, 1, 2, 3, 7}, ({0, 1}, {2, 3, 7})),
        ({}, {1, 2, 3, 4, 5}, ({1, 2}, {3, 4, 5})),
        ({n: f"{n % 2},{n % 2 + 2}" for n in range(4)}, set(range(4)), (set(range(4)), set(range(4)))),
    ],
)
def test_threads_of_a_core_are_in_one_half(
    lists: dict[int, str], logical: set[int], halves: tuple[set[int], set[int]], tmp_path: Path
) -> None:
    assert core_halves(logical, write_topology(tmp_path, lists)) == halves
