"""The environment of the peers: `python -m benchmarks.peers.environment` makes it, in `.second_opinion`.

It is a virtual environment with a few packages, and beside it the Python sources of the peers, unpacked from their
wheels without their dependencies. Nothing else installs or imports them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
HOME: Final = ROOT / ".second_opinion"
SOURCES: Final = HOME / "sources"
PYTHON: Final = HOME / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"

PEERS: Final = {"vllm": "0.33.0", "sglang": "0.5.23"}
"""The peers' packages, at the versions for which the explanations of differences hold."""

MEGATRON: Final = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
"""The commit of Megatron-LM: no release has its planner of KV caches yet."""

VERSIONS: Final = {**PEERS, "megatron": MEGATRON[:7]}


def is_there() -> bool:
    """Whether the environment exists, with the peers at these versions."""
    unpacked = [f"{name}-{version}.dist-info" for name, version in PEERS.items()]
    return PYTHON.exists() and all((SOURCES / name).exists() for name in [*unpacked, f"megatron-{MEGATRON}"])


def build() -> None:
    """Make the environment. It downloads 400 MB, mostly a wheel of which it uses the Python files alone."""
    HOME.mkdir(exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / "venv"], check=True)
    _pip("install", "--requirement", str(HERE / "requirements.txt"))
    for name, version in PEERS.items():
        if (SOURCES / f"{name}-{version}.dist-info").exists():
            continue
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, f"{name}=={version}")
            (wheel,) = Path(folder).glob("*.whl")
            _unpack(wheel)
    _checkout()


def _checkout() -> None:
    """Get the folder of Megatron-LM's planner, without the rest of its repository."""
    folder, mark = "megatron/core/inference/disaggregation", SOURCES / f"megatron-{MEGATRON}"
    if mark.exists():
        return
    with tempfile.TemporaryDirectory(dir=HOME) as clone:
        git = ["git", "-C", clone]
        subprocess.run([*git, "init", "--quiet"], check=True)
        url = "https://github.com/NVIDIA/Megatron-LM"
        subprocess.run([*git, "fetch", "--quiet", "--depth=1", "--filter=blob:none", url, MEGATRON], check=True)
        archive = subprocess.run([*git, "archive", MEGATRON, folder], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", SOURCES], input=archive, check=True)
    mark.touch()


def _pip(command: str, *arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([PYTHON, "-m", "pip", command, *quiet, *arguments], check=True)


def _unpack(wheel: Path) -> None:
    """Unpack the Python files of a wheel, and METADATA last, which marks the folder as complete."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in (*(n for n in names if n.endswith(".py")), *(n for n in names if n.endswith("/METADATA"))):
            archive.extract(name, SOURCES)


if __name__ == "__main__":
    build()
    print(f"ready: {PYTHON} -m tests.second_opinion")
