"""Find a Triton server: TRITON_BIN, then the path in NVIDIA's container, then the wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_configs.errors import LaunchError

CONTAINER_HOME = Path("/opt/tritonserver")
PROJECT_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class TritonServer:
    """A server on this machine. `home` holds bin/, backends/ and caches/."""

    binary: Path
    source: str  # TRITON_BIN | container | wheel
    version: str | None  # of the release, where a file beside the binary says so
    environment: Mapping[str, str] = field(default_factory=dict)  # to add when it is started

    @property
    def home(self) -> Path:
        return self.binary.parent.parent

    @property
    def backends(self) -> Path | None:
        """None: the server's own default."""
        path = self.home / "backends"
        return path if path.is_dir() else None


def find_tritonserver(environ: Mapping[str, str] = os.environ) -> TritonServer:
    """The first server found. Raises LaunchError when there is none, or one that cannot work."""
    binary, source = _locate(environ)
    from_wheel = "pytriton" in binary.parts
    if from_wheel:
        _check_wheel(binary)
    version_file = binary.parent.parent / "TRITON_VERSION"
    version = version_file.read_text().strip() if version_file.is_file() else None
    # The stubs take the python of PATH, and our models import `serving` from the project.
    environment = {
        "PATH": _prepend(str(Path(sys.executable).parent), environ.get("PATH")),
        "PYTHONPATH": _prepend(str(PROJECT_ROOT), environ.get("PYTHONPATH")),
    }
    return TritonServer(binary, source, version, environment)


def _locate(environ: Mapping[str, str]) -> tuple[Path, str]:
    named = environ.get("TRITON_BIN")
    if named:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise LaunchError(
                f"TRITON_BIN is {named!r}, which is not an executable file",
                fix="Point it at a tritonserver binary, or unset it.",
            )
        return Path(named).resolve(), "TRITON_BIN"
    container = CONTAINER_HOME / "bin" / "tritonserver"
    if container.is_file():
        return container, "container"
    wheel = importlib.util.find_spec("pytriton")
    for place in wheel.submodule_search_locations or () if wheel else ():
        binary = Path(place) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary, "wheel"
    raise LaunchError(
        "no Triton server was found: TRITON_BIN is not set, "
        f"{container} does not exist and the wheel nvidia-pytriton is not installed",
        fix="Run `make setup`, run in NVIDIA's Triton container, or set TRITON_BIN.",
    )


def _check_wheel(binary: Path) -> None:
    stub = binary.parent.parent / "backends" / "python" / "triton_python_backend_stub"
    if not stub.is_file():
        raise LaunchError(
            f"the Triton wheel has no python stub at {stub}",
            fix="Run `make setup`: it copies the stub of this python version there.",
        )
    # Without its libraries the stub dies silently and the server waits for it for ever.
    loader = subprocess.run([stub], capture_output=True, text=True, timeout=30, check=False)
    if loader.returncode == 127:
        raise LaunchError(
            f"Triton's python stub does not start: {loader.stderr.strip()}",
            fix="Run `make setup`: it brings the libraries.",
        )
    numpy_version = importlib.metadata.version("numpy")
    if int(numpy_version.split(".")[0]) >= 2:
        raise LaunchError(
            f"numpy {numpy_version} with this Triton server corrupts tensors without an error",
            fix="Install numpy==1.26.4, as requirements/serving.txt says.",
        )


def _prepend(first: str, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first
