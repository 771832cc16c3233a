"""Memory of weights in large pages: the request to the system, as the system reports it."""

import gc
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from llmcli.runners.torch.weights import HUGE_PAGE_BYTES, empty_weight

has_advice = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)


def flags_at(address: int) -> list[str]:
    """The flags of the mapping that an address lies in."""
    flags: list[str] = []
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    return flags


@has_advice
def test_large_weights_ask_for_huge_pages() -> None:
    for shape, dtype in (((1024, 1024), torch.bfloat16), ((3, 1000, 999), torch.int8)):
        weight = empty_weight(shape, dtype)
        assert (weight.shape, weight.dtype, weight.is_contiguous()) == (shape, dtype, True)
        assert "hg" in flags_at(weight.data_ptr())  # madvise(MADV_HUGEPAGE)


def test_small_weights_and_other_systems_have_usual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", None)
    assert empty_weight((HUGE_PAGE_BYTES - 1,), torch.uint8).shape == (HUGE_PAGE_BYTES - 1,)
    assert empty_weight((0, 5), torch.float32).shape == (0, 5)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert empty_weight((HUGE_PAGE_BYTES,), torch.uint8).shape == (HUGE_PAGE_BYTES,)


@has_advice
def test_memory_goes_with_the_last_view() -> None:
    weight = empty_weight((HUGE_PAGE_BYTES,), torch.uint8).fill_(7)
    address, view = weight.data_ptr(), weight[5:6]
    del weight
    gc.collect()
    assert view.item() == 7
    del view
    gc.collect()
    assert "hg" not in flags_at(address)
