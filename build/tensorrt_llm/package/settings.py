"""What config.json says to the package: ``hybrid_serve`` in it, written by convert.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine_configs.spec import HybridSpec, build_dataclass
from serving.prefix_cache.planner import ReplayMode, ReplayRequest
from serving.replay.calibration import Calibration
from serving.replay.policy import default_replay

ARCHITECTURE = "HybridServeForCausalLM"
MODEL_TYPE = "hybrid_serve"


@dataclass(frozen=True)
class Sparse:
    """Retention of decode steps: K/V blocks that a step reads of each head. ``sinks`` first and
    ``recent`` last blocks always; of the others the ``budget`` whose keys can score highest."""

    budget: int
    sinks: int = 1
    recent: int = 2


@dataclass(frozen=True)
class Settings:
    """replay_mode, replay_amount: what every request asks (TensorRT-LLM's requests have no field
    for it); record_bytes: host memory for states that may be started from; spare_rows: of states
    beyond max_batch_size, for requests that only warm up; sparse: None = dense attention."""

    spec: HybridSpec
    calibration: Calibration
    replay_mode: str = "exact"
    replay_amount: float = 0.0
    record_bytes: int = 1 << 30
    spare_rows: int = 16
    sparse: Sparse | None = None

    @classmethod
    def of(cls, spec: HybridSpec, calibration: Calibration) -> Settings:
        """As calibration allows."""
        replay = default_replay(calibration)
        return cls(spec, calibration, str(replay.mode), replay.amount)

    @property
    def replay(self) -> ReplayRequest:
        return ReplayRequest(ReplayMode(self.replay_mode), self.replay_amount)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_settings(data: dict[str, Any], where: str) -> Settings:
    """Read back ``Settings.to_json()``. Raises ConfigError on an unknown or missing key."""
    settings: Settings = build_dataclass(Settings, data, where)
    return settings
