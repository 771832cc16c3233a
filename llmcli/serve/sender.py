"""`Sender`: writes to one end of the link between two processes, in a thread of its own.

Both processes read and write one pair of sockets. If either wrote where it reads, each could wait for the other to
read, for good. So no reader ever waits for a writer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

_MOST_UNSENT = 64  # messages after which `wait_for_room` waits
_CLOSE_SECONDS = 1.0


class Sender:
    """See the module. `send` is for any thread, and never waits."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._unsent: deque[tuple[object, ...]] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def send(self, *message: object) -> None:
        """Queue a message. After the other process has ended, which the reader sees, it is dropped."""
        with self._changed:
            if not self._is_over:
                self._unsent.append(message)
                self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Wait until few messages are unsent. For who makes many of them, and does not read."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._unsent) < _MOST_UNSENT)

    def close(self) -> None:
        """Send what is queued, unless the other process does not read it, and end the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_over)
                if not self._unsent:
                    return
                message = self._unsent[0]  # counts as unsent while it is written
            try:
                self._connection.send(message)
            except BaseException:  # the other process has ended; or a message cannot be sent, and all would hang
                with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
                    link.shutdown(socket.SHUT_RDWR)
                with self._changed:
                    self._is_over = True
                    self._unsent.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._unsent.popleft()
                self._changed.notify_all()
