"""`generate --receipt` and `replay` as a user runs them: the same text again, and each change by its name."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from results import Llmcli, Result
from safetensors.torch import load_file, save_file

from llmcli.engine.scheduler import Generation
from llmcli.receipt.receipt import load_receipt, save_receipt

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"


@pytest.fixture
def receipt(tmp_path: Path) -> Path:
    return tmp_path / "receipt.json"


@pytest.fixture
def generate(llmcli: Llmcli, model_copy: Path, receipt: Path) -> Llmcli:
    """Generate with a receipt, quietly."""

    def call(*arguments: object) -> Result:
        fixed = ("-m", model_copy, "--max-new-tokens", 12, "--receipt", receipt, "--quiet")
        result = llmcli("generate", *fixed, *arguments)
        assert result.exit_code == 0, result.stderr
        return result

    return call


def differences(result: Result) -> list[str]:
    """The names in the warnings."""
    begin = "warning: differs: "
    return [line.removeprefix(begin) for line in result.stderr.splitlines() if line.startswith(begin)]


def test_the_storyteller_tells_its_story_again(llmcli: Llmcli, receipt: Path) -> None:
    told = llmcli("generate", "Once upon a time", "--seed", 1, "--max-new-tokens", 20, "--receipt", receipt)
    assert told.stderr.endswith(f"receipt: {receipt}\n")
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    assert "Model, program and machine are as in the receipt\n" in result.stderr
    assert result.stderr.endswith("Same text as in the receipt (20 tokens)\n")
    assert differences(result) == []


@pytest.mark.parametrize(
    "flags",
    [
        ("-n", 3, "--dtype", "bfloat16", "--kv-cache", "int8"),
        ("--logit-bias", "104=-inf", "--logit-bias", "105=2.5", "--min-new-tokens", 5),
        ("--sampler-order", "top_k,temperature", "--top-k", 9, "--repetition-penalty", 1.3),
        (
            "--dry-multiplier",
            1,
            "--dry-breaker",
            "a",
            "--mirostat-tau",
            3,
            "--ignore-eos",
            "--context",
            99,
            "--only",
            7,
        ),
        ("--stop", "e", "--stop", "\n", "--presence-penalty", 0.5, "--penalty-window", 4, "--preset", "story"),
    ],
    ids=lambda flags: str(flags[0]),
)
def test_settings_come_back(generate: Llmcli, llmcli: Llmcli, receipt: Path, flags: tuple[object, ...]) -> None:
    told = generate("Hello there", "--seed", 9, *flags)
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    assert differences(result) == []


def test_the_model_s_wishes_are_those_of_the_receipt(
    generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path
) -> None:
    """Other settings now are named, and change nothing."""
    wishes = {"temperature": 1.5, "suppress_tokens": [101], "bad_words_ids": [[5, 6], [116]], "forced_eos_token_id": 3}
    (model_copy / "generation_config.json").write_text(json.dumps({**wishes, "sequence_bias": [[[110], -1.5]]}))
    told = generate("Hello", "--seed", 2)
    (model_copy / "generation_config.json").write_text(json.dumps({"temperature": 0.1, "stop_strings": ["a", "e"]}))
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    assert [text.split()[:2] for text in differences(result)] == [["file", "generation_config.json"]]


def test_threads_are_those_of_the_receipt(generate: Llmcli, llmcli: Llmcli, receipt: Path) -> None:
    generate("Hi", "--seed", 1, "--threads", 2)
    result = llmcli("replay", receipt)
    assert "CPU, float32, 2 threads" in result.stderr
    assert differences(result) == []


def flip(path: Path) -> None:
    """Change the last bit of the last float32 weight."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: flip(model / "model.safetensors"), "file model.safetensors"),
        (lambda model: (model / "config.json").open("a").write(" "), "file config.json"),
        (lambda model: (model / "tokenizer_config.json").write_text("{}"), "file tokenizer_config.json"),
    ],
    ids=["weights", "config", "settings"],
)
def test_a_byte_of_a_file_is_named(
    generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path, change: Callable[[Path], object], name: str
) -> None:
    told = generate("Hi", "--seed", 1)
    change(model_copy)
    result = llmcli("replay", receipt, "--quiet")
    assert (result.exit_code, result.stdout) == (0, told.stdout)  # the change is too small for the text
    (named,) = differences(result)
    assert named.startswith(f"{name} ")


