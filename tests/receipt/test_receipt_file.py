"""Receipts: files, what is described, comparisons, the machine, and the codec."""

import json
import math
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from receipt.some_receipt import RECEIPT, changed
from tiny_models import write_tiny_llama

from llmcli import __version__
from llmcli.checkpoint.model import open_model
from llmcli.differences import Difference, find_differences
from llmcli.engine.request import Request
from llmcli.errors import UsageError
from llmcli.kernels import environment
from llmcli.kernels.environment import Card, Driver
from llmcli.kernels.sources import kernels_folder, sources_digest
from llmcli.receipt import describe
from llmcli.receipt.describe import describe_run, sampler_of
from llmcli.receipt.receipt import (
    FileFacts,
    LoadedReceipt,
    MalformedError,
    ModelFacts,
    Range,
    Receipt,
    SampleFacts,
    StringForm,
    compare_receipts,
    compare_samples,
    from_json,
    load_receipt,
    save_receipt,
    to_json,
)
from llmcli.runners.base import Arithmetic

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "receipt.json"
    save_receipt(path, RECEIPT, replace=False)
    return path


def edit(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_round_trip(path: Path) -> None:
    assert load_receipt(path) == LoadedReceipt(RECEIPT, is_unchanged=True)


def test_people_and_other_programs_can_read_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"token_ids": [1, 22, 333]' in text
    assert "Grüße" in text
    assert "\x1b" not in text

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(text, parse_constant=refuse)["sampling"]["logit_bias"][0] == [3, "-inf"]


def test_equal_runs_have_equal_files(path: Path, tmp_path: Path) -> None:
    save_receipt(tmp_path / "again.json", RECEIPT, replace=False)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_only_the_owner_can_read_it_and_only_a_receipt_is_replaced(path: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="exists; replace it with --force"):
        save_receipt(path, RECEIPT, replace=False)
    save_receipt(path, changed("runner", threads=3), replace=True)
    other = tmp_path / "notes.json"
    other.write_text("{}")
    with pytest.raises(UsageError, match="exists and is not a receipt of llmcli"):
        save_receipt(other, RECEIPT, replace=True)
    assert other.read_text() == "{}"


def test_a_name_that_is_not_utf8_is_written_as_far_as_it_goes(tmp_path: Path) -> None:
    name = os.fsdecode(b"m\xff")
    path = tmp_path / "receipt.json"
    save_receipt(path, replace(RECEIPT, model=ModelFacts(name, None, RECEIPT.model.files)), replace=False)
    loaded = load_receipt(path)
    assert loaded.is_unchanged
    assert loaded.receipt.model.name == "m?"


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["sampling"].update(seed=4),
        lambda content: content["samples"][0].update(text="five"),
        lambda content: content["program"].update(torch="2.11.1"),
        lambda content: content.pop("sha256"),
        lambda content: content.update(sha256="0" * 64),
        lambda content: content.update(sha256=None),
    ],
)
def test_an_edit_is_seen(path: Path, change: Change) -> None:
    edit(path, change)
    assert not load_receipt(path).is_unchanged


