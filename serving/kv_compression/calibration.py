"""What conversion found out about the bound of a model's compressed attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from engine_configs.spec import build_dataclass
from serving.kv_compression.bounds import holds


@dataclass(frozen=True)
class BoundCalibration:
    """violations[i]: summed over ``sequences`` of the model's own, the share of head steps that
    were further off than allowed with ``factors[i]`` (rising), at the worst of ``epsilons``."""

    sequences: int = 0
    epsilons: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    violations: tuple[float, ...] = ()

    def factor(self, alpha: float) -> float | None:
        """The smallest with at most ``alpha`` violations on a new sequence; None where none was
        found."""
        pairs = zip(self.factors, self.violations, strict=True)
        return next((f for f, total in pairs if holds(total, self.sequences, alpha)), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(data: dict[str, Any], where: str) -> BoundCalibration:
    """Read back ``BoundCalibration.to_json()``. Raises ConfigError on an unknown or missing key."""
    return cast(BoundCalibration, build_dataclass(BoundCalibration, data, where))
