"""Compiled kernels on disk, so that a warm start runs no compiler: for each program and architecture a `.cubin` as CuPy
loads it, and a `.json` of the same name that describes it.

The folder may be deleted at any time. Files that are damaged, half written or writable by others are compiled again. If
files cannot be kept there, they lie in a temporary folder of this process, since CuPy loads only files.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from llmcli import resources
from llmcli.errors import KernelCompileError
from llmcli.kernels import compiler, environment
from llmcli.kernels.compiler import CompiledKernels, KernelResources
from llmcli.kernels.sources import flatten

_FORMAT = "llmcli kernels 2"  # a new number when the layout of the files changes
_log = logging.getLogger(__name__)

Kernel = tuple[str, str]  # the stem of its `.cu` file, and a name expression
OnCompile = Callable[[int, int], None]  # kernels compiled so far, kernels to compile


def say_nothing(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class CachedKernels:
    """Machine code of one program in the file `cubin`; `lowered` and `resources` by name expression."""

    cubin: Path
    lowered: dict[str, str]
    resources: dict[str, KernelResources]


class KernelCache:
    """Compiled kernels by source, names, architecture, options and compiler version, kept in `folder`.

    `own` are flattened texts by stem that replace files or are added to them.
    Attributes: own
    """

    def __init__(
        self, folder: Path | None = None, sources: Path | None = None, own: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder or resources.kernel_cache_folder()
        self._sources = sources
        self.own = own or {}
        self._temporary = cache(partial(resources.temporary_folder, "llmcli-kernels-"))

    def without_own(self) -> "KernelCache":
        """The same cache, from files only."""
        return KernelCache(self._folder, self._sources)

    @cached_property
    def _compiler(self) -> str:
        # Asked once, since looking a package up takes a millisecond and a model has twenty files.
        return environment.compiler_identity()

    def get_all(
        self, kernels: Iterable[Kernel], arch: str, on_compile: OnCompile = say_nothing
    ) -> dict[Kernel, CachedKernels]:
        """Get these kernels, each a program of its own, from disk, or compile them now on all cores.

        `on_compile` is called before the first compilation and after each; on a warm start it is not. Kernels compiled
        before an error or a Ctrl-C are kept.
        Raises: KernelCompileError
        """
        wanted = list(kernels)
        stems = {stem for stem, _ in wanted}
        sources = {stem: self.own.get(stem) or flatten(stem, self._sources) for stem in stems}
        found, missing = {}, []
        try:
            folder = resources.private_folder(self._folder, make=False)
        except OSError as error:
            _log.debug("kernel cache: %s", error)
            folder = None
        for stem, name in wanted:
            entry = _find(folder / self._file_name(sources[stem], stem, name, arch)) if folder else None
            if entry is None:
                missing.append((stem, name))
            else:
                found[stem, name] = entry
        return found | self._compile_all(missing, sources, arch, on_compile) if missing else found

    def _compile_all(
        self, missing: Sequence[Kernel], sources: Mapping[str, str], arch: str, on_compile: OnCompile
    ) -> dict[Kernel, CachedKernels]:
        """Compile in threads, and write the results in this one."""
        # The binding releases Python's lock. NVRTC (since 12.8 at the latest) holds its own lock in its front end, some
        # 50 ms a program; the rest runs in parallel. Processes would spend that much on starting.
        target = compiler.nearest_architecture(arch)  # loads the library, which may be missing
        on_compile(0, len(missing))
        longest_first = sorted(missing, key=lambda kernel: -len(sources[kernel[0]]))
        pool = ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1), "compile kernels")
        try:
            running = {
                pool.submit(compiler.compile_kernels, sources[stem], stem, [name], target): (stem, name)
                for stem, name in longest_first
            }
            entries = {}
            for done, future in enumerate(as_completed(running), start=1):
                stem, name = running[future]
                entries[stem, name] = self._keep(future.result(), sources[stem], stem, name, arch)
                on_compile(done, len(missing))
            return entries
        finally:
            # After an error or a Ctrl-C do not wait for running compilations, which cannot be stopped.
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, compiled: CompiledKernels, source: str, stem: str, name: str, arch: str) -> CachedKernels:
        file_name = self._file_name(source, stem, name, arch)
        try:
            return resources.keep_files(
                self._folder, lambda folder: _write(folder / file_name, compiled), self._temporary
            )
        except OSError as error:
            folders = f"{self._folder} or {tempfile.gettempdir()}"
            raise KernelCompileError(
                f"kernel {stem} cannot be cached in {folders}: {error.strerror}; free space, or set LLMCLI_HOME"
            ) from error

    def _file_name(self, source: str, stem: str, name: str, arch: str) -> str:
        parts = (_FORMAT, source, arch, *compiler.OPTIONS, self._compiler, name)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return f"{stem.replace('/', '-')}-{arch}-{key[:32]}.cubin"


def _find(cubin: Path) -> CachedKernels | None:
    try:
        return _read(cubin)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.debug("kernel cache: %s cannot be used (%s)", cubin, error)
        return None


def _read(cubin: Path) -> CachedKernels:
    """Read an entry. Raises: OSError; ValueError for files that are damaged, or from different compilations."""
    sidecar = json.loads(resources.read_private(_sidecar(cubin)))
    try:
        kernels, digest = sidecar["kernels"], sidecar["sha256"]
        if digest == _digest(resources.read_private(cubin), kernels):
            taken = {name: KernelResources(**counts) for name, counts in kernels["resources"].items()}
            return CachedKernels(cubin, kernels["lowered"], taken)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("not a description of kernels") from error
    raise ValueError("damaged")


def _write(cubin: Path, compiled: CompiledKernels) -> CachedKernels:
    """Write the description last: without it, or next to other machine code, there is no entry."""
    taken = {name: asdict(counts) for name, counts in compiled.resources.items()}
    kernels = {"lowered": compiled.lowered, "resources": taken}
    sidecar = {"kernels": kernels, "sha256": _digest(compiled.cubin, kernels)}
    resources.replace_file(cubin, compiled.cubin)
    resources.replace_file(_sidecar(cubin), json.dumps(sidecar, indent=1).encode())
    return CachedKernels(cubin, compiled.lowered, compiled.resources)


def _sidecar(cubin: Path) -> Path:
    return cubin.with_suffix(".json")


def _digest(cubin: bytes, kernels: Any) -> str:
    """The SHA-256 of the machine code and of its description."""
    return hashlib.sha256(cubin + json.dumps(kernels, sort_keys=True).encode()).hexdigest()
