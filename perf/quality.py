"""``python -m perf.quality``: does tail replay keep the answers? Judged by retrieval.

Every sample's prefix is prefilled once; then each replay answers the same questions (teacher
forced). "Relative" is right answers over the exact run's, with a paired bootstrap interval over
samples. r = 0 and the linear control are always in the table: both must fail somewhere, or the
tasks do not need the linear layers and the table says nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from build.bundles import bundle_of
from build.lab import Lab, kl
from build.tasks import Sample, make_samples
from serving.engine.model import Model

TASKS = ("needle", "mqar", "lww", "copy", "split")
CONTROL = "hybrid-tiny-linear"
console = Console(width=110)


@dataclass(frozen=True)
class Cell:
    """One task at one length under one ratio; low and high bound ``relative`` at 95 %."""

    model: str
    task: str
    length: int
    ratio: float
    answers: int
    exact: float
    accuracy: float
    relative: float
    low: float
    high: float
    kl: float


def answer_rows(sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the suffix whose logits predict an answer token, and those tokens."""
    positions = np.flatnonzero(sample.answer_mask)
    positions = positions[positions > 0]
    return positions - 1, sample.suffix[positions]


def measure(
    lab: Lab, samples: list[Sample], ratios: list[float], note: str
) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """Per ratio: [samples, 4] = right under exact, right replayed, answers, summed KL."""
    rows: dict[float, list[tuple[float, ...]]] = {r: [] for r in ratios}
    for sample in track(samples, description=note, console=console, transient=True):
        lab.prefill(sample.prefix)
        at, want = answer_rows(sample)
        lab.exact()
        reference = lab.ask(sample.suffix, at)
        right = int((reference.argmax(1) == want).sum())
        for ratio in ratios:
            lab.zero_start(math.ceil(ratio * lab.length))
            logits = lab.ask(sample.suffix, at)
            hits = int((logits.argmax(1) == want).sum())
            rows[ratio].append((right, hits, len(at), float(kl(reference, logits).sum())))
    yield from ((ratio, np.array(values)) for ratio, values in rows.items())


def paired_interval(exact: NDArray[np.float64], got: NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of sum(got) / sum(exact) over samples drawn together."""
    draws = np.random.default_rng(0).integers(0, len(exact), (2000, len(exact)))
    ratios = got[draws].sum(1) / np.maximum(exact[draws].sum(1), 1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def run(
    model_name: str, tasks: list[str], lengths: list[int], ratios: list[float], answers: int
) -> list[Cell]:
    """All cells of one model."""
    model = Model(bundle_of(model_name))
    cells = []
    for length in lengths:
        lab = Lab(model, length + 512)
        for task in tasks:
            samples = _samples(task, length, answers)
            for ratio, got in measure(lab, samples, ratios, f"{model_name} {task} {length}"):
                exact, hits, count, divergence = got.sum(0)
                low, high = paired_interval(got[:, 0], got[:, 1])
                cells.append(
                    Cell(
                        model_name, task, length, ratio, int(count), exact / count, hits / count,
                        hits / max(exact, 1), low, high, divergence / count,
                    )
                )  # fmt: skip
    return cells


def _samples(task: str, length: int, answers: int) -> list[Sample]:
    """Enough samples for ``answers`` answer tokens."""
    samples, found = make_samples(task, length, answers, seed=1), 0
    for i, sample in enumerate(samples):
        found += int(sample.answer_mask.sum())
        if found >= answers:
            return samples[: i + 1]
    return samples


def table(cells: list[Cell]) -> Table:
    out = Table(title="Right answers relative to the exact run (95 % interval), KL to it")
    ratios = sorted({c.ratio for c in cells})
    for column in ("model", "task", "L", "answers", "exact"):
        out.add_column(column)
    for ratio in ratios:
        out.add_column(f"r = {ratio:.0%} L", justify="right")
    keys = dict.fromkeys((c.model, c.task, c.length) for c in cells)
    for key in keys:
        row = {c.ratio: c for c in cells if (c.model, c.task, c.length) == key}
        first = row[ratios[0]]
        out.add_row(
            first.model.removeprefix("hybrid-"),
            first.task,
            str(first.length),
            str(first.answers),
            f"{first.exact:.3f}",
            *(f"{c.relative:.3f} ±{(c.high - c.low) / 2:.2f}\nKL {c.kl:.1e}" for c in row.values()),
        )
    return out


def verdict(cells: list[Cell]) -> dict[str, float]:
    """Relative answers pooled over all cells, by model and ratio."""
    pooled = {}
    for key in dict.fromkeys((c.model, c.ratio) for c in cells):
        chosen = [c for c in cells if (c.model, c.ratio) == key]
        right = sum(c.accuracy * c.answers for c in chosen)
        exact = sum(c.exact * c.answers for c in chosen)
        pooled[f"{key[0]} r={key[1]:g}"] = right / max(exact, 1)
    return pooled


def main(
    model: Annotated[list[str] | None, typer.Option(help="Model name; may be repeated")] = None,
    ratios: Annotated[str, typer.Option()] = "0,0.01,0.05,0.1,1",
    lengths: Annotated[str, typer.Option()] = "1024,2048",
    tasks: Annotated[str, typer.Option()] = ",".join(TASKS),
    answers: Annotated[int, typer.Option(help="At least, per cell")] = 256,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure replay quality; the control model always runs too."""
    if quick:
        lengths, answers = "1024", 48
    names = list(dict.fromkeys([*(model or ["hybrid-tiny"]), CONTROL]))
    wanted = sorted({0.0, *(float(r) for r in ratios.split(","))})
    cells = []
    for name in names:
        sizes = [int(n) for n in lengths.split(",")]
        cells += run(name, tasks.split(","), sizes, wanted, answers)
    console.print(table(cells))
    pooled = verdict(cells)
    for key, value in pooled.items():
        console.print(f"{key}: {value:.3f} of the exact run's right answers, all cells pooled")
    if json_path:
        data = {"cells": [asdict(c) for c in cells], "pooled": pooled}
        json_path.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
