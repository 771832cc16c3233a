"""A source that changes while it is exported: nothing is published, whatever file changes and however."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from exports import contents, export, write_model

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.export_workspace import ExportWorkspace
from llmcli.checkpoint.folder import SourceState
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError
from llmcli.quantization.schemes import ExportOptions, WeightScheme

INT8 = WeightScheme(8, 64)
OPTIONS = ExportOptions(INT8, shard_bytes=60_000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def exporter_of(source: Path, destination: Path) -> Exporter:
    state = SourceState.record(source)
    return Exporter(plan_export(open_model(source), OPTIONS, state), destination, source.name)


def run(exporter: Exporter, on_tensor: Callable[[str], None] = lambda name: None) -> int:
    """Export; how many shards an earlier run had finished."""
    workspace = exporter.prepare()
    num_resumed = workspace.num_resumed
    exporter.run(workspace, lambda done, total: None, lambda name, quality: on_tensor(name))
    return num_resumed


def once(change: Callable[[], object], after: int) -> Callable[[str], None]:
    """Does something after a number of tensors."""
    seen: list[str] = []

    def on_tensor(name: str) -> None:
        seen.append(name)
        if len(seen) == after:
            change()

    return on_tensor


def rewritten(path: Path) -> None:
    """The same size and bytes, another time."""
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))


def replaced(path: Path) -> None:
    """The same size and time, another file."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def longer(path: Path) -> None:
    info = path.stat()
    with path.open("ab") as file:
        file.write(b" ")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("change", [rewritten, replaced, longer, Path.unlink])
def test_a_file_that_changes_is_named(
    source: Path, tmp_path: Path, name: str, change: Callable[[Path], object]
) -> None:
    what = "vanished" if change is Path.unlink else "changed"
    with pytest.raises(CheckpointError, match=rf"/{name} has {what} while the model was being read") as caught:
        run(exporter_of(source, tmp_path / "export"), once(lambda: change(source / name), 9))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool.jinja", "LICENSE"])
def test_a_file_that_appears_is_named(source: Path, tmp_path: Path, name: str) -> None:
    (source / name).parent.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=rf"/{name} has appeared while"):
        run(exporter_of(source, tmp_path / "export"), once(lambda: (source / name).write_text(""), 14))
    assert not (tmp_path / "export").exists()
    run(exporter_of(source, tmp_path / "export"))
    assert (tmp_path / "export" / name).exists()


def test_a_change_before_the_work_begins_is_seen(source: Path, tmp_path: Path) -> None:
    exporter = exporter_of(source, tmp_path / "export")
    rewritten(source / "config.json")
    with pytest.raises(CheckpointError, match="config.json has changed"):
        run(exporter)


def test_files_that_do_not_matter_may_change(source: Path, tmp_path: Path) -> None:
    def change() -> None:
        (source / "pytorch_model.bin").write_text("new")
        (source / ".cache.json").write_text("new")
        (source / "model.safetensors.lock").write_text("new")

    run(exporter_of(source, tmp_path / "export"), once(change, 9))
    assert (tmp_path / "export" / "config.json").exists()


def test_shards_of_unchanged_weights_are_taken_up(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer_config.json has changed"):
        run(exporter_of(source, tmp_path / "export"), once(lambda: longer(source / "tokenizer_config.json"), 14))
    assert run(exporter_of(source, tmp_path / "export")) > 3
    export(source, tmp_path / "undisturbed" / "export", INT8, shard_bytes=60_000)
    assert contents(tmp_path / "export") == contents(tmp_path / "undisturbed" / "export")


def test_a_shard_of_bytes_that_were_there_for_a_while_is_not_trusted(source: Path, tmp_path: Path) -> None:
    """The weights are overwritten, and later restored with their old time: the state of the opening."""
    weights = source / "model.safetensors"
    before, info = weights.read_bytes(), weights.stat()
    other = (write_model(tmp_path / "other", seed=1) / "model.safetensors").read_bytes()

    with pytest.raises(CheckpointError, match="model.safetensors has changed"):
        run(exporter_of(source, tmp_path / "export"), once(lambda: weights.write_bytes(other), 6))
    weights.write_bytes(before)
    os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns))
    run(exporter_of(source, tmp_path / "export"))
    export(source, tmp_path / "undisturbed" / "export", INT8, shard_bytes=60_000)
    assert contents(tmp_path / "export") == contents(tmp_path / "undisturbed" / "export")


def test_a_change_while_the_small_files_are_copied_is_seen(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ExportWorkspace.write

    def write_and_change(workspace: ExportWorkspace, name: str, content: bytes) -> None:
        write(workspace, name, content)
        if name == "config.json":  # the last one
            longer(source / "tokenizer.json")

    monkeypatch.setattr(ExportWorkspace, "write", write_and_change)
    with pytest.raises(CheckpointError, match="tokenizer.json has changed"):
        run(exporter_of(source, tmp_path / "export"))
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_an_earlier_run_with_other_files_is_not_taken_up(
    source: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    with pytest.raises(CheckpointError, match="LICENSE has appeared"):
        run(exporter_of(source, tmp_path / "export"), once(lambda: (source / "LICENSE").write_text(""), 14))
    change(source / "model.safetensors")
    assert run(exporter_of(source, tmp_path / "export")) == 0


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [pipe, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("nowhere")]
)
def test_what_is_not_a_regular_file_is_refused_before_any_work(
    source: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (source / "tokenizer.json").unlink()
    make(source / "tokenizer.json")
    with pytest.raises(CheckpointError, match="tokenizer.json is not a regular file and cannot be copied"):
        exporter_of(source, tmp_path / "export")


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = exporter_of(source, tmp_path / "export")
    files = {"tokenizer.json": source / "tokenizer.json"}
    monkeypatch.setattr("llmcli.checkpoint.export.files_to_copy", lambda folder: files)  # it was one a moment ago
    (source / "tokenizer.json").unlink()
    pipe(source / "tokenizer.json")
    monkeypatch.setattr(SourceState, "check", lambda state: None)
    with pytest.raises(CheckpointError, match="tokenizer.json is not a regular file"):
        run(exporter)
    assert not (tmp_path / "export").exists()


def test_a_file_too_long_to_be_copied_stays_behind(source: Path, tmp_path: Path) -> None:
    with (source / "corpus.txt").open("wb") as file:
        file.truncate(257 * 1024**2)
    run(exporter_of(source, tmp_path / "export"))
    assert not (tmp_path / "export" / "corpus.txt").exists()
