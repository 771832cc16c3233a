"""`BodyReader`: reads long bodies in a separate process.

A thread of the front would compete with the event loop for Python's lock, which the loop releases at each system call:
all clients would wait for a second. Garbage collection of what is read would stop both.
"""

import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from llmcli.patterns import child_program
from llmcli.serve.bodies import Body, Kind, parse_body
from llmcli.serve.refusal import Refusal

_PROGRAM = child_program("llmcli.serve.body_reader", "main(int(sys.argv[1]))")


class BodyReader:
    """See the module. For one thread at a time. The process ends with its parent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process now; else the first body waits for it."""
        self._connection, there = Pipe()
        with there:
            command = [sys.executable, "-P", "-c", _PROGRAM, str(there.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(there.fileno(),))

    def read(self, kind: type[Kind], content: bytes) -> Kind:
        """As `parse_body`. Raises: as it does; a Refusal if the process dies, and the next body starts a new one"""
        if self._connection is None:
            self.start()
        assert self._connection is not None
        try:
            self._connection.send((kind, content))
            body: Kind | Refusal = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise Refusal(500, "the body could not be read; send a shorter one") from error
        if isinstance(body, Refusal):
            try:
                raise body
            finally:
                del body  # else error, traceback and this frame would be a reference cycle, which keeps the content
        return body

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None


def main(link: int) -> None:
    """Read bodies until the other process closes the link."""
    with Connection(link) as connection:
        while True:
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                return
            try:
                answer: Body | Refusal = parse_body(kind, content)
            except Refusal as refusal:
                answer = refusal
            connection.send(answer)
