"""From calibration to what the planner may do, and to the default of requests."""

from __future__ import annotations

import math

from serving.prefix_cache.planner import (
    NO_POLICY,
    CostModel,
    ReplayMode,
    ReplayPolicy,
    ReplayRequest,
)
from serving.replay.calibration import Calibration


def policy_of(calibration: Calibration, cost: CostModel) -> ReplayPolicy:
    """What calibration allows: split replay, and zero-start tails that kept the target answers."""
    if not calibration.known:
        return NO_POLICY
    zero = [p for p in calibration.curve if p.ratio and p.answers >= calibration.target_answers]
    split = [p.kl for p in calibration.curve if p.tail == calibration.min_tail and not p.ratio]
    return ReplayPolicy(
        min_tail=calibration.min_tail,
        split_error=split[0] if split else math.inf,
        zero=tuple((p.ratio, p.kl) for p in sorted(zero, key=lambda p: p.ratio)),
        cost=cost,
    )


def default_replay(calibration: Calibration) -> ReplayRequest:
    """Of requests that ask for nothing: the calibrated target, or exact where it is not known."""
    if calibration.known:
        return ReplayRequest(ReplayMode.BOUNDED, calibration.target_kl)
    return ReplayRequest(ReplayMode.EXACT)
