"""Compiles kernel sources to machine code by NVRTC, CUDA's compiler library. Needs no card or driver; has no cache."""

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.errors import KernelCompileError
from llmcli.kernels import environment
from llmcli.resources import install_command

# No fast-math option: kernels call the fast functions by name where their error bound allows it.
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
# With a driver NVRTC caches results of its own; a cached one lacks the assembler's report.
_UNCACHED = "--no-cache"
_UNCACHED_SINCE = (12, 9)
_NAMES = "__nv_name_map"  # the file in which NVRTC looks name expressions up


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes on one architecture, as its assembler reports it.

    `waits_for_each_wgmma`: the assembler could not overlap Hopper's products, and put a wait after each.
    Units: 32-bit registers a thread; bytes of static shared memory a block, of stack and spills a thread
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    waits_for_each_wgmma: bool = False


@dataclass(frozen=True)
class CompiledKernels:
    """Machine code of one program; `lowered` and `resources` by name expression."""

    cubin: bytes
    lowered: dict[str, str]
    resources: dict[str, KernelResources]


def load_nvrtc() -> Any:
    """The compiler library's binding.

    Raises: KernelCompileError if it is not installed
    """
    version = environment.nvrtc_version()
    if isinstance(version, str):
        raise KernelCompileError(f"the CUDA compiler library NVRTC is missing ({version}); {_cure()}")
    # Not at module level: everything but a compilation works without CuPy.
    return importlib.import_module("cupy_backends.cuda.libs.nvrtc")


def _cure() -> str:
    return f"`{install_command(f'llmcli[{environment.toolkit_extra()}]')}` brings it"


def nearest_architecture(arch: str) -> str:
    """What to compile for a card of architecture `arch`: its own, else the newest older one of its generation.

    Raises: KernelCompileError if the compiler knows neither
    """
    nvrtc = load_nvrtc()
    wanted, supported = int(arch.removeprefix("sm_")), nvrtc.getSupportedArchs()
    known = [one for one in supported if one // 10 == wanted // 10 and one <= wanted]
    if known:
        return f"sm_{max(known)}"
    version = ".".join(map(str, nvrtc.getVersion()))
    older = f"`{install_command('llmcli[cuda12]')}` brings an older one"
    fix = "install a newer one" if wanted > max(supported) else older
    raise KernelCompileError(
        f"NVRTC {version} compiles for compute capability {min(supported) / 10} to {max(supported) / 10}, "
        f"and the card has {wanted / 10}; {fix}"
    )


def compile_kernels(source: str, stem: str, names: Sequence[str], arch: str) -> CompiledKernels:
    """Compile a flattened source with these name expressions for one architecture, such as `sm_90`.

    Raises: KernelCompileError
    """
    nvrtc = load_nvrtc()
    headers = environment.header_folder()
    if headers is None:
        raise KernelCompileError(f"the CUDA headers (cuda_fp16.h) are missing; {_cure()}")
    options = compile_options((headers, *environment.cub_folders()), arch)
    if nvrtc.getVersion() >= _UNCACHED_SINCE:
        options += (_UNCACHED,)
    program = nvrtc.createProgram(source, f"kernels/{stem}.cu", [], [])
    try:
        try:
            for name in names:
                nvrtc.addNameExpression(program, name)
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            problem = first_error(nvrtc.getProgramLog(program)) or str(error)
            if problem.startswith(_NAMES):  # it names no line of the source
                problem = f"{problem.partition('error: ')[2]}; what is launched is {' or '.join(names)}"
            raise KernelCompileError(f"kernel {stem} does not compile for {arch}: {problem}") from error
        lowered = {name: str(nvrtc.getLoweredName(program, name)) for name in names}
        by_symbol = parse_resources(nvrtc.getProgramLog(program))
        return CompiledKernels(
            cubin=bytes(nvrtc.getCUBIN(program)),
            lowered=lowered,
            resources={name: by_symbol[symbol] for name, symbol in lowered.items()},
        )
    finally:
        nvrtc.destroyProgram(program)


def compile_options(folders: Iterable[Path], arch: str) -> tuple[str, ...]:
    """All options of one compilation, which looks for headers in these folders in turn.

    For sm_90 with Hopper's own operations (wgmma): such code runs on every card of compute capability 9.0.
    """
    target = f"{arch}a" if arch == "sm_90" else arch
    return (f"--gpu-architecture={target}", *OPTIONS, *(f"--include-path={folder}" for folder in folders))


def first_error(log: str) -> str | None:
    """The first error line of a compiler log, which names file and line, or None."""
    return next((line.strip() for line in log.splitlines() if re.search(r"\berror\b", line)), None)


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Resources by lowered name, from the assembler's report in a program log."""
    found = {}
    serialized = "".join(line for line in log.splitlines() if "wgmma.mma_async instructions are serialized" in line)
    for block in log.split("Compiling entry function '")[1:]:
        symbol = block.partition("'")[0]
        properties = block.partition(f"Function properties for {symbol}\n")[2]
        found[symbol] = KernelResources(
            registers=_count(properties, "registers", "Used "),
            shared_bytes=_count(properties, "bytes smem"),
            stack_bytes=_count(properties, "bytes stack frame"),
            spill_store_bytes=_count(properties, "bytes spill stores"),
            spill_load_bytes=_count(properties, "bytes spill loads"),
            waits_for_each_wgmma=f"'{symbol}'" in serialized,
        )
    return found


def _count(text: str, unit: str, prefix: str = "") -> int:
    match = re.search(rf"{prefix}(\d+) {unit}", text)
    return int(match[1]) if match else 0
