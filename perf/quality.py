"""``python -m perf.quality``: does a replayed prefix keep the answers? Judged by retrieval.

Every sample's prefix is prefilled once; then each method answers the same questions (teacher
forced). "Relative" is right answers over the exact run's, with a paired bootstrap interval over
samples. Memory only (r = 0) and the linear control are always in the table: both must fail
somewhere, or the tasks do not need the linear layers and the table says nothing.
"""

from __future__ import annotations

import json
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
from perf.compress import report_compression
from perf.gate import report_gate
from perf.methods import EVERY, Method, all_methods, zero_start
from serving.engine.bundle import Bundle
from serving.engine.model import Model

TASKS = ("needle", "mqar", "lww", "copy", "split")
CONTROL = "hybrid-tiny-linear"
# By default, of replay and with --compress, which tries twenty settings on each sample.
LENGTHS, ANSWERS = ("1000,4000,16000", "2000"), (256, 128)
# Prefix lengths of a cell: L, L - STEP, ...; over 512 they meet checkpoints at all distances.
SPREAD, STEP = 5, 101
console = Console(width=160)


@dataclass(frozen=True)
class Cell:
    """One task at one length under one method; low and high bound ``relative`` at 95 %; replayed
    (mean, and at worst) and lost in tokens, state_bytes of checkpoints and kv_bytes per prefix."""

    model: str
    task: str
    length: int
    method: str
    answers: int
    exact: float
    accuracy: float
    relative: float
    low: float
    high: float
    kl: float
    replayed: float
    worst_replayed: int
    lost: float
    state_bytes: int
    kv_bytes: int


