"""Fixtures of all tests: the folder of real tokenizers and models next to the project, and tiny models made here."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in the command line; numpy reads it when it is imported
os.environ["LLMCLI_CONFIG"] = ""  # the settings of whoever runs the tests do not count

import huggingface_hub
import pytest
import torch
from fake_ncu import FakeNcu
from hub_server import HubServer
from huggingface_hub import constants
from tiny_models import write_tiny_llama

from llmcli.kernels import environment
from llmcli.kernels.device import Device

# Before a test imports CuPy, which would make a folder in the user's home.
if environment.cupy_distributions():
    environment.prepare_cupy()

# More than 10 s each. They begin first, so that no processor waits for the last of them.
SLOW_FILES = {
    "test_chat_sandbox.py",
    "test_cli_batch_ray.py",
    "test_cli_process.py",
    "test_cli_schema.py",
    "test_cli_storyteller.py",
    "test_cli_tour.py",
    "test_cuda_dry_run.py",
    "test_cuda_emulated.py",
    "test_cuda_simulated.py",
    "test_deaths.py",
    "test_generation_schema.py",
    "test_guide_commands.py",
    "test_host_packed.py",
    "test_schema_refusals.py",
    "test_serve_process.py",
    "test_storyteller_evaluation.py",
    "test_torch_conformance.py",
}
SHARED = Path(__file__).resolve().parents[2] / "shared"

# Programs in a shell's background, and their children, ignore these signals. Tests have to interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Tiny matrices gain nothing from more threads, and waiting for a busy second core costs more than it gains.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """For tests that compile: scripts/test installs what they need."""
    version = environment.nvrtc_version()
    if isinstance(version, str) or environment.header_folder() is None:
        pytest.skip("needs CuPy, NVRTC and the CUDA headers: the extra compile, cuda12 or cuda13")


@pytest.fixture(scope="session")
def opened_device() -> Device:
    """Card 0. Tests that ask for it are marked `cuda`; without a card they fail rather than pass unseen."""
    return Device.open(0)


@pytest.fixture
def device(opened_device: Device) -> Iterator[Device]:
    """Card 0, its stream current in this thread, idle at the start and at the end of the test.

    A failure of the card names the test that caused it, since the next test starts idle.
    """
    opened_device.activate()
    opened_device.synchronize()
    opened_device.noted = None
    with opened_device.stream:
        yield opened_device
    opened_device.synchronize()


@pytest.fixture
def wgmma_card(device: Device) -> Device:
    if not device.can_wgmma:
        pytest.skip("the card has no wgmma")
    return device


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    """A stand-in for Nsight Compute: the only program on PATH."""
    folder = tmp_path / "ncu_bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return FakeNcu(folder)


@pytest.fixture
def num_export_races(request: pytest.FixtureRequest) -> int:
    """How many pairs of `quantize` run at once on one folder, and how many of them are killed."""
    return int(request.config.getoption("--export-races"))


@pytest.fixture
def num_batch_prompts(request: pytest.FixtureRequest) -> int:
    """Prompts of the killed batch; the numbers of kills and of checked lines follow from it."""
    return int(request.config.getoption("--batch-evidence"))


@pytest.fixture
def num_ray_kills(request: pytest.FixtureRequest) -> int:
    """Kills of workers, drivers and nodes."""
    return int(request.config.getoption("--ray-kills"))


@pytest.fixture
def num_schemas(request: pytest.FixtureRequest) -> int:
    """How many JSON Schemas constrain texts; two fifths as many expressions."""
    return int(request.config.getoption("--schemas"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the slow files; leave the long tests out, unless --all asks for them."""
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)
    if config.getoption("--all"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage in what tests make, not again and again in the modules and tests, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Longer runs of tests that draw their cases; without an option each runs a few of them."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.addoption("--all", action="store_true", help="run the tests marked `long` too")
    parser.addoption("--fuzz", **number, help="damage files in N other ways than those of every run")
    parser.addoption("--hub-kills", **number, default=2, help="N kills of `pull`")
    parser.addoption("--odd-configs", **number, default=120, help="N random configurations")
    parser.addoption("--odd-tokenizers", **number, help="N random tokenizers and chat templates")
    parser.addoption("--export-races", **number, default=3, help="N pairs and N kills of `quantize`")
    parser.addoption("--serve-attack", **number, default=8, help="N seconds of attacks on the server")
    parser.addoption("--serve-clients", **number, default=24, help="N clients of one server at once")
    parser.addoption("--serve-bodies", **number, default=150, help="N malformed bodies to the server")
    parser.addoption("--serve-leavers", **number, default=40, help="N clients that leave")
    parser.addoption("--serve-seconds", **number, default=2, help="for N seconds")
    parser.addoption("--draft-evidence", **number, default=19, help="N runs with every source of drafts")
    parser.addoption("--batch-evidence", **number, default=30, help="a batch of N prompts, killed N / 100 times")
    parser.addoption("--ray-kills", **number, default=6, help="N kills in a batch of 60 N prompts on a Ray cluster")
    parser.addoption("--chat-walks", **number, default=24, help="N sequences of commands of a chat")
    parser.addoption("--schemas", **number, default=48, help="N JSON Schemas; from 2225 on all of the official suite")


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A trained LLaMA of 260 thousand parameters with its author's published greedy text."""
    folder = SHARED / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("needs the model stories260K in ../shared, which is not part of the project")
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA with grouped heads and a tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on this machine, and an empty cache at `tmp_path`; for this process and those it starts."""
    server = HubServer()
    cache = tmp_path / "hf-home" / "hub"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    # huggingface_hub has read its environment when it was imported.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield server
    server.close()
    huggingface_hub.close_session()
