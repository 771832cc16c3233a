"""An unread log neither blocks its writer nor fills the memory."""

import threading

from llmcli.serve.server import LogWriter


def test_what_finds_no_room_is_counted() -> None:
    may_write, written = threading.Event(), list[str]()

    def write(line: str) -> None:
        may_write.wait(30)
        written.append(line)

    log = LogWriter(write)
    for _ in range(100):
        log.log("x" * 2**20)
    may_write.set()
    while len(written) < 17:  # 16 MiB may wait, and the last one may go beyond
        threading.Event().wait(0.01)
    log.log("the end")
    assert log.close()
    assert [len(line) for line in written[:-2]] == [2**20] * 17
    assert written[-2:] == ["83 lines are missing here, as nobody read the log", "the end"]
