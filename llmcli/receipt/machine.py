"""What computes a text on this machine: versions of the program and its libraries, processor, system and card."""

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from llmcli import __version__
from llmcli.kernels.environment import card_libraries, driver_version, find_driver
from llmcli.kernels.sources import sources_digest
from llmcli.runners.base import Arithmetic

# By which libraries choose their code: it rounds otherwise with other instructions.
_INSTRUCTIONS = frozenset(
    {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"}
    | {"avx_vnni", "amx_int8", "amx_bf16", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"}
)
# What overrules that choice, or changes how products are rounded.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)
_CPU_INFO = Path("/proc/cpuinfo")
_CUPY = "cupy"


def describe_program(arithmetic: Arithmetic, others: Iterable[str]) -> dict[str, str]:
    """Versions of llmcli, Python, the packages that compute and `others`, and digests of sources that compute.

    `kernels` stands for the files of llmcli; a kernel of the user's has a line of its own, so that a replay names it.
    """
    versions = {"llmcli": __version__, "Python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in sorted({"numpy", *arithmetic.libraries, *others}):
        if name == _CUPY:  # whose packages have other names, and which brings others
            versions |= card_libraries() | {"kernels": f"sha256 {sources_digest()}"}
        else:
            versions[name] = _version(name)
    versions |= {f"kernels/cpu/{stem}.cpp": f"sha256 {digest}" for stem, digest in arithmetic.cpu_sources.items()}
    return versions | {f"kernel {stem}": f"sha256 {digest}" for stem, digest in arithmetic.own_kernels.items()}


def describe_machine(card: int | None) -> dict[str, str]:
    """The system, the processor, variables that change how libraries round; and a card, by the driver's number."""
    processor, instructions = _processor()
    described = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "instructions": " ".join(instructions),
        **{f"variable {name}": os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    driver = None if card is None else find_driver()
    if card is not None and driver is not None and card < len(driver.cards):
        found = driver.cards[card]
        described |= {
            "card": found.name,
            "compute capability": "{}.{}".format(*found.compute_capability),
            "driver": driver_version() or "unknown",
            "driver's CUDA": "{}.{}".format(*driver.cuda_version),
        }
    return described


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> tuple[str, list[str]]:
    """The processor's name, and those of its instruction sets that matter; as far as the system tells."""
    try:
        text = _CPU_INFO.read_text(errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = _INSTRUCTIONS.intersection(flags[1].split()) if flags else frozenset()
    return name[1].strip() if name else platform.processor() or "unknown", sorted(known)
