"""What `import llmcli` costs and names, the errors of `llmcli.load`, its end, and the examples of its page."""

import ast
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guide.guide_pages import GUIDE, ROOT, fenced

import llmcli
from llmcli.batch.input import KEYS
from llmcli.cli.terminal import terminal
from llmcli.engine.scheduler import Scheduler
from llmcli.errors import CheckpointError, DeviceError, UsageError

IMPORT = """
import json, sys, time
before, start = set(sys.modules), time.process_time()
import llmcli
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_an_import_is_quick_and_imports_nothing_heavy() -> None:
    run = [sys.executable, "-c", IMPORT]
    told = [json.loads(subprocess.run(run, capture_output=True, check=True, cwd=ROOT).stdout) for _ in range(3)]
    assert min(seconds for seconds, _ in told) < 0.05
    assert {name for name in told[0][1] if name.startswith("llmcli")} == {"llmcli"}
    assert {"torch", "numpy", "typer", "rich"}.isdisjoint(told[0][1])


def test_the_names_are_few_typed_and_there() -> None:
    tree = ast.parse((ROOT / "llmcli" / "__init__.pyi").read_text(encoding="utf-8"))
    typed = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(llmcli.__all__) <= set(dir(llmcli))
    assert len(typed) <= 10
    assert all(getattr(llmcli, name).__doc__ for name in typed)
    assert (ROOT / "llmcli" / "py.typed").is_file()
    keys = set(llmcli.api.Options.__annotations__) - {"logprobs"}
    assert keys == set(KEYS) - {"prompt", "messages", "id"}
    with pytest.raises(AttributeError, match="no_such"):
        _ = llmcli.no_such


BAD_CALLS: list[tuple[Callable[[llmcli.Model], Any], str]] = [
    (lambda model: model.generate("Once", seed=-1), "seed"),
    (lambda model: model.generate(5), "text is 5"),
    (lambda model: model.generate("Once", schema={}, regex="a"), "schema and regex"),
    (lambda model: model.generate("Once", regex="("), "regex"),
    (lambda model: model.generate("Once " * 2000), "the context holds 1024"),
    (lambda model: model.stream("Once", max_new_tokens=0), "max_new_tokens"),
    (lambda model: model.chat([{"role": "user"}]), "content"),
    (lambda model: model.batch(["Once", "Once " * 2000]), "prompt 2: the prompt has"),
    (lambda model: model.batch(["Once", [{"role": "user"}]]), "prompt 2: messages"),
    (lambda model: model.batch("Once"), "prompts is one text, expected a list"),
    (lambda model: model.generate("Once", max_tokens=5), "unknown key 'max_tokens'; did you mean max_new_tokens?"),
    (lambda model: model.logprobs("Once " * 2000), "the context holds 1024"),
]


@pytest.mark.parametrize(("call", "part"), BAD_CALLS, ids=[part for _, part in BAD_CALLS])
def test_what_cannot_be_is_our_error(model: llmcli.Model, call: Callable[[llmcli.Model], Any], part: str) -> None:
    with pytest.raises(UsageError, match=part) as caught:
        call(model)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_loaded_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.cli.device_choice.find_driver", lambda: None)
    for options, kind, part in [
        ({"name": tmp_path}, CheckpointError, "config.json"),
        ({"device": "cuda"}, DeviceError, "no NVIDIA driver"),
        ({"device": "gpu"}, UsageError, "device"),
        ({"device": "cpu", "context": 10**6}, UsageError, "context"),
        ({"device": "cpu", "rows": 0}, UsageError, "rows is 0"),
        ({"device": "cpu", "drafts": ""}, UsageError, "draft"),
    ]:
        with pytest.raises(kind, match=part):
            llmcli.load(**options)


def test_a_closed_model_is_gone() -> None:
    with llmcli.load(device="cpu") as model:
        runner = weakref.ref(model._engine().runner)
        stream = model.stream("Once upon a time", seed=1)
        next(stream)
        assert runner() is not None
    assert runner() is None
    for call in (lambda: next(stream), lambda: model.generate("Once"), lambda: model.logprobs("Once upon")):
        with pytest.raises(UsageError, match="closed"):
            call()
    model.close()


@pytest.mark.cuda
def test_closing_frees_the_card() -> None:
    from llmcli.runners.cuda.step.arena import free_bytes

    llmcli.load(device="cuda", rows=1).close()  # the context, kernels and libraries stay
    before = free_bytes()
    model = llmcli.load(device="cuda", rows=8)
    assert str(model.generate("Once upon a time", seed=1, max_new_tokens=8))
    assert free_bytes() < before - 2**20
    model.close()
    assert free_bytes() >= before - 2**20


def test_after_a_ctrl_c_the_model_can_be_used_again_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Scheduler.step, iter(range(4))

    def interrupted(scheduler: Scheduler) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step(scheduler)

    with llmcli.load(device="cpu") as model:
        expected = model.generate("Once upon a time", seed=1, max_new_tokens=10)
        runner = weakref.ref(model._engine().runner)
        stream, waiting = (model.stream("The little dog", seed=1) for _ in range(2))
        next(stream)
        monkeypatch.setattr(Scheduler, "step", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            model.generate("Once upon a time", seed=1)
        monkeypatch.setattr(Scheduler, "step", step)
        assert model._engine().is_idle
        assert model.generate("Once upon a time", seed=1, max_new_tokens=10) == expected
        *_, last = stream
        assert getattr(last.result, "finish_reason", None) == "interrupted"
        assert next(waiting).token_id is not None  # it begins only now
    assert runner() is None, caught.traceback  # which a notebook keeps


@pytest.mark.parametrize("was_quiet", [False, True])
def test_nothing_is_printed_unless_asked_for(
    was_quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "is_quiet", was_quiet)  # as a command in this process may have left it
    llmcli.load(device="cpu").close()
    assert capsys.readouterr() == ("", "")
    llmcli.load(device="cpu", quiet=False).close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "storyteller: CPU" in err


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    examples = fenced((GUIDE / "python.md").read_text(encoding="utf-8"), "python")
    for example in examples:
        exec(example, names)
    printed = capsys.readouterr().out
    assert str(names["story"]) in printed
    assert names["animal"].text in (" dog", " cat")
    assert len(names["texts"]) == 2
    assert "temprature" in printed
    names["model"].close()
