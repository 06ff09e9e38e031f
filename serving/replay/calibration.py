"""What calibration found out about one model: which units remember, and what a short tail costs.

A *unit* is a part of a recurrent state with a decay of its own: a head (GDN, Mamba-2, lightning)
or a key channel (KDA). Slow units are restored from checkpoints, fast ones start from zero.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from engine_configs.spec import build_dataclass

Status = Literal["measured", "imported", "uncalibrated"]
# How far beyond the largest estimate that was seen an error is still bounded.
SEEN = 1.5


@dataclass(frozen=True)
class LayerUnits:
    """One layer. slow: units kept in checkpoints; norm [units]: mean ‖S_u‖ over calibration;
    weight [units]: share of the answers' error that losing the unit causes, all layers sum to 1."""

    layer: int
    slow: tuple[int, ...]
    norm: tuple[float, ...]
    weight: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """A replay of ``tail`` tokens (``ratio`` of L where > 0) with ``slow`` units restored:
    right answers relative to the exact run, and the logit KL at its 95th percentile."""

    slow: int
    tail: int
    ratio: float
    answers: float
    kl: float


@dataclass(frozen=True)
class Gate:
    """``error[i]``: KL (95th percentile) of replays whose estimate is at most ``estimate[i]``;
    both rise."""

    estimate: tuple[float, ...] = ()
    error: tuple[float, ...] = ()

    def bound(self, estimate: float) -> float:
        """The calibrated error of an estimate; somewhat beyond what was seen it grows as the
        square, further out it is infinite."""
        at = bisect.bisect_left(self.estimate, estimate)
        if at < len(self.error):
            return self.error[at]
        beyond = estimate / self.estimate[-1] if self.estimate and self.estimate[-1] else math.inf
        return self.error[-1] * beyond**2 if beyond <= SEEN else math.inf


@dataclass(frozen=True)
class Calibration:
    """interval: tokens between checkpoints; min_tail: r_min, replayed at least; dtype: of the slow
    units in a checkpoint; split, zero: gates of the two kinds of replay; curve: what was measured;
    safe: zero-start tail replay at 5 % keeps the target on this model."""

    status: Status = "uncalibrated"
    interval: int = 0
    min_tail: int = 0
    dtype: str = "fp32"
    layers: tuple[LayerUnits, ...] = ()
    split: Gate = Gate()
    zero: Gate = Gate()
    curve: tuple[Point, ...] = ()
    target_answers: float = 0.99
    target_kl: float = 0.01
    safe: bool = False
    verdict: str = "not calibrated: replay only what a request asks for"

    @property
    def slow_units(self) -> int:
        return sum(len(layer.slow) for layer in self.layers)

    @property
    def known(self) -> bool:
        """Errors can be bounded."""
        return self.status != "uncalibrated"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


UNCALIBRATED = Calibration()


def from_json(data: dict[str, Any], where: str) -> Calibration:
    """Read back ``Calibration.to_json()``. Raises ConfigError on an unknown or missing key."""
    return cast(Calibration, build_dataclass(Calibration, data, where))


STEP = 20


def fit_gate(pairs: Sequence[tuple[float, float]]) -> Gate:
    """A rising step function over (estimate, error) pairs: each step of 20 pairs is bounded by its
    largest error, so about 1 in 21 fresh errors lies above (the 95th percentile, rounded up)."""
    ordered = sorted(pairs)
    edges, bounds, highest = list[float](), list[float](), 0.0
    for i in range(0, len(ordered) - STEP + 1, STEP):
        step = ordered[i : i + STEP]
        highest = max(highest, max(error for _, error in step))
        edges.append(step[-1][0])
        bounds.append(highest)
    return Gate(tuple(edges), tuple(bounds))