def test_other_weights_are_named_and_so_is_the_first_token(
    generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path
) -> None:
    generate("Hi", "--seed", 1)
    tensors = load_file(model_copy / "model.safetensors")
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, model_copy / "model.safetensors")
    result = llmcli("replay", receipt)
    assert result.exit_code == 6
    assert [text.split(" '")[0] for text in differences(result)] == ["file model.safetensors"]
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert error.startswith("error: sample 1 differs from token ")
    assert error.endswith("; see above what else differs")


def test_another_text_though_nothing_differs(generate: Llmcli, llmcli: Llmcli, receipt: Path) -> None:
    generate("Hi", "--seed", 1, "-n", 2)
    held = load_receipt(receipt).receipt
    first, second = held.samples
    token_ids = (*second.token_ids[:4], (second.token_ids[4] + 1) % 256, *second.token_ids[5:])
    save_receipt(receipt, replace(held, samples=(first, replace(second, token_ids=token_ids))), replace=True)
    result = llmcli("replay", receipt)
    assert result.exit_code == 6
    assert differences(result) == []
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"error: sample 2 differs from token 5 on: {token_ids[4]} ")
    assert f" in the receipt, {second.token_ids[4]} " in error
    assert error.endswith(" now; 1 of 2 samples differ; everything else in the receipt is the same")
    assert llmcli("replay", receipt, "--only", 1).exit_code == 0


def test_an_edited_receipt_is_told(generate: Llmcli, llmcli: Llmcli, receipt: Path) -> None:
    generate("Hi", "--seed", 1)
    receipt.write_text(receipt.read_text().replace('"seed": 1', '"seed": 2'))
    result = llmcli("replay", receipt)
    assert result.exit_code == 6
    assert f"warning: {receipt} was changed after it was written" in result.stderr
    assert result.stderr.endswith("; the receipt was changed after it was written\n")


def test_a_prompt_that_is_not_that_of_the_ids_is_named(generate: Llmcli, llmcli: Llmcli, receipt: Path) -> None:
    generate("A prompt of some length", "--seed", 1)
    held = load_receipt(receipt).receipt
    save_receipt(receipt, replace(held, prompt=replace(held.prompt, text="A prompt of no length")), replace=True)
    result = llmcli("replay", receipt)
    assert result.exit_code == 0  # the ids are run
    # BOS, then a token for each byte: they differ after "A prompt of ".
    assert differences(result) == ["prompt token_ids has 24 entries, now 22; they differ from entry 14 on"]


@pytest.mark.parametrize("choice", ["model's", "plain", "file"])
def test_a_message_and_its_template(
    generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path, tmp_path: Path, choice: str
) -> None:
    file = model_copy / "chat_template.jinja" if choice == "model's" else tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    flags: dict[str, tuple[object, ...]] = {"plain": ("--chat-template", "plain"), "file": ("--chat-template", file)}
    told = generate("Hi", "--seed", 1, "--chat", "--system", "Be kind.", *flags.get(choice, ()))
    assert json.loads(receipt.read_text())["program"]["jinja2"]
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout, differences(result)) == (0, told.stdout, [])

    file.write_text(TEMPLATE.replace("[assistant]", "[bot]"))
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    names = [" ".join(text.split()[:2]) for text in differences(result)]
    template = {"model's": "file chat_template.jinja", "file": "file --chat-template"}
    assert names == ([] if choice == "plain" else [template[choice], "prompt token_ids"])

    file.unlink()
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    assert ("the prompt cannot be encoded again" in result.stderr) == (choice != "plain")


