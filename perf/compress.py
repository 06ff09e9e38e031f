"""Retrieval after KV compression: the question comes once the prompt's rows are gone.

Every sample's prefix is prefilled once, in the graph the server runs, with its queries shown to the
policies (every 16th and the last 32). Then, for every policy and share of the K/V bytes saved,
the kept rows of each layer and head move to a smaller slot, and the same question is answered from
there. Beside right answers and KL to the dense run: the error of the attention layers' outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from build.bound_calibration import Watched
from build.lab import kl
from build.tasks import Sample, make_samples
from engine_configs.spec import HybridSpec
from serving.engine.bundle import Bundle
from serving.engine.compression import LAST
from serving.engine.model import Model, Step, prefill_step
from serving.engine.slots import SlotClass
from serving.kv_compression.retention import (
    H2O,
    KeepEnds,
    RandomKeepPrompt,
    ReasoningAware,
    Retention,
    SlidingWindow,
    SnapKV,
    keep_top,
)

TASKS = ("needle", "mqar", "lww", "copy")
SAVED = (0.25, 0.5, 0.65, 0.75)
OURS = "ours"
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Cell:
    """right: of ``answers``; dense: right ones of the dense run; kl: mean per answer; output_error:
    mean relative L2 error of a head's output over the prefix, at the answers' queries."""

    model: str
    task: str
    length: int
    policy: str
    saved: float
    answers: int
    dense: float
    right: float
    kl: float
    output_error: float


def policies(count: int, seed: int) -> dict[str, Retention]:
    """Each with its paper's own window; ``count``: rows to keep."""
    return {
        "sliding window": KeepEnds(SlidingWindow(), 4, 0),
        "H2O": KeepEnds(H2O(), 0, count // 2),
        "SnapKV": KeepEnds(SnapKV(), 0, LAST),
        # A prefix is all prompt here: what "keep the prompt" would keep is everything.
        "random": KeepEnds(RandomKeepPrompt(seed), 4, LAST),
        OURS: KeepEnds(ReasoningAware(), 4, LAST),
    }


class Bench(Watched):
    """And a second slot for what is kept."""

    def __init__(self, model: Model, capacity: int) -> None:
        super().__init__(model, capacity)
        self.small = SlotClass(model.spec, capacity, 1)

    def ask_kept(self, kept: dict[int, Mask], suffix: Any, rows: Any) -> Any:
        """Logits [N, V] with the kept rows [Hk, T] of each layer alone, as many in every head."""
        self.restore(self.small)
        for i, mask in kept.items():
            count = int(mask[0].sum())
            for name, a in (("key", self.stats[i].keys), ("value", self.stats[i].values)):
                slot = self.small.kv[f"past_{name}_{i}"][0]
                slot[:, :count, : a.shape[2]] = a[mask].reshape(len(mask), count, -1)
        step = prefill_step(suffix, self.length, logits=rows.tolist())
        total = np.array([count + step.tokens.shape[1]])
        moved = Step(step.tokens, step.positions, total, True, step.logit_rows, step.valid_len)
        return self.model.run(self.small, 0, moved)[0]

    def output_error(self, kept: dict[int, Mask], queries: dict[int, Any]) -> float:
        """Mean relative error of heads' outputs over the prefix when only kept rows are read."""
        errors = []
        for i, mask in kept.items():
            stats = self.stats[i]
            heads = len(mask)
            q = queries[i].reshape(len(queries[i]), heads, -1, stats.keys.shape[2])
            for h in range(heads):
                score = np.einsum("ngd,td->ngt", q[:, h], stats.keys[h])
                p = np.exp(score - score.max(-1, keepdims=True))
                whole = p @ stats.values[h] / p.sum(-1, keepdims=True)
                p *= mask[h]
                part = p @ stats.values[h] / np.maximum(p.sum(-1, keepdims=True), 1e-30)
                size = np.maximum(np.linalg.norm(whole, axis=-1), 1e-30)
                errors.append(np.linalg.norm(part - whole, axis=-1) / size)
        return float(np.mean(errors))


def answer_rows(sample: Sample) -> tuple[Any, Any]:
    """Rows of the suffix whose logits predict an answer token, and those tokens."""
    positions = np.flatnonzero(sample.answer_mask)
    positions = positions[positions > 0]
    return positions - 1, sample.suffix[positions]


def samples_of(task: str, length: int, answers: int) -> list[Sample]:
    """Samples that hold at least ``answers`` answer tokens."""
    found: list[Sample] = []
    for sample in make_samples(task, length, answers, seed=1):
        found.append(sample)
        if sum(int(s.answer_mask.sum()) for s in found) >= answers:
            break
    return found


def measure(
    bench: Bench,
    spec: HybridSpec,
    name: str,
    task: str,
    length: int,
    answers: int,
    console: Console,
) -> Iterator[Cell]:
    """Cells of one task at one length."""
    totals: dict[tuple[str, float], list[Any]] = {}
    note = f"{name} {task} {length}"
    samples = samples_of(task, length, answers)
    for seed, sample in enumerate(track(samples, note, console=console, transient=True)):
        bench.prefill(sample.prefix)
        at, want = answer_rows(sample)
        reference, queries = bench.ask(sample.suffix, at)
        right = int((reference.argmax(1) == want).sum())
        for saved in SAVED:
            count = int(bench.length * (1 - saved))
            for policy, retention in policies(count, seed).items():
                kept = {i: keep_top(retention.scores(s), count) for i, s in bench.stats.items()}
                logits = bench.ask_kept(kept, sample.suffix, at)
                hits = int((logits.argmax(1) == want).sum())
                error = bench.output_error(kept, queries) * len(at)
                figures = (len(at), right, hits, float(kl(reference, logits).sum()), error)
                totals.setdefault((policy, saved), []).append(figures)
    for (policy, saved), rows in totals.items():
        n, dense, hits, divergence, error = np.sum(rows, axis=0)
        yield Cell(
            name, task, length, policy, saved, int(n), dense / n, hits / n, divergence / n,
            error / n,
        )  # fmt: skip


def table(cells: Sequence[Cell]) -> Table:
    out = Table(
        title="Right answers after compression (dense run in front), KL to it, output error"
    )
    for column in ("model", "task", "L", "dense", "policy"):
        out.add_column(column, no_wrap=True)
    for saved in SAVED:
        out.add_column(f"{saved:.0%} saved", justify="right", no_wrap=True)
    for key in dict.fromkeys((c.model, c.task, c.length, c.policy) for c in cells):
        row = [c for c in cells if (c.model, c.task, c.length, c.policy) == key]
        texts = [f"{c.right:.3f}  {c.kl:.2f}  {c.output_error:.2f}" for c in row]
        first = row[0]
        head = [first.model.removeprefix("hybrid-"), first.task, str(first.length)]
        out.add_row(*head, f"{first.dense:.3f}", first.policy, *texts)
    return out


def verdict(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """By model and share saved: tasks on which ours has as many right answers as every baseline,
    and a KL as low."""
    found: dict[str, dict[str, Any]] = {}
    for model, saved in dict.fromkeys((c.model, c.saved) for c in cells):
        some = [c for c in cells if (c.model, c.saved) == (model, saved)]
        answers, divergence = [], []
        for task, length in dict.fromkeys((c.task, c.length) for c in some):
            rows = [c for c in some if (c.task, c.length) == (task, length)]
            ours = next(c for c in rows if c.policy == OURS)
            others = [c for c in rows if c.policy != OURS]
            answers.append(all(ours.right >= c.right for c in others))
            divergence.append(all(ours.kl <= c.kl for c in others))
        found[f"{model} {saved:.0%}"] = {
            "tasks": len(answers),
            "answers_at_least": sum(answers),
            "kl_at_most": sum(divergence),
        }
    return found


def report_compression(
    bundles: Sequence[Bundle],
    lengths: Sequence[int],
    answers: int,
    console: Console,
    json_path: Path | None,
) -> None:
    """Measure, print and write."""
    cells: list[Cell] = []
    for bundle in bundles:
        model = Model(bundle)
        for length in lengths:
            bench = Bench(model, length + 512)
            for task in TASKS:
                cells += measure(bench, bundle.spec, bundle.name, task, length, answers, console)
    console.print(table(cells))
    found = verdict(cells)
    for key, v in found.items():
        console.print(
            f"{key} saved: ours at least as many right answers as every baseline on "
            f"{v['answers_at_least']} of {v['tasks']} tasks, KL at most theirs on {v['kl_at_most']}"
        )
    if json_path:
        data = {"cells": [asdict(c) for c in cells], "verdict": found}
        json_path.write_text(json.dumps(data, indent=1, default=float))
