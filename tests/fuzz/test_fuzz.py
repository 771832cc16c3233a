"""Damaged files of every kind, through the commands that read them: never exit 1, a hang, or much memory.

2,000 cases, always the same; `--all` goes on to 20,000, and `--fuzz N` runs N others.
"""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fuzz.base_files import write_base
from fuzz.targets import TARGETS, target_of

TESTS = Path(__file__).resolve().parents[1]
USUAL_CASES, ALL_CASES = 2_000, 20_000
CASES_PER_PROCESS = 1_000
HANG_SECONDS = 60  # without an answer, also while a process starts on a busy machine
LIMIT_BYTES = 300 * 1024**2


@dataclass
class Report:
    """The outcome of the cases of one or more processes."""

    num_cases: int = 0
    problems: list[str] = field(default_factory=list)
    peak_bytes: int = 0

    def add(self, other: "Report") -> None:
        """Add another report's cases."""
        self.num_cases += other.num_cases
        self.problems += other.problems
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


def run_cases(base: Path, first: int, count: int, seed: int) -> Report:
    """Run cases in processes of their own; one that hangs or dies is a problem, and the next continues after it."""
    report, case, end = Report(), first, first + count
    while case < end:
        last = _run_process(base, case, end - case, seed, report)
        report.num_cases += last + 1 - case
        case = last + 1
    return report


def _run_process(base: Path, first: int, count: int, seed: int, report: Report) -> int:
    command = [sys.executable, "-m", "fuzz.worker", str(base), str(first), str(count), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
    case = first
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said: list[str] = []
        listener = threading.Thread(target=lambda: said.extend(process.stderr or ()))
        listener.start()
        has_hung = False

        def end_it() -> None:
            nonlocal has_hung
            has_hung = True
            process.kill()

        while True:
            timer = threading.Timer(HANG_SECONDS, end_it)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            event = json.loads(line)
            case = event.get("begins", case)
            report.peak_bytes = max(report.peak_bytes, event.get("peak_bytes", 0))
            if "problem" in event:
                report.problems.append(f"case {event['case']} ({event['target']}): {event['problem']}")
        listener.join()
    if has_hung:
        report.problems.append(f"case {case} ({target_of(case).name}) takes more than {HANG_SECONDS} s")
    elif process.returncode:
        tail = "".join(said)[-1500:]
        report.problems.append(
            f"case {case} ({target_of(case).name}) ends the process with {process.returncode}: {tail}"
        )
    else:
        case = first + count - 1
    return case


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory as Linux tells it")
@pytest.mark.timeout(0)
def test_damaged_files_end_in_one_line(base: Path, pytestconfig: pytest.Config) -> None:
    asked, usual = pytestconfig.getoption("fuzz"), ALL_CASES if pytestconfig.getoption("--all") else USUAL_CASES
    num_cases, seed = (usual, 0) if asked is None else (asked, 1)
    total = Report()
    firsts = range(0, num_cases, CASES_PER_PROCESS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for report in pool.map(
            lambda first: run_cases(base, first, min(CASES_PER_PROCESS, num_cases - first), seed), firsts
        ):
            total.add(report)
    assert not total.problems, f"{len(total.problems)} of {total.num_cases} cases:\n" + "\n".join(total.problems[:20])
    assert total.num_cases == num_cases
    assert 0 < total.peak_bytes <= LIMIT_BYTES


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_undamaged_files_are_read(base: Path, target) -> None:
    from fuzz.worker import _use

    file = base / target.folder / target.file
    assert _use(target, base / target.folder, file) is None
