"""Compiled kernels on disk: one file for each program and architecture, so that a warm start runs no compiler.

The folder may be deleted at any time. What cannot be read or written is compiled again, never an error.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from llmcli.kernels import compiler, environment
from llmcli.kernels.compiler import CompiledKernels, KernelResources
from llmcli.kernels.sources import flatten
from llmcli.resources import kernel_cache_folder

_FORMAT = b"llmcli kernels 1\n"  # a new number when the file's layout changes
_log = logging.getLogger(__name__)


class KernelCache:
    """Compiled kernels by source, names, architecture, options and compiler version, kept in `folder`."""

    def __init__(self, folder: Path | None = None, sources: Path | None = None) -> None:
        self._folder = folder or kernel_cache_folder()
        self._sources = sources

    @cached_property
    def _compiler(self) -> str:
        # Asked once, since looking a package up takes a millisecond and a model has twenty files.
        return environment.compiler_identity()

    def get(self, stem: str, names: Sequence[str], arch: str) -> CompiledKernels:
        """These name expressions of one `.cu` file, from disk or compiled now.

        Raises: KernelCompileError
        """
        return self.find(stem, names, arch) or self.compile(stem, names, arch)

    def find(self, stem: str, names: Sequence[str], arch: str) -> CompiledKernels | None:
        """The entry on disk, or None if there is none that is whole."""
        path = self._path(flatten(stem, self._sources), stem, names, arch)
        try:
            return _unpack(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.debug("kernel cache: %s is of no use (%s)", path, error)
            return None

    def compile(self, stem: str, names: Sequence[str], arch: str) -> CompiledKernels:
        """Compile now, and keep the result if the folder can be written.

        Raises: KernelCompileError
        """
        source = flatten(stem, self._sources)
        compiled = compiler.compile_kernels(source, stem, names, compiler.nearest_architecture(arch))
        path = self._path(source, stem, names, arch)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(path, _pack(compiled))
        except OSError as error:
            _log.debug("kernel cache: %s cannot be written (%s)", path, error)
        return compiled

    def _path(self, source: str, stem: str, names: Sequence[str], arch: str) -> Path:
        parts = (_FORMAT.decode(), source, arch, *compiler.OPTIONS, self._compiler, *names)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return self._folder / f"{stem}-{arch}-{key[:32]}.cubin"


def _pack(compiled: CompiledKernels) -> bytes:
    """Format line, SHA-256 of the rest, one line of JSON, machine code."""
    header = {
        "lowered": compiled.lowered,
        "resources": {name: asdict(resources) for name, resources in compiled.resources.items()},
    }
    body = json.dumps(header).encode() + b"\n" + compiled.cubin
    return _FORMAT + hashlib.sha256(body).digest() + body


def _unpack(content: bytes) -> CompiledKernels:
    start = len(_FORMAT) + hashlib.sha256().digest_size
    digest, body = content[len(_FORMAT) : start], content[start:]
    if not content.startswith(_FORMAT) or hashlib.sha256(body).digest() != digest:
        raise ValueError("damaged")
    line, _, cubin = body.partition(b"\n")
    header = json.loads(line)
    resources = {name: KernelResources(**counts) for name, counts in header["resources"].items()}
    return CompiledKernels(cubin, header["lowered"], resources)


def _write(path: Path, content: bytes) -> None:
    # A reader, or a second writer, sees the whole file or none.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
