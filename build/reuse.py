"""What an earlier conversion into the same place can still be used for.

Weights and graph are reused when the spec, the dtype, the checkpoint's files and the code that
builds graphs are unchanged; parity and calibration when the code that serves is unchanged too.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_configs.errors import BundleError
from serving.engine.bundle import Bundle

if TYPE_CHECKING:
    from build.pipeline import Options

ROOT = Path(__file__).resolve().parent.parent
GRAPH_CODE = ("build", "engine_configs", "plugins")
SERVING_CODE = ("serving",)
FILES = ("model.onnx", "model.onnx.data")


@dataclass(frozen=True)
class Sources:
    """Hashes of what a bundle was made from."""

    graph: str
    measured: str

    @classmethod
    def of(cls, options: Options) -> Sources:
        graph = _hash(
            json.dumps(options.family.spec.to_json(), sort_keys=True),
            options.dtype,
            options.lowering,
            _identity(options.checkpoint) or f"random {options.seed}",
            _code(GRAPH_CODE),
        )
        imported = _identity(options.import_calibration)
        wanted = (options.calibration, imported, options.calibrate_on, options.max_kl)
        return cls(graph, _hash(graph, repr(wanted), _code(SERVING_CODE)))

    def to_json(self) -> dict[str, str]:
        return {"graph": self.graph, "measured": self.measured}


def earlier(options: Options, sources: Sources) -> Bundle | None:
    """The bundle that is already there, when its weights are those of these sources."""
    try:
        bundle = Bundle.open(options.output)
    except BundleError:
        return None
    same = bundle.manifest.get("sources", {}).get("graph") == sources.graph
    return bundle if same else None


def link_files(bundle: Bundle, scratch: Path) -> str:
    """Bring graph and weights over without copying; returns their digest."""
    for name in FILES:
        os.link(bundle.path / name, scratch / name)
    return bundle.digest


def measurements(bundle: Bundle | None, sources: Sources) -> dict[str, Any] | None:
    """Parity and calibration of an earlier bundle, when nothing they depend on has changed."""
    if bundle is None or bundle.manifest["sources"]["measured"] != sources.measured:
        return None
    keys = ("parity", "skipped", "calibration", "bound_calibration")
    return {key: bundle.manifest[key] for key in keys}


def _identity(path: Path | None) -> str:
    """Names, sizes and times of a checkpoint's files, or of one file."""
    if path is None:
        return ""
    files = sorted(f for f in path.iterdir() if f.suffix != ".md") if path.is_dir() else [path]
    return repr([(f.name, s.st_size, s.st_mtime_ns) for f in files if (s := f.stat())])


def _code(packages: tuple[str, ...]) -> str:
    files = sorted(f for package in packages for f in (ROOT / package).rglob("*.py"))
    return _hash(*(f"{f.relative_to(ROOT)} {f.read_text()}" for f in files))


def _hash(*parts: str) -> str:
    joined = "\0".join(parts)
    return hashlib.sha256(joined.encode()).hexdigest()
