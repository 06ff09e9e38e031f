"""Retrieval accuracy of a saved model: exact, and after tail replay from a zero linear state.

Replay of r tokens on a hit of L: attention keeps its exact keys and values of all L tokens (the
tail's queries read them, nothing is rewritten); linear layers start from zero at L - r. r = 0
drops the linear state altogether.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from build.tasks import Sample, heldout_text, make_samples
from perf.train_tiny.checkpoint import load
from perf.train_tiny.model import LayerState, LinearLayer, TinyHybrid, forget_linear

RATIOS = (0.0, 0.01, 0.05, 0.1)
"""Replayed share of the prefix; 0 is the control that drops the linear state."""
_BATCH_TOKENS = 16384
_MAX_SPLIT_LENGTH = 1024
"""`split` has a single answer per sample; longer cells would take most of the time."""


@dataclass(frozen=True)
class Plan:
    """What to measure: every task at every length, at least `answers` answer tokens a cell."""

    tasks: tuple[str, ...] = ("needle", "mqar", "lww", "copy", "split", "text")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    answers: int = 256
    seed: int = 7

    def cells(self) -> Iterator[tuple[str, int]]:
        for task, length in itertools.product(self.tasks, self.lengths):
            if task != "split" or length <= _MAX_SPLIT_LENGTH:
                yield task, length


@dataclass(frozen=True)
class Cell:
    """Accuracy of greedy answers: `exact`, and per ratio `accuracy` and `kl` (nats) to exact."""

    task: str
    length: int
    answers: int
    exact: float
    accuracy: dict[float, float] = field(default_factory=dict)
    kl: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything measured on one checkpoint; decay lengths in tokens, per linear layer and head."""

    cells: list[Cell]
    decay_lengths: list[list[float]]
    parameters: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def replayed(
    model: TinyHybrid, prefix: Tensor, exact: list[LayerState], num_replayed: int
) -> list[LayerState]:
    """States after prefix [B, L] when only its last `num_replayed` tokens are replayed."""
    start = forget_linear(exact)
    if num_replayed == 0:
        return start
    return model(prefix[:, -num_replayed:], start, replay=True, logits_from=num_replayed)[1]


@torch.no_grad()
def measure_cell(model: TinyHybrid, task: str, length: int, plan: Plan) -> Cell:
    samples = _enough(task, length, plan)
    modes: dict[float, tuple[list[Tensor], list[Tensor]]] = {r: ([], []) for r in RATIOS}
    exact_hits: list[Tensor] = []
    per_batch = max(1, _BATCH_TOKENS // length)
    for group in (samples[i : i + per_batch] for i in range(0, len(samples), per_batch)):
        prefix = torch.from_numpy(np.stack([s.prefix for s in group]))
        suffix = torch.from_numpy(np.stack([s.suffix for s in group]))
        asked = torch.from_numpy(np.stack([s.answer_mask for s in group]))[:, 1:]
        targets = suffix[:, 1:][asked]
        _, exact = model(prefix, logits_from=length)

        reference = _answers(model, suffix, asked, exact)
        exact_hits.append(reference.argmax(-1) == targets)
        for ratio, (hits, divergences) in modes.items():
            states = replayed(model, prefix, exact, round(ratio * length))
            scores = _answers(model, suffix, asked, states)
            hits.append(scores.argmax(-1) == targets)
            divergences.append((reference.exp() * (reference - scores)).sum(-1))
    return Cell(
        task,
        length,
        sum(map(len, exact_hits)),
        _mean(exact_hits),
        {ratio: _mean(hits) for ratio, (hits, _) in modes.items()},
        {ratio: _mean(divergences) for ratio, (_, divergences) in modes.items()},
    )


def _answers(model: TinyHybrid, suffix: Tensor, asked: Tensor, states: list[LayerState]) -> Tensor:
    """Log-probabilities [answer tokens, V] where asked [B, S - 1] holds."""
    return model(suffix, states)[0][:, :-1][asked].log_softmax(-1)


def _enough(task: str, length: int, plan: Plan) -> list[Sample]:
    per_sample = int(make_samples(task, length, 1, seed=plan.seed)[0].answer_mask.sum())
    count = max(-(-plan.answers // per_sample), 8)
    questions = len(make_samples(task, length, 1, seed=plan.seed)[0].questions)
    return make_samples(task, length, count * questions, seed=plan.seed)


def _mean(parts: Sequence[Tensor]) -> float:
    return torch.cat(list(parts)).double().mean().item()


@torch.no_grad()
def decay_lengths(model: TinyHybrid, num_tokens: int = 2048) -> list[list[float]]:
    """1 / mean |log-decay| on held-out text, in tokens, for every linear layer and head."""
    seen: list[Tensor] = []
    hooks = [
        layer.linear_attn.register_forward_pre_hook(
            lambda mixer, args: seen.append(mixer.log_decay(args[0]))
        )
        for layer in model.model.layers
        if isinstance(layer, LinearLayer)
    ]
    model(torch.from_numpy(heldout_text(num_tokens))[None], logits_from=num_tokens)
    for hook in hooks:
        hook.remove()
    return [(1 / -log_decay[0].mean(0)).tolist() for log_decay in seen]


def evaluate(directory: Path, plan: Plan, report: Callable[[Cell], None]) -> Report:
    """Measures the checkpoint in `directory` (proved equal to transformers first)."""
    model = load(directory).eval()
    cells = []
    for task, length in plan.cells():
        cells.append(measure_cell(model, task, length, plan))
        report(cells[-1])
    parameters = sum(p.numel() for p in model.parameters())
    return Report(cells, decay_lengths(model), parameters)