def answer_rows(sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the suffix whose logits predict an answer token, and those tokens."""
    positions = np.flatnonzero(sample.answer_mask)
    positions = positions[positions > 0]
    return positions - 1, sample.suffix[positions]


def measure(
    lab: Lab, samples: list[Sample], methods: list[Method], note: str
) -> dict[str, NDArray[np.float64]]:
    """Per method [samples, 4]: right under exact, right replayed, answers, summed KL."""
    rows: dict[str, list[tuple[float, ...]]] = {m.name: [] for m in methods}
    for sample in track(samples, description=note, console=console, transient=True):
        length = sample.length
        # Two tokens before the end: samples of "split" share what comes before.
        lab.prefill(sample.prefix, [length - 2, *(m.start(length) for m in methods)])
        at, want = answer_rows(sample)
        lab.exact()
        reference = lab.ask(sample.suffix, at)
        right = int((reference.argmax(1) == want).sum())
        for method in methods:
            method.run(lab, method.start(length))
            logits = lab.ask(sample.suffix, at)
            hits = int((logits.argmax(1) == want).sum())
            rows[method.name].append((right, hits, len(at), float(kl(reference, logits).sum())))
    return {name: np.array(values) for name, values in rows.items()}


def paired_interval(exact: NDArray[np.float64], got: NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of sum(got) / sum(exact) over samples drawn together."""
    draws = np.random.default_rng(0).integers(0, len(exact), (2000, len(exact)))
    ratios = got[draws].sum(1) / np.maximum(exact[draws].sum(1), 1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def run(
    bundle: Bundle, methods: list[Method], tasks: list[str], lengths: list[int], answers: int
) -> list[Cell]:
    """All cells of one model."""
    model = Model(bundle)
    cells = []
    for length in lengths:
        lab = Lab(model, length + 512)
        kv_bytes = length * model.spec.kv_bytes_per_token()
        hits_at = range(length - EVERY + 1, length + 1)
        for task in tasks:
            samples = enough_samples(task, length, answers_at(length, answers))
            results = measure(lab, samples, methods, f"{bundle.name} {task} {length}")
            for method in methods:
                got = results[method.name]
                exact, hits, count, divergence = got.sum(0)
                low, high = paired_interval(got[:, 0], got[:, 1])
                cells.append(
                    Cell(
                        bundle.name, task, length, method.name, int(count), exact / count,
                        hits / count, hits / max(exact, 1), low, high, divergence / count,
                        float(np.mean([method.replayed(n) for n in hits_at])),
                        max(method.replayed(n) for n in hits_at),
                        float(np.mean([method.lost(n) for n in hits_at])),
                        method.state_bytes(length), kv_bytes,
                    )
                )  # fmt: skip
    return cells


def answers_at(length: int, answers: int) -> int:
    """Fewer at long lengths, where a sample takes seconds (the intervals show it)."""
    return min(answers, max(24, answers * 1000 // length))


def enough_samples(task: str, length: int, answers: int) -> list[Sample]:
    """Samples that hold at least ``answers`` answer tokens, at several lengths up to ``length``:
    where a hit ends between two checkpoints decides how much is replayed."""
    chosen: list[Sample] = []
    for i in range(SPREAD):
        samples = make_samples(task, length - STEP * i, answers, seed=1 + i)
        found = 0
        while found < answers / SPREAD:
            chosen.append(samples.pop(0))
            found += int(chosen[-1].answer_mask.sum())
    return chosen


def table(cells: list[Cell]) -> Table:
    methods = list(dict.fromkeys(c.method for c in cells))
    out = Table(title="Right answers relative to the exact run (95 % interval), KL to it")
    for column in ("model", "task", "L", "answers", "exact"):
        out.add_column(column, no_wrap=True)
    for method in methods:
        out.add_column(method, justify="right", no_wrap=True)
    for key in dict.fromkeys((c.model, c.task, c.length) for c in cells):
        row = {c.method: c for c in cells if (c.model, c.task, c.length) == key}
        first = next(iter(row.values()))
        texts = [f"{c.relative:.3f}±{(c.high - c.low) / 2:.2f}\n{c.kl:.0e}" for c in row.values()]
        name = first.model.removeprefix("hybrid-")
        head = [name, first.task, str(first.length), str(first.answers), f"{first.exact:.3f}"]
        out.add_row(*head, *texts)
    return out


def costs(cells: list[Cell]) -> Table:
    """What each method replays and stores, by model and length."""
    out = Table(
        title="Tokens replayed with snap (mean, worst of 512 lengths), hit lost, state over K/V"
    )
    for column in (
        "model",
        "L",
        "method",
        "replayed",
        "of L",
        "worst",
        "lost",
        "state bytes",
        "of KV",
    ):
        out.add_column(column, justify="left" if column in ("model", "method") else "right")
    for c in {(c.model, c.length, c.method): c for c in cells}.values():
        out.add_row(
            c.model.removeprefix("hybrid-"), str(c.length), c.method, f"{c.replayed:.0f}",
            f"{c.replayed / c.length:.1%}", f"{c.worst_replayed / c.length:.1%}", f"{c.lost:.0f}",
            str(c.state_bytes),
            f"{c.state_bytes / c.kv_bytes:.1%}",
        )  # fmt: skip
    return out


def verdict(cells: list[Cell]) -> dict[str, dict[str, float]]:
    """By model and method: right answers over the exact run's, all cells pooled and the worst
    task at one length, of those whose exact run answers at least half."""
    judged = [c for c in cells if c.exact >= 0.5]
    found = {}
    for key in dict.fromkeys((c.model, c.method) for c in judged):
        chosen = [c for c in judged if (c.model, c.method) == key]
        right = sum(c.accuracy * c.answers for c in chosen)
        exact = sum(c.exact * c.answers for c in chosen)
        found[" ".join(key)] = {
            "pooled": right / exact,
            "worst": min(c.relative for c in chosen),
            "kl": float(np.mean([c.kl for c in chosen])),
        }
    return found


def main(
    model: Annotated[list[str] | None, typer.Option(help="Model name; may be repeated")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A converted model instead")] = None,
    ratios: Annotated[str, typer.Option(help="Shares of L to replay from zero")] = "",
    methods: Annotated[str, typer.Option(help="all, or nothing beside the ratios")] = "",
    lengths: Annotated[
        str, typer.Option(help="Default 1000,4000,16000; 2000 with --compress")
    ] = "",
    tasks: Annotated[str, typer.Option()] = ",".join(TASKS),
    answers: Annotated[
        int, typer.Option(help="At least, per cell; default 256; 128 with --compress")
    ] = 0,
    gate: Annotated[bool, typer.Option("--gate", help="Judge the error gate instead")] = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Judge KV compression instead of replay")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw answers over replayed")] = None,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure replay quality; the control model always runs too."""
    if quick:
        lengths, answers = lengths or "1000", answers or (16 if compress else 48)
    lengths, answers = lengths or LENGTHS[compress], answers or ANSWERS[compress]
    names = list(dict.fromkeys([*(model or ["hybrid-tiny"]), CONTROL]))
    bundles = [Bundle.open(bundle)] if bundle else [bundle_of(name) for name in names]
    if gate:
        report_gate(bundles, console, json_path, 4 if quick else 24)
        return
    sizes = [int(n) for n in lengths.split(",")]
    if compress:
        report_compression(bundles, sizes, answers, console, json_path)
        return
    cells = []
    for each in bundles:
        zeros = [zero_start(r) for r in sorted({0.0, *(float(r) for r in ratios.split(",") if r)})]
        chosen = all_methods(each.spec, each.calibration) if methods == "all" else zeros
        cells += run(each, chosen, tasks.split(","), sizes, answers)
    console.print(table(cells))
    console.print(costs(cells))
    found = verdict(cells)
    for key, values in found.items():
        console.print(
            f"{key}: {values['pooled']:.3f} of the exact run's answers, worst task "
            f"{values['worst']:.3f}, mean KL {values['kl']:.1e}"
        )
    if json_path:
        data = {"cells": [asdict(c) for c in cells], "verdict": found}
        json_path.write_text(json.dumps(data, indent=1))
    if plot:
        draw(cells, plot)


def draw(cells: list[Cell], path: Path) -> None:
    """Answers kept over tokens replayed, a panel per model, a mark per method and length."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(c.model for c in cells))
    methods = list(dict.fromkeys(c.method for c in cells))
    figure = Figure(figsize=(5 * len(models), 4))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for method, mark in zip(methods, "oP^vsDX", strict=False):
            mine = [c for c in cells if (c.model, c.method) == (model, method) and c.exact >= 0.5]
            lengths = sorted({c.length for c in mine})
            shares = [np.mean([c.replayed / n for c in mine if c.length == n]) for n in lengths]
            kept = [np.mean([c.relative for c in mine if c.length == n]) for n in lengths]
            axes.scatter([100 * float(x) for x in shares], kept, marker=mark, s=45, label=method)
        axes.set(title=model, xlabel="tokens replayed, % of L", ylabel="answers kept, of exact")
        axes.set_ylim(-0.05, 1.1)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    typer.run(main)
