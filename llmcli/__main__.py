"""The process: `llmcli` and `python -m llmcli` start here, to handle a Ctrl-C from the first import on."""

import os
import signal
import sys
from types import FrameType

from llmcli.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command line and end the process with its exit code."""
    _hold_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the parent may want it ignored
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
        # Not sys.exit: after an interrupt inside an exec, such as dataclasses use at import, the interpreter kills
        # itself by SIGINT at its end, although it was handled.
        os._exit(exit_code)
    sys.exit(exit_code)


def _hold_closed_streams() -> None:
    """Occupy the numbers of closed standard streams (`llmcli serve <&-`), so that the next file does not get them.

    A child process would take that file for its own standard input. Reading and writing fail as before.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number: this one


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a Ctrl-C: raise KeyboardInterrupt, or end at once during an import.

    There a callback of the import's lock would drop it, or it would abort torch's C++ code. Ending is safe, as
    llmcli's work survives a kill.
    """
    outer = frame
    while outer is not None:
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(EXIT_INTERRUPTED)
        outer = outer.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
