"""`llmcli batch --ray` with a real Ray on this machine: the bytes of one run, whatever is killed."""

import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import psutil
import pytest
from batch.fake_ray import FakeRay
from batch_runs import ROOT, SEED, finish, num_lines, start, without_timings, write_prompts
from guide.guide_pages import GUIDE, fenced
from results import Llmcli, Result

from llmcli.batch import on_ray
from llmcli.batch.output import Journal
from llmcli.batch.shards import load_record
from llmcli.cli.batch import LEAST_RAY
from llmcli.engine.remote.worker import AskedEngine

NEEDS_RAY = "--ray needs Ray 2.60 or later: run `"
NODE: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder for Ray's files, so that no cluster of others is found. Paths of sockets must be short."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    for name, value in {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_machine_without_a_cluster(ray_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` starts Ray for this machine alone, where nobody else can reach it.

    A terminal sees one line of progress. Though a worker is killed, stdout has the results and nothing of Ray's.
    """
    source, here, output = (tmp_path / name for name in ("in", "here", "out"))
    write_prompts(source, 12)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")  # a user's wish to be told more
    monkeypatch.setenv("TERM", "xterm")  # which shows a bar
    flags = ("--ordered", "--ray", "auto", "--device", "cpu", "--stats")
    command = shlex.join([sys.executable, "-m", "llmcli", "batch", str(source), "-", *SEED, *flags])
    child = pexpect.spawn("/bin/sh", ["-c", f"exec {command} > {output}"], encoding="utf-8", timeout=300)
    child.logfile_read = told = io.StringIO()
    child.expect(r"storyteller .* [1-9]/12\S* \S+:[-0-9]{2}\S* 1 worker, [0-9.]+ tokens/s")
    driver = psutil.Process(child.pid)
    reached = {address for process in driver.children(recursive=True) for address in listens_at(process)}
    (worker,) = workers(driver)
    worker.kill()
    child.expect(pexpect.EOF)
    child.close()
    stderr = told.getvalue().replace("\r\n", "\n")
    assert child.exitstatus == 0, stderr
    finish(start(source, here, "--ordered"))
    assert without_timings(output) == without_timings(here)
    for line in (
        "Starting workers: Ray on this machine\n",
        "12 prompts, one at a time on each worker\n",
        " died; its 2 prompts run again\n",
        "1.0 of each worker on average\n",
    ):
        assert line in stderr
    assert reached <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listens_at(process: psutil.Process) -> set[str]:
    """The addresses where it waits for connections."""
    try:
        return {one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()


def workers(of: psutil.Process) -> list[psutil.Process]:
    """The workers of the cluster that a process has started."""
    return [one for one in of.children(recursive=True) if "ray::AskedEngine" in "".join(_command(one))]


class Nodes:
    """A cluster: a head without a card, and nodes with one."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(True, head_node_args={**NODE, "num_gpus": 0, "include_dashboard": False})
        self.nodes = [self.add() for _ in range(count)]

    def add(self) -> Any:
        return self.cluster.add_node(num_gpus=1, **NODE)

    def replace(self, index: int) -> None:
        """Kill a node's raylet, and add another node."""
        self.cluster.remove_node(self.nodes[index], allow_graceful=False)
        self.nodes[index] = self.add()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.long
