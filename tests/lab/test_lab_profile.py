"""Profiling: the chosen call, the rung, and the process that launches them."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.errors import DeviceError, UsageError
from llmcli.kernels.launches import TYPICAL_CARD, Launch
from llmcli.kernels.spec import KernelCost
from llmcli.lab import profile_worker, trial
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.profile import (
    ProfileRequest,
    RungRequest,
    StepRequest,
    choose_call,
    profile,
    read_request,
    request_json,
    rung_call,
)
from llmcli.lab.study import find_rung, load_study, study_names
from llmcli.lab.walk import Call, Lengths, Walk, card_of

LENGTHS = Lengths(prompt=16, depth=33, rows=2, context=161)
STEP = StepRequest("/models/\u00fc \udcff'", LENGTHS, step=0, call=1)


def call(stem: str, matrix: str, num_bytes: int, *places: int) -> Call:
    return Call(Launch(stem, f"{stem}<1>", (1,), 32, ()), matrix, KernelCost(num_bytes, 0, 0), places, None)


def walk(*calls: Call) -> Walk:
    labels = {place: (one.launch.stem, one.launch.name) for one in calls for place in one.places}
    return Walk("A step", tuple(labels[place] for place in sorted(labels)), calls)


DECODE = walk(
    call("embedding", "", 10, 0),
    call("gemv", "q_proj k_proj", 30, 1, 3),
    call("gemv", "down_proj", 40, 2, 4),
    call("gemv", "head", 70, 5),
)
PROMPT = walk(call("embedding", "", 100, 0), call("cublas", "down_proj", 5, 1))


@pytest.mark.parametrize(
    ("stem", "matrix", "place"),
    [
        ("gemv", None, (0, 2)),  # 2 * 40 bytes are more than 70
        ("gemv", "k_proj", (0, 1)),
        ("gemv", "head", (0, 3)),
        ("embedding", None, (1, 0)),
        ("cublas", "down_proj", (1, 1)),
    ],
)
def test_the_launches_that_move_most(stem: str, matrix: str | None, place: tuple[int, int]) -> None:
    chosen = choose_call((DECODE, PROMPT), stem, matrix)
    assert (chosen.step, chosen.index) == place
    assert chosen.call is chosen.walk.calls[chosen.index]


@pytest.mark.parametrize(
    ("stem", "matrix", "named"),
    [
        ("softmax", None, "does not launch softmax; it launches cublas, embedding, gemv"),
        ("gemv", "o_proj", "'o_proj'; it reads those of q_proj, k_proj, down_proj, head"),
        ("gemv", "proj", "'proj'; it reads"),
        ("embedding", "head", "it reads those of no linear layer"),
    ],
)
def test_what_is_not_launched_is_refused(stem: str, matrix: str | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        choose_call((DECODE, PROMPT), stem, matrix)


@pytest.mark.parametrize("request_", [STEP, RungRequest("rmsnorm", "packed")])
def test_a_request_survives_a_command_line(request_: ProfileRequest) -> None:
    text = request_json(request_)
    assert text.isascii()
    assert read_request(text) == request_


@pytest.mark.usefixtures("nvrtc")
def test_a_rung_is_a_call() -> None:
    study, problem, one = rung_call("rmsnorm", "packed", card_of("sm_86"), "sm_86")
    assert (study.name, dict(problem.sizes)) == ("rmsnorm", dict(study.sizes[-1]))
    assert one.launch.stem == "studies/rmsnorm"
    assert one.name == "by_four"
    assert one.num_bytes == problem.num_bytes
    assert one.use is not None
    assert one.use.num_blocks == problem.sizes["num_rows"]
    assert 0 < one.use.occupancy.share <= 1


@pytest.mark.usefixtures("nvrtc")
def test_a_rung_of_the_matrix_library_takes_what_is_not_known() -> None:
    _, _, one = rung_call("matmul", "cublas", card_of("sm_90"), "sm_90")
    assert (one.name, one.use) == ("cublas", None)


@pytest.mark.usefixtures("nvrtc")
def test_a_rung_of_several_launches_is_refused() -> None:
    with pytest.raises(UsageError, match="fusion/two launches 2 kernels"):
        rung_call("fusion", "two", TYPICAL_CARD, "sm_90")


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The launches that the process marks; it has no card."""
    starts: list[Callable[[], None]] = []

    def run_marked(device: Any, given: list[Callable[[], None]], count: int) -> None:
        assert count >= 3
        starts.extend(given)

    monkeypatch.setattr(profile_worker, "run_marked", run_marked)
    return starts


