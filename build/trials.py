"""What calibration asks of a model: samples prefilled by the engine, replays judged on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from build.lab import Floats, Lab, kl
from build.tasks import Sample

TASKS = ("needle", "mqar", "lww", "copy", "split", "text")
LENGTHS = (1024, 2048)


class Tasks(Protocol):
    """Draws samples in the tokens of one model."""

    def sample(self, task: str, length: int) -> Sample: ...


@dataclass(frozen=True)
class CalibrationOptions:
    """target_*: what a replay must keep; slow_state_budget: bytes of checkpoints over KV bytes;
    samples: per task and length, in each pass; seconds: time box."""

    target_answers: float = 0.99
    target_kl: float = 0.01
    slow_state_budget: float = 0.04
    samples: int = 3
    seconds: float = 180.0
    seed: int = 11


@dataclass
class Trial:
    """One kind of replay over all samples: answers asked, right here and in the exact run, KL."""

    asked: int = 0
    right: int = 0
    exact: int = 0
    kl: list[float] = field(default_factory=list)

    @property
    def answers(self) -> float:
        return self.right / max(self.exact, 1)

    @property
    def kl95(self) -> float:
        return float(np.quantile(self.kl, 0.95)) if self.kl else 0.0

    def keeps(self, options: CalibrationOptions) -> bool:
        return self.answers >= options.target_answers and self.kl95 <= options.target_kl


@dataclass
class Prepared:
    """A prefilled sample: logits of the exact run, where its answers are."""

    lab: Lab
    sample: Sample
    rows: NDArray[np.int64]
    want: NDArray[np.int64]
    reference: Floats

    @property
    def right(self) -> int:
        """Answers of the exact run."""
        return int((self.reference.argmax(1) == self.want).sum())

    def judge(self, trial: Trial) -> float:
        """Ask after a replay; returns the mean KL."""
        logits = self.lab.ask(self.sample.suffix, self.rows)
        divergence = kl(self.reference, logits)
        if self.sample.task != "text":
            trial.asked += len(self.want)
            trial.right += int((logits.argmax(1) == self.want).sum())
            trial.exact += self.right
        trial.kl += divergence.tolist()
        return float(divergence.mean())


@dataclass
class Trials:
    """Passes over fresh samples within a time box; ``tasks(seed)`` draws them."""

    labs: dict[int, Lab]
    tasks: Callable[[int], Tasks]
    options: CalibrationOptions
    advance: Callable[[], None]
    deadline: float

    def run(
        self, offset: int, tails: Sequence[int] | dict[int, list[int]], share: float = 1.0,
        rounds: int | None = None,
    ) -> Iterator[Prepared]:  # fmt: skip
        """Samples one by one, each prefilled with exact states kept ``tails`` (by length, where
        they differ) before its end.

        Takes ``share`` of the time that is left, but sees every task once.
        """
        box = time.monotonic() + share * (self.deadline - time.monotonic())
        texts = self.tasks(self.options.seed + offset)
        for i in range(rounds or self.options.samples):
            for length, lab in self.labs.items():
                for task in TASKS:
                    if i and time.monotonic() > box:
                        return
                    sample = texts.sample(task, length)
                    before = tails[length] if isinstance(tails, dict) else tails
                    lab.prefill(sample.prefix, [length - t for t in before])
                    rows = np.flatnonzero(sample.answer_mask)
                    rows = rows[rows > 0] - 1
                    lab.exact()
                    reference = lab.ask(sample.suffix, rows)
                    yield Prepared(lab, sample, rows, sample.suffix[rows + 1], reference)
                    self.advance()
