"""What `llmcli kernels compare STUDY --json` printed on cards: the files of docs/studies/measured/CARD/STUDY.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcli.kernels.compiler import KernelResources
from llmcli.lab.compare import Finding, KernelUse, Measured, find_claims
from llmcli.lab.occupancy import Occupancy
from llmcli.lab.study import Claim, Study
from llmcli.lab.trial import Times

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "studies"
MEASURED = FOLDER / "measured"
WARP = 32


@dataclass(frozen=True)
class Results:
    """A study on a card. `missing` are rungs that the study has and the file has not, or not at all sizes."""

    card: str
    arch: str
    measured: tuple[Measured, ...]
    missing: tuple[str, ...]

    def findings(self, study: Study) -> list[Finding]:
        """The verdicts on claims whose rungs were measured."""
        known = {one.rung for one in self.measured}
        claims = tuple(claim for claim in study.claims if {claim.faster, claim.slower} <= known)
        return find_claims(replace(study, claims=claims), self.measured)

    def finding(self, study: Study, claim: Claim) -> Finding:
        """The verdict on one claim, which need not be in the study's file.

        Raises: UsageError
        """
        return find_claims(replace(study, claims=(claim,)), self.measured)[0]

    def at(self, rung: str, sizes: Mapping[str, int]) -> Measured:
        """A rung at the last sizes that have these.

        Raises: ValueError
        """
        found = [one for one in self.measured if one.rung == rung and sizes.items() <= one.sizes.items()]
        if not found:
            raise ValueError(f"{self.card} has no {rung} at {dict(sizes)}")
        return found[-1]


def read_results(study: Study, folder: Path = MEASURED) -> list[Results]:
    """The results of a study by card; rungs and sizes that it no longer has are left out.

    Raises: ValueError for a file of another study
    """
    found = [_read(study, path) for path in sorted(folder.glob(f"*/{study.name}.json"))]
    return [one for one in found if one.measured]


def _read(study: Study, path: Path) -> Results:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["study"] != study.name:
        raise ValueError(f"{path} is of the study {content['study']}")
    told = [_measured(one) for one in content["rungs"]]
    complete = [
        rung.name for rung in study.rungs if _has_all_sizes(study, [one for one in told if one.rung == rung.name])
    ]
    measured = tuple(
        one
        for sizes in study.sizes
        for name in complete
        for one in told
        if one.rung == name and sizes.items() <= one.sizes.items()
    )
    missing = tuple(rung.name for rung in study.rungs if rung.name not in complete)
    return Results(content["device"], content["arch"], measured, missing)


def _has_all_sizes(study: Study, told: Sequence[Measured]) -> bool:
    return all(any(sizes.items() <= one.sizes.items() for one in told) for sizes in study.sizes)


def _measured(told: Mapping[str, Any]) -> Measured:
    return Measured(
        rung=told["rung"],
        sizes=told["sizes"],
        num_bytes=told["bytes"],
        num_operations=told["operations"],
        uses=tuple(map(_use, told["kernels"])),
        times=Times(told["median_seconds"], told["fastest_seconds"]),
    )


def _use(told: Mapping[str, Any]) -> KernelUse:
    """A kernel as the file has it: static and dynamic shared memory are one number there, and so are spills."""
    warps = told["blocks_per_multiprocessor"] * -(-told["threads"] // WARP)
    return KernelUse(
        name=told["name"],
        num_blocks=told["blocks"],
        block=told["threads"],
        shared_bytes=told["shared_bytes"],
        resources=KernelResources(told["registers"], told["shared_bytes"], 0, told["spill_bytes"], 0),
        occupancy=Occupancy(told["blocks_per_multiprocessor"], warps, told["occupancy"], tuple(told["limited_by"])),
    )
