"""From bytes to rows, and the factor that makes an error estimate hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import BLOCK


def entry_bytes(key_dim: int, value_dim: int) -> int:
    """Of one summary: fp16 vectors and two fp32 figures."""
    return 2 * (2 * key_dim + value_dim) + 8


def rows_within(budget: float, length: int, key_dim: int, value_dim: int, group: int) -> int:
    """Rows a head may keep so that they and all summaries (of kept blocks, and of groups of what
    goes) take at most ``budget`` of the bytes of ``length`` fp32 rows. Never negative."""
    row, entry = 4 * (key_dim + value_dim), entry_bytes(key_dim, value_dim)
    left = budget * length * row - entry * (length / group + 1)
    per_row = row + entry / BLOCK - entry / group
    return max(0, min(length, int(left / per_row)))


def calibrated_factor(
    losses: Callable[[float], NDArray[np.float64]], factors: Sequence[float], alpha: float
) -> float:
    """The smallest factor whose share of violations on calibration sequences holds for new ones.

    losses(factor) [n]: by sequence, the share of its head steps whose true error was above the
    allowed one when the step ran with ``factor``. Sequences are exchangeable, steps of one are
    not independent, so the unit is the sequence: conformal risk control (2208.02814, eq. 4),
    (sum of losses + 1) / (n + 1) <= alpha. inf (read everything) when no factor will do.
    """
    for factor in sorted(factors):
        found = losses(factor)
        if holds(found.sum(), len(found), alpha):
            return float(factor)
    return float("inf")


def holds(total: float, sequences: int, alpha: float) -> bool:
    """Whether violations that add up to ``total`` over calibration sequences promise at most the
    share ``alpha`` on a new one (see ``calibrated_factor``)."""
    return (total + 1) / (sequences + 1) <= alpha
