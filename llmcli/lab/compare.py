"""Compares the rungs of a study: are they right, how long do they take, what do they need of a multiprocessor.

Its sentences are computed: a claim that does not hold on this card is reported as one that does not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llmcli.errors import UsageError
from llmcli.kernels.cache import KernelCache
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts
from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch
from llmcli.lab.study import Claim, Rung, Source, Study, own_sources, solve
from llmcli.lab.trial import Times, measure, run_once
from llmcli.lab.walk import KernelUse, require_architecture, use_of

_SAME = 0.03  # times closer than this are equal


@dataclass(frozen=True)
class Measured:
    """A rung at some sizes. `times` is None without a card; `uses` is empty for a library's kernels."""

    rung: str
    sizes: Mapping[str, int]
    num_bytes: int
    num_operations: int
    uses: tuple[KernelUse, ...]
    times: Times | None


@dataclass(frozen=True)
class Finding:
    """The result for a claim: the measured ratio, and whether the claim holds."""

    claim: Claim
    sizes: Mapping[str, int]
    faster_seconds: float
    slower_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the slower rung the faster one is."""
        return self.slower_seconds / self.faster_seconds

    @property
    def holds(self) -> bool:
        """Whether there is a difference beyond that of two measurements."""
        return self.ratio > 1 + _SAME


def inspect_rungs(study: Study, sources: Mapping[str, Source], rungs: Sequence[Rung], arch: str) -> list[Measured]:
    """What the rungs need of a multiprocessor of an architecture, at the study's last sizes. Needs no card.

    Raises: UsageError, KernelCompileError
    """
    require_architecture(arch)
    problem = make_problem(study.problem, dict(study.sizes[-1]))
    cache = KernelCache(own=own_sources(sources.values()))
    return [
        _measured(rung, problem, _uses(rung, sources[rung.name], problem, arch, cache, TYPICAL_CARD), None)
        for rung in rungs
    ]


def check(device: Device, rung: Rung, source: Source, problem: Problem) -> None:
    """Run a rung once, and compare every element with the reference.

    Raises: UsageError naming the worst element; DeviceError
    """
    results = run_once(device, problem, lambda arrays: solve(device, rung, source, problem, arrays))
    mismatch = find_mismatch(problem, results)
    if mismatch is not None:
        sizes = ", ".join(f"{name} {size:,}" for name, size in problem.sizes.items())
        raise UsageError(f"rung {rung.name} is wrong at {sizes}: {mismatch}")


def compare_rungs(
    device: Device,
    study: Study,
    sources: Mapping[str, Source],
    rungs: Sequence[Rung],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measured]:
    """Check every rung, then measure all of them in turn, for each of the study's sizes.

    `sources` are the rungs' files by the rungs' names; `on_progress` gets how many sizes are done, and of how many.
    Raises: UsageError for a rung that is wrong; DeviceError, KernelCompileError
    """
    cache = KernelCache(own=own_sources(sources.values()))
    total = len(study.check_sizes) + len(study.sizes)
    for done, sizes in enumerate(study.check_sizes):
        on_progress(done, total)
        problem = make_problem(study.problem, dict(sizes))
        for rung in rungs:
            check(device, rung, sources[rung.name], problem)
    measured = []
    for done, sizes in enumerate(study.sizes, start=len(study.check_sizes)):
        on_progress(done, total)
        problem = make_problem(study.problem, dict(sizes))
        starts = {rung.name: partial(solve, device, rung, sources[rung.name], problem) for rung in rungs}
        times = measure(device, problem, starts, by_stream={rung.name for rung in rungs if rung.by_stream})
        for rung in rungs:
            uses = _uses(rung, sources[rung.name], problem, device.arch, cache, device.facts)
            measured.append(_measured(rung, problem, uses, times[rung.name]))
    on_progress(total, total)
    return measured


def find_claims(study: Study, measured: Sequence[Measured]) -> list[Finding]:
    """The result for each claim; at the largest sizes where a claim names none."""
    findings = []
    for claim in study.claims:
        seconds = {}
        for one in measured:  # later sizes replace earlier ones
            if one.times is not None and claim.sizes.items() <= one.sizes.items():
                seconds[one.rung] = one.times.median
                sizes = one.sizes
        if claim.faster not in seconds or claim.slower not in seconds:
            raise UsageError(f"{study.name}: no sizes of the study are those of the claim {claim.reason!r}")
        findings.append(Finding(claim, sizes, seconds[claim.faster], seconds[claim.slower]))
    return findings


def _measured(rung: Rung, problem: Problem, uses: tuple[KernelUse, ...], times: Times | None) -> Measured:
    return Measured(rung.name, problem.sizes, problem.num_bytes, problem.cost.flops, uses, times)


def _uses(
    rung: Rung, source: Source, problem: Problem, arch: str, cache: KernelCache, card: CardFacts
) -> tuple[KernelUse, ...]:
    """The kernels that a rung launches, compiled for an architecture; equal launches count once."""
    notes = Notes(card)
    solve(notes, rung, source, problem, phantoms_of(problem))
    compiled = cache.get_all({(launch.stem, launch.name) for launch in notes.launches}, arch)
    uses = (use_of(launch, compiled[launch.stem, launch.name], arch) for launch in notes.launches)
    return tuple(dict.fromkeys(uses))
