"""Retention policies: which rows of a layer to keep. A policy is a frozen dataclass with one
method, ``scores(stats) -> [Hk, T]``; the rows with the highest scores stay. Wrappers compose.

Sources: StreamingLLM (2309.17453) for the window with sinks, H2O (2306.14048) eq. 3-4, SnapKV
(2404.14469) section 4, random retention with the prompt kept (2609.03430).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.kv_compression.grouping import Floats
from serving.kv_compression.history import Mask, Stats

_ALWAYS = np.float32(1e6)


class Retention(Protocol):
    def scores(self, stats: Stats) -> Floats:
        """[Hk, T], higher = keep; ties go to the later row."""
        ...


@dataclass(frozen=True)
class KeepEnds:
    """The first ``sinks`` and the last ``recent`` rows before all others, then as ``inner``."""

    inner: Retention
    sinks: int = 4
    recent: int = 64

    def scores(self, stats: Stats) -> Floats:
        scores = np.array(self.inner.scores(stats), np.float32)
        scores[:, : self.sinks] += _ALWAYS
        scores[:, max(stats.length - self.recent, 0) :] += _ALWAYS
        return scores


@dataclass(frozen=True)
class SlidingWindow:
    """The last rows; with KeepEnds the first ones too (StreamingLLM)."""

    def scores(self, stats: Stats) -> Floats:
        return np.broadcast_to(_age(stats), stats.attention_sum.shape)


@dataclass(frozen=True)
class H2O:
    """Heavy hitters: attention received in sum. The paper keeps as many recent rows again
    (KeepEnds with half of the budget)."""

    def scores(self, stats: Stats) -> Floats:
        return stats.attention_sum


@dataclass(frozen=True)
class SnapKV:
    """Attention received from the last queries, smoothed over ``pool`` rows by their maximum."""

    pool: int = 7

    def scores(self, stats: Stats) -> Floats:
        side = self.pool // 2
        padded = np.pad(stats.recent_mean, ((0, 0), (side, side)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * side + 1, axis=1)
        return np.asarray(windows.max(-1), np.float32)


@dataclass(frozen=True)
class RandomKeepPrompt:
    """The prompt, and a random choice of what came after it."""

    seed: int = 0

    def scores(self, stats: Stats) -> Floats:
        rng = np.random.default_rng(self.seed)
        scores = rng.random(stats.attention_sum.shape, np.float32)
        scores[:, : stats.prompt_len] += 1
        return scores


@dataclass(frozen=True)
class ReasoningAware:
    """Ours: what is asked for now, what ever was, and what nothing else could stand in for.

    Rows that ``outstanding`` names come first (a summary would misjudge them and their moment may
    be still to come). The others by the weight their loss would have: attention of the last
    queries in root mean square, since errors add up in squares, and ``peak`` times the most they
    ever received, both times the norm of the value; ``recency`` breaks ties among rows nobody
    asked for.
    """

    peak: float = 0.02
    recency: float = 1e-6
    distinct: float = 0.024
    heavy: float = 0.006

    def scores(self, stats: Stats) -> Floats:
        size = np.linalg.norm(stats.values, axis=-1)
        size /= np.maximum(size.mean(1, keepdims=True), 1e-30)
        weight = (stats.recent_rms + self.peak * stats.attention_peak) * size
        scores = weight + np.float32(self.recency) * _age(stats)
        scores[outstanding(stats, self.distinct, self.heavy)] += _ALWAYS / 2
        return np.asarray(scores, np.float32)


def outstanding(stats: Stats, distinct: float, heavy: float) -> Mask:
    """[Hk, T]: rows that a summary of many would misjudge.

    The share ``distinct`` whose keys are least like those of any group of similar rows (a quiet
    anchor looks like this before it is asked for), and the share ``heavy`` with the highest score
    under the mean query (what every query attends to).
    """
    found = np.zeros(stats.attention_sum.shape, bool)
    for h, keys in enumerate(stats.keys):
        _mark(found[h], keys @ stats.query_mean[h], heavy)
        _mark(found[h], stats.distinctiveness[h], distinct)
    return found


def keep_top(scores: Floats, count: int) -> Mask:
    """[Hk, T]: the ``count`` rows of each head with the highest scores."""
    heads, length = scores.shape
    kept = np.zeros((heads, length), bool)
    if count:
        order = np.argsort(scores, axis=1, kind="stable")[:, max(length - count, 0) :]
        np.put_along_axis(kept, order, True, 1)
    return kept


def _age(stats: Stats) -> Floats:
    return np.arange(1, stats.length + 1, dtype=np.float32) / stats.length


def _mark(found: Mask, values: Floats, share: float) -> None:
    """Set the share of rows with the largest values among those not found yet."""
    count = int(share * len(found))
    if count:
        free = np.where(found, -np.inf, values)
        found[np.argpartition(-free, count - 1)[:count]] = True
