"""Where the library of CPU kernels lies, if it was built (`make native`)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import onnxruntime as ort

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
