"""A server under attack: it answers with the right texts, and is unchanged afterwards. See attackers.py.

pytest tests/serve/test_attack.py --all --serve-attack 3600        for an hour
"""

import http.client
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from raw_client import metric, post
from server import ServerProcess, running_server
from test_many_clients import PARAMS, Asked, texts_alone

COMPLETE = "/v1/completions"
HEALTH_SECONDS = 1.0
MAX_GROWTH_BYTES = 300 * 2**20
ATTACKERS = Path(__file__).with_name("attackers.py")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """With the usual limit of files, which idle connections would exhaust."""
    with running_server("--rows", 8, "--max-queue", 2000, open_files=1024) as server:
        assert post(server.port, COMPLETE, {"prompt": "It was", "regex": "[a-z]{3}"})[0] == 200
        yield server


def processes_of(server: ServerProcess) -> list[psutil.Process]:
    engine = psutil.Process(server.process.pid)
    return [engine, *engine.children(recursive=True)]


def ask_health(port: int, until: threading.Event, times: list[float]) -> None:
    while not until.wait(0.2):
        start_time = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        times.append(time.monotonic() - start_time)


def check_texts(port: int, until: threading.Event, asked: list[Asked], wrong: list[Asked], count: list[int]) -> None:
    rng = random.Random(threading.get_ident())
    while not until.is_set():
        one = rng.choice(asked)
        body = {"prompt": one.prompt, "seed": one.seed, "max_tokens": one.max_tokens, **PARAMS}
        status, answer = post(port, COMPLETE, body)
        if status == 200:  # else there are too many at once
            count.append(1)
            if answer["choices"][0]["text"] != one.text:
                wrong.append(one)


@pytest.mark.long
def test_under_attack(server: ServerProcess, pytestconfig: pytest.Config) -> None:
    seconds = pytestconfig.getoption("--serve-attack")
    asked = texts_alone(50)
    processes = processes_of(server)
    time.sleep(0.5)
    memory = sum(process.memory_info().rss for process in processes)
    num_files = [process.num_fds() for process in processes]

    until, times, wrong, count = threading.Event(), [], [], []
    threads = [threading.Thread(target=ask_health, args=(server.port, until, times))]
    threads += [threading.Thread(target=check_texts, args=(server.port, until, asked, wrong, count)) for _ in range(4)]
    attack = subprocess.Popen([sys.executable, str(ATTACKERS), str(server.port), str(seconds), "1"])
    for thread in threads:
        thread.start()
    most_memory, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        most_memory = max(most_memory, sum(process.memory_info().rss for process in processes))
    assert attack.wait(30) == 0
    until.set()
    for thread in threads:
        thread.join(60)

    print(f"/health max {max(times):.2f} s, memory +{(most_memory - memory) / 2**20:.0f} MiB, {len(count)} texts")
    assert wrong == []
    assert len(count) > 4
    # A short run shares its cores with other tests: there half of the answers are as quick.
    assert sorted(times)[-1 if seconds > 60 else len(times) // 2] < HEALTH_SECONDS
    end = time.monotonic() + 60
    while metric(server.port, "texts") or metric(server.port, "pages_free") != metric(server.port, "pages"):
        assert time.monotonic() < end
        time.sleep(0.2)
    while [process.num_fds() for process in processes] > [number + 8 for number in num_files]:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert most_memory - memory < MAX_GROWTH_BYTES
    assert sum(len(line) for line in server.lines) < 2**20 * max(1, seconds / 10)
    assert server.end(signal.SIGTERM) == 0