@pytest.mark.parametrize(("step", "index", "numbers"), [(0, 1, [101, 103]), (0, 3, [105]), (1, 0, [200])])
def test_the_process_makes_the_launches_of_the_call(
    marked: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    index: int,
    numbers: list[int],
) -> None:
    """Each launch of the recorded step has its own address."""
    started: list[int] = []

    def note(first: int, one: Walk) -> list[Any]:
        def noted(label: tuple[str, str]) -> Any:
            return SimpleNamespace(label=label, start=lambda where: started.append(*where))

        return [(noted(label), [first + place]) for place, label in enumerate(one.labels)]

    prompt = walk(PROMPT.calls[0], Call(Launch("gemm_wide", "", (1,), 32, ()), "", KernelCost(5, 0, 0), (1,), None))
    seen: list[Any] = []

    def note_decode(device: Any, runner: Any, lengths: Lengths) -> list[Any]:
        seen.append((runner, lengths))
        return note(100, DECODE)

    def note_prompt(device: Any, runner: Any, lengths: Lengths) -> list[Any]:
        seen.append((runner, lengths))
        return note(200, prompt)

    for name, fake in {
        "open_model": lambda folder: f"the model in {folder}",
        "walk_model": lambda model, lengths, facts, arch: (DECODE, prompt),
        "load_to_note": lambda device, model, lengths, **others: f"a runner of {model}",
        "note_decode": note_decode,
        "note_prompt": note_prompt,
    }.items():
        monkeypatch.setattr(profile_worker, name, fake)
    device: Any = SimpleNamespace(activate=lambda: None, facts=None, arch="sm_90")
    profile_worker.make_launches(device, StepRequest("here", LENGTHS, step, index))
    for start in marked:
        start()
    assert started == numbers
    assert seen == [("a runner of the model in here", LENGTHS)]


def test_the_process_makes_a_rung(marked: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    notes: Any = Notes()
    notes.activate = lambda: None
    monkeypatch.setattr(profile_worker, "upload_copies", lambda device, problem: [phantoms_of(problem)] * 2)
    profile_worker.make_launches(notes, RungRequest("rmsnorm", "packed"))
    assert not notes.launches
    for start in marked:
        start()
    assert [launch.stem for launch in notes.launches] == ["studies/rmsnorm"] * 2


def test_launches_are_marked_for_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy.cuda.runtime")
    events: list[Any] = []
    monkeypatch.setattr(runtime, "profilerStart", partial(events.append, "begin"))
    monkeypatch.setattr(runtime, "profilerStop", partial(events.append, "end"))

    class Stream:
        def __enter__(self) -> None: ...

        def __exit__(self, *arguments: object) -> None: ...

    device: Any = SimpleNamespace(stream=Stream(), synchronize=partial(events.append, "wait"))
    trial.run_marked(device, [partial(events.append, 0), partial(events.append, 1)], 3)
    assert events == [0, "wait", "begin", 0, 1, 0, "wait", "end"]


@pytest.mark.parametrize("request_", [STEP, RungRequest("rmsnorm", "packed")])
def test_the_process_says_why_it_fails(
    request_: ProfileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as by the profiler, in a folder with modules of the same names, without a card."""
    (tmp_path / "json.py").write_text("raise SystemExit('another module')")
    (tmp_path / "llmcli").mkdir()
    (tmp_path / "llmcli" / "__init__.py").write_text("raise SystemExit('another package')")
    commands = []

    def count(ncu: Path, program: list[str], arch: str) -> Any:
        commands.append(program)

    monkeypatch.setattr("llmcli.lab.profile.count", count)
    profile(Path("ncu"), request_, "sm_90")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        commands[0], cwd=tmp_path, env={**environment, "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C"}, capture_output=True
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: CUDA cannot be used: "), done.stderr
    assert commands[0][0] == sys.executable


@pytest.mark.parametrize("name", study_names())
def test_every_rung_is_found_by_its_name(name: str) -> None:
    study, _ = load_study(name)
    assert [find_rung(study, rung.name) for rung in study.rungs] == list(study.rungs)
    with pytest.raises(UsageError, match=study.rungs[0].name):
        find_rung(study, "nothing")


def test_a_failure_of_the_profiler_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="does not start"):
        profile(tmp_path / "ncu", STEP, "sm_90")
