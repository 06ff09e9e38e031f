"""How a family's weights are named and laid out in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Source:
    """Where one canonical weight comes from: a checkpoint tensor, then ``read`` makes it ours.

    ``shape`` gives the tensor's shape in the checkpoint from the canonical one, where they differ.
    A tensor may feed several weights (fused projections).
    """

    name: str
    read: Callable[[Array], Array] | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Family:
    """What a family function returns: the spec, and the source of each of ``spec.weights()``.

    ``unused``: prefixes of checkpoint tensors that are known and not needed (multi-token heads).
    """

    spec: HybridSpec
    sources: dict[str, Source]
    unused: tuple[str, ...] = ()


def squeeze_conv(name: str) -> Source:
    """A depthwise ``Conv1d`` weight [channels, 1, W] → [channels, W]."""
    return Source(name, read=lambda w: w[:, 0, :], shape=lambda s: (s[0], 1, s[1]))
