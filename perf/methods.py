"""Ways to bring the linear layers to the end of a cached prefix, and what each one costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from build.lab import Lab
from engine_configs.spec import HybridSpec
from serving.replay.calibration import Calibration
from serving.replay.checkpoint import CheckpointCodec

# Classic checkpoints, and the block an engine aligns hybrid prefixes to.
EVERY = 512


@dataclass(frozen=True)
class Method:
    """start(L): where the replay starts (its exact states are kept there); run(lab, start);
    state_bytes(L): of checkpoints stored for a prefix; lost(L): tokens of the hit given up."""

    name: str
    start: Callable[[int], int]
    run: Callable[[Lab, int], None]
    state_bytes: Callable[[int], int] = lambda length: 0
    lost: Callable[[int], int] = lambda length: 0

    def replayed(self, length: int) -> int:
        return length - self.start(length)


def zero_start(ratio: float) -> Method:
    """The paper's: zero states, the last r = ratio * L tokens."""
    return Method(
        f"zero {ratio:g}",
        lambda length: length - math.ceil(ratio * length),
        lambda lab, start: lab.zero_start(lab.length - start),
    )


def memory_only() -> Method:
    """Nothing but the attention layers' K/V."""
    return Method("memory only", lambda length: length, lambda lab, start: lab.zero_start(0))


def split(spec: HybridSpec, calibration: Calibration) -> Method:
    """Slow units from the last checkpoint at least min_tail before the end, fast ones from zero."""
    codec = CheckpointCodec.of(spec, calibration)
    interval, tail = calibration.interval, calibration.min_tail
    return Method(
        "split",
        lambda length: max(0, (length - tail) // interval * interval),
        lambda lab, start: lab.split_start(start, codec),
        lambda length: length // interval * codec.nbytes(),
    )


def full_checkpoints(spec: HybridSpec) -> Method:
    """Every state in full each 512 tokens; exact."""
    return Method(
        f"full every {EVERY}",
        lambda length: length // EVERY * EVERY,
        lambda lab, start: lab.full_start(start),
        lambda length: length // EVERY * spec.state_bytes(),
    )


def aligned_checkpoint(spec: HybridSpec) -> Method:
    """One state at the last block boundary of the prompt that was served (vLLM's ``align`` mode);
    the hit ends there, what follows is computed again; exact."""
    return Method(
        f"aligned {EVERY}",
        lambda length: length // EVERY * EVERY,
        lambda lab, start: lab.full_start(start),
        lambda length: spec.state_bytes(),
        lambda length: length % EVERY,
    )


def all_methods(spec: HybridSpec, calibration: Calibration) -> list[Method]:
    methods = [memory_only(), zero_start(0.01), zero_start(0.05), zero_start(0.1)]
    if calibration.known:
        methods.append(split(spec, calibration))
    return [*methods, full_checkpoints(spec), aligned_checkpoint(spec)]
