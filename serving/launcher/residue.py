"""What a running server owns beside its own process: stub processes and /dev/shm files.

A stub has its own process group and outlives a server that crashed, and shared memory outlives
both. Every start has a fresh run id; stubs carry it in their command line (the name of their
shared memory region), files in their name, so that nothing of another run is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
RUN_ID_VARIABLE = "HYBRID_SERVE_RUN_ID"


def file_prefix(run_id: str) -> str:
    """Start of the name of every /dev/shm file of this run, the models' arenas included."""
    return f"hybrid-serve-{run_id}-"


def stub_region_prefix(run_id: str) -> str:
    """What the python backend is told to call its shared memory regions."""
    return file_prefix(run_id) + "stub-"


def find_stubs(run_id: str) -> dict[int, str]:
    """pid -> model name of each living stub of this run (a zombie has no command line)."""
    mark = stub_region_prefix(run_id).encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if any(argument.startswith(mark) for argument in arguments):
            found[int(entry.name)] = _model_name(arguments)
    return found


def _model_name(arguments: list[bytes]) -> str:
    """From REPOSITORY/<model>/<version>/model.py."""
    for argument in arguments[1:]:
        parts = Path(os.fsdecode(argument)).parts
        if len(parts) >= 3 and parts[-1].endswith(".py"):
            return parts[-3]
    return "unknown"


def remove(run_id: str, *, patience: float = 5.0) -> None:
    """Kill what stubs are left of this run and delete its /dev/shm files.

    Waits up to `patience` seconds for the killed to be gone: until then they could create files.
    """
    end = time.monotonic() + patience
    while stubs := find_stubs(run_id):
        for pid in stubs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    for path in SHARED_MEMORY.glob(file_prefix(run_id) + "*"):
        path.unlink(missing_ok=True)
