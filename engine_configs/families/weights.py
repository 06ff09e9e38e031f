"""How a family's weights are named and laid out in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec

Array = NDArray[np.float32]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where one canonical weight comes from: checkpoint tensors, then ``read`` makes them ours.

    ``shape`` gives the shape the tensors must have from the canonical one, where they differ; for
    several tensors, that of all of them joined along axis 0, or ``shapes`` that of each. A tensor
    may feed several weights.
    """

    names: tuple[str, ...]
    read: Callable[..., Array] | None = None
    shape: Callable[[Shape], Shape] | None = None
    shapes: tuple[Shape, ...] = ()

    def expected(self, canonical: Shape) -> Shape | tuple[Shape, ...]:
        if self.shapes:
            return self.shapes
        return self.shape(canonical) if self.shape else canonical

    def fits(self, canonical: Shape, found: Sequence[Shape]) -> bool:
        if self.shapes:
            return tuple(found) == self.shapes
        joined = (sum(f[0] for f in found if f), *found[0][1:])
        same_rest = all(f[1:] == found[0][1:] for f in found)
        return same_rest and (joined if found[0] else ()) == self.expected(canonical)


# The spellings of one weight; the first whose tensors are all there is read.
Sources = tuple[Source, ...]


@dataclass(frozen=True)
class Family:
    """What a family function returns: the spec, and the sources of each of ``spec.weights()``.

    ``unused``: prefixes of checkpoint tensors that are known and not needed (multi-token heads).
    """

    spec: HybridSpec
    sources: Mapping[str, Sources]
    unused: tuple[str, ...] = ()


def named(*spellings: str) -> Sources:
    """One tensor, taken as it is, under any of these names."""
    return tuple(Source((name,)) for name in spellings)


def scaled(name: str, factor: float | Array) -> Sources:
    """One tensor times a factor (or a factor per row), folded in on reading."""

    def read(w: Array) -> Array:
        f = np.asarray(factor, np.float32)
        product: Array = w * (f.reshape(-1, *[1] * (w.ndim - 1)) if f.ndim else f)
        return product

    return (Source((name,), read),)


def part(full: Shape, read: Callable[[Array], Array], *spellings: str) -> Sources:
    """Rows that ``read`` takes out of a fused tensor of shape ``full``."""
    return tuple(Source((name,), read, lambda _: full) for name in spellings)


def stacked(*groups: Sequence[str]) -> Source:
    """[E, rows, columns] from a tensor per expert; several groups (gate, up) are joined by rows."""
    names = [name for expert in zip(*groups, strict=True) for name in expert]

    def read(*parts: Array) -> Array:
        joined = np.concatenate(parts)
        return joined.reshape(len(groups[0]), -1, joined.shape[-1])

    return Source(tuple(names), read, lambda s: (s[0] * s[1], s[2]))


def conv1d(name: str) -> Source:
    """A depthwise ``Conv1d`` weight [channels, 1, W] as [channels, W]."""
    return Source((name,), lambda w: w[:, 0], lambda s: (s[0], 1, s[1]))


def joined_conv1d(*names: str) -> Source:
    """Several depthwise ``Conv1d`` weights, joined along the channels."""

    def read(*parts: Array) -> Array:
        joined: Array = np.concatenate(parts)
        return joined[:, 0]

    return Source(names, read, lambda s: (s[0], 1, s[1]))
