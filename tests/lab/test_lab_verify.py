"""Verifying a card: its own kernels alone are compiled and run."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from llmcli.kernels.registry import KERNELS
from llmcli.lab import verify
from llmcli.lab.engine import CASES
from llmcli.lab.problem import KernelCases
from llmcli.lab.walk import card_of


class Card:
    """A card of an architecture, which prepares nothing."""

    def __init__(self, arch: str):
        self.arch, self.facts = arch, card_of(arch)
        self.prepared: set[str] = set()

    def prepare_all(self, wanted: Mapping[str, Iterable[str]], on_compile: Any) -> None:
        self.prepared = set(wanted)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_kernels_of_another_architecture_are_left_out(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(device: Any, cases: KernelCases) -> str:
        return cases.stem

    monkeypatch.setattr(verify, "verify_kernel", name)
    card: Any = Card(arch)
    verified = set(verify.verify_kernels(card))
    assert verified == card.prepared == {stem for stem in CASES if KERNELS[stem].runs_on(arch)}
    assert ("gemm_codes" in verified) == (arch == "sm_90")
