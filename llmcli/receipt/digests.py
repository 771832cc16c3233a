"""The SHA-256 of a model's files, computed by threads of its own while other work goes on.

Always from the content: the name of a file in the hub's cache says what was downloaded, not what lies there now. A file
that changes between the first look and the end is refused.
"""

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from llmcli.checkpoint.folder import FileState
from llmcli.errors import CheckpointError
from llmcli.receipt.receipt import FileFacts

_CHUNK_BYTES = 2**20
_MOST_THREADS = 4
_PATIENCE_SECONDS = 0.1  # between two looks at how far they are

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


class FileDigests:
    """The files by name. They are looked at when this is made, which should be before anybody reads them.

    Raises: CheckpointError for a file that is gone.
    """

    def __init__(self, files: Mapping[str, Path]):
        self._files = files
        self._states = {name: _state(path) for name, path in files.items()}
        self._total = sum(state.size for state in self._states.values())
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, str | CheckpointError]] = queue.SimpleQueue()
        self._num_read = 0
        self._lock = threading.Lock()
        self._has_ended = False

    def start(self) -> None:
        """Begin to read."""
        # The largest first, so that none begins late.
        for name in sorted(self._states, key=lambda name: -self._states[name].size):
            self._waiting.put(name)
        for _ in range(min(_MOST_THREADS, len(self._files), os.cpu_count() or 1)):
            # Daemons: a program that ends early does not wait for them.
            threading.Thread(target=self._work, name="digests", daemon=True).start()

    def stop(self) -> None:
        """End without a result."""
        self._has_ended = True

    def wait(self, on_progress: OnProgress) -> dict[str, FileFacts]:
        """Wait for the end.

        Raises: CheckpointError for a file that cannot be read, or has changed since this was made.
        """
        found: dict[str, str] = {}
        while len(found) < len(self._files):
            on_progress(self._num_read, self._total)
            try:
                name, result = self._results.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                continue
            if isinstance(result, CheckpointError):
                self.stop()
                raise result
            found[name] = result
        for name, path in self._files.items():
            if _state(path) != self._states[name]:
                raise CheckpointError(f"{path} changed while the model ran; run again once it no longer changes")
        return {name: FileFacts(self._states[name].size, found[name]) for name in self._files}

    def _work(self) -> None:
        while not self._has_ended:
            try:
                name = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._results.put((name, self._digest(self._files[name])))
            except OSError as error:
                self._results.put((name, CheckpointError(f"{self._files[name]} cannot be read: {error.strerror}")))

    def _digest(self, path: Path) -> str:
        """Reading and hashing both let other threads run."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
        # Not blocking: a pipe may have taken the file's place since.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb", buffering=0) as file:
            while not self._has_ended and (count := file.readinto(buffer)):
                digest.update(buffer[:count])
                with self._lock:
                    self._num_read += count
        return digest.hexdigest()


def _state(path: Path) -> FileState:
    try:
        info = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return FileState(info.st_size, info.st_mtime_ns, info.st_ino)
