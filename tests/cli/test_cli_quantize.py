"""`llmcli quantize`: its output, its refusals and its result."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from results import Llmcli
from tiny_models import WIDE, write_tiny_llama

from llmcli.checkpoint import export


def test_default_export(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    result = llmcli("quantize", wide, tmp_path / "int8")
    assert (result.exit_code, result.stdout) == (0, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'int8'}: ")
    assert "-> " in line
    assert "largest error 0." in line
    card = json.loads((tmp_path / "int8" / "quantization.json").read_text())
    assert (card["num_bits"], card["group_size"], card["symmetric"], card["head_bits"]) == (8, 128, True, None)


def test_every_choice(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    flags = ("--bits", 4, "--group-size", 32, "--head", "int8", "--skip", "layers.1.self_attn", "--skip", "down")
    result = llmcli("quantize", wide, tmp_path / "int4", *flags, "--shard-size", "0.1MB")
    assert result.exit_code == 0
    assert "kept as they are: model.layers.0.mlp.down_proj, model.layers.1.self_attn.q_proj" in result.stderr
    assert "warning: vLLM takes a quantized output head only" in result.stderr
    card = json.loads((tmp_path / "int4" / "quantization.json").read_text())
    assert (card["num_bits"], card["group_size"], card["head_bits"]) == (4, 32, 8)
    assert len(card["kept_layers"]) == 6
    assert len(list((tmp_path / "int4").glob("model-*.safetensors"))) > 1
    result = llmcli("quantize", wide, tmp_path / "channel", "--bits", 4, "--group-size", "channel", "--asymmetric")
    assert result.exit_code == 0
    card = json.loads((tmp_path / "channel" / "quantization.json").read_text())
    assert (card["group_size"], card["symmetric"]) == (None, False)


def test_verbose_shows_every_layer_and_quiet_leaves_warnings(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    lines = llmcli("quantize", wide, tmp_path / "skipped", "--skip", "q_proj", "--quiet").stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warning"]
    lines = llmcli("quantize", wide, tmp_path / "int8", "--verbose").stderr.splitlines()
    assert len(lines) == 15
    assert lines[0].startswith("model.layers.0.self_attn.q_proj: error 0.")
    assert "at the ends of the range" in lines[0]


def test_dry_run_writes_nothing(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    result = llmcli("quantize", wide, tmp_path / "int8", "--dry-run", "--bits", 4)
    assert result.exit_code == 0
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in result.stdout.splitlines()}
    assert list(rows) == ["kind", "embedding", "norms and biases", "attention", "MLP", "output head", "all"]
    assert result.stdout.splitlines()[-1].split()[-4:] == ["722.2", "kB", "309.0", "kB"]
    assert list(tmp_path.iterdir()) == []


def test_layers_that_the_group_does_not_divide_are_listed(llmcli: Llmcli, tmp_path: Path) -> None:
    narrow = write_tiny_llama(tmp_path / "model", **{**WIDE, "intermediate_size": 250})
    result = llmcli("quantize", narrow, tmp_path / "int8")
    (line,) = [line for line in result.stderr.splitlines() if "does not divide" in line]
    assert line.startswith(
        "warning: group size 128 does not divide the input size of these layers, which get one scale per row: "
    )
    assert line.endswith("model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj")


def test_a_head_that_leaves_the_embedding_is_announced(llmcli: Llmcli, tmp_path: Path) -> None:
    tied = write_tiny_llama(tmp_path / "model", dtype=torch.bfloat16, tie_word_embeddings=True, **WIDE)
    result = llmcli("quantize", tied, tmp_path / "int8", "--head", "int8")
    assert "the output head is now stored apart from the embedding: 41.6 kB more" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--bits", 3), "--bits is 3, expected 8 or 4"),
        (("--group-size", 16), "--group-size is '16', expected one of 32, 64, 128, channel"),
        (("--head", "int4"), "--head is 'int4', expected one of keep, int8"),
        (("--asymmetric",), "--asymmetric is for --bits 4"),
        (("--asymmetric", "--bits", 4, "--head", "int8"), "--asymmetric and --head int8 cannot be combined"),
        (("--shard-size", "5"), "--shard-size is '5', expected a size such as 5GB"),
        (("--shard-size", "0.0GB"), "--shard-size is '0.0GB'"),
        (("--shard-size", "9" * 5000 + "GB"), "--shard-size is '999"),
        (("--bits", "9" * 5000), "--bits: expected"),
        (("--skip", "(.+)+$^"), "--skip '(.+)+$^' takes longer than 3 s to match"),
        (("--skip", "a" * 5000), "is longer than 4000 characters"),
        (("--skip", "["), "--skip '[' is not a regular expression"),
        (("--skip", "banana"), "--skip 'banana' matches no linear layer"),
    ],
)
def test_flags_that_cannot_be(
    llmcli: Llmcli, wide: Path, tmp_path: Path, flags: tuple[object, ...], message: str
) -> None:
    llmcli("quantize", wide, tmp_path / "int8", *flags).expect_error(2, message)
    assert list(tmp_path.iterdir()) == []


def test_refusals_have_exit_codes(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    llmcli("quantize", wide, wide).expect_error(2, "exists")
    llmcli("quantize", wide, wide, "--force").expect_error(2, "is the source itself")
    llmcli("quantize", wide, wide / "inside").expect_error(2, "is inside the source")
    llmcli("quantize", tmp_path / "none", tmp_path / "int8").expect_error(3, "does not exist")
    llmcli("quantize", wide, tmp_path / "int8", "--quiet")
    llmcli("quantize", tmp_path / "int8", tmp_path / "twice").expect_error(3, "quantized")
    llmcli("quantize", wide, tmp_path / "int8").expect_error(2, "exists; give another folder, or --force")
    assert llmcli("quantize", wide, tmp_path / "int8", "--force").exit_code == 0


@pytest.mark.parametrize("inside", ["", "notes"])
def test_the_current_folder_is_not_replaced(
    llmcli: Llmcli, wide: Path, tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell would be left in a removed folder."""
    here = shutil.copytree(wide, tmp_path / "here")
    (here / "notes").mkdir()
    monkeypatch.chdir(here / inside)
    for destination in (here, "."):
        if destination == "." and inside:
            continue
        llmcli("quantize", wide, destination, "--force").expect_error(2, "the current folder")
    assert (here / "notes").is_dir()


