"""Decode steps of a trace under a policy: what they answer, how far off, what they read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from build.bounded_steps import Entries, Truth, bound_of, limit_of, take_step
from perf.traces_data import HEADS, KV_HEADS, SCALE, STEPS, Trace
from serving.kv_compression.bounds import entry_bytes
from serving.kv_compression.compact import CompactLayer
from serving.kv_compression.history import Mask

ALL_ROWS = 0.986


@dataclass
class Outcome:
    """By head step [S, Hq] unless said otherwise; shares of the softmax mass and of T rows.

    error: relative L2 of the output; read, estimated: mass of rows read exactly, and of the others
    as far as their estimate covers it; rows: read by the head's group;
    stage: 0 some retained rows, 1 all retained, 2 evicted rows fetched, 3 every row read;
    fetched: rows read from the host copy; kept: rows in the slot, and those fetched at this step;
    recalled [asked, Hk]; summary_bytes: over the bytes of T rows.
    """

    error: Any
    read: Any
    estimated: Any
    rows: Any
    stage: Any
    fetched: Any
    bound: Any
    kept: Any
    recalled: Any
    summary_bytes: float


class TraceTruth(Truth):
    """Of a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.keys, trace.values, trace.queries * np.float32(SCALE))
        self.trace = trace

    @cached_property
    def oracle(self) -> Any:
        """[Hk, S*G]: fewest rows, over T, that hold 98.6 % of the mass."""
        tail = np.sort(self.p, axis=2).cumsum(2, dtype=np.float64)
        return 1 - (tail <= (1 - ALL_ROWS) * tail[..., -1:]).sum(2) / self.length


def evict(truth: TraceTruth, kept: Mask) -> Outcome:
    """Attention over the kept rows [Hk, T], the others forgotten."""
    p = truth.p * kept[:, None]
    mass = p.sum(2)
    o = (p @ truth.values) / np.maximum(mass, 1e-30)[..., None]
    error = np.linalg.norm(o - truth.output, axis=2) / truth.size
    share = kept.mean()
    asked = truth.trace.asked[truth.trace.asked >= 0]
    nothing = np.zeros((STEPS, HEADS))
    return Outcome(
        truth.by_step(error), truth.by_step(mass / truth.total), nothing, nothing + share,
        nothing + 1, nothing, nothing + np.nan, nothing + share, kept[:, asked].T, 0.0,
    )  # fmt: skip


def bounded(
    truth: TraceTruth, layer: CompactLayer, entries: list[Entries], epsilon: float, factor: float
) -> Outcome:
    """Every decode step in order; ``entries`` by kv head, ``factor`` unused by sound ones."""
    shape = truth.size.shape
    out = {n: np.zeros(shape) for n in ("error", "read", "estimated", "rows", "stage", "bound")}
    out |= {n: np.zeros(shape) for n in ("fetched", "kept")}
    asked = np.flatnonzero(truth.trace.asked >= 0)
    recalled = np.zeros((len(asked), KV_HEADS), bool)
    summary_bytes = 0.0
    for h, e in enumerate(entries):
        slot = np.arange(len(e.sizes)) < e.slot_blocks
        for s in range(STEPS):
            rows = truth.rows(s)
            unread, _, o, left = take_step(e, rows, limit_of(e.sound, epsilon, factor))
            fetched = ~unread & ~slot
            all_retained = not unread[slot].any()
            stage = 3 if not unread.any() else 2 if fetched.any() else int(all_retained)
            true_mass, total = e.mass[rows], truth.total[h, rows]
            error = np.linalg.norm(o - truth.output[h, rows], axis=1) / truth.size[h, rows]
            out["error"][h, rows] = error
            out["bound"][h, rows] = bound_of(e.sound, left.sum(1), factor)
            out["read"][h, rows] = (true_mass * ~unread).sum(1) / total
            covered = np.minimum(e.estimate[rows], true_mass) * unread
            out["estimated"][h, rows] = covered.sum(1) / total
            out["rows"][h, rows] = e.sizes[~unread].sum() / truth.length
            out["stage"][h, rows] = stage
            out["fetched"][h, rows] = e.sizes[fetched].sum() / truth.length
            if truth.trace.asked[s] >= 0:
                row = truth.trace.asked[s]
                where = next(i for i, m in enumerate(e.members) if row in m)
                recalled[np.searchsorted(asked, s), h] = not unread[where]
            out["kept"][h, rows] = e.sizes[slot | fetched].sum() / truth.length
        size = entry_bytes(*(a.shape[2] for a in (truth.keys, truth.values)))
        row_bytes = 4 * sum(a.shape[2] for a in (truth.keys, truth.values))
        summary_bytes += len(e.sizes) * size / (truth.length * row_bytes) / KV_HEADS
    done: dict[str, Any] = {name: truth.by_step(values) for name, values in out.items()}
    return Outcome(**done, recalled=recalled, summary_bytes=summary_bytes)
