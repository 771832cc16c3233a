"""Compiles the C++ of `kernels/cpu` with the machine's own compiler on first use, and keeps it next to the cubins.

A second start runs no compiler. A file may be deleted at any time. A file that is damaged, or that others could have
written, is compiled again: a library runs as soon as it is loaded.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from llmcli import resources
from llmcli.kernels.cache import OnCompile, say_nothing

# Without contraction a product and its sum are rounded separately, on every processor and by every compiler.
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")

# Sets of instructions that the sources use.
INSTRUCTIONS = {
    "avx512vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}
_COMPILE_SECONDS = 300
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)
_temporary = functools.cache(functools.partial(resources.temporary_folder, "llmcli-kernels-"))


def cpp_compiler() -> list[str]:
    """The command of the C++ compiler: the variable CXX, else c++."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def compiler_problem() -> str | None:
    """Why the compiler cannot be used, or None: compiles a program of one line, with OpenMP."""
    if shutil.which(cpp_compiler()[0]) is None:
        return f"{cpp_compiler()[0]} not found"
    try:
        with resources.temporary_folder("llmcli-compile-") as folder:
            source = Path(folder) / "one.cpp"
            source.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n", encoding="utf-8")
            _compile([source], OPTIONS)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("%s", error)
        return f"{shlex.join(cpp_compiler())} cannot compile C++17 with OpenMP"
    return None


def source_folder() -> Path:
    """Where the C++ is."""
    return resources.resource_folder("kernels") / "cpu"


def source_digest(stem: str) -> str:
    """The SHA-256 of that source and of the headers next to it, in hexadecimal."""
    source = source_folder() / f"{stem}.cpp"
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.glob("*.h"))):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def open_library(instructions: str, on_compile: OnCompile = say_nothing) -> ctypes.CDLL | None:
    """Load all sources as one library for one of `INSTRUCTIONS`; compile it first if needed.

    `on_compile` is called before and after the compiler runs.
    Returns: None if it cannot be compiled; the log says why
    """
    if shutil.which(cpp_compiler()[0]) is None:
        _log.debug("no library for the CPU: %s is not found", cpp_compiler()[0])
        return None
    sources = sorted(source_folder().glob("*.cpp"))
    options = (*OPTIONS, *INSTRUCTIONS[instructions])
    parts = (*cpp_compiler(), *options, platform.platform(), *(source_digest(source.stem) for source in sources))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    name = f"cpu-{instructions}-{key[:32]}.so"
    try:
        kept = _find(name)
        if kept is None:
            on_compile(0, 1)
            try:
                cache, content = resources.kernel_cache_folder(), _with_digest(_compile(sources, options))
                kept = resources.keep_files(cache, lambda to: resources.replace_file(to / name, content), _temporary)
            finally:
                on_compile(1, 1)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("no library for the CPU: %s", error)
        return None


# A compiler has children of its own. So its whole group is killed once this process closes a pipe, which also happens
# when this process ends in any way.
_GUARD = 'exec 3<&0; { cat <&3; kill -9 0; } >/dev/null 2>&1 & exec "$@" 3<&- </dev/null'


def _compile(sources: list[Path], options: tuple[str, ...]) -> bytes:
    """The library's file. Raises: SubprocessError, OSError"""
    with resources.temporary_folder("llmcli-compile-") as folder:
        target = Path(folder) / "library.so"
        command = [*cpp_compiler(), *options, *map(str, sources), "-o", str(target)]
        guard = ["sh", "-c", _GUARD, "sh"] if os.name == "posix" else []
        end, pipe = os.pipe()
        try:
            result = subprocess.run(
                [*guard, *command],
                stdin=end,
                capture_output=True,
                text=True,
                timeout=_COMPILE_SECONDS,
                check=False,
                env={**os.environ, "TMPDIR": folder},  # a killed compiler leaves its files there
                start_new_session=True,
            )
        finally:
            os.close(pipe)
            os.close(end)
        if result.returncode != 0:
            raise subprocess.SubprocessError(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
        return target.read_bytes()


def _find(name: str) -> Path | None:
    """The cached library, if it was written completely: opening half of one may end the process."""
    try:
        path = resources.private_folder(resources.kernel_cache_folder(), make=False) / name
        content = resources.read_private(path)
    except OSError as error:
        _log.debug("%s cannot be used: %s", name, error)
        return None
    return path if _with_digest(content[:-_DIGEST_BYTES]) == content else None


def _with_digest(content: bytes) -> bytes:
    """Append the digest. A loader reads only what the file's head names, so nothing after it."""
    return content + hashlib.sha256(content).digest()