def test_another_layout_of_the_same_content_is_no_edit(path: Path) -> None:
    edit(path, lambda content: None)
    assert load_receipt(path).is_unchanged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("format"), 'it lacks the line "format": "llmcli receipt"'),
        (lambda content: content.update(version=2), "has version 2 of the format, but this llmcli reads version 1"),
        (lambda content: content.update(version=True), "has version True"),
        (lambda content: content.pop("model"), "is not a valid receipt: model is missing"),
        (lambda content: content.update(extra=1), "extra is an unknown key"),
        (lambda content: content["model"].update(name=""), "model.name is '', expected a string, not empty"),
        (lambda content: content["model"].update(name="a\0"), r"model.name is 'a\x00'"),
        (lambda content: content["model"].update(commit="../x"), "model.commit is '../x', expected 40 hexadecimal"),
        (lambda content: content["model"]["files"]["config.json"].update(size=-1), "files.config.json.size is -1"),
        (lambda content: content["machine"].update(card=["x"]), "machine.card is ['x'], expected a string"),
        (lambda content: content["runner"].update(device="cuda:0; rm"), "runner.device is 'cuda:0; rm'"),
        (lambda content: content["runner"].update(threads=10**6), "runner.threads is 1000000, expected an integer"),
        (lambda content: content["prompt"].update(token_ids=[]), "prompt.token_ids is empty"),
        (lambda content: content["prompt"].update(token_ids=[-1]), "prompt.token_ids[0] is -1"),
        (lambda content: content["sampling"].update(seed=2**64), "sampling.seed is 18446744073709551616"),
        (lambda content: content["stopping"].update(stop_strings=[""]), "stopping.stop_strings[0] is ''"),
        (lambda content: content["stopping"].update(max_new_tokens=62), "runner.context is 64, and prompt and new"),
        (lambda content: content.update(samples=[]), "samples holds 0, expected 1 to 10000"),
        (lambda content: content["samples"][1].update(sample=1), "samples holds the same sample twice"),
        (lambda content: content["samples"][1].update(sample=0), "samples[1].sample is 0"),
        (lambda content: content["samples"][0].update(finish_reason="interrupted"), "finish_reason is 'interrupted'"),
    ],
)
def test_what_is_no_receipt_is_refused_in_words(path: Path, change: Change, message: str) -> None:
    edit(path, change)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_receipt(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content, message in (("[]", "holds a JSON list"), ("{", "is not valid JSON"), ("\xff", "is not valid JSON")):
        (tmp_path / "x").write_text(content, encoding="latin-1")
        with pytest.raises(UsageError, match=message):
            load_receipt(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file, expected a receipt"):
        load_receipt(tmp_path / "pipe")


def test_a_receipt_without_a_schema_is_as_before_there_were_schemas(tmp_path: Path) -> None:
    save_receipt(path := tmp_path / "receipt.json", RECEIPT, replace=False)
    assert "schema" not in json.loads(path.read_text())
    assert load_receipt(path).receipt == RECEIPT


def test_any_receipt_has_all_keys() -> None:
    """A new field needs a default or a new version of the format; else old files are refused."""
    assert list(Receipt.__dataclass_fields__) == [
        "model", "program", "machine", "runner", "prompt", "sampling", "stopping", "samples", "schema"
    ]  # fmt: skip


# From a run to its receipt and back to the sampler, on the CPU and on a card.


def described(folder: Path, arithmetic: Arithmetic, card: int | None) -> Receipt:
    runner: Any = SimpleNamespace(
        arithmetic=arithmetic, description="Some device", limits=SimpleNamespace(max_seq_len=64)
    )
    request = Request((1, 22, 333), sampler_of(RECEIPT), (0, 2), 20, ("THE END", "\n\n"), at_start=True)
    parts = (RECEIPT.prompt, request, RECEIPT.model.files, RECEIPT.samples)
    return describe_run("org/name", open_model(folder), runner, card, *parts)


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    found = described(folder, Arithmetic("float32", "int8", 2, ("torch",)), None)
    assert (found.sampling, found.stopping, found.samples) == (RECEIPT.sampling, RECEIPT.stopping, RECEIPT.samples)
    runner = found.runner
    assert (runner.device, runner.dtype, runner.kv_cache, runner.threads) == ("cpu", "float32", "int8", 2)
    assert (runner.description, runner.context) == ("Some device", 64)
    assert set(found.program) == {"llmcli", "Python", "numpy", "torch", "sentencepiece", "jinja2"}
    assert found.model.commit is None


def test_libraries_are_those_of_the_runner(tmp_path: Path) -> None:
    """Not those that happen to be imported, such as torch here."""
    folder = write_tiny_llama(tmp_path / "model")
    assert "torch" not in described(folder, Arithmetic("float32", "auto", 1, ("numpy",)), None).program


def test_a_run_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "find_driver", lambda: None)
    folder = write_tiny_llama(tmp_path / "model")
    found = described(folder, Arithmetic("auto", "auto", None, ("cupy",)), 1)
    assert (found.runner.device, found.runner.dtype, found.runner.threads) == ("cuda:1", "auto", None)
    assert {"NVRTC", "cuBLAS", "kernels"} <= set(found.program)
    assert "torch" not in found.program


def test_parameters_of_another_version_are_refused() -> None:
    for parameters, message in (
        ({**RECEIPT.sampling.parameters, "top_q": 1}, "top_q is unknown, expected temperature"),
        ({"temperature": 1}, "dry_allowed_length is missing"),
    ):
        sampling: Any = SimpleNamespace(parameters=parameters)
        receipt: Any = SimpleNamespace(sampling=sampling)
        with pytest.raises(UsageError, match=f"sampling.parameters.{message}"):
            sampler_of(receipt)


# Each difference between two receipts is named.


FILES = RECEIPT.model.files


@pytest.mark.parametrize(
    ("now", "name"),
    [
        (changed("model", commit="d" * 40), "commit"),
        (changed("model", files={**FILES, "m.safetensors": FileFacts(9, "e" * 64)}), "file m.safetensors"),
        (changed("model", files={"config.json": FILES["config.json"]}), "file m.safetensors"),
        (changed("model", files={**FILES, "added_tokens.json": FileFacts(2, "e" * 64)}), "file added_tokens.json"),
        (replace(RECEIPT, program={**RECEIPT.program, "torch": "2.12.0"}), "torch"),
        (replace(RECEIPT, program={**RECEIPT.program, "llmcli": "0.2.0"}), "llmcli"),
        (replace(RECEIPT, machine={**RECEIPT.machine, "instructions": "avx2"}), "instructions"),
        (replace(RECEIPT, machine={**RECEIPT.machine, "variable MKL_CBWR": "AVX2"}), "variable MKL_CBWR"),
        (changed("runner", threads=3), "runner threads"),
        (changed("runner", dtype="bfloat16"), "runner dtype"),
        (changed("runner", description="CPU"), "runner description"),
        (changed("runner", context=65), "runner context"),
        (changed("prompt", text="Gruß"), "prompt text"),
        (changed("prompt", system=None), "prompt system"),
        (changed("prompt", token_ids=(1, 22)), "prompt token_ids"),
        (changed("sampling", seed=1), "seed"),
        (changed("sampling", parameters={**RECEIPT.sampling.parameters, "top_k": 41}), "top_k"),
        (changed("sampling", order=("top_k", "temperature")), "order"),
        (changed("sampling", logit_bias=()), "logit_bias"),
        (changed("stopping", max_new_tokens=None), "max_new_tokens"),
        (changed("stopping", stop_strings=()), "stop_strings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_single_change_is_named_and_nothing_else(now: Receipt, name: str) -> None:
    assert [difference.name for difference in compare_receipts(RECEIPT, now)] == [name]


def test_the_texts_and_the_model_s_name_are_no_difference() -> None:
    assert compare_receipts(RECEIPT, changed("model", name="elsewhere")) == []
    assert compare_receipts(RECEIPT, replace(RECEIPT, samples=RECEIPT.samples[:1])) == []


def test_the_first_token_that_differs() -> None:
    def sample(*token_ids: int) -> SampleFacts:
        return SampleFacts(1, token_ids, "".join(map(str, token_ids)), "length")

    for then, now, first, tokens in (
        (sample(1, 2, 3), sample(1, 5, 3), 1, (2, 5)),
        (sample(1, 2), sample(1, 2, 3), 2, (None, 3)),
        (sample(1, 2, 3), sample(1, 2), 2, (3, None)),
    ):
        (found,) = compare_samples([then], [now])
        assert not found.is_same
        assert (found.first, found.tokens_at_first()) == (first, tokens)
    (found,) = compare_samples([sample(1)], [sample(1)])
    assert found.is_same
    assert found.first is None


@pytest.mark.parametrize("values", [{"text": "other"}, {"finish_reason": "stop"}])
def test_equal_tokens_are_not_all(values: dict[str, str]) -> None:
    (then, _) = RECEIPT.samples
    (found,) = compare_samples([then], [replace(then, **values)])
    assert not found.is_same
    assert found.first is None


def test_samples_are_found_by_their_numbers() -> None:
    first, third = RECEIPT.samples
    assert [item.now for item in compare_samples([third, first], [third])] == [third]
    assert [item.now for item in compare_samples([third, first], [third, first])] == [first, third]


def test_differences_in_words() -> None:
    (short,) = find_differences({"a": 1, "b": "x"}, {"a": 1, "b": "y"})
    assert str(short) == "b 'x', now 'y'"
    assert str(Difference("stop", ["a"], None)) == "stop ['a'], now unset"
    many = Difference("ids", list(range(10)), [0, 1, 2, *range(4, 12)])
    assert str(many) == "ids has 10 entries, now 11; they differ from entry 4 on"


# A receipt's facts about program and machine, tested on any machine.


X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu sse2 avx2 fma avx512f vmx\n\nprocessor\t: 1\n"
ON_CARD = Arithmetic("float16", "auto", None, ("cupy",))
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm crc32\n"


def test_versions_are_those_of_what_computes() -> None:
    arithmetic = Arithmetic("bfloat16", "auto", 1, ("torch",), cpu_sources={"codes_product": "12ab"})
    described = describe.describe_program(arithmetic, ["tokenizers"])
    assert list(described) == ["llmcli", "Python", "numpy", "tokenizers", "torch", "kernels/cpu/codes_product.cpp"]
    assert described["kernels/cpu/codes_product.cpp"] == "sha256 12ab"
    assert described["llmcli"] == __version__
    assert described["Python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert described["numpy"] == np.__version__
    assert described["torch"] == metadata.version("torch")
    assert describe.describe_program(arithmetic, ["no-such-package"])["no-such-package"] == "unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(X86, ("AMD EPYC 9654", "avx2 avx512f fma")), (ARM, (platform.processor() or "unknown", "asimd i8mm"))],
)
def test_the_processor(text: str, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(describe, "_CPU_INFO", tmp_path / "cpuinfo")
    described = describe.describe_machine(None)
    assert (described["processor"], described["instructions"]) == expected
    assert described["system"] == f"{platform.system()} {platform.machine()}"


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "_CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(describe.platform, "processor", str)
    described = describe.describe_machine(None)
    assert (described["processor"], described["instructions"]) == ("unknown", "")


def test_variables_that_change_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert "variable ATEN_CPU_CAPABILITY" not in describe.describe_machine(None)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    described = describe.describe_machine(None)
    assert described["variable ATEN_CPU_CAPABILITY"] == "default"
    assert "hf_secret" not in str(described)


def test_a_card_and_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("580.159.03\n")
    cards = (Card(0, "NVIDIA One", (8, 0), 1), Card(1, "NVIDIA Two", (9, 0), 1))
    monkeypatch.setattr(describe, "find_driver", lambda: Driver((13, 0), cards))
    monkeypatch.setattr(environment, "_DRIVER_VERSION", tmp_path / "version")
    described = describe.describe_machine(1)
    names = ("card", "compute capability", "driver", "driver's CUDA")
    assert [described[name] for name in names] == ["NVIDIA Two", "9.0", "580.159.03", "13.0"]
    assert "card" not in describe.describe_machine(None)

    versions = {"cupy-cuda13x": "14.2.0", "nvidia-cuda-nvrtc": "13.0.88", "nvidia-cublas": "13.1.0", "numpy": "2.0.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    program = describe.describe_program(ON_CARD, [])
    assert program["kernels"] == f"sha256 {sources_digest()}"
    found = {name: value for name, value in program.items() if name not in ("llmcli", "Python", "kernels")}
    assert found == {"numpy": "2.0.0", "cupy-cuda13x": "14.2.0", "NVRTC": "13.0.88", "cuBLAS": "13.1.0"}
    del versions["nvidia-cublas"]
    assert describe.describe_program(ON_CARD, [])["cuBLAS"] == "the system's"


def test_every_kernel_source_counts(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    (folder / "common").mkdir(parents=True)
    (folder / "a.cu").write_text("one")
    (folder / "common" / "b.cuh").write_text("two")
    (folder / "README.md").write_text("three")
    digests = {sources_digest(folder)}
    (folder / "README.md").write_text("four")
    (folder / "studies").mkdir()
    (folder / "studies" / "d.cu").write_text("no part of the engine")
    assert sources_digest(folder) in digests
    for name, text in (("a.cu", "onE"), ("common/b.cuh", "twO"), ("c.cu", "")):
        (folder / name).write_text(text)
        digests.add(sources_digest(folder))
    (folder / "c.cu").rename(folder / "d.cu")
    digests.add(sources_digest(folder))
    assert len(digests) == 5
    assert sources_digest() == sources_digest(kernels_folder())


# Dataclasses as JSON: nothing is lost, and what does not fit is refused by the name of its key.


@dataclass(frozen=True)
class Inner:
    number: Annotated[int, Range(1, 9)]
    word: Annotated[str, StringForm("[a-z]+", "small letters")] | None


@dataclass(frozen=True)
class Outer:
    text: str
    is_on: bool
    ratios: Mapping[str, float]
    pairs: tuple[tuple[int, float], ...]
    inner: Inner
    inners: tuple[Inner, ...]
    kind: Literal["a", "b"]


VALUE = Outer("ä\n", True, {"x": 0.5, "y": 2}, ((1, -math.inf), (2, -0.25)), Inner(3, None), (Inner(9, "z"),), "b")


def test_round_trip_through_text() -> None:
    text = json.dumps(to_json(VALUE), allow_nan=False)
    found = from_json(Outer, json.loads(text))
    assert found == VALUE
    assert [type(value) for value in found.ratios.values()] == [float, int]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("text",), 5, "text is 5, expected a string"),
        (("is_on",), 1, "is_on is 1, expected true or false"),
        (("ratios",), [], "ratios is [], expected an object"),
        (("ratios", "x"), "inf", "ratios.x is 'inf', expected a finite number"),
        (("ratios", "x"), math.nan, "ratios.x is nan, expected a finite number"),
        (("ratios", "x"), True, "ratios.x is true, expected a finite number"),
        (("pairs",), {}, "pairs is {}, expected a list"),
        (("pairs", 1), [1], "pairs[1] is [1], expected a list of 2"),
        (("pairs", 0, 0), 1.0, "pairs[0][0] is 1.0, expected an integer"),
        (("inner",), None, "inner is null, expected an object"),
        (("inner", "number"), 10, "inner.number is 10, expected an integer from 1 to 9"),
        (("inner", "number"), True, "inner.number is true, expected an integer from 1 to 9"),
        (("inner", "number"), 1.0, "inner.number is 1.0, expected an integer from 1 to 9"),
        (("inners", 0, "word"), "a\n", r"inners[0].word is 'a\n', expected small letters"),
        (("inners", 0, "word"), 1, "inners[0].word is 1, expected small letters"),
        (("inners", 0, "more"), 1, "inners[0].more is an unknown key, expected number, word"),
        (("kind",), "c", "kind is 'c', expected one of a, b"),
        (("kind",), ["a"], "kind is ['a'], expected one of a, b"),
    ],
)
def test_what_does_not_fit_is_named(path: tuple[Any, ...], value: object, message: str) -> None:
    content = to_json(VALUE)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(MalformedError, match=f"^{re.escape(message)}"):
        from_json(Outer, content)


def test_a_missing_key_and_another_root() -> None:
    content = to_json(VALUE)
    del content["inner"]["word"]
    with pytest.raises(MalformedError, match=r"^inner\.word is missing$"):
        from_json(Outer, content)
    with pytest.raises(MalformedError, match=r"^the file is \[\], expected an object$"):
        from_json(Outer, [])
