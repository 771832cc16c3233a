"""`llmcli generate` as a user runs it: output, sources of settings, errors and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from results import Llmcli
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama


@pytest.fixture
def generate(llmcli: Llmcli, tiny_llama: Path) -> Llmcli:
    return lambda *arguments: llmcli("generate", "-m", tiny_llama, "--max-new-tokens", 12, *arguments)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_published_story_from_an_empty_prompt(llmcli: Llmcli, stories260k: Path) -> None:
    expected = json.loads((stories260k / "expected_greedy.json").read_text())
    count = len(expected["token_ids"]) - 1
    arguments = ("generate", "", "-m", stories260k, "--temperature", 0, "--max-new-tokens", count)
    result = llmcli(*arguments)
    assert result.exit_code == 0
    assert result.stdout == expected["text"] + "\n"
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    assert answer["prompt_token_ids"] + answer["token_ids"] == expected["token_ids"]
    assert answer["text"] == expected["text"]


def test_stdout_holds_only_the_text(generate: Llmcli) -> None:
    answer = json.loads(generate("Hi", "--seed", 1, "--json").stdout)
    result = generate("Hi", "--seed", 1, "--stats")
    assert result.stdout == answer["text"] + "\n"
    assert "\x1b" not in result.stdout + result.stderr  # no colour without a terminal


def test_json_keys(generate: Llmcli, tiny_llama: Path) -> None:
    answer = json.loads(generate("Hi", "--seed", 5, "--json").stdout)
    keys = {"text", "prompt_token_ids", "token_ids", "finish_reason", "seed", "model", "timings"}
    assert set(answer) == keys
    assert answer["prompt_token_ids"] == [256, *b"Hi"]
    assert (answer["seed"], answer["model"]) == (5, str(tiny_llama))
    assert answer["finish_reason"] in ("length", "eos")
    assert answer["timings"]["decode_tokens"] == len(answer["token_ids"]) - 1


def test_one_line_says_device_precision_context_and_seed(generate: Llmcli) -> None:
    for flags, shown in (
        ((), "float32, numpy"),
        (("--dtype", "float32", "--threads", 1), "float32, 1 thread"),
        (("--dtype", "bfloat16", "--threads", 1), "bfloat16, 1 thread"),
    ):
        stderr = generate("Hi", "--seed", 77, *flags).stderr
        assert stderr == f"tiny-llama: CPU, {shown} (no NVIDIA driver), context 512, seed 77\n"


def test_the_printed_seed_tells_the_story_again(generate: Llmcli) -> None:
    first = generate("Hi")
    seed = first.stderr.rsplit("seed ", 1)[1].strip()
    assert generate("Hi", "--seed", seed).stdout == first.stdout
    assert generate("Hi", "--seed", int(seed) + 1).stdout != first.stdout


def test_samples_are_separated_and_each_can_be_had_alone(generate: Llmcli) -> None:
    together = generate("Hi", "--seed", 3, "-n", 3).stdout
    first, rest = together.removeprefix("--- sample 1 ---\n").split("\n--- sample 2 ---\n")
    second, third = rest.split("\n--- sample 3 ---\n")
    assert len({first, second, third.removesuffix("\n")}) == 3
    for number, text in ((1, first + "\n"), (2, second + "\n"), (3, third)):
        assert generate("Hi", "--seed", 3, "--only", number).stdout == text
        assert generate("Hi", "--seed", 3, "-n", 3, "--only", number).stdout == text
    samples = json.loads(generate("Hi", "--seed", 3, "-n", 3, "--json").stdout)["samples"]
    assert [sample["sample"] for sample in samples] == [1, 2, 3]
    assert [sample["text"] for sample in samples] == [first, second, third.removesuffix("\n")]


def test_sources_of_settings(generate: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("[sampling]\ntop_k = 9\ntemperature = 0.5\n")
    generation_config = tiny_llama / "generation_config.json"
    generation_config.write_text(json.dumps({"top_k": 11, "min_p": 0.1}))
    try:
        stderr = generate("Hi", "--stats", "--preset", preset, "--temperature", 0.7).stderr
    finally:
        generation_config.unlink()
    lines = {line.split("  ")[0]: line.rsplit("  ", 1)[1] for line in stderr.splitlines()[1:]}
    assert lines["temperature"] == "0.7 (flag)"
    assert lines["top_k"] == "9 (preset mine)"
    assert lines["min_p"] == "0.1 (generation_config.json)"
    assert lines["top_p"] == "0.95 (default)"
    assert {"load", "time to first token", "prefill", "decode"} <= set(lines)


def test_the_model_says_how_long_a_text_may_be(model_copy: Path, llmcli: Llmcli) -> None:
    arguments = ("generate", "Hi", "-m", model_copy, "--ignore-eos", "--json")
    change_json(model_copy / "config.json", max_position_embeddings=512)
    for stated, expected in ((7, 7), (300, 300), (None, 256)):
        (model_copy / "generation_config.json").write_text(json.dumps({"max_new_tokens": stated}))
        result = llmcli(*arguments)
        answer = json.loads(result.stdout)
        assert (len(answer["token_ids"]), answer["finish_reason"]) == (expected, "length")
        assert f"stopped at {expected} new tokens; --max-new-tokens N for more" in result.stderr
    (model_copy / "generation_config.json").write_text(json.dumps({"max_new_tokens": 0}))
    llmcli(*arguments).expect_error(3, "max_new_tokens is 0", "a positive integer")


def test_end_tokens_of_all_files_stop(model_copy: Path, llmcli: Llmcli) -> None:
    """generation_config.json, config.json and the tokenizer each name another end token."""
    arguments = ("generate", "Hi", "-m", model_copy, "--temperature", 0, "--max-new-tokens", 40, "--json")
    plain = json.loads(llmcli(*arguments).stdout)["token_ids"]
    target = plain[5]
    first = plain.index(target)
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [280, target]}))
    answer = json.loads(llmcli(*arguments).stdout)
    assert (answer["token_ids"], answer["finish_reason"]) == (plain[: first + 1], "eos")
    (model_copy / "generation_config.json").unlink()
    change_json(model_copy / "config.json", eos_token_id=[281, target])
    assert json.loads(llmcli(*arguments).stdout)["token_ids"] == plain[: first + 1]


def test_prompt_from_a_file(generate: Llmcli, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfHi\r\n")
    assert json.loads(generate("--file", path, "--json").stdout)["prompt_token_ids"] == [256, *b"Hi"]


def test_a_text_runs_to_its_own_end_within_the_context(llmcli: Llmcli, tiny_llama: Path) -> None:
    never_ends = ("--logit-bias", "257=-100", "--temperature", 0, "--json")
    result = llmcli("generate", "Hello", "-m", tiny_llama, "--context", 300, *never_ends)
    assert len(json.loads(result.stdout)["token_ids"]) == 294
    assert "stopped: the context of 300 tokens is full; --context N for more" in result.stderr


def test_a_limit_that_was_asked_for_says_nothing(llmcli: Llmcli, model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    result = llmcli("generate", "Hello", "-m", model_copy, "--ignore-eos", "--json", "--max-new-tokens", 3)
    assert len(json.loads(result.stdout)["token_ids"]) == 3
    assert "stopped" not in result.stderr


def test_a_text_that_fills_the_context_says_so(llmcli: Llmcli, tiny_llama: Path) -> None:
    arguments = ("generate", "Hello", "-m", tiny_llama, "--context", 16, "--ignore-eos", "--json")
    result = llmcli(*arguments)
    assert json.loads(result.stdout)["finish_reason"] == "context"
    assert "stopped: the context of 16 tokens is full; --context N for more" in result.stderr
    result = llmcli(*arguments, "--max-new-tokens", 10)
    assert json.loads(result.stdout)["finish_reason"] == "length"
    assert "stopped" not in result.stderr
    assert "stopped" not in llmcli(*arguments, "--quiet").stderr


def test_unused_tensors_are_named_in_a_warning(model_copy: Path, llmcli: Llmcli) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    save_file({**tensors, "vision.weight": torch.zeros(2)}, model_copy / "model.safetensors")
    result = llmcli("generate", "Hi", "-m", model_copy, "--max-new-tokens", 1, "--quiet")
    assert (result.exit_code, result.stderr) == (
        0,
        "warning: model has tensors that its config does not use: vision.weight\n",
    )


# Errors: one line each, the exit code of its class, nothing on stdout.


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--temperature", "-1"), ("temperature is -1.0 (flag), expected a number >= 0",)),
        (("--temperature", "warm"), ("--temperature: expected a number (see llmcli generate --help)",)),
        (("--top-p", "1.5"), ("top_p is 1.5 (flag), expected a number > 0 and <= 1",)),
        (("--top-p", "nan"), ("top_p is nan",)),
        (("--min-p", "1"), ("min_p is 1.0",)),
        (("--top-k", "-1"), ("top_k is -1",)),
        (("--repetition-penalty", "0"), ("repetition_penalty is 0.0",)),
        (("--seed", "-1"), ("--seed: expected at least 0",)),
        (("--max-new-tokens", "0"), ("--max-new-tokens: expected at least 1",)),
        (("--context", "0"), ("--context: expected at least 1",)),
        (
            ("--context", "513"),
            ("--context 513 is over the context limit of ", ", 512 tokens; use --context 512 or less"),
        ),
        (("--threads", "0"), ("--threads: expected at least 1",)),
        (("--threads", "20000"), ("--threads: expected at most 1024",)),
        (("-n", "10001"), ("--num-samples: expected at most 10000",)),
        (("--only", "4294967297"), ("--only: expected at most 4294967296",)),
        (("-m", ""), ("the model name is empty",)),
        (("--stop", "caf\udce9"), ("--stop is not UTF-8 text",)),
        (("-n", "0"), ("--num-samples: expected at least 1",)),
        (("-n", "2", "--only", "3"), ("--only is 3, expected 1 to 2",)),
        (("--stop", ""), ("--stop is empty",)),
        (("--dtype", "int3"), ("--dtype is 'int3', expected one of auto, float32, bfloat16, float16",)),
        (("--device", "tpu"), ("--device is 'tpu', expected auto, cpu, cuda or cuda:N",)),
        (("--preset", "tale"), ("preset 'tale' is unknown, expected one of: precise, story",)),
        (("--file", "nowhere.txt"), ("the argument PROMPT and --file cannot be combined",)),
        (("--frobnicate",), ("no such option: --frobnicate", "llmcli generate --help-all")),
    ],
)
def test_bad_flag_values(generate: Llmcli, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    generate("Hi", *arguments).expect_error(2, *parts)


def test_missing_folder(llmcli: Llmcli, tmp_path: Path) -> None:
    llmcli("generate", "Hi", "-m", tmp_path / "none").expect_error(3, "none", "does not exist")


def test_a_tokenizer_of_another_model(llmcli: Llmcli, model_copy: Path) -> None:
    write_tiny_llama(model_copy / "small", vocab_size=200, bos_token_id=1, eos_token_id=2)
    llmcli("generate", "Hi", "-m", model_copy / "small").expect_error(2, "id 256", "200 embeddings", "another model")


def test_over_long_prompts_tell_counts_and_remedy(llmcli: Llmcli, tiny_llama: Path) -> None:
    arguments = ("generate", "x" * 99, "-m", tiny_llama)
    result = llmcli(*arguments, "--context", 120, "--max-new-tokens", 50)
    result.expect_error(
        2, "the prompt has 100 tokens, and --max-new-tokens is 50; the context holds 120; use --context 150"
    )
    llmcli(*arguments, "--context", 100).expect_error(
        2, "the prompt has 100 tokens; the context holds 100; use --context 101"
    )
    llmcli(*arguments, "--max-new-tokens", 500).expect_error(2, "use --max-new-tokens 412 or a shorter prompt")
    llmcli("generate", "x" * 999, "-m", tiny_llama).expect_error(
        2, "the prompt has 1000 tokens;", "use a shorter prompt (the context limit of "
    )


def test_a_model_larger_than_memory(llmcli: Llmcli, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runners.host.memory.available_memory", lambda num_threads: 100_000)
    result = llmcli("generate", "Hi", "-m", tiny_llama)
    result.expect_error(4, "at float32 with context 512 needs 0.01 GiB", "is available", "use a smaller model")


def test_a_prompt_that_is_no_text(generate: Llmcli, tmp_path: Path) -> None:
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"caf\xe9")
    generate("--file", path).expect_error(2, str(path), "is not UTF-8 text: byte 0x")
    generate("--file", "nowhere.txt").expect_error(2, "--file nowhere.txt cannot be read: No such file")
    generate("caf\udce9").expect_error(2, "the prompt is not UTF-8 text")


def test_our_own_bugs_are_one_line_too(generate: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.cli.run.open_session", lambda *arguments, **named: 1 / 0)
    generate("Hi").expect_error(1, "internal error, please report it: ZeroDivisionError", "--debug")
    assert "Traceback" in generate("Hi", "--debug").stderr


def test_what_a_contradicting_config_means_is_said(llmcli: Llmcli, tmp_path: Path) -> None:
    settings = {"use_sliding_window": False, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3}
    folder = write_tiny_llama(tmp_path / "tiny", model_type="smollm3", architectures=None, **settings)
    result = llmcli("generate", "Hi", "-m", folder, "--max-new-tokens", 1, "--quiet")
    assert result.exit_code == 0
    note = "use_sliding_window is false, but layer_types has sliding windows: they are used"
    assert result.stderr == f"warning: tiny: {note}\n"
