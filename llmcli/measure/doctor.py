"""Is this machine ready? One check a line, each ok or with how to fix it."""

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from llmcli.checkpoint.hub import hub_cache_folder
from llmcli.kernels import environment
from llmcli.kernels.cpp_library import compiler_problem, cpp_compiler
from llmcli.resources import folder_problem, install_command, kernel_cache_folder, token_cache_folder

_ROOMY_BYTES = 20 * 10**9  # for a model of 8 billion parameters in 16 bits, and some more

State = Literal["ok", "absent", "problem"]  # absent: not there, but nothing is broken by that


@dataclass(frozen=True)
class Check:
    """One check; `fix` says what to do about a problem."""

    name: str
    state: State
    detail: str
    fix: str = ""


def examine() -> list[Check]:
    """All checks; a check comes after those that it depends on. Changes nothing."""
    driver = environment.find_driver()
    python = Check("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    packages = [_package(name) for name in ("numpy", "torch", "tokenizers", "sentencepiece")]
    checks = [python, *packages, _cpp_compiler(), _driver(driver)]
    checks += _cards(driver)
    cupy = environment.cupy_distributions()
    checks.append(_cupy(driver, cupy))
    if cupy:
        checks += [_nvrtc(), _headers()]
    for name, folder, consequence in (
        ("kernel cache", kernel_cache_folder(), "kernels are compiled again at every start"),
        ("token cache", token_cache_folder(), "the tokens for --schema are read again at every start"),
    ):
        checks.append(_private(folder, name, consequence) or _writable(name, folder, consequence, "LLMCLI_HOME"))
    checks.append(_writable("model cache", hub_cache_folder(), "models cannot be downloaded", "HF_HOME"))
    checks.append(_disk(hub_cache_folder()))
    return checks


def _package(name: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "problem", "not installed", install_command(name))


def _cpp_compiler() -> Check:
    problem = compiler_problem()
    if problem is not None:
        return Check("C++ compiler", "absent", f"{problem}; int8 and int4 on the CPU are faster with g++: install it")
    return Check("C++ compiler", "ok", shutil.which(cpp_compiler()[0]) or "")


def _driver(driver: environment.Driver | None) -> Check:
    if driver is None:
        return Check("NVIDIA driver", "absent", "none on this machine; models run on the CPU")
    version = ".".join(map(str, driver.cuda_version))
    if driver.problem:
        return Check("NVIDIA driver", "problem", driver.problem, "restart the machine, or install the driver again")
    if driver.cuda_version < (12, 0):
        return Check("NVIDIA driver", "problem", f"for CUDA {version}", "install a driver for CUDA 12 or newer")
    return Check("NVIDIA driver", "ok", f"for CUDA {version}")


def _cards(driver: environment.Driver | None) -> list[Check]:
    if driver is None or driver.problem:
        return []
    if not driver.cards:
        fix = "check CUDA_VISIBLE_DEVICES" if os.environ.get("CUDA_VISIBLE_DEVICES") is not None else "check the card"
        return [Check("GPU", "problem", "the driver sees no card", fix)]
    checks = []
    minimum = ".".join(map(str, environment.MIN_COMPUTE_CAPABILITY))
    for card in driver.cards:
        capability = ".".join(map(str, card.compute_capability))
        detail = f"{card.name}, compute capability {capability}, {card.memory_bytes / 2**30:.1f} GiB"
        if card.compute_capability >= environment.MIN_COMPUTE_CAPABILITY:
            checks.append(Check(f"GPU {card.index}", "ok", detail))
        else:
            fix = f"needs compute capability {minimum} or more (Ampere and newer); use the CPU"
            checks.append(Check(f"GPU {card.index}", "problem", detail, fix))
    return checks


def _cupy(driver: environment.Driver | None, found: dict[str, str]) -> Check:
    installed = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        fix = f"pip uninstall {' '.join(found)}, then install one"
        return Check("CuPy", "problem", f"{installed}: they overwrite each other", fix)
    has_card = driver is not None and bool(driver.cards)
    wanted = 13 if driver is not None and driver.cuda_version >= (13, 0) else 12
    if not found:
        if has_card:
            return Check("CuPy", "problem", "not installed", _install_toolkit())
        return Check("CuPy", "absent", "not installed, and there is no card for it")
    if has_card and "cupy-cuda13x" in found and wanted < 13:
        fix = f"pip uninstall {installed.split()[0]}, then {install_command('llmcli[cuda12]')}"
        return Check("CuPy", "problem", f"{installed}, but the driver is for CUDA 12", fix)
    return Check("CuPy", "ok", installed)


def _nvrtc() -> Check:
    version = environment.nvrtc_version()
    if isinstance(version, str):
        return Check("NVRTC", "problem", version, _install_toolkit())
    return Check("NVRTC", "ok", ".".join(map(str, version)))


def _headers() -> Check:
    folder = environment.header_folder()
    if folder is None:
        return Check("CUDA headers", "problem", "cuda_fp16.h not found", _install_toolkit())
    return Check("CUDA headers", "ok", str(folder))


def _install_toolkit() -> str:
    """CuPy alone brings neither; the extra names them together with the CuPy of the same CUDA version."""
    return install_command(f"llmcli[{environment.toolkit_extra()}]")


def _private(folder: Path, name: str, consequence: str) -> Check | None:
    """The problem of a cache that others could change; None if there is none."""
    problem = folder_problem(folder)
    if problem is None:
        return None
    reason, _, fix = problem.partition("; ")
    return Check(name, "problem", f"{reason}: {consequence}", fix or "set LLMCLI_HOME to another folder")


def _disk(folder: Path) -> Check:
    """The free room where models are kept; too little is not broken, as many models are small."""
    free = shutil.disk_usage(_existing(folder)).free
    detail = f"{decimal(free)} free where models are kept"
    if free < _ROOMY_BYTES:
        detail += "; an 8B model takes 16 GB in 16 bits: `llmcli models list` shows what could be removed"
    return Check("disk", "ok" if free >= _ROOMY_BYTES else "absent", detail)


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _writable(name: str, folder: Path, consequence: str, variable: str) -> Check:
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return Check(name, "ok", str(folder))
    except OSError as error:
        detail = f"{folder} cannot be written ({error.strerror}): {consequence}"
        return Check(name, "problem", detail, f"make it writable, or set {variable} to another folder")
