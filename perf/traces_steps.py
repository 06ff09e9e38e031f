"""Decode steps of a trace under a policy: what they answer, how far off, what they read.

Our steps follow ``plugins.compressed_sparse_attention.ref`` with all steps' scores taken at once:
evicted groups that a step asks for are read from the host copy (a test compares them with the op's
reference).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.traces_data import HEADS, KV_HEADS, SCALE, STEPS, Trace
from plugins.compressed_sparse_attention.ref import BLOCK, MAX_VARIANCE
from serving.kv_compression.bounds import entry_bytes
from serving.kv_compression.compact import CompactLayer, summarise
from serving.kv_compression.history import Mask

GROUP = HEADS // KV_HEADS
RECENT = 2
ALL_ROWS = 0.986


@dataclass
class Outcome:
    """By head step [S, Hq] unless said otherwise; shares of the softmax mass and of T rows.

    error: relative L2 of the output; read, estimated: mass of rows read exactly, and of the others
    as far as their estimate covers it; rows: read by the head's group; entries: summaries scored;
    stage: 0 some retained rows, 1 all retained, 2 evicted rows fetched, 3 every row read;
    fetched: rows read from the host copy; kept: rows in the slot, and those fetched at this step;
    recalled [asked, Hk]; summary_bytes: over the bytes of T rows.
    """

    error: Any
    read: Any
    estimated: Any
    rows: Any
    entries: Any
    stage: Any
    fetched: Any
    bound: Any
    kept: Any
    recalled: Any
    summary_bytes: float


class Truth:
    """Dense attention of every decode step: weights [Hk, S*G, T] (not normalised), outputs."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.length = trace.keys.shape[1]
        grouped = trace.queries.reshape(STEPS, KV_HEADS, GROUP, -1) * np.float32(SCALE)
        self.queries = grouped.transpose(1, 0, 2, 3).reshape(KV_HEADS, STEPS * GROUP, -1)
        score = self.queries @ trace.keys.transpose(0, 2, 1)
        self.top = score.max(2, keepdims=True)
        self.p = np.exp(score - self.top)
        self.total = self.p.sum(2)
        self.output = (self.p @ trace.values) / self.total[..., None]
        self.size = np.linalg.norm(self.output, axis=2)

    @cached_property
    def oracle(self) -> Any:
        """[Hk, S*G]: fewest rows, over T, that hold 98.6 % of the mass."""
        tail = np.sort(self.p, axis=2).cumsum(2, dtype=np.float64)
        return 1 - (tail <= (1 - ALL_ROWS) * tail[..., -1:]).sum(2) / self.length

    def by_step(self, values: Any) -> Any:
        """[Hk, S*G] -> [S, Hq]."""
        return np.asarray(values).reshape(KV_HEADS, STEPS, GROUP).swapaxes(0, 1).reshape(STEPS, -1)


def evict(truth: Truth, kept: Mask) -> Outcome:
    """Attention over the kept rows [Hk, T], the others forgotten."""
    p = truth.p * kept[:, None]
    mass = p.sum(2)
    o = (p @ truth.trace.values) / np.maximum(mass, 1e-30)[..., None]
    error = np.linalg.norm(o - truth.output, axis=2) / truth.size
    share = kept.mean()
    asked = truth.trace.asked[truth.trace.asked >= 0]
    nothing = np.zeros((STEPS, HEADS))
    return Outcome(
        truth.by_step(error), truth.by_step(mass / truth.total), nothing, nothing + share, nothing,
        nothing + 1, nothing, nothing + np.nan, nothing + share, kept[:, asked].T, 0.0,
    )  # fmt: skip


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
        keys, values = truth.trace.keys[head], truth.trace.values[head]
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


def bounded(
    truth: Truth, layer: CompactLayer, entries: list[Entries], epsilon: float, factor: float
) -> Outcome:
    """Every decode step in order; ``entries`` by kv head, ``factor`` unused by sound ones."""
    shape = (KV_HEADS, STEPS * GROUP)
    out = {n: np.zeros(shape) for n in ("error", "read", "estimated", "rows", "stage", "bound")}
    out |= {n: np.zeros(shape) for n in ("entries", "fetched", "kept")}
    asked = np.flatnonzero(truth.trace.asked >= 0)
    recalled = np.zeros((len(asked), KV_HEADS), bool)
    summary_bytes = 0.0
    for h, e in enumerate(entries):
        slot = np.arange(len(e.sizes)) < e.slot_blocks
        for s in range(STEPS):
            rows = slice(s * GROUP, (s + 1) * GROUP)
            unread, _, o, left = _step(e, rows, _limit(e.sound, epsilon, factor))
            fetched = ~unread & ~slot
            all_retained = not unread[slot].any()
            stage = 3 if not unread.any() else 2 if fetched.any() else int(all_retained)
            true_mass, total = e.mass[rows], truth.total[h, rows]
            error = np.linalg.norm(o - truth.output[h, rows], axis=1) / truth.size[h, rows]
            out["error"][h, rows] = error
            out["bound"][h, rows] = _bound(e.sound, left.sum(1), factor)
            out["read"][h, rows] = (true_mass * ~unread).sum(1) / total
            covered = np.minimum(e.estimate[rows], true_mass) * unread
            out["estimated"][h, rows] = covered.sum(1) / total
            out["rows"][h, rows] = e.sizes[~unread].sum() / truth.length
            out["entries"][h, rows] = len(e.sizes)
            out["stage"][h, rows] = stage
            out["fetched"][h, rows] = e.sizes[fetched].sum() / truth.length
            if truth.trace.asked[s] >= 0:
                row = truth.trace.asked[s]
                where = next(i for i, m in enumerate(e.members) if row in m)
                recalled[np.searchsorted(asked, s), h] = not unread[where]
            out["kept"][h, rows] = e.sizes[slot | fetched].sum() / truth.length
        size = entry_bytes(*(a.shape[2] for a in (truth.trace.keys, truth.trace.values)))
        row_bytes = 4 * sum(a.shape[2] for a in (truth.trace.keys, truth.trace.values))
        summary_bytes += len(e.sizes) * size / (truth.length * row_bytes) / KV_HEADS
    done: dict[str, Any] = {name: truth.by_step(values) for name, values in out.items()}
    return Outcome(**done, recalled=recalled, summary_bytes=summary_bytes)


def _limit(sound: bool, epsilon: float, factor: float) -> float:
    return epsilon / (1 + epsilon) if sound else (epsilon / factor) ** 2


def _bound(sound: bool, left: Any, factor: float) -> Any:
    if not sound:
        return factor * np.sqrt(left)
    return np.where(left < 1, left / np.maximum(1 - left, 1e-30), np.inf)


def _step(e: Entries, rows: slice, limit: float) -> tuple[Any, ...]:
    """Read more until each head of the group is within its limit; evicted entries are fetched."""
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