def test_only_and_json(generate: Llmcli, llmcli: Llmcli, receipt: Path) -> None:
    told = generate("Hi", "--seed", 1, "-n", 3, "--json")
    samples = json.loads(told.stdout)["samples"]
    answer = json.loads(llmcli("replay", receipt, "--json").stdout)
    assert (answer["is_same"], answer["receipt_is_unchanged"], answer["differences"]) == (True, True, [])
    keys = ("sample", "text", "token_ids", "finish_reason")
    assert [[item[key] for key in keys] for item in answer["samples"]] == [
        [item[key] for key in keys] for item in samples
    ]
    assert all(item["is_same"] and item["first_different_token"] is None for item in answer["samples"])
    assert llmcli("replay", receipt, "--only", 2).stdout == samples[1]["text"] + "\n"
    llmcli("replay", receipt, "--only", 4).expect_error(2, "--only is 4", "holds sample 1, 2, 3")


def test_json_of_another_text(generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path) -> None:
    generate("Hi", "--seed", 1)
    flip(model_copy / "model.safetensors")
    held = load_receipt(receipt).receipt
    (sample,) = held.samples
    short = replace(sample, token_ids=sample.token_ids[:3])  # as if the text had ended there
    save_receipt(receipt, replace(held, samples=(short,)), replace=True)
    result = llmcli("replay", receipt, "--json")
    assert result.exit_code == 6
    assert "differs from token 4 on: the end in the receipt, " in result.stderr
    answer = json.loads(result.stdout)
    assert answer["is_same"] is False
    assert answer["samples"][0]["first_different_token"] == 3
    (difference,) = answer["differences"]
    assert difference["name"] == "file model.safetensors"
    assert difference["then"] != difference["now"]


def test_a_model_that_lies_elsewhere_now(generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path) -> None:
    told = generate("Hi", "--seed", 1)
    moved = model_copy.rename(model_copy.with_name("moved"))
    llmcli("replay", receipt).expect_error(
        3, f"was made with the model '{model_copy}', which is not here; give its folder"
    )
    result = llmcli("replay", receipt, "--model", moved)
    assert (result.exit_code, result.stdout, differences(result)) == (0, told.stdout, [])


def test_a_model_that_cannot_be_the_receipt_s(
    generate: Llmcli, llmcli: Llmcli, receipt: Path, model_copy: Path
) -> None:
    generate("Hi", "--seed", 1)
    held = load_receipt(receipt).receipt
    for part, values, message in (
        ("prompt", {"token_ids": (256, 288)}, "it names token 288, and model has tokens 0 to 287"),
        ("sampling", {"logit_bias": ((300, 1.0),)}, "it names token 300, and model has tokens 0 to 287"),
        ("runner", {"context": 600}, "the context is 600 tokens; model has a context limit of 512"),
        ("sampling", {"order": ("top_q",)}, "top_q"),
        ("sampling", {"parameters": {"top_k": 1}}, "sampling.parameters.dry_allowed_length is missing"),
        ("sampling", {"parameters": {**held.sampling.parameters, "top_p": 2.0}}, "top_p is 2.0, expected a number"),
    ):
        changes: dict[str, Any] = {part: replace(getattr(held, part), **values)}
        save_receipt(receipt, replace(held, **changes), replace=True)
        llmcli("replay", receipt).expect_error(2, f"{receipt}: ", message)