@pytest.mark.timeout(0)  # as long as the option says
def test_whatever_is_killed(
    ray_folder: str, tmp_path: Path, num_ray_kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers, drivers and nodes, at random; then a node joins."""
    draw = random.Random(num_ray_kills)
    source, here, output = (tmp_path / name for name in ("in", "here", "out"))
    count = 60 * num_ray_kills
    write_prompts(source, count)
    finish(start(source, here, "--ordered"))
    nodes = Nodes(2)
    begin, killed = time.perf_counter(), []
    flags = ("--ordered", "--ray", nodes.cluster.address)
    try:
        process = start(source, output, *flags)
        for number in range(num_ray_kills):
            kind = draw.choices(("worker", "driver", "node"), (6, 2, 1))[0] if number else "node"
            while process.poll() is None and num_lines(output) < number * count // num_ray_kills:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 2))
            killed.append(kind)
            if kind == "node":
                nodes.replace(draw.randrange(2))
            elif kind == "driver":
                process.kill()
                process.communicate()
                process = start(source, output, *flags)
            elif there := workers(psutil.Process()):
                draw.choice(there).kill()
        finish(process)
        with capsys.disabled():
            kinds = {kind: killed.count(kind) for kind in ("worker", "driver", "node")}
            print(f"{count} prompts, killed {kinds}: {time.perf_counter() - begin:.0f} s")
        assert without_timings(output) == without_timings(here)
        assert load_record(output) == load_record(here)
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            third = tmp_path / f"out-{code}"
            process = start(source, third, *flags)
            while process.poll() is None and num_lines(third) < 5:
                time.sleep(0.05)
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == code, stderr
            assert stderr.splitlines()[-1].endswith(b" prompts are done; run the same command again to resume")
    finally:
        nodes.cluster.shutdown()


def test_what_ray_takes(llmcli: Llmcli, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "Hi"}\n')
    for flags, message in (
        (("--workers", "2"), "--workers needs --ray"),
        (("--mixed-cards",), "--mixed-cards needs --ray"),
        (("--ray", "auto", "--shard", "1/2"), "--ray and --shard cannot be combined"),
        (("--ray", "auto", "--check"), "--ray and --check cannot be combined"),
        (("--ray", "auto", "--device", "cuda:1"), "--ray and --device cuda:1 cannot be combined: Ray chooses the card"),
        (("--ray", "nonsense"), "--ray is 'nonsense', expected auto, or HOST:PORT as `ray start --head` prints it"),
        (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: Connection refused; start a cluster with `ray start --head`"),
    ):
        llmcli("batch", tmp_path / "in", tmp_path / "out", "-m", "storyteller", "-q", *flags).expect_error(2, message)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, llmcli: Llmcli, tmp_path: Path) -> Llmcli:
    """Run a batch on two workers that are in this process, without Ray's own."""
    ray = FakeRay(lambda node: AskedEngine(), {"a": 1, "b": 1})
    monkeypatch.setattr(on_ray, "ray", ray)
    monkeypatch.setattr(on_ray, "connect", lambda address: "a cluster")
    monkeypatch.setattr(on_ray, "_EXCHANGE_SECONDS", 0.01)
    monkeypatch.setattr(on_ray, "NodeAffinitySchedulingStrategy", lambda node, soft: SimpleNamespace(node_id=node))
    monkeypatch.chdir(tmp_path)

    def call(source: str, output: str, *flags: object) -> Result:
        told = llmcli("batch", source, output, "-m", "storyteller", "--seed", 5, *flags)
        assert "--ray" not in flags or all(actor.is_dead for actor in ray.actors)
        return told

    return call


def test_a_run_resumes_here_and_there(far: Llmcli, tmp_path: Path) -> None:
    """What is done is not run again, what has failed is; each way the bytes are those of one machine."""
    write_prompts(tmp_path / "in", 15)
    assert far("in", "here", "--ordered").exit_code == 0
    whole = (tmp_path / "here").read_text().splitlines(keepends=True)
    for flags in (("--ray", "auto"), ()):
        failed = '{"id": 2, "error": {"message": "x"}}\n'
        (tmp_path / "out").write_text("".join([whole[7], whole[3], failed, whole[4][:-9]]))
        shutil.copy(tmp_path / "here.run.json", tmp_path / "out.run.json")
        told = far("in", "out", "--ordered", *flags)
        assert told.exit_code == 0, told.stderr
        assert "Resumed: 2 of 15 prompts are done\n" in told.stderr
        assert without_timings(tmp_path / "out") == without_timings(tmp_path / "here")
        kept = (tmp_path / "out").read_text().splitlines(keepends=True)
        assert (kept[7], kept[3]) == (whole[7], whole[3])  # with their times
        assert load_record(tmp_path / "out") == load_record(tmp_path / "here")


def test_other_kinds_of_card_are_in_the_record(far: Llmcli, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in", 4)
    assert far("in", "out", "--ray", "auto", "--mixed-cards", "--max-new-tokens", 4).exit_code == 0
    assert load_record(tmp_path / "out").runner == "mixed cards"
    (tmp_path / "out").write_text((tmp_path / "out").read_text().splitlines(keepends=True)[0])
    told = far("in", "out", "--ray", "auto", "--max-new-tokens", 4, "-q")
    told.expect_error(2, "out was made with --mixed-cards: run with --mixed-cards again, or name another output")
    assert far("in", "one", "--max-new-tokens", 4).exit_code == 0
    (tmp_path / "one").write_text((tmp_path / "one").read_text().splitlines(keepends=True)[0])
    told = far("in", "one", "--ray", "auto", "--mixed-cards", "--max-new-tokens", 4, "-q")
    told.expect_error(2, "one was made without --mixed-cards: run without --mixed-cards again, or name another output")


def test_an_input_that_changes_meanwhile(far: Llmcli, tmp_path: Path, monkeypatch: Any) -> None:
    write_prompts(tmp_path / "in", 4)
    content = (tmp_path / "in").read_bytes()

    def change(address: str) -> str:
        (tmp_path / "in").write_bytes(content.replace(b"max_new_tokens", b"max_new_tokenz"))
        return ""

    monkeypatch.setattr(on_ray, "connect", change)
    told = far("in", "out", "--ray", "auto", "--max-new-tokens", 4, "-q")
    told.expect_error(2, "in has changed while it was run; restore it, and run again to resume")


def test_a_file_is_sorted_at_the_end(far: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is late holds back no other: a kill would lose them."""
    lengths = (60, 2, 2, 2, 2, 2)
    (tmp_path / "in").write_text("".join(f'{{"prompt": "Hi", "max_new_tokens": {length}}}\n' for length in lengths))
    written: list[object] = []
    append = Journal.append
    monkeypatch.setattr(Journal, "append", lambda self, key, line: (written.append(key), append(self, key, line))[1])
    assert far("in", "out", "--ordered", "--ray", "auto").exit_code == 0
    assert written != sorted(written, key=str)
    lines = (tmp_path / "out").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [*range(1, 7)]


def test_a_signal_ends_the_workers_and_says_how_to_resume(
    far: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tmp_path / "in", 4)
    get = FakeRay.get

    def stop(ray: FakeRay, call: Any) -> Any:
        if call.method == "open":
            on_ray._exit(signal.SIGTERM, None)
        return get(ray, call)

    monkeypatch.setattr(FakeRay, "get", stop)
    told = far("in", "out", "--ray", "auto")
    assert told.exit_code == 143
    assert told.stderr.endswith("Interrupted: 0 of 4 prompts are done; run the same command again to resume\n")


def test_without_the_package(tmp_path: Path) -> None:
    """A line says which command installs it; a batch needs nothing of the server's extra."""
    (tmp_path / "in").write_text('{"prompt": "Hi"}\n')
    extras = ("ray", "starlette", "uvicorn", "httptools")
    hide = f"import sys; sys.modules.update(dict.fromkeys({extras}))"
    hide += "; from llmcli.cli.main import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", hide, "batch", "in", "out", "--ray", "auto"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert told.stderr.startswith(f"error: {NEEDS_RAY}")
    assert told.stderr.endswith(f' install "{ROOT}[ray]"`\n')


def test_an_old_package(far: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRay, "__version__", "2.59.1")
    far("in", "out", "--ray", "auto", "-q").expect_error(2, NEEDS_RAY)
    assert "ray>={}.{}".format(*LEAST_RAY) in (ROOT / "pyproject.toml").read_text()


def test_the_worker_of_the_page(llmcli: Llmcli, tmp_path: Path) -> None:
    """The class for Ray Data on the page tells a batch's texts."""
    (code,) = fenced((GUIDE / "many-machines.md").read_text(encoding="utf-8"), "python")
    names: dict[str, Any] = {}
    exec(code, names)
    prompts = ["Once upon a time", "The owl", "A"]
    (tmp_path / "in").write_text("".join(f"{prompt}\n" for prompt in prompts))
    flags = ("--text", "--seed", 5, "--max-new-tokens", 7, "--ordered", "-m", "storyteller", "-q")
    assert llmcli("batch", tmp_path / "in", tmp_path / "out", *flags).exit_code == 0
    expected = [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()]
    found = names["Texts"]("storyteller", 5, 7)({"number": [2, 0, 1], "prompt": [prompts[2], *prompts[:2]]})
    assert found["text"] == [expected[2], *expected[:2]]
