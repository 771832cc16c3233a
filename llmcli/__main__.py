"""The process: `llmcli` and `python -m llmcli` start here, so that a Ctrl-C is met from the first import on."""

import os
import signal
import sys
from types import FrameType

from llmcli.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command line and end the process with its exit code."""
    _hold_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # who started this may want it ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from llmcli.cli.main import main as run_command_line

        exit_code = run_command_line()
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    if exit_code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end has begun; a second Ctrl-C changes nothing
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Not sys.exit: an interrupt inside an exec, as dataclasses use it at import, makes the interpreter kill
        # itself by SIGINT at its end although it was handled.
        os._exit(exit_code)
    sys.exit(exit_code)


def _hold_closed_streams() -> None:
    """Take the numbers of standard streams that are closed (`llmcli serve <&-`), or the next file would get them.

    A child process would then take that file for its own standard input. Reading and writing fail as before.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number: this one


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Meet a Ctrl-C: KeyboardInterrupt, or inside an import the end at once.

    There it would be dropped by a callback of the import's lock, or abort torch's C++ code; and what llmcli does
    survives a kill, so that nothing is left to be done.
    """
    outer = frame
    while outer is not None:
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(EXIT_INTERRUPTED)
        outer = outer.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
