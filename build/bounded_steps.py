"""Decode steps of one layer tried out on K/V that is known: what bounded steps read and answer.

They follow ``plugins.compressed_sparse_attention.ref`` with all scores taken at once; evicted
groups that a step asks for are read, as from the host copy (a test compares them with the op's
reference).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import BLOCK, MAX_VARIANCE
from serving.kv_compression.compact import CompactLayer
from serving.kv_compression.summaries import summarise

Floats = NDArray[np.float32]
RECENT = 2


class Truth:
    """Dense attention of every decode step: weights p [Hk, S*G, T] (not normalised), their sums
    and maxima, outputs [Hk, S*G, dv]."""

    def __init__(self, keys: Floats, values: Floats, queries: Floats) -> None:
        """keys [Hk, T, dk], values [Hk, T, dv], queries [S, Hq, dk] times the attention scale."""
        self.keys, self.values = keys, values
        (heads, self.length, dk), self.steps = keys.shape, len(queries)
        self.group = queries.shape[1] // heads
        grouped = queries.reshape(self.steps, heads, self.group, dk)
        self.queries = grouped.transpose(1, 0, 2, 3).reshape(heads, -1, dk)
        score = self.queries @ keys.transpose(0, 2, 1)
        self.top = score.max(2, keepdims=True)
        self.p = np.exp(score - self.top)
        self.total = self.p.sum(2)
        self.output = (self.p @ values) / self.total[..., None]
        self.size = np.linalg.norm(self.output, axis=2)

    def by_step(self, values: Any) -> Any:
        """[Hk, S*G] -> [S, Hq]."""
        grouped = np.asarray(values).reshape(len(self.keys), self.steps, self.group)
        return grouped.swapaxes(0, 1).reshape(self.steps, -1)

    def rows(self, step: int) -> slice:
        """Of the heads of one K/V head at a step, in [S*G]."""
        return slice(step * self.group, (step + 1) * self.group)


class Entries:
    """Summaries of one kv head against the truth of every step: masses and value sums by entry.

    Entry order: slot blocks, then evicted groups; [R, E] for R = S*G rows of queries.
    """

    def __init__(self, truth: Truth, layer: CompactLayer, head: int, sound: bool) -> None:
        held, groups = layer.positions[head], layer.groups[head]
        blocks = [held[a : a + BLOCK] for a in range(0, len(held), BLOCK)]
        members = [*blocks, *groups]
        self.slot_blocks, self.members, self.sound = len(blocks), members, sound
        self.sizes = np.array([len(m) for m in members])
        self.pinned = np.zeros(len(members), bool)
        self.pinned[: self.slot_blocks] = np.isinf(layer.stats[head, : self.slot_blocks, 1])
        self.pinned[self.slot_blocks - RECENT : self.slot_blocks] = True
        keys, values = truth.keys[head], truth.values[head]
        p = truth.p[head]
        self.mass = np.empty((len(p), len(members)), np.float32)
        self.value = np.empty((len(members), len(p), values.shape[1]), np.float32)
        entry = np.empty((len(members), 3 * keys.shape[1]), np.float32)
        self.reach = np.empty(len(members), np.float32)
        for size in np.unique(self.sizes):
            some = np.flatnonzero(self.sizes == size)
            rows = np.stack([members[i] for i in some])
            entry[some], stats = summarise(keys[rows], values[rows], sound=sound)
            self.reach[some] = stats[:, 1]
            part = p[:, rows]
            self.mass[:, some] = part.sum(2)
            self.value[some] = part.transpose(1, 0, 2) @ values[rows]
        if not sound:
            at = np.r_[: self.slot_blocks, layer.blocks + np.arange(len(groups))]
            self.reach = np.where(self.pinned, self.reach, layer.stats[head, at, 1])
        centre, spread, self.mean_v = np.split(entry, 3, axis=1)
        q, top, count = truth.queries[head], truth.top[head], self.sizes
        mean = q @ centre.T - top
        if sound:
            half = np.abs(q) @ spread.T
            self.low, self.high = count * np.exp(mean - half), count * np.exp(mean + half)
            self.estimate = (self.low + self.high) / 2
        else:
            var = np.minimum(q**2 @ (spread**2).T, MAX_VARIANCE)
            self.estimate = count * np.exp(mean + var / 2)
            self.noise = np.expm1(var) / count

    def attend(self, rows: slice, unread: NDArray[np.bool_]) -> tuple[Any, ...]:
        """Of the heads ``rows`` with entries [E] unread: z [G], o [G, dv], e [G, E]."""
        m = self.estimate[rows] * unread
        read = self.mass[rows] * ~unread
        z = m.sum(1) + read.sum(1)
        value = np.einsum("egd,e->gd", self.value[:, rows], (~unread).astype(np.float32))
        o = (value + m @ self.mean_v) / z[:, None]
        size = np.maximum(np.linalg.norm(o, axis=1), 1e-30)[:, None]
        away2 = np.maximum(
            (self.mean_v**2).sum(1) - 2 * o @ self.mean_v.T + (o**2).sum(1)[:, None], 0
        )
        if self.sound:
            z_low = read.sum(1) + (self.low[rows] * unread).sum(1)
            gap = (self.high[rows] - self.low[rows]) / 2
            e = (gap * np.sqrt(away2) + self.high[rows] * self.reach) / (z_low[:, None] * size)
        else:
            e = (m / z[:, None]) ** 2 * self.noise[rows] * (self.reach**2 + away2) / size**2
        return z, o, e * unread


def limit_of(sound: bool, epsilon: float, factor: float) -> float:
    """What the errors of unread entries may sum up to."""
    return epsilon / (1 + epsilon) if sound else (epsilon / factor) ** 2


def bound_of(sound: bool, left: Any, factor: float) -> Any:
    """Of the output's relative error, from the sum of errors left."""
    if not sound:
        return factor * np.sqrt(left)
    return np.where(left < 1, left / np.maximum(1 - left, 1e-30), np.inf)


def take_step(e: Entries, rows: slice, limit: float) -> tuple[Any, ...]:
    """Read more until each head of the group is within its limit, evicted entries too; returns
    which entries [E] stay unread, z, o, e as ``attend`` does."""
    unread = ~e.pinned
    for attempt in range(4):
        z, o, left = e.attend(rows, unread)
        broken = left.sum(1) > limit
        if not broken.any():
            return unread, z, o, left
        for g in np.flatnonzero(broken):
            order = np.argsort(-left[g], kind="stable")
            tail = np.cumsum(left[g, order][::-1], dtype=np.float64)[::-1]
            unread[order[tail > limit] if attempt < 3 else order] = False
    return unread, *e.attend(rows, unread)


def errors_of(truth: Truth, entries: list[Entries], epsilon: float, factor: float) -> Any:
    """[Hk, S*G]: relative L2 error of every head's output; ``entries`` by K/V head."""
    found = np.empty(truth.size.shape)
    for h, e in enumerate(entries):
        for s in range(truth.steps):
            rows = truth.rows(s)
            o = take_step(e, rows, limit_of(e.sound, epsilon, factor))[2]
            found[h, rows] = np.linalg.norm(o - truth.output[h, rows], axis=1)
    return found / truth.size
