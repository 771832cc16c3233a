"""`tokenize`, `info`, `presets` and `doctor` as a user runs them."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from results import Llmcli
from tiny_models import write_tiny_llama

from llmcli.kernels import environment


def test_tokenize_shows_ids_and_pieces(llmcli: Llmcli, tiny_llama: Path) -> None:
    result = llmcli("tokenize", "Hi\n", "-m", tiny_llama)
    assert result.stdout == "256  <|begin|>\n 72  H\n105  i\n 10  Ċ\n"
    assert result.stderr == "4 tokens\n"


def test_tokenize_json_and_the_way_back(llmcli: Llmcli, tiny_llama: Path) -> None:
    text = "Grüße 👩‍👩‍👧"
    answer = json.loads(llmcli("tokenize", text, "-m", tiny_llama, "--json").stdout)
    assert answer["token_ids"] == [256, *text.encode()]
    assert answer["pieces"][:3] == ["<|begin|>", "G", "r"]
    assert answer["text"] == text
    for ids in (" ".join(map(str, answer["token_ids"])), str(answer["token_ids"])):
        assert llmcli("tokenize", "--decode", ids, "-m", tiny_llama).stdout == f"{text}\n"


@pytest.mark.parametrize("ids", ["1 two", "-1", "258", "1.5", "9" * 5000, "\u0661"])
def test_decode_refuses_what_is_no_token_id(llmcli: Llmcli, tiny_llama: Path, ids: str) -> None:
    result = llmcli("tokenize", "-m", tiny_llama, "--decode", "--", ids)
    result.expect_error(2, "is not a token id of this tokenizer, expected numbers from 0 to 257")


def test_info_counts_what_a_token_reads(llmcli: Llmcli, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 5, "eos_token_id": [257, 3]}))
    facts = json.loads(llmcli("info", folder, "--context", 100, "--json").stdout)
    # By hand: attention 2 * 64*64 + 2 * 16*64, MLP 3 * 64*176, two norms; embedding and head 288*64 each; last norm.
    layer = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 176 + 2 * 64
    parameters = 3 * layer + 2 * 288 * 64 + 64
    assert facts["num_parameters"] == parameters
    assert facts["bytes_by_dtype"] == {"BF16": 2 * parameters}
    assert facts["decode_bytes_per_token"] == 2 * (3 * layer + 288 * 64 + 64 + 64)
    assert facts["kv_bytes_per_token"] == 2 * 3 * 16 * 2
    assert facts["memory"]["float32"] == {"weights_bytes": 4 * parameters, "kv_cache_bytes": 100 * 2 * 3 * 16 * 4}
    assert facts["eos"] == {"3": "\u0103", "257": "<|end|>"}  # byte 3 in the letters of byte-level BPE
    assert facts["sampling"]["top_k"] == [5, "generation_config.json"]


def test_info_of_a_tied_model_reads_its_one_matrix_once(llmcli: Llmcli, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    facts = json.loads(llmcli("info", folder, "--json").stdout)
    assert facts["decode_bytes_per_token"] == 4 * facts["num_parameters"] + 4 * 64
    assert facts["shape"]["tied_head"] is True


def test_info_table(llmcli: Llmcli, tiny_llama: Path) -> None:
    lines = {line[:28].strip(): line[28:] for line in llmcli("info", tiny_llama).stdout.splitlines()}
    assert lines["attention"] == "8 heads over 2 key-value heads of 8"
    assert lines["begins with"] == "<|begin|>"
    assert lines["ends with"] == "<|end|> (257)"
    assert lines["chat template"] == "none"
    assert lines["temperature"] == "0.8 (default)"
    floats = 3 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 176 + 2 * 64) + 2 * 288 * 64 + 64
    assert lines["memory, numpy"] == lines["memory, float32"]  # the model is stored as float32
    assert f"weights {4 * floats / 1024:.1f} KiB" in lines["memory, numpy"]
    assert lines["memory, float32"].endswith("KV cache 192.0 KiB")  # 2 * 3 layers * 16 * 512 tokens * 4 bytes


def test_info_of_windows_and_layers_without_rotary(llmcli: Llmcli, tmp_path: Path) -> None:
    smollm3 = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1]}
    windows = {"use_sliding_window": True, "sliding_window": 16}
    folder = write_tiny_llama(tmp_path / "model", **smollm3, **windows)
    text = llmcli("info", folder).stdout
    assert "without rotary              1 of 3 layers\n" in text
    assert "sliding window              16 tokens, in 1 of 3 layers\n" in text


def test_info_errors_like_generate(llmcli: Llmcli, tmp_path: Path, tiny_llama: Path) -> None:
    llmcli("info", tmp_path / "none").expect_error(3, "does not exist")
    llmcli("info", tiny_llama, "--context", 513).expect_error(2, "over the context limit of tiny-llama", "512 tokens")


def test_presets(llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "mine.toml").write_text('description = "my own"\n[sampling]\ntop_k = 3\n')
    found = json.loads(llmcli("presets", "--json").stdout)
    assert set(found) == {"mine", "precise", "story"}
    assert found["mine"]["sampling"] == {"top_k": 3}
    result = llmcli("presets")
    assert "mine\n  my own\n  top_k 3\n" in result.stdout
    assert str(tmp_path / "presets") in result.stderr


CARD = environment.Card(0, "NVIDIA Test", (8, 9), 24 * 2**30)


@pytest.mark.parametrize(
    ("driver", "cupy", "nvrtc", "problem"),
    [
        (None, {}, None, None),
        (environment.Driver((13, 0), (CARD,)), {"cupy-cuda13x": "14.2.0"}, (13, 0), None),
        (environment.Driver((12, 4), (CARD,)), {"cupy-cuda12x": "14.2.0"}, (12, 4), None),
        (environment.Driver((13, 0), (CARD,)), {}, None, '[cuda13]"\n'),
        (environment.Driver((12, 4), (CARD,)), {}, None, '[cuda12]"\n'),
        (environment.Driver((12, 4), (CARD,)), {"cupy-cuda13x": "14"}, (13, 0), "the driver is for CUDA 12"),
        (
            environment.Driver((13, 0), (CARD,)),
            {"cupy-cuda12x": "14", "cupy-cuda13x": "14"},
            (13, 0),
            "pip uninstall cupy-cuda12x cupy-cuda13x",
        ),
        (environment.Driver((11, 8), (CARD,)), {"cupy-cuda12x": "14"}, (12, 0), "install a driver for CUDA 12"),
        (environment.Driver((13, 0), ()), {}, None, "the driver sees no card"),
        (environment.Driver((13, 0), (), "the driver does not start (CUDA error 999)"), {}, None, "does not start"),
        (
            environment.Driver((13, 0), (environment.Card(0, "Old", (7, 5), 2**30),)),
            {"cupy-cuda13x": "14"},
            (13, 0),
            "needs compute capability 8.0",
        ),
        (environment.Driver((13, 0), (CARD,)), {"cupy-cuda13x": "14"}, "no NVRTC", '[cuda13]"\n'),
        (environment.Driver((13, 0), (CARD,)), {"cupy-cuda12x": "14"}, "no NVRTC", '[cuda12]"\n'),
    ],
)
def test_doctor(
    llmcli: Llmcli,
    monkeypatch: pytest.MonkeyPatch,
    driver: environment.Driver | None,
    cupy: dict[str, str],
    nvrtc: tuple[int, int] | str | None,
    problem: str | None,
) -> None:
    monkeypatch.setattr(environment, "find_driver", lambda: driver)
    monkeypatch.setattr(environment, "cupy_distributions", lambda: cupy)
    monkeypatch.setattr(environment, "nvrtc_version", lambda: nvrtc)
    monkeypatch.setattr(environment, "header_folder", lambda: Path("/usr/include"))
    result = llmcli("doctor")
    assert result.exit_code == (4 if problem else 0)
    assert ("!!" in result.stdout) == (problem is not None)
    if problem:
        assert problem in result.stdout
        assert "fix: " in result.stdout
    states = [check["state"] for check in json.loads(llmcli("doctor", "--json").stdout)]
    assert ("problem" in states) == (problem is not None)


def test_doctor_says_what_a_cpp_compiler_is_for(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = " ".join(llmcli("doctor").stdout.split())
    assert "C++ compiler no-such-compiler not found; int8 and int4 on the CPU are faster with g++" in said
    monkeypatch.setenv("CXX", sys.executable)  # a program that compiles nothing
    assert f"{sys.executable} cannot compile C++17 with OpenMP; int8" in " ".join(llmcli("doctor").stdout.split())
    if shutil.which("c++"):
        monkeypatch.delenv("CXX")
        assert f"ok  C++ compiler   {shutil.which('c++')}" in llmcli("doctor").stdout


def test_doctor_says_how_much_room_the_disk_has(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of the models, which may be another than that of the home; exit code 0 in any case."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "models"))
    free = {tmp_path: 123_400_000_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    result = llmcli("doctor")
    assert (result.exit_code, "ok  disk           123.4 GB free where models are kept\n" in result.stdout) == (0, True)
    free[tmp_path] = 3_000_000_000
    result = llmcli("doctor")
    assert "--  disk           3.0 GB free where models are kept; an 8B model takes 16 GB" in result.stdout
    assert result.exit_code == 0


def test_doctor_sees_a_cache_that_cannot_be_written(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCLI_HOME", "/proc/nowhere")
    result = llmcli("doctor")
    assert result.exit_code == 4
    assert "kernels are compiled again at every start" in result.stdout
    assert "set LLMCLI_HOME to another folder" in result.stdout
