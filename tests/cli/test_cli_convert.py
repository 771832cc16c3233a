"""`llmcli convert`, and LoRA adapters on the command line."""

import json
import re
from pathlib import Path

import pytest
import torch
from foreign_models import write_awq, write_fp8, write_gptq
from hub_server import HubServer
from lora_adapters import layer_shapes, write_lora
from results import Llmcli, Result
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.cli.shared import AdapterChoice, parse_adapters
from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation, save_conversation
from llmcli.errors import UsageError
from llmcli.resources import chat_folder


@pytest.fixture(scope="module")
def gptq(wide: Path) -> Path:
    return write_gptq(wide, wide.parent / "gptq")


def test_the_same_text(llmcli: Llmcli, gptq: Path, tmp_path: Path) -> None:
    result = llmcli("convert", gptq, tmp_path / "int4")
    assert (result.exit_code, result.stdout) == (0, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'int4'}: ")
    texts = [
        llmcli("generate", "Hi", "-m", folder, "--seed", 1, "--max-new-tokens", 20).stdout
        for folder in (gptq, tmp_path / "int4")
    ]
    assert texts[0] == texts[1] != ""
    assert "14 layers as int4, groups of 64, stored as GPTQ\n" in llmcli("info", gptq).stdout
    assert "14 layers as int4, groups of 64\n" in llmcli("info", tmp_path / "int4").stdout


