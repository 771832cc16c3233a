"""A program `llmcli` for scripts that starts at once: each call is a fork of one process that has imported most.

`python -m preloaded_program SOCKET` is that process, and `... SOCKET WORDS` one call, with the caller's streams and
folder and the environment of the first. With MOST_TOKENS in it, texts without a limit of their own end after so many.
"""

import contextlib
import json
import os
import socket
import sys
import traceback
from typing import Any


def serve(path: str) -> None:
    """Fork for each call; a call without words is the last."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    import sentencepiece  # noqa: F401

    import llmcli.runners.numpy.load  # noqa: F401
    from llmcli.cli.session import Session

    usual_limit = Session.limit_new_tokens

    def limit_new_tokens(session: Session, requested: int | None, *where: int, **how: Any) -> int | None:
        usual, most = usual_limit(session, requested, *where, **how), int(os.environ["MOST_TOKENS"])
        return usual if requested is not None else min(usual or most, most)

    if "MOST_TOKENS" in os.environ:
        Session.limit_new_tokens = limit_new_tokens  # type: ignore[method-assign]
    while True:
        call, _ = listener.accept()
        content, streams, _, _ = socket.recv_fds(call, 2**16, 3)
        if not content:
            break
        if os.fork() == 0:  # one waits for the other, and says how it ended
            program = os.fork()
            if program == 0:
                _run(json.loads(content), streams)
            call.send(bytes([os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) % 256]))
            os._exit(0)
        call.close()
        for stream in streams:
            os.close(stream)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _run(wanted: dict[str, Any], streams: list[int]) -> None:
    from llmcli.__main__ import main

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    os.chdir(wanted["folder"])
    sys.argv = wanted["words"]
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def call(path: str, words: list[str]) -> int:
    """Run `llmcli WORDS` in a fork of the process at `path`; its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        wanted = {"folder": os.getcwd(), "words": ["llmcli", *words]}
        socket.send_fds(server, [json.dumps(wanted).encode()], [0, 1, 2])
        return (server.recv(1) or b"\1")[0]


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
