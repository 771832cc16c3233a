"""A wheel of the tree, installed alone into an empty environment, runs from an empty folder."""

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# int8 and 16 bits: the package must stay small.
MAX_STORYTELLER_BYTES = {"storyteller": 14e6, "storyteller-bf16": 24e6}


def run(*command: object, **options: object) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


def link_dependencies(requirements: list[str], site_packages: Path) -> None:
    """Put what these requirements ask for, and what that asks for, into an environment, as links to ours."""
    left, seen = [*requirements], set[str]()
    while left:
        requirement = Requirement(left.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        found = distribution(requirement.name)
        left += found.requires or []
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(str(found.locate_file(top)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("llmcli-*.whl")
    return path


def test_kernels_and_configs_travel_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    for folder in ("kernels", "configs"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        for path in files:
            assert f"llmcli/resources/{path.relative_to(ROOT)}" in packed
    assert not [name for name in packed if name.startswith(("tests/", "scripts/"))]


@pytest.mark.parametrize("name", MAX_STORYTELLER_BYTES)
def test_the_storyteller_travels_in_the_wheel(wheel: Path, name: str) -> None:
    folder = ROOT / "llmcli" / "resources" / name
    files = [path for path in folder.rglob("*") if path.is_file()]
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    packed = {str(path.relative_to(ROOT)): path.stat().st_size for path in files}
    assert packed.items() <= sizes.items()
    assert {path.name for path in files} >= {"config.json", "model.safetensors", "tokenizer.model"}
    assert sum(packed.values()) <= MAX_STORYTELLER_BYTES[name]


def test_the_installed_wheel_generates(wheel: Path, tiny_llama: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        link_dependencies(message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or [], site_packages)
    run(*pip, "check")
    empty = tmp_path / "empty"
    empty.mkdir()
    llmcli = tmp_path / "venv" / "bin" / "llmcli"
    prompt = ("generate", "Once", "-m", tiny_llama, "--seed", 1, "--max-new-tokens", 9, "--preset", "story")
    text = run(llmcli, *prompt, cwd=empty)
    assert text == run(sys.executable, "-m", "llmcli", *prompt, cwd=ROOT)
    told = run(llmcli, "generate", "Once upon a time", "--seed", 1, "--max-new-tokens", 9, cwd=empty)
    assert len(told.split()) > 3
    location = run(python, "-c", "import llmcli; print(llmcli.__file__)", cwd=empty)
    assert str(tmp_path) in location
    assert list(empty.iterdir()) == []
