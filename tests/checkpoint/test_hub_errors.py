"""Every way in which a download from the hub fails, as the line a user reads."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, Repository
from huggingface_hub import constants

from llmcli.checkpoint.hub import resolve_model
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, UnsupportedModelError


def refusal(name: str, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(name, on_progress=lambda done, total: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_such_repository(tiny_hub: HubServer) -> None:
    message = refusal("org/tony")
    assert message.startswith(f"org/tony is neither a local folder nor a model on {tiny_hub.url}; check the spelling")
    assert "HF_TOKEN" in message


def test_an_impossible_name(tiny_hub: HubServer) -> None:
    assert "expected a folder or ORG/NAME" in refusal("org/a..b")
    assert not tiny_hub.requests


def test_no_such_revision(tiny_hub: HubServer) -> None:
    assert refusal("org/tiny@v9").startswith("org/tiny has no revision v9; ")
    assert refusal(f"org/tiny@{'0' * 40}").startswith(f"org/tiny has no revision {'0' * 40}; ")


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("hf_other", 403)])
def test_gated(tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str | None, status: int) -> None:
    repository = tiny_hub.repositories["org/tiny"]
    repository.token, repository.is_gated = "hf_right", True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refusal("org/tiny") == (
        f"no access to org/tiny ({status}, it is gated): accept its licence on {tiny_hub.url}/org/tiny, then set "
        "HF_TOKEN to a token of that account, or run `hf auth login`"
    )
    assert tiny_hub.requested_files() == {"config.json"}


def test_access_lost_later(tiny_hub: HubServer, tiny_llama: Path) -> None:
    """The small files are there, and the large one is refused."""
    tiny_hub.cuts = [0] * 6
    refusal("org/tiny")
    tiny_hub.repositories["org/tiny"].token, tiny_hub.repositories["org/tiny"].is_gated = "hf_right", True
    assert "it is gated" in refusal("org/tiny")


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_an_answer_of_failure(tiny_hub: HubServer, status: int) -> None:
    tiny_hub.failing_status = status
    message = refusal("org/tiny")
    if status == 403:
        assert message.startswith("no access to org/tiny (403, gated or private, or the token is not valid)")
    else:
        assert message.startswith(f"{tiny_hub.url} answers {status} ")
        assert "wait, then try again" in message


def test_offline(tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expected = (
        f"org/tiny is neither a local folder nor complete in the cache {constants.HF_HUB_CACHE}, "
        "and HF_HUB_OFFLINE forbids downloads"
    )
    assert refusal("org/tiny").startswith(expected)
    assert not tiny_hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = resolve_model("org/tiny", on_progress=lambda done, total: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/tiny", on_progress=lambda done, total: None) == folder
    (folder / "model.safetensors").unlink()
    assert refusal("org/tiny").startswith(expected)


@pytest.mark.parametrize("revision", [None, "v2"])
@pytest.mark.parametrize("has_hub", [True, False], ids=["offline", "no connection"])
def test_a_complete_commit_without_a_ref_is_named(
    tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch, revision: str | None, has_hub: bool
) -> None:
    """As in a cache copied without its refs, or filled by a commit's hash."""
    folder = resolve_model("org/tiny", on_progress=lambda done, total: None)
    shutil.rmtree(folder.parents[1] / "refs")
    shutil.copytree(folder, folder.parent / "incomplete", ignore=shutil.ignore_patterns("*.safetensors"))
    if has_hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        tiny_hub.close()
    message = refusal("org/tiny" if revision is None else f"org/tiny@{revision}")
    assert f"; give org/tiny@{folder.name}, which is complete there, or " in message
    assert "incomplete" not in message
    assert resolve_model(f"org/tiny@{folder.name}", on_progress=lambda done, total: None) == folder
    (folder / "model.safetensors").unlink()
    assert "which is complete" not in refusal("org/tiny")