def test_a_destination_is_refused_before_anything_is_downloaded(llmcli: Llmcli, tmp_path: Path) -> None:
    llmcli("quantize", "no-such-org/no-such-model", tmp_path).expect_error(2, "exists")


@pytest.mark.parametrize("other", [(), ("--group-size", 64)])
def test_a_stopped_run_is_taken_up_or_begun_anew(
    llmcli: Llmcli, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: tuple[object, ...]
) -> None:
    calls: list[object] = []
    measure_quality = export.rounding.measure_quality

    def interrupted(errors: Any) -> object:
        calls.append(errors)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return measure_quality(errors)

    command = ("quantize", wide, tmp_path / "int8", "--shard-size", "0.05MB")
    with monkeypatch.context() as patch:
        patch.setattr(export.rounding, "measure_quality", interrupted)
        result = llmcli(*command)
    assert result.exit_code == 130
    assert "Stopped: run the same command again to resume" in result.stderr
    assert not (tmp_path / "int8").exists()
    llmcli(*command, "--bits", 4, "--dry-run")  # only looks, and keeps the unfinished run
    result = llmcli(*command, *other)
    assert result.exit_code == 0
    first, _ = result.stderr.splitlines()
    assert first.startswith("starting over: " if other else "resuming: ")
    assert other or first.endswith("weight files were finished by an earlier run")
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_eval_goes_into_both_cards(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    destination = tmp_path / "export"
    result = llmcli("quantize", wide, destination, "--eval", text)
    assert result.exit_code == 0
    arguments = ("eval", wide, "--against", destination, "--file", text, "--json")
    measured = json.loads(llmcli(*arguments).stdout)
    card = json.loads((destination / "quantization.json").read_text())["evaluation"]
    assert card["text"] == "text.txt"
    assert card["perplexity_before"] == pytest.approx(measured["models"][0]["perplexity"])
    assert card["perplexity_after"] == pytest.approx(measured["models"][1]["perplexity"])
    assert card["perplexity_change_interval"] == pytest.approx(measured["perplexity_change_interval"])
    low, high = card["perplexity_change_interval"]
    assert f"({low:+.3%} to {high:+.3%}); mean KL" in result.stderr
    assert f"| its change, 95% interval | | {low:+.3%} to {high:+.3%} |" in (destination / "README.md").read_text()
    assert card["mean_kl"] == pytest.approx(measured["mean_kl"])
    assert card["top1_agreement"] == measured["top1_agreement"]
    assert (
        f"| {card['perplexity_before']:.4f} | {card['perplexity_after']:.4f} |"
        in (destination / "README.md").read_text()
    )
    assert f"{card['perplexity_after']:.4f} now, on text.txt" in llmcli("info", destination).stdout


def test_eval_of_a_missing_text_is_refused_before_any_work(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    result = llmcli("quantize", wide, tmp_path / "export", "--eval", tmp_path / "none.txt")
    result.expect_error(2, "none.txt cannot be read")
    assert not (tmp_path / "export").exists()


def test_a_device_that_is_not_there_is_refused_before_any_work(llmcli: Llmcli, wide: Path, tmp_path: Path) -> None:
    command = ("quantize", wide, tmp_path / "int8", "--device")
    llmcli(*command, "cuda").expect_error(4, "--device cuda: there is no NVIDIA driver; use --device cpu")
    llmcli(*command, "gpu").expect_error(2, "--device is 'gpu', expected auto, cpu, cuda or cuda:N")
    assert list(tmp_path.iterdir()) == []
    assert llmcli(*command, "cpu").exit_code == 0
