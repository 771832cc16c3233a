"""A killed export leaves nothing that looks complete, and the next run ends as usual."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exports import contents, export, write_model

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.safetensors_file import SafetensorsWriter
from llmcli.quantization.schemes import ExportOptions, WeightScheme

INT4 = WeightScheme(4, 32, is_symmetric=False)
SHARD_BYTES = 60_000


def run_killed(prepare: Callable[[], Exporter], moment: int, moments: Path) -> int:
    """Export in a fork that dies by SIGKILL at one of all moments before something reaches the disk; its exit code.

    Without a kill, as for moment 0, it writes their number into the file `moments`.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        count = 0

        def lethal(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return wrapped

        for owner, name in (
            *((os, name) for name in ("replace", "rename", "fsync", "mkdir", "unlink")),
            *((Path, name) for name in ("unlink", "mkdir")),
            (SafetensorsWriter, "_write_all"),
        ):
            setattr(owner, name, lethal(getattr(owner, name)))
        exporter = prepare()
        exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
        moments.write_text(str(count))
    finally:
        os._exit(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("killed") / "source")


@pytest.mark.parametrize("replaces", [False, True])
def test_kills(source: Path, tmp_path: Path, replaces: bool, num_export_races: int) -> None:
    """Five or more, and those around the publishing, without and with an older folder to replace; each is resumed."""
    export(source, tmp_path / "undisturbed" / "export", INT4, shard_bytes=SHARD_BYTES)
    expected, old = contents(tmp_path / "undisturbed" / "export"), contents(source)
    destination, moments = tmp_path / "killed" / "export", tmp_path / "moments"
    plan = plan_export(open_model(source), ExportOptions(INT4, shard_bytes=SHARD_BYTES))

    def exporter_of_plan() -> Exporter:
        return Exporter(plan, destination, source.name, replace=replaces)

    def end_of_a_run(moment: int) -> int:
        shutil.rmtree(destination.parent, ignore_errors=True)
        destination.parent.mkdir()
        if replaces:
            shutil.copytree(source, destination)
        return run_killed(exporter_of_plan, moment, moments)

    end_of_a_run(0)
    num_moments = int(moments.read_text())
    chooser = random.Random(replaces)
    num_resumed = 0
    drawn = [chooser.randint(1, num_moments) for _ in range(max(5, num_export_races))]
    for moment in [*drawn, *range(num_moments - 12, num_moments + 1, 1 if replaces else 4)]:
        assert end_of_a_run(moment) == -signal.SIGKILL
        if destination.exists():
            assert contents(destination) in ([old, expected] if replaces else [expected])
            if contents(destination) == expected:
                continue
        else:
            assert not replaces or any(destination.parent.glob(".export.replaced-*"))
        for hidden in destination.parent.glob(".export.partial-*/config.json"):
            assert contents(hidden.parent) == expected  # complete except for its name
        exporter = exporter_of_plan()
        workspace = exporter.prepare()
        num_resumed += workspace.num_resumed
        exporter.run(workspace, lambda done, total: None, lambda name, quality: None)
        assert contents(destination) == expected
        assert [path.name for path in destination.parent.iterdir()] == ["export"]
    assert num_resumed > 0


class StoppedError(Exception):
    pass


def stopped_export(source: Path, destination: Path, num_tensors: int, scheme: WeightScheme = INT4) -> Exporter:
    """An export that ends after a number of tensors, and the exporter to resume with."""
    plan = plan_export(open_model(source), ExportOptions(scheme, shard_bytes=SHARD_BYTES))
    exporter = Exporter(plan, destination, source.name)
    seen: list[str] = []

    def on_tensor(name: str, quality: object) -> None:
        seen.append(name)
        if len(seen) == num_tensors:
            raise StoppedError

    with pytest.raises(StoppedError):
        exporter.run(exporter.prepare(), lambda done, total: None, on_tensor)
    assert not destination.exists()
    return exporter


def test_finished_shards_are_not_written_again(source: Path, tmp_path: Path) -> None:
    exporter = stopped_export(source, tmp_path / "export", 9)
    workspace = exporter.prepare()
    assert 0 < workspace.num_resumed < len(exporter.plan.shards)
    assert not workspace.has_cleaned
    written: list[str] = []
    progress: list[int] = []
    exporter.run(
        workspace, lambda done, total: progress.append(done / total), lambda name, quality: written.append(name)
    )
    assert len(written) < 14
    assert progress[-1] == 1


def test_a_run_with_other_choices_starts_clean(source: Path, tmp_path: Path) -> None:
    stopped_export(source, tmp_path / "export", 9)
    (neighbour,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    plan = plan_export(open_model(source), ExportOptions(WeightScheme(8, 32), shard_bytes=SHARD_BYTES))
    workspace = Exporter(plan, tmp_path / "export", source.name).prepare()
    assert workspace.has_cleaned
    assert workspace.num_resumed == 0
    assert not neighbour.exists()
    assert [path for path in tmp_path.iterdir() if "journal" in path.name] == []


def test_a_changed_source_starts_clean(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    stopped_export(source, tmp_path / "export", 9)
    shutil.rmtree(source)
    write_model(source, seed=1)
    workspace = Exporter(
        plan_export(open_model(source), ExportOptions(INT4, shard_bytes=SHARD_BYTES)), tmp_path / "export", "source"
    ).prepare()
    assert workspace.has_cleaned


def test_exports_of_other_names_are_left_alone(source: Path, tmp_path: Path) -> None:
    stopped_export(source, tmp_path / "export", 9)
    before = set(tmp_path.iterdir())
    export(source, tmp_path / "ex", INT4)
    export(source, tmp_path / "export2", INT4)
    assert before <= set(tmp_path.iterdir())


def num_resumed(exporter: Exporter) -> int:
    """What a run would reuse, without the run."""
    with exporter.lock:
        found = exporter.prepare().num_resumed
        exporter.lock.release()
    return found


def test_a_shard_that_the_journal_does_not_vouch_for_is_written_again(source: Path, tmp_path: Path) -> None:
    exporter = stopped_export(source, tmp_path / "export", 9)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    with shard.open("ab") as file:
        file.write(b"x")
    num_finished = len(list(folder.glob("model-*.safetensors")))
    assert num_resumed(exporter) < num_finished
    exporter = stopped_export(source, tmp_path / "export", 9)
    (journal,) = [path for path in tmp_path.iterdir() if path.name.endswith(".journal")]
    for damaged in ("", "[]", "[" * 10**5, "9" * 5000, json.dumps({"model-00001-of-00002.safetensors": 1})):
        journal.write_text(damaged)
        assert num_resumed(exporter) == 0
    export(source, tmp_path / "export", INT4, shard_bytes=SHARD_BYTES)
    export(source, tmp_path / "undisturbed" / "export", INT4, shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "export") == contents(tmp_path / "undisturbed" / "export")
