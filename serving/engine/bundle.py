"""A converted model on disk: what convert.py wrote, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine_configs.errors import BundleError, ConfigError
from engine_configs.spec import HybridSpec, from_json
from serving.kv_compression.calibration import BoundCalibration
from serving.kv_compression.calibration import from_json as bounds_from_json
from serving.replay.calibration import UNCALIBRATED, Calibration
from serving.replay.calibration import from_json as calibration_from_json

FORMAT = 1


@dataclass(frozen=True)
class Bundle:
    """``artifacts/<model>/``: model.onnx and its weights, manifest.json, tokenizer files."""

    path: Path
    spec: HybridSpec
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """Raises BundleError where ``path`` is not a whole bundle of this format."""
        path = Path(path)
        file = path / "manifest.json"
        fix = "Convert the model again with convert.py"
        try:
            manifest = json.loads(file.read_text())
            if manifest.get("format") != FORMAT:
                raise BundleError(
                    f"format is {manifest.get('format')!r}, expected {FORMAT}",
                    where=str(file),
                    fix=fix,
                )
            spec = from_json(manifest["spec"], f"{file}: spec")
            for name, size in manifest["files"].items():
                found = (path / name).stat().st_size
                if found != size:
                    raise BundleError(
                        f"{name} has {found} bytes, expected {size}", where=str(path), fix=fix
                    )
        except FileNotFoundError as e:
            raise BundleError(
                f"not a bundle: {Path(e.filename).name} is missing", where=str(path), fix=fix
            ) from None
        except OSError as e:
            raise BundleError(f"not a bundle: {e.strerror}", where=str(path), fix=fix) from None
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as e:
            raise BundleError(f"damaged manifest: {e!r}", where=str(file), fix=fix) from None
        return cls(path, spec, manifest)

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def model_file(self) -> Path:
        return self.path / "model.onnx"

    @cached_property
    def calibration(self) -> Calibration:
        """What is known of replaying prefixes on this model. Raises ConfigError when damaged."""
        data = self.manifest.get("calibration")
        where = f"{self.manifest_file}: calibration"
        return calibration_from_json(data, where) if data else UNCALIBRATED

    @property
    def bounds(self) -> BoundCalibration:
        """What is known of the error of compressed attention. Raises ConfigError when damaged."""
        data = self.manifest.get("bound_calibration")
        where = f"{self.manifest_file}: bound_calibration"
        return bounds_from_json(data, where) if data else BoundCalibration()

    @property
    def digest(self) -> str:
        """Identity of weights, dtype and layout: part of every prefix-cache key."""
        return str(self.manifest["digest"])

    @property
    def name(self) -> str:
        return str(self.manifest["name"])
