"""What this machine can do at best: the floors that measured times are printed beside."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import numpy as np

_READ_BYTES = 256 << 20
_WRITE_BYTES = 256 << 20


def peak_memory_gib() -> float:
    """Most memory this process has held, by the kernel's count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def memory_bandwidth(threads: int) -> float:
    """Bytes per second that ``threads`` threads read from memory together."""
    parts = [np.ones(_READ_BYTES // 8 // threads) for _ in range(threads)]
    best = 0.0
    for _ in range(3):
        workers = [threading.Thread(target=part.sum) for part in parts]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, _READ_BYTES / (time.perf_counter() - started))
    return best


def disk_speed(folder: Path) -> float:
    """Bytes per second written to ``folder`` and flushed."""
    file, data = folder / f".speed-{os.getpid()}", os.urandom(1 << 20)
    started = time.perf_counter()
    try:
        with file.open("wb") as out:
            for _ in range(_WRITE_BYTES >> 20):
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        return _WRITE_BYTES / (time.perf_counter() - started)
    finally:
        file.unlink(missing_ok=True)
