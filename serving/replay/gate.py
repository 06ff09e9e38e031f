"""The error estimate of a replay that started some units from zero.

For fixed inputs, the part of a unit's state that was there before the tail has decayed by the
product of its decays: ``∏ α_t · ‖S_u(start)‖`` bounds what is missing at the end (the delta rule
with unit keys and 0 ≤ β ≤ 2 never expands). Units count by the share of the answers' error that
losing them caused in calibration, relative to their usual norm. Deeper layers see inputs that are
off already, so the estimate is no bound there: it is mapped to an error by what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from serving.replay.calibration import Calibration

Floats = NDArray[np.float32]


class Estimator:
    """Estimates of one calibrated model."""

    def __init__(self, calibration: Calibration) -> None:
        self._layers = [
            (
                u.layer,
                np.asarray(u.weight, np.float64),
                np.maximum(np.asarray(u.norm, np.float64), 1e-12),
                np.isin(np.arange(len(u.weight)), u.slow),
            )
            for u in calibration.layers
        ]

    def estimate(
        self,
        decay_sums: Mapping[int, Floats],
        norms: Mapping[int, Floats] | None,
        *,
        split: bool,
    ) -> float:
        """decay_sums: Σ log α over the tail [units] by layer; norms: ‖S_u(start)‖ [units] by
        layer (None: the usual ones). ``split``: slow units were restored, they lose nothing."""
        total = 0.0
        for layer, weight, usual, slow in self._layers:
            left = np.exp(np.asarray(decay_sums[layer], np.float64))
            if norms is not None:
                left = left * np.asarray(norms[layer], np.float64) / usual
            if split:
                left = np.where(slow, 0.0, left)
            total += float((weight * left).sum())
        return total
