"""Every variant of every kernel compiles for every architecture, without spills; with -s, a table of what it takes."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from llmcli.kernels import compiler, environment
from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.gemv import STATIC_SHARED_BYTES
from llmcli.kernels.registry import KERNELS
from llmcli.kernels.sources import flatten

# Unchanged sources are not compiled again; git ignores the folder.
FOLDER = Path(__file__).resolve().parents[2] / "build" / "kernels"

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

Builds = dict[tuple[str, str], "Future[dict[str, KernelResources]]"]


def build(stem: str, arch: str) -> dict[str, KernelResources]:
    """All that one source needs in one program, so that the headers are parsed once."""
    source, variants = flatten(stem), KERNELS[stem].variants
    parts = (source, arch, *compiler.OPTIONS, environment.compiler_identity(), *variants)
    report = FOLDER / f"{stem}-{arch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.resources.json"
    if not report.exists():
        resources = compiler.compile_kernels(source, stem, variants, arch).resources
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({name: asdict(taken) for name, taken in resources.items()}))
    return {name: KernelResources(**taken) for name, taken in json.loads(report.read_text()).items()}


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, nvrtc: None) -> Iterator[Builds]:
    """What the selected tests ask for, under way in threads."""
    wanted = {
        (item.callspec.params["stem"], item.callspec.params["arch"]): None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_every_variant_compiles_without_spills
    }
    with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
        yield {key: pool.submit(build, *key) for key in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", sorted(KERNELS))
def test_every_variant_compiles_without_spills(stem: str, arch: str, builds: Builds) -> None:
    resources = builds[stem, arch].result()
    assert sorted(resources) == sorted(KERNELS[stem].variants)
    print(f"\n{stem} on {arch}: registers, static shared bytes, stack bytes")
    for name, taken in resources.items():
        print(f"  {taken.registers:3} {taken.shared_bytes:6} {taken.stack_bytes:4}  {name}")
    spilling = {name for name, taken in resources.items() if taken.spill_store_bytes or taken.spill_load_bytes}
    assert not spilling
    assert not {name for name, taken in resources.items() if taken.stack_bytes}
    if stem == "gemv":  # which plans its shared memory beside them
        assert max(taken.shared_bytes for taken in resources.values()) <= STATIC_SHARED_BYTES