def test_no_connection(tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_hub.close()
    message = refusal("org/tiny")
    assert message.startswith(f"org/tiny is not a local folder, and {tiny_hub.url} cannot be reached (")
    assert "refused" in message
    assert "check the spelling, or the network (or HF_ENDPOINT)" in message


@pytest.mark.parametrize("waits", ["answer", "pause"])
def test_no_answer(tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    getattr(tiny_hub, waits).clear()
    assert refusal("org/tiny").startswith(f"{tiny_hub.url} did not answer in time for org/tiny; check the network")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config.json": b"{}", "a.bin": b"", "b.gguf": b""},
            "org/odd has no safetensors, but a.bin, b.gguf; expected",
        ),
        (
            {f"{name}.gguf": b"" for name in "abcde"},
            "org/odd has no config.json, but a.gguf, b.gguf, c.gguf and 2 more;",
        ),
        ({"README.md": b""}, "org/odd has no config.json; expected a Hugging Face model"),
        ({"a.safetensors": b""}, "org/odd has no config.json; expected"),
    ],
)
def test_not_a_model(tiny_hub: HubServer, files: dict[str, bytes], message: str) -> None:
    tiny_hub.repositories["org/odd"] = Repository()
    tiny_hub.repositories["org/odd"].add(files, "main")
    assert refusal("org/odd", UnsupportedModelError).startswith(message)
    assert not tiny_hub.requested_files()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quantized (method exl3)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "GPTQ with bits 3"),
    ],
)
def test_unsupported_models_before_their_weights(
    tiny_hub: HubServer, tiny_llama: Path, change: dict[str, Any], message: str
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **change}).encode()
    tiny_hub.repositories["org/tiny"].add(files, "main")
    refused = refusal("org/tiny", UnsupportedModelError)
    assert refused.startswith("org/tiny: config.json")
    assert message in refused
    assert "model.safetensors" not in tiny_hub.requested_files()


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_damaged_config(tiny_hub: HubServer, tiny_llama: Path, content: bytes) -> None:
    tiny_hub.add_model("org/tiny", tiny_llama, **{"config.json": content})
    assert "config.json" in refusal("org/tiny")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {"a": "absent.safetensors"}}', "org/tiny lacks absent.safetensors: its upload is incomplete"),
        (b'{"weight_map": {"a": "../../config.json"}}', "places a in ../../config.json, expected the name of"),
        (b'{"weight_map": {"a": "sub/b.safetensors"}}', "places a in sub/b.safetensors, expected the name of"),
        (b'{"weight_map": {"a": 3}}', "places a in 3, expected the name of"),
    ],
)
def test_damaged_index(tiny_hub: HubServer, tiny_llama: Path, index: bytes, message: str) -> None:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    files["model-00001-of-00001.safetensors"] = files.pop("model.safetensors")
    tiny_hub.repositories["org/tiny"].add({**files, "model.safetensors.index.json": index}, "main")
    assert message in refusal("org/tiny")


def test_shards_without_an_index(tiny_hub: HubServer, tiny_llama: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    files["model-00001-of-00001.safetensors"] = files.pop("model.safetensors")
    tiny_hub.repositories["org/tiny"].add(files, "main")
    assert "org/tiny lacks model.safetensors or its index" in refusal("org/tiny")


def test_weights_of_another_name(tiny_hub: HubServer, tiny_llama: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    files["tiny.safetensors"] = files.pop("model.safetensors")
    tiny_hub.repositories["org/tiny"].add(files, "main")
    open_model(resolve_model("org/tiny", on_progress=lambda done, total: None))


def test_a_full_disk(tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmcli.checkpoint.hub_client.HubClient.download", fail)
    expected = f"the disk of {constants.HF_HUB_CACHE} is full; free some space, then try again"
    assert refusal("org/tiny").startswith(expected)


def test_a_cache_that_cannot_be_written(tiny_hub: HubServer) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert refusal("org/tiny").startswith(f"org/tiny cannot be stored: {cache}")


def test_what_a_file_name_tells_is_refused_before_any_download(tiny_hub: HubServer, tiny_llama: Path) -> None:
    tiny_hub.add_model("org/odd", tiny_llama, **{"adapter_model.safetensors": b"{}"})
    assert refusal("org/odd").startswith("org/odd holds a LoRA adapter, not a whole model")
    assert not tiny_hub.requested_files()


@pytest.mark.parametrize(
    ("name", "method"),
    [("quant_config.json", "awq"), ("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")],
)
def test_a_quantized_model_whose_config_does_not_say_so(
    tiny_hub: HubServer, tiny_llama: Path, name: str, method: str
) -> None:
    tiny_hub.add_model("org/odd", tiny_llama, **{name: b"{}"})
    assert refusal("org/odd").startswith(f"org/odd/{name} says that the weights are quantized (method {method})")
    assert "model.safetensors" not in tiny_hub.requested_files()


def test_a_repository_without_a_tokenizer(tiny_hub: HubServer, tiny_llama: Path) -> None:
    names = ("config.json", "model.safetensors")
    tiny_hub.repositories["org/bare"] = Repository()
    tiny_hub.repositories["org/bare"].add({name: (tiny_llama / name).read_bytes() for name in names}, "main")
    assert refusal("org/bare") == "org/bare has no tokenizer: neither tokenizer.json nor tokenizer.model"
    assert not tiny_hub.requested_files()
