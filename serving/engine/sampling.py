"""Chooses the next token of one sequence from its row of logits."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import RequestError
from serving.engine.requests import SamplingParams

Row = NDArray[np.float32]


class Sampler:
    """Holds what sampling remembers: the random stream and the tokens seen so far."""

    def __init__(self, params: SamplingParams, prompt: NDArray[np.int32], vocab_size: int) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)
        self._made = 0
        self._history: list[int] = []
        self._bad = [b for b in params.bad_tokens if b]
        self._plain = not self._bad and params.repetition_penalty == 1.0
        self._seen = np.zeros(vocab_size, bool)
        if params.repetition_penalty != 1.0:
            self._seen[prompt] = True

    def choose(self, logits: Row) -> tuple[int, float | None]:
        """The next token and, where asked for, its log-probability under the raw logits [V]."""
        scores = logits
        if not self._plain or self._made < self.params.min_tokens:
            scores = logits.copy()
            self._penalise(scores)
        token = self._pick(scores)
        if not math.isfinite(scores[token]):
            raise RequestError("no token can be chosen: bad_tokens cover everything, or overflow")
        self._made += 1
        if not self._plain:
            self._seen[token] = True
            self._history.append(token)
        return token, log_prob(logits, token) if self.params.log_probs else None

    def _penalise(self, scores: Row) -> None:
        penalty = self.params.repetition_penalty
        if penalty != 1.0:  # as in transformers: shrink positive scores, push negative ones down
            seen = scores[self._seen]
            scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._made < self.params.min_tokens and self.params.stop_tokens:
            scores[list(self.params.stop_tokens)] = -np.inf
        for bad in self._bad:
            head = list(bad[:-1])
            if self._history[len(self._history) - len(head) :] == head:
                scores[bad[-1]] = -np.inf

    def _pick(self, scores: Row) -> int:
        if self.params.temperature == 0.0 or self.params.top_k == 1:
            return int(scores.argmax())
        kept, weights = shortlist(scores, self.params)
        mass = weights.cumsum()
        at = int(mass.searchsorted(self._random.random() * mass[-1], side="right"))
        return int(kept[min(at, len(kept) - 1)])


def shortlist(scores: Row, p: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that top-k, then top-p leave, and their weights (a multiple of probabilities)."""
    below_top = scores.astype(np.float64) - scores.max()
    weights = np.exp(below_top / max(p.temperature, 1e-30))
    kept = np.arange(len(weights))
    if 0 < p.top_k < len(weights):
        kept = np.argpartition(weights, -p.top_k)[-p.top_k :]
    if p.top_p < 1.0:
        total = weights[kept].sum()
        # What is lighter than an even share of the mass to drop cannot be needed: do not sort it.
        kept = kept[weights[kept] * len(kept) >= (1.0 - p.top_p) * total]
        kept = kept[np.argsort(-weights[kept], kind="stable")]
        kept = kept[: int(weights[kept].cumsum().searchsorted(p.top_p * total)) + 1]
    return kept, weights[kept]


def log_prob(logits: Row, token: int) -> float:
    """log softmax(logits)[token]."""
    top = float(logits.max())
    total = float(np.log(np.exp(logits.astype(np.float64) - top).sum()))
    return float(logits[token]) - top - total
