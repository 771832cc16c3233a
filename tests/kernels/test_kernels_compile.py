"""Every variant of every kernel compiles for its architectures, without spills; with -s, a table of its resources.

By default sm_90 with each value of each template argument that those before it leave open, and sm_80 with one variant
of each kernel, which finds what only another architecture refuses. `--all` compiles all variants for all architectures.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from llmcli.kernels import compiler, environment, gemm_wide, gemv
from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.sources import flatten
from llmcli.lab.engine import KERNELS

# Unchanged sources are not compiled again; git ignores the folder.
FOLDER = Path(__file__).resolve().parents[2] / "build" / "kernels"

STATIC_SHARED_BYTES = {
    **{module.SPEC.stem: module.STATIC_SHARED_BYTES for module in (gemm_wide, gemv)},
    gemm_wide.NARROW_SPEC.stem: gemm_wide.NARROW_STATIC_SHARED_BYTES,
}
# Cards of sm_86 have the registers and the instructions of sm_80, as the compiler sees them, and less shared memory.
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

Builds = dict[tuple[str, str, str], "Future[dict[str, KernelResources]]"]


def variants_of(stem: str, choice: str) -> tuple[str, ...]:
    """All variants of a source's kernels; the fewest with each value of each free template argument; one of each."""
    variants = KERNELS[stem].variants
    if choice == "all":
        return variants
    if choice == "one each":
        return tuple({name.partition("<")[0]: name for name in reversed(variants)}.values())
    chosen: dict[str, None] = {}
    seen: set[tuple[str, int, str]] = set()
    free = free_places(variants)
    values = {name: {one for one in values_of(name) if one[:2] in free} for name in variants}
    while missing := set().union(*values.values()) - seen:
        name = max(variants, key=lambda name: len(values[name] & missing))
        chosen[name] = None
        seen |= values[name]
    return tuple(chosen)


def free_places(variants: tuple[str, ...]) -> set[tuple[str, int]]:
    """The places of template arguments, by kernel, except of those that the arguments before them determine."""
    free = set()
    for kernel in {name.partition("<")[0] for name in variants}:
        arguments = [name.removesuffix(">").split("<")[-1].split(", ") for name in variants if name.startswith(kernel)]
        for place in range(len(arguments[0])):
            before, with_it = ({tuple(one[:end]) for one in arguments} for end in (place, place + 1))
            if len(with_it) > len(before) or place == 0:
                free.add((kernel, place))
    return free


def values_of(name: str) -> set[tuple[str, int, str]]:
    """The template arguments of a variant, with their places."""
    kernel, _, arguments = name.removesuffix(">").partition("<")
    return {(kernel, place, value) for place, value in enumerate(arguments.split(", "))}


def build(stem: str, arch: str, choice: str) -> dict[str, KernelResources]:
    """All that one source needs in one program, so that the headers are parsed once."""
    source, variants = flatten(stem), variants_of(stem, choice)
    parts = (source, arch, *compiler.OPTIONS, environment.compiler_identity(), *variants)
    report = FOLDER / f"{stem}-{arch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.resources.json"
    if not report.exists():
        resources = compiler.compile_kernels(source, stem, variants, arch).resources
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({name: asdict(taken) for name, taken in resources.items()}))
    return {name: KernelResources(**taken) for name, taken in json.loads(report.read_text()).items()}


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, nvrtc: None) -> Iterator[Builds]:
    """The compilations that the selected tests need, running in threads."""
    wanted = {
        tuple(item.callspec.params[name] for name in ("stem", "arch", "choice")): None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_every_variant_compiles_without_spills
    }
    with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
        yield {key: pool.submit(build, *key) for key in wanted}
        pool.shutdown(cancel_futures=True)


BUILT = [(stem, arch) for stem in sorted(KERNELS) for arch in ARCHS if KERNELS[stem].runs_on(arch)]
CASES = [
    *(pytest.param(stem, "sm_90", "each value", id=f"{stem}-sm_90-each_value") for stem in sorted(KERNELS)),
    *(pytest.param(stem, "sm_80", "one each", id=f"{stem}-sm_80-one_each") for stem, arch in BUILT if arch == "sm_80"),
    *(pytest.param(stem, arch, "all", id=f"{stem}-{arch}-all", marks=pytest.mark.long) for stem, arch in BUILT),
]


def test_a_kernel_is_for_all_architectures_or_for_one() -> None:
    assert {stem for stem, arch in BUILT if arch == "sm_90"} == KERNELS.keys()
    only_arch = {stem: spec.only_arch for stem, spec in KERNELS.items() if spec.only_arch}
    assert only_arch == dict.fromkeys(("attention_prefill_wgmma", "gemm_narrow", "gemm_wide"), "sm_90")


@pytest.mark.parametrize(("stem", "arch", "choice"), CASES)
def test_every_variant_compiles_without_spills(stem: str, arch: str, choice: str, builds: Builds) -> None:
    resources = builds[stem, arch, choice].result()
    assert sorted(resources) == sorted(variants_of(stem, choice))
    print(f"\n{stem} on {arch}: registers, static shared bytes, stack bytes")
    for name, taken in resources.items():
        print(f"  {taken.registers:3} {taken.shared_bytes:6} {taken.stack_bytes:4}  {name}")
    spilling = {name for name, taken in resources.items() if taken.spill_store_bytes or taken.spill_load_bytes}
    assert not spilling
    assert not {name for name, taken in resources.items() if taken.waits_for_each_wgmma}
    assert not {name for name, taken in resources.items() if taken.stack_bytes}
    if stem in STATIC_SHARED_BYTES:  # they plan the rest of their shared memory themselves
        assert max(taken.shared_bytes for taken in resources.values()) <= STATIC_SHARED_BYTES[stem]
