"""Chooses the next token of one sequence from its row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        scores = logits if self._plain and self._made >= self.params.min_tokens else logits.copy()
        self._penalise(scores)
        token = self._pick(scores)
        self._made += 1
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
        p = self.params
        if p.temperature == 0.0 or p.top_k == 1:
            return int(scores.argmax())
        scaled = scores.astype(np.float64) / p.temperature
        if 0 < p.top_k < len(scaled):
            kept = np.argpartition(scaled, -p.top_k)[-p.top_k :]
        else:
            kept = np.arange(len(scaled))
        kept = kept[np.argsort(-scaled[kept], kind="stable")]
        weights = np.exp(scaled[kept] - scaled[kept[0]])
        weights /= weights.sum()
        if p.top_p < 1.0:
            size = int(np.searchsorted(weights.cumsum(), p.top_p)) + 1
            kept, weights = kept[:size], weights[:size] / weights[:size].sum()
        return int(self._random.choice(kept, p=weights))


def log_prob(logits: Row, token: int) -> float:
    """log softmax(logits)[token]."""
    top = float(logits.max())
    total = float(np.log(np.exp(logits.astype(np.float64) - top).sum()))
    return float(logits[token]) - top - total
