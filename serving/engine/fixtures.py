"""Recorded answers of a model, and playing the same steps on another device or precision.

A recording is a few turns over one sequence of tokens: prefill in chunks, decode, and replays from
an empty state, which read the K/V of the turns before them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.engine.model import Step
from serving.engine.runner import Runner

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Turn:
    """Feed tokens [start, end), from zero states where ``fresh``; the last ``rows`` give logits."""

    start: int
    end: int
    append: bool = True
    fresh: bool = False
    rows: int = 0

    def name(self) -> str:
        if not self.append:
            return f"replay {self.start}..{self.end}"
        return f"{'decode' if self.end - self.start == 1 else 'prefill'} {self.start}..{self.end}"


TOKENS = 120
TURNS = (
    Turn(0, 64, fresh=True, rows=8),
    Turn(64, 99, rows=8),
    *(Turn(p, p + 1, rows=1) for p in range(99, 104)),
    Turn(0, 104, append=False, fresh=True),
    *(Turn(p, p + 1, rows=1) for p in range(104, 108)),
    Turn(76, 108, append=False, fresh=True),
    *(Turn(p, p + 1, rows=1) for p in range(108, 112)),
)


@dataclass(frozen=True)
class Recording:
    """tokens [T]; logits [sum of rows, V] of the turns that give any, end to end."""

    tokens: Ints
    turns: tuple[Turn, ...]
    logits: Floats

    def save(self, path: Path) -> None:
        turns = np.array([astuple(t) for t in self.turns], np.int64)
        np.savez_compressed(path, tokens=self.tokens, turns=turns, logits=self.logits)

    @classmethod
    def load(cls, path: Path) -> Recording:
        with np.load(path, allow_pickle=False) as file:
            rows = ((s, e, bool(a), bool(f), n) for s, e, a, f, n in file["turns"].tolist())
            return cls(file["tokens"], tuple(Turn(*row) for row in rows), file["logits"])

    def of_turn(self) -> list[tuple[Turn, slice]]:
        """Which rows of ``logits`` are whose."""
        ends = np.cumsum([t.rows for t in self.turns]).tolist()
        pairs = zip(self.turns, ends, strict=True)
        return [(t, slice(end - t.rows, end)) for t, end in pairs if t.rows]


def play(runner: Runner, tokens: Ints, turns: tuple[Turn, ...] = TURNS) -> Recording:
    """Run the turns in one slot, each as one step."""
    slots = runner.new_slots(len(tokens), 1)
    owner = object()
    row = slots.allocate(owner)
    parts = []
    for turn in turns:
        if turn.fresh:
            slots.zero_states(row)
        count = turn.end - turn.start
        step = Step(
            tokens[None, turn.start : turn.end],
            np.arange(turn.start, turn.end)[None],
            np.array([turn.end]),
            turn.append,
            np.arange(count - turn.rows, count),
        )
        parts.append(runner.run(slots, row, step)[0])
    slots.close()
    return Recording(tokens, turns, np.concatenate(parts))


def errors(expected: Recording, found: Recording) -> dict[str, dict[str, float]]:
    """Per turn: largest logit error, mean KL from the expected distribution (in nats), share of
    rows with the same best token."""
    table = {}
    for turn, rows in expected.of_turn():
        want, got = (r.logits[rows].astype(np.float64) for r in (expected, found))
        p, q = _log_softmax(want), _log_softmax(got)
        table[turn.name()] = {
            "max_abs_logit_error": float(np.abs(want - got).max()),
            "logit_kl": float((np.exp(p) * (p - q)).sum(axis=1).mean()),
            "same_token": float((want.argmax(1) == got.argmax(1)).mean()),
        }
    return table


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
