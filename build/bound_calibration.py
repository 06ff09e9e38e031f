"""Finds out what the error bound of compressed attention is worth on a model's own sequences.

Prefixes of the retrieval tasks are prefilled and compacted as served; queries of what follows them
take bounded steps with several factors, and the output of each head is compared with dense
attention's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build.bounded_steps import Entries, Truth, errors_of
from build.lab import Floats, Tokens, chunks
from build.trials import CalibrationOptions, Tasks
from serving.engine.compact_slots import can_compress
from serving.engine.compression import Watch
from serving.engine.model import Model, prefill_step
from serving.engine.slots import SlotClass
from serving.kv_compression.calibration import BoundCalibration
from serving.kv_compression.config import CompressionConfig
from serving.kv_compression.history import Stats
from serving.kv_compression.policy import compact_layer, rows_kept

SEQUENCES, LENGTH, STEPS = 32, 1280, 8
TASKS = ("needle", "mqar", "lww", "copy", "text")
EPSILONS = (0.02, 0.1)
FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# Of the time box of calibration.
SHARE = 0.25


class Watched:
    """A prefix in a dense slot, with what its queries looked at: ``stats`` by attention layer."""

    def __init__(self, model: Model, capacity: int) -> None:
        self.model, self.layers = model, model.spec.attention_layers()
        self.dense = SlotClass(model.spec, capacity, 1)
        self.length = 0
        self.stats: dict[int, Stats] = {}

    def prefill(self, prefix: Tokens) -> None:
        self.length = len(prefix)
        self.dense.zero_states(0)
        watch = Watch(self.model.spec, self.length)
        for low, high in chunks(0, self.length):
            step = prefill_step(prefix[low:high], low)
            _, found = self.model.run(self.dense, 0, step, queries=True)
            watch.observe(self.dense, 0, low, found)
        self.states = {name: a[0].copy() for name, a in self.dense.states.items()}
        for i, _ in self.layers:
            keys, values = (
                self.dense.kv[f"past_{n}_{i}"][0, :, : self.length].copy() for n in ("key", "value")
            )
            self.stats[i] = watch.history[i].stats(keys, values, self.length)

    def ask(self, suffix: Tokens, rows: NDArray[np.int64]) -> tuple[Floats, dict[int, Floats]]:
        """Logits [N, V] after the suffix tokens ``rows`` and, by layer, their queries [N, Hq, dk]
        times the attention scale."""
        self.restore(self.dense)
        step = prefill_step(suffix, self.length, logits=rows.tolist())
        logits, found = self.model.run(self.dense, 0, step, queries=True)
        return logits, {
            i: found[f"query_{i}"][0, rows].reshape(len(rows), -1, m.head_dim) * m.scale
            for i, m in self.layers
        }

    def restore(self, slots: SlotClass) -> None:
        """The states at the end of the prefix."""
        for name, array in slots.states.items():
            array[0] = self.states[name]


def calibrate_bounds(
    model: Model,
    tasks: Callable[[int], Tasks],
    options: CalibrationOptions,
    advance: Callable[[], None] = lambda: None,
) -> BoundCalibration:
    """``advance`` is called once per sequence. Nothing is known of a model that cannot compress."""
    if not all(can_compress(m) for _, m in model.spec.attention_layers()):
        return BoundCalibration()
    texts, watched = tasks(options.seed + 4), Watched(model, LENGTH + 512)
    deadline = time.monotonic() + SHARE * options.seconds
    found: list[Any] = []
    for i in range(SEQUENCES):
        sample = texts.sample(TASKS[i % len(TASKS)], LENGTH)
        watched.prefill(sample.prefix)
        rows = np.unique(np.linspace(0, len(sample.suffix) - 1, STEPS).astype(np.int64))
        _, queries = watched.ask(sample.suffix, rows)
        shares = [violations(watched.stats[i], q) for i, q in queries.items()]
        found.append(np.mean(shares, axis=0))
        advance()
        if time.monotonic() > deadline:
            break
    worst = np.sum(found, axis=0).max(0)
    return BoundCalibration(len(found), EPSILONS, FACTORS, tuple(worst.tolist()))


def violations(stats: Stats, queries: Floats) -> NDArray[np.float64]:
    """[EPSILONS, FACTORS]: share of head steps of a layer, compacted as served, that are further
    off than epsilon; queries [S, Hq, dk], scaled."""
    heads, length, dk = stats.keys.shape
    dv = stats.values.shape[2]
    slots = (np.empty((heads, length + 96, d), np.float32) for d in (dk, dv))
    layer = compact_layer(stats, rows_kept(CompressionConfig().budget, length, dk, dv), *slots)
    truth = Truth(stats.keys, stats.values, queries)
    entries = [Entries(truth, layer, h, False) for h in range(heads)]
    shares = np.zeros((len(EPSILONS), len(FACTORS)))
    for e, epsilon in enumerate(EPSILONS):
        for f, share in enumerate(_falling(truth, entries, epsilon)):
            shares[e, f] = share
    return shares


def _falling(truth: Truth, entries: list[Entries], epsilon: float) -> Iterator[float]:
    """By factor; a larger one reads no less: none above the first without violations is tried."""
    for factor in FACTORS:
        share = float((errors_of(truth, entries, epsilon, factor) > epsilon).mean())
        yield share
        if not share:
            return
