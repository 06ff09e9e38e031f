"""Training batches: task samples that fill T tokens exactly, and what each target weighs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from build.tasks import (
    BOS,
    EOS,
    FIRST_KEY,
    MIN_LENGTH,
    NUM_BYTES,
    NUM_KEYS,
    NUM_VALUES,
    USER,
    TaskGenerator,
    Tokens,
)

_USER_SHARE = 0.2
"""Share of samples whose questions follow a `<|user|>` marker, as in the chat template."""
_MAX_PERIOD = 24


@dataclass(frozen=True)
class Batch:
    """tokens [B, T] int64; answers and text [B, T - 1] say which targets tokens[:, 1:] are."""

    tasks: list[str]
    tokens: Tensor
    answers: Tensor
    text: Tensor


class BatchGenerator:
    """Draws batches from a mixture of tasks {name: share}; `repeat` exists in training only."""

    def __init__(self, seed: int, mixture: dict[str, float]) -> None:
        self.tasks = TaskGenerator(seed, "train")
        self.names = list(mixture)
        self.shares = np.array([*mixture.values()]) / sum(mixture.values())

    def draw(self, batch: int, num_tokens: int) -> Batch:
        names = [str(n) for n in self.tasks.rng.choice(self.names, batch, p=self.shares)]
        rows, masks = zip(*(self._row(name, num_tokens) for name in names), strict=True)
        tokens = torch.from_numpy(np.stack(rows))
        answers = torch.from_numpy(np.stack(masks))[:, 1:]
        targets = tokens[:, 1:]
        text = ((targets < NUM_BYTES) | (targets == EOS)) & ~answers
        return Batch(names, tokens, answers.float(), text.float())

    def _row(self, name: str, num_tokens: int) -> tuple[Tokens, Tokens]:
        if name == "text":
            row = self.tasks.text(num_tokens)
            if self.tasks.rng.random() < 0.5:
                row[0] = BOS
            return row, np.zeros(num_tokens, np.bool_)
        if name == "repeat":
            return self._repeat(num_tokens)
        length = num_tokens
        marked = self.tasks.rng.random() < _USER_SHARE
        # How long the suffix is depends on the task and on the prefix: shrink until both fit.
        while True:
            sample = self.tasks.sample(name, length)
            suffix, mask = sample.suffix, sample.answer_mask
            if marked:
                starts = np.concatenate([[0], np.flatnonzero(suffix == EOS)[:-1] + 1])
                suffix, mask = np.insert(suffix, starts, USER), np.insert(mask, starts, False)
            excess = sample.length + len(suffix) - num_tokens
            if excess <= 0:
                break
            if length == MIN_LENGTH:
                raise ValueError(f"{num_tokens} tokens are too few for {name}")
            length = max(MIN_LENGTH, length - excess)
        rest = self.tasks.text(-excess)
        row = np.concatenate([sample.prefix, suffix, rest])
        before, after = np.zeros(sample.length, np.bool_), np.zeros(-excess, np.bool_)
        return row, np.concatenate([before, mask, after])

    def _repeat(self, num_tokens: int) -> tuple[Tokens, Tokens]:
        """Symbols with a period: every token after the first two periods is an answer."""
        period = int(self.tasks.rng.integers(3, _MAX_PERIOD + 1))
        cycle = FIRST_KEY + self.tasks.rng.choice(NUM_KEYS + NUM_VALUES, period, replace=False)
        row = np.concatenate([[BOS], np.resize(cycle, num_tokens - 1)]).astype(np.int64)
        return row, np.arange(num_tokens) > _MAX_PERIOD
