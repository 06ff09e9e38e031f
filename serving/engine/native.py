"""The library of CPU kernels, if it was built (`make native`): where it lies, what it does."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path("native") / "libhybrid_ops.so"
_log = logging.getLogger(__name__)


def library(bundle: Path | None = None) -> Path | None:
    """$HYBRID_OPS_LIBRARY, this checkout's, or the copy in ``bundle``; None where there is none."""
    named = os.environ.get("HYBRID_OPS_LIBRARY")
    places = [Path(named)] if named else [ROOT / "artifacts" / LIBRARY]
    if bundle and not named:
        places.append(bundle / LIBRARY)
    return next((path for path in places if path.is_file()), None)


def register(options: ort.SessionOptions, bundle: Path | None = None) -> bool:
    """Let sessions of ``options`` use the kernels; False, and a line in the log, where they run
    the ops' function bodies instead: dense attention, slower."""
    path = library(bundle)
    if path is None:
        _log.warning("no CPU kernels (libhybrid_ops.so was not built): the slower bodies run")
        return False
    try:
        options.register_custom_ops_library(str(path))
    except Exception as e:  # onnxruntime's own classes; this machine lacks AVX2, or it is damaged
        _log.warning("the CPU kernels of %s do not load (%s): the slower bodies run", path, e)
        return False
    return True


def summarise_slot(k: Floats, v: Floats, *, sound: bool = False) -> tuple[Halves, Floats]:
    """The summaries of a slot's rows, a block of 32 at a time: k [rows, dk], v [rows, dv], both
    contiguous.

    Returns entries [M, 2*dk + dv] float16 and stats [M, 2], M = ceil(rows / 32), as ``summarise``
    of the attention op's reference gives them one by one. Raises OSError without the library.
    """
    rows, dk, dv = *k.shape, v.shape[1]
    blocks = -(-rows // 32)
    entries = np.empty((blocks, 2 * dk + dv), np.float16)
    stats = np.empty((blocks, 2), np.float32)
    for array in (k, v):
        assert array.flags.c_contiguous
        assert array.dtype == np.float32
    arrays = [ctypes.c_void_p(a.ctypes.data) for a in (k, v, entries, stats)]
    sizes = [ctypes.c_int64(n) for n in (rows, dk, dv, blocks)]
    if _functions().hybrid_summarise(*arrays[:2], *sizes, int(sound), *arrays[2:]):
        raise OSError("the CPU kernels do not run on this machine")
    return entries, stats


@functools.cache
def _functions() -> ctypes.CDLL:
    path = library()
    if path is None:
        raise OSError("libhybrid_ops.so was not built: make native")
    return ctypes.CDLL(str(path))