def test_a_card_that_is_not_here(generate: Llmcli, llmcli: Llmcli, receipt: Path) -> None:
    told = generate("Hi", "--seed", 1)
    held = load_receipt(receipt).receipt
    runner = replace(held.runner, device="cuda:1", dtype="float16", threads=None, description="NVIDIA Some, float16")
    save_receipt(receipt, replace(held, runner=runner), replace=True)
    llmcli("replay", receipt).expect_error(
        4, "the receipt was made on NVIDIA Some, float16; --device cuda:1: there is no NVIDIA driver; use --device cpu"
    )
    result = llmcli("replay", receipt, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    assert "runner device 'cuda:1', now 'cpu'" in differences(result)


def test_a_hub_s_model_is_that_of_its_commit(llmcli: Llmcli, hub: HubServer, tiny_llama: Path, receipt: Path) -> None:
    repository = hub.add_model("org/tiny", tiny_llama)
    flags = ("--seed", 1, "--max-new-tokens", 8, "--quiet")
    told = llmcli("generate", "Hi", "-m", "org/tiny", "--receipt", receipt, *flags)
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    newer = repository.add({**files, "generation_config.json": b'{"temperature": 0}'}, "main")
    assert llmcli("pull", "org/tiny", "--update").stdout.endswith(f"{newer}\n")
    result = llmcli("replay", receipt)
    assert (result.exit_code, result.stdout, differences(result)) == (0, told.stdout, [])

    commit = json.loads(receipt.read_text())["model"]["commit"]
    assert llmcli("models", "rm", f"org/tiny@{commit}", "--yes").exit_code == 0
    num_requests = len(hub.requests)
    llmcli("replay", receipt).expect_error(3, f"org/tiny@{commit} is not on this machine", "llmcli pull org/tiny@")
    assert len(hub.requests) == num_requests  # a stranger's file downloads nothing


def test_a_receipt_is_refused_before_anything_is_done(llmcli: Llmcli, tmp_path: Path, receipt: Path) -> None:
    flags = ("generate", "Hi", "-m", tmp_path / "none", "--receipt")
    llmcli(*flags, tmp_path / "no" / "r.json").expect_error(2, "is not a folder")
    receipt.write_text('{"format": "llmcli receipt"}')
    llmcli(*flags, receipt).expect_error(2, "exists; replace it with --force")
    (tmp_path / "notes").write_text("mine")
    llmcli(*flags, tmp_path / "notes", "--force").expect_error(2, "exists and is not a receipt of llmcli")
    llmcli(*flags, tmp_path / "x", "--html", tmp_path / "x").expect_error(2, "--html and --receipt are both")
    llmcli("replay", receipt).expect_error(2, "has version None of the format")
    llmcli("replay", tmp_path).expect_error(2, "is not a regular file, expected a receipt")


def test_an_interrupted_run_has_no_receipt(
    llmcli: Llmcli, model_copy: Path, receipt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Generation.events

    def interrupted(self: Generation) -> Any:
        for number, event in enumerate(events(self)):
            yield event
            if number == 4:
                raise KeyboardInterrupt

    flags = ("--seed", 1, "--max-new-tokens", 9)
    assert llmcli("generate", "Hi", "-m", model_copy, "--receipt", receipt, *flags).exit_code == 0
    before = receipt.read_bytes()
    monkeypatch.setattr(Generation, "events", interrupted)
    result = llmcli("generate", "Ho", "-m", model_copy, "--receipt", receipt, "--force", *flags)
    assert result.exit_code == 130
    assert result.stderr.endswith("no receipt: the run was interrupted\n")
    assert receipt.read_bytes() == before
    assert llmcli("replay", receipt).exit_code == 130


def test_a_file_that_changes_meanwhile_leaves_no_receipt(
    llmcli: Llmcli, model_copy: Path, receipt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Generation.events

    def changing(self: Generation) -> Any:
        os.utime(model_copy / "config.json", ns=(1, 1))
        yield from events(self)

    monkeypatch.setattr(Generation, "events", changing)
    result = llmcli("generate", "Hi", "-m", model_copy, "--max-new-tokens", 3, "--receipt", receipt)
    assert result.exit_code == 3
    assert "config.json changed while the model ran" in result.stderr
    assert not receipt.exists()