def test_an_order_of_inputs_is_told_of(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    ordered = write_gptq(wide, tmp_path / "ordered", desc_act=True)
    result = llmcli("convert", ordered, tmp_path / "int4")
    assert result.exit_code == 0
    assert "warning: inputs have an order of their own (desc_act): transformers loads the model with" in result.stderr
    for folder, name in (
        (ordered, "GPTQ with desc_act"),
        (tmp_path / "int4", "compressed-tensors pack-quantized with g_idx"),
    ):
        assert f"14 layers as int4, groups of 64, stored as {name}\n" in llmcli("info", folder).stdout
    llmcli("convert", tmp_path / "int4", tmp_path / "again").expect_error(2, "pack-quantized already; use it as it is")


def test_a_dry_run_writes_nothing(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    awq = write_awq(wide, tmp_path / "awq", keep="layers.1.mlp")
    before = set(tmp_path.iterdir())
    result = llmcli("convert", awq, tmp_path / "int4", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["kind", "tensors", "before", "after"]
    assert "kept as they are: model.layers.1.mlp." in result.stderr
    assert "vLLM takes asymmetric weights only in versions" in result.stderr
    assert set(tmp_path.iterdir()) == before


def test_refusals(llmcli: Llmcli, wide: Path, gptq: Path, tmp_path: Path) -> None:
    destination = tmp_path / "new"
    llmcli("convert", wide, destination).expect_error(2, "is not quantized, so there is nothing to convert")
    llmcli("convert", write_fp8(wide, tmp_path / "fp8"), destination).expect_error(3, "holds 8-bit floats")
    llmcli("convert", gptq, gptq).expect_error(2, "exists; give another folder, or --force to replace it")
    llmcli("convert", gptq, destination, "--shard-size", "5").expect_error(2, "--shard-size is '5', expected a size")
    llmcli("convert", tmp_path / "none", destination).expect_error(3, "does not exist")
    assert not destination.exists()


# `--adapter`: every command runs the same merged model; the lines about it, and refusals.


SHAPES = layer_shapes(2, 64, 176)
RUN = ("--seed", 1, "--max-new-tokens", 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("adapter") / "base", dtype=torch.bfloat16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_lora(base.parent / "lora", SHAPES)


@pytest.fixture(scope="module")
def merged(base: Path, adapter: Path) -> Path:
    """The model with the adapter, merged by the test."""
    folder = base.parent / "merged"
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    factors = load_file(adapter / "adapter_model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for module in SHAPES:
        a, b = (factors[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"].float() + b @ a * 2).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def text(llmcli: Llmcli, *arguments: object) -> str:
    result = llmcli("generate", "Hi", *arguments, *RUN)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_text_is_that_of_the_merged_model(llmcli: Llmcli, base: Path, adapter: Path, merged: Path) -> None:
    result = llmcli("generate", "Hi", "-m", base, "--adapter", adapter, *RUN)
    assert result.stdout == text(llmcli, "-m", merged) != text(llmcli, "-m", base)
    assert "Adapter lora: LoRA of rank 4, trained on org/base\n" in result.stderr
    assert "base + lora: " in result.stderr
    weighted = llmcli("generate", "Hi", "-m", base, "--adapter", f"{adapter}=-0.5", *RUN)
    assert "base + lora x -0.5: " in weighted.stderr
    assert weighted.stdout != result.stdout


def test_other_commands_run_the_same(llmcli: Llmcli, base: Path, adapter: Path, merged: Path, tmp_path: Path) -> None:
    talk = ("--message", "Hi", "--chat-template", "plain", *RUN)
    said = llmcli("chat", base, "--adapter", adapter, *talk)
    assert said.stdout == llmcli("chat", merged, *talk).stdout != llmcli("chat", base, *talk).stdout
    (tmp_path / "text.txt").write_text("Once upon a time there was a model that had an adapter.")
    measured = llmcli("eval", base, "--adapter", adapter, "--against", merged, "--file", tmp_path / "text.txt")
    assert "base + lora: perplexity" in measured.stdout
    assert "merged: perplexity" in measured.stdout
    assert re.search(r"mean KL divergence 0( \(.*?\))? nats per token, top-1 agreement 100\.00%", measured.stdout)
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "Hi"}\n')
    outputs = [tmp_path / "with.jsonl", tmp_path / "merged.jsonl"]
    llmcli("batch", tmp_path / "in.jsonl", outputs[0], "-m", base, "--adapter", adapter, *RUN)
    llmcli("batch", tmp_path / "in.jsonl", outputs[1], "-m", merged, *RUN)
    lines = [json.loads(path.read_text()) for path in outputs]
    assert lines[0]["text"] == lines[1]["text"] != ""
    llmcli("batch", tmp_path / "in.jsonl", outputs[0], "-m", base, *RUN).expect_error(2, "adapter", "weight 1")


def test_a_resumed_chat_has_its_adapters(
    llmcli: Llmcli, base: Path, adapter: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless others or another model are named; the chat is saved with those in use."""
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    path = chat_folder() / "talk.json"
    path.parent.mkdir(parents=True)
    talk = ("--message", "Hi", "--chat-template", "plain", *RUN)

    def resume(*arguments: object, held_with: tuple[str, ...]) -> tuple[Result, SavedConversation]:
        save_conversation(path, SavedConversation(str(base), Conversation(), held_with), replace=True)
        result = llmcli("chat", *arguments, "--resume", "talk", *talk)
        assert result.exit_code == 0, result.stderr
        return result, load_conversation(path)

    with_it = llmcli("chat", merged, *talk).stdout
    again, kept = resume(held_with=(str(adapter),))
    assert (again.stdout, kept.adapters, "This chat was held" in again.stderr) == (with_it, (str(adapter),), False)
    assert resume(base, held_with=(str(adapter),))[0].stdout == with_it
    half = f"{adapter}=0.5"
    other, kept = resume("--adapter", half, held_with=(str(adapter),))
    assert f"This chat was held with {adapter}; it is resumed with {half}" in other.stderr
    assert (kept.adapters, other.stdout == with_it) == ((half,), False)
    assert resume(held_with=(half,))[0].stdout == other.stdout
    elsewhere, kept = resume(merged, held_with=(str(adapter),))
    assert f"This chat was held with {adapter}; it is resumed with no adapter" in elsewhere.stderr
    assert (elsewhere.stdout, kept.adapters) == (with_it, ())


def test_quantize_merges_first(llmcli: Llmcli, base: Path, adapter: Path, merged: Path, tmp_path: Path) -> None:
    both = [(base, tmp_path / "a", "--adapter", adapter), (merged, tmp_path / "b")]
    for arguments in both:
        assert llmcli("quantize", *arguments, "--bits", 4, "--group-size", 32).exit_code == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "a", tmp_path / "b")]
    assert weights[0] == weights[1]
    card = json.loads((tmp_path / "a" / "quantization.json").read_text())
    (entry,) = card["adapters"]
    assert (entry["name"], entry["weight"], len(entry["sha256"])) == (str(adapter), 1.0, 64)
    assert "| LoRA adapters added before | lora |" in (tmp_path / "a" / "README.md").read_text()
    assert json.loads((tmp_path / "b" / "quantization.json").read_text())["adapters"] == []
    result = llmcli("quantize", base, tmp_path / "c", "--adapter", adapter, "--eval", "builtin", "--dry-run")
    assert "Adapter lora: LoRA of rank 4" in result.stderr
    refused = llmcli("generate", "Hi", "-m", tmp_path / "a", "--adapter", adapter)
    refused.expect_error(3, "is quantized, and an adapter is added to 16-bit weights", f"--adapter {adapter}`")


def test_a_receipt_has_the_adapters(llmcli: Llmcli, base: Path, tmp_path: Path) -> None:
    adapter = write_lora(tmp_path / "lora", SHAPES, seed=3)
    receipt = tmp_path / "receipt.json"
    text(llmcli, "-m", base, "--adapter", f"{adapter}=0.5", "--receipt", receipt)
    model = json.loads(receipt.read_text())["model"]
    assert model["adapters"] == [{"name": str(adapter), "commit": None, "weight": 0.5}]
    assert {"adapter 1 adapter_config.json", "adapter 1 adapter_model.safetensors"} <= model["files"].keys()
    same = llmcli("replay", receipt)
    assert (same.exit_code, "Same text as in the receipt" in same.stderr) == (0, True)
    moved = adapter.rename(tmp_path / "moved")
    llmcli("replay", receipt).expect_error(3, "was made with the adapter", "give adapters with --adapter")
    assert llmcli("replay", receipt, "--adapter", f"{moved}=0.5").exit_code == 0
    other = llmcli("replay", receipt, "--adapter", moved)
    assert "differs: adapter 1 " in other.stderr
    text(llmcli, "-m", base, "--receipt", receipt, "--force")
    assert "adapters" not in json.loads(receipt.read_text())["model"]


def test_values() -> None:
    assert parse_adapters(None) == ()
    assert parse_adapters(["a", "b=0.5", "c=-1e-2"]) == (
        AdapterChoice("a"),
        AdapterChoice("b", 0.5),
        AdapterChoice("c", -0.01),
    )
    for value in ("a=", "a=x", "a=0", "a=nan", "a=inf", "=1"):
        with pytest.raises(UsageError, match="--adapter is"):
            parse_adapters([value])
    with pytest.raises(UsageError, match="--adapter names 'a' twice"):
        parse_adapters(["a", "a=2"])


def test_paths_with_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "x=0.5").mkdir()
    assert parse_adapters([f"{tmp_path}/x=0.5"]) == (AdapterChoice(f"{tmp_path}/x=0.5"),)
    assert parse_adapters([f"{tmp_path}/x=0.5=2"]) == (AdapterChoice(f"{tmp_path}/x=0.5", 2.0),)
    assert parse_adapters([f"{tmp_path}/x"]) == (AdapterChoice(f"{tmp_path}/x"),)


def test_an_adapter_on_the_hub(llmcli: Llmcli, base: Path, adapter: Path, merged: Path, hub: HubServer) -> None:
    hub.add_model("org/lora", adapter, **{"README.md": b"", "checkpoint-1/optimizer.pt": b"no"})
    result = llmcli("generate", "Hi", "-m", base, "--adapter", "org/lora", *RUN)
    assert result.stdout == text(llmcli, "-m", merged)
    assert "downloading org/lora" in result.stderr
    assert "Adapter org/lora: LoRA of rank 4" in result.stderr
    assert hub.requested_files() == {"adapter_config.json", "adapter_model.safetensors"}
    hub.requests.clear()
    assert text(llmcli, "-m", base, "--adapter", "org/lora=1") == result.stdout
    assert hub.requests == []  # it is in the cache
    hub.add_model("org/model", base)
    refused = llmcli("generate", "Hi", "-m", base, "--adapter", "org/model")
    refused.expect_error(3, "org/model is a model, expected an adapter")
    llmcli("generate", "Hi", "-m", "org/lora").expect_error(3, "holds a LoRA adapter", "`--adapter`")
