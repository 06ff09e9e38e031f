"""One sequence under the microscope: prefill a prefix once, then replay its tail in many ways.

The same graph, steps and slots as the engine's, with the logits of a whole question returned.
Calibration and the quality benchmark run on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from build.remote import RemoteModel
from serving.engine.model import Model, prefill_step
from serving.engine.slots import SlotClass
from serving.replay.checkpoint import CheckpointCodec

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]
States = dict[str, Floats]
CHUNK = 512


class Lab:
    """A prefix in a slot: its exact K/V stay, its linear states come and go."""

    def __init__(self, model: Model | RemoteModel, capacity: int) -> None:
        self.model, self.slots = model, SlotClass(model.spec, capacity, 1)
        self.length = 0
        self.prefix: Tokens = np.zeros(0, np.int64)
        self.kept: dict[int, States] = {0: self._states()}
        # Cumulative log-decay by layer [units] at every kept position.
        self.decay: dict[int, dict[str, Floats]] = {0: {}}

    def prefill(self, prefix: Tokens, keep: Sequence[int] = ()) -> None:
        """Run the prefix cold; exact states stay at its end and at the ``keep`` positions.

        What it shares with the one before, up to a kept position, is not run again.
        """
        start = max(p for p in self.kept if p <= _shared(self.prefix, prefix))
        self.prefix, self.length = prefix, len(prefix)
        self.kept = {p: s for p, s in self.kept.items() if p <= start}
        self.decay = {p: d for p, d in self.decay.items() if p <= start}
        self._restore(self.kept[start])
        total = dict(self.decay[start])
        for end in sorted(p for p in {*keep, self.length} if p > start):
            for low, high in chunks(start, end):
                step = prefill_step(prefix[low:high], low)
                _, sums = self.model.run(self.slots, 0, step, decay_sums=True)
                total = {k: v[0] + total.get(k, 0) for k, v in sums.items()}
            start = end
            self.kept[end], self.decay[end] = self._states(), total

    def exact(self) -> None:
        """The states a cold run leaves at the end of the prefix."""
        self._restore(self.kept[self.length])

    def zero_start(self, r: int) -> None:
        """Tail replay: zero states, then the last r tokens against the cached K/V."""
        self.slots.zero_states(0)
        self._replay(self.length - r)

    def split_start(self, start: int, codec: CheckpointCodec) -> None:
        """Split replay from the kept position ``start``: slow units and conv from a record."""
        record = codec.encode(self.kept[start])
        codec.decode(record, self._views())
        self._replay(start)

    def full_start(self, start: int) -> None:
        """Replay from the exact states at the kept position ``start``."""
        self._restore(self.kept[start])
        self._replay(start)

    def without(self, start: int, layer: int, unit: int, units: int) -> None:
        """As ``full_start``, with one unit lost."""
        self._restore(self.kept[start])
        self._views()[f"recurrent_state_{layer}"].reshape(units, -1)[unit] = 0
        self._replay(start)

    def ask(self, suffix: Tokens, rows: Tokens) -> Floats:
        """Logits [N, V] after the suffix tokens ``rows``; the prefix stays as it is."""
        step = prefill_step(suffix, self.length, logits=rows.tolist())
        return self.model.run(self.slots, 0, step)[0]

    def _replay(self, start: int) -> None:
        for low, high in chunks(start, self.length):
            step = prefill_step(self.prefix[low:high], low, append=False)
            self.model.run(self.slots, 0, step)

    def _views(self) -> States:
        return {name: array[0] for name, array in self.slots.states.items()}

    def _states(self) -> States:
        return {name: array.copy() for name, array in self._views().items()}

    def _restore(self, states: States) -> None:
        for name, view in self._views().items():
            view[...] = states[name]


def chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Of a prefill, as [low, high)."""
    for low in range(start, end, CHUNK):
        yield low, min(low + CHUNK, end)


def _shared(a: Tokens, b: Tokens) -> int:
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


def kl(reference: Floats, other: Floats) -> NDArray[np.float64]:
    """KL(reference || other) [N] of two sets of logits [N, V]."""
    p, q = _log_softmax(reference), _log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
