"""One sequence under the microscope: prefill a prefix once, then replay it in several ways.

The same graph, steps and slots as the engine's, with the logits of a whole question returned.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from serving.engine.model import Model, prefill_step
from serving.engine.slots import SlotClass

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]
CHUNK = 512


class Lab:
    """A prefix in a slot: its exact K/V stay, its linear states come and go."""

    def __init__(self, model: Model, capacity: int) -> None:
        self.model, self.slots = model, SlotClass(model.spec, capacity, 1)
        self.length = 0

    def prefill(self, prefix: Tokens) -> None:
        """Run the prefix cold; its final states are what ``exact`` restores."""
        self.prefix, self.length = prefix, len(prefix)
        self.slots.zero_states(0)
        for low, high in _chunks(0, self.length):
            self._run(prefix[low:high], low, append=True)
        self._exact = {name: array[0].copy() for name, array in self.slots.states.items()}

    def exact(self) -> None:
        """The states a cold run leaves at the end of the prefix."""
        for name, array in self.slots.states.items():
            array[0] = self._exact[name]

    def zero_start(self, r: int) -> None:
        """Tail replay: zero states, then the last r tokens against the cached K/V."""
        self.slots.zero_states(0)
        for low, high in _chunks(self.length - r, self.length):
            self._run(self.prefix[low:high], low, append=False)

    def ask(self, suffix: Tokens, rows: Tokens) -> Floats:
        """Logits [N, V] after the suffix tokens ``rows``; the prefix stays as it is."""
        return self._run(suffix, self.length, append=True, rows=rows)

    def _run(
        self, tokens: Tokens, start: int, *, append: bool, rows: Tokens | None = None
    ) -> Floats:
        wanted = [] if rows is None else rows.tolist()
        step = prefill_step(tokens, start, append=append, logits=wanted)
        return self.model.run(self.slots, 0, step)[0]


def _chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    for low in range(start, end, CHUNK):
        yield low, min(low + CHUNK, end)


def kl(reference: Floats, other: Floats) -> NDArray[np.float64]:
    """KL(reference || other) [N] of two sets of logits [N, V]."""
    p, q = _log_softmax(reference), _log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
