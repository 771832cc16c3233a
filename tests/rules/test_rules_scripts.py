"""The scripts choose the CUDA extra by the driver they find, and never die on the way."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NVIDIA_SMI = "| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: {version}  |"


@pytest.mark.parametrize(
    ("cuda_version", "wanted", "extras"),
    [
        (None, [], ""),
        (None, ["dev"], "dev,compile"),
        ("13.0", [], "cuda13"),
        ("13.2", ["dev"], "dev,cuda13"),
        ("12.4", ["dev"], "dev,cuda12"),
        ("11.8", [], ""),
        ("11.8", ["dev"], "dev,compile"),
        ("broken", ["dev"], "dev,compile"),
    ],
)
def test_extras(tmp_path: Path, cuda_version: str | None, wanted: list[str], extras: str) -> None:
    if cuda_version is not None:
        fake = tmp_path / "nvidia-smi"
        text = NVIDIA_SMI.format(version=cuda_version)
        fake.write_text(f"#!/bin/sh\necho '{text}'\n" if cuda_version != "broken" else "#!/bin/sh\nexit 9\n")
        fake.chmod(0o755)
    script = f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; wanted_extras "$@"'
    path = f"{tmp_path}:/usr/bin:/bin"
    command = ["bash", "-c", script, "bash", *wanted]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, extras, "")


def test_an_old_python_is_refused_in_words(tmp_path: Path) -> None:
    script = f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; root={tmp_path}; ensure_environment'
    environment = {**os.environ, "PYTHON": "/bin/false"}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert "missing or older than Python 3.11" in result.stderr
