"""Judges the error gate on samples calibration never saw: how often does it promise too little?

The engine's own planner and gate choose, per sample and error limit, among full state, split,
zero-start tail and recompute; a violation is a replay whose KL exceeds what was promised for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from build.calibrate import state_norms, tail_decay
from build.lab import Lab, kl
from build.tasks import TaskGenerator
from build.trials import TASKS
from serving.engine.bundle import Bundle
from serving.engine.model import Model
from serving.prefix_cache import EXACT, Match, MissReason, StateRef
from serving.prefix_cache.planner import (
    CostModel,
    ReplayMode,
    ReplayRequest,
    ReplaySource,
    replay_plans,
)
from serving.replay.checkpoint import CheckpointCodec
from serving.replay.gate import Estimator
from serving.replay.policy import policy_of

LIMITS = (0.001, 0.01, 0.1)
LENGTHS = (1024, 1536)
ANY = 1e9  # an error that every plan keeps


@dataclass
class Count:
    """Over the samples of one model at one limit."""

    model: str
    limit: float
    samples: int = 0
    violations: int = 0
    split: int = 0
    tail: int = 0
    recompute: int = 0
    moved_on: int = 0


class Judge:
    """Plans and gates replays of one model as the engine does."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.calibration = bundle, bundle.calibration
        self.labs = {n: Lab(Model(bundle), n + 512) for n in LENGTHS}
        self.codec = CheckpointCodec.of(bundle.spec, self.calibration)
        self.estimator = Estimator(self.calibration)
        self.policy = policy_of(self.calibration, CostModel(1e-4, 1e-8, 1e-7))

    def match(self, length: int) -> Match:
        """A whole prefix cached, with its checkpoints and no full state."""
        interval = self.calibration.interval
        positions = range(interval, length + 1, interval) if interval else range(0)
        checkpoints = tuple(StateRef(p, 0, 0, EXACT) for p in reversed(positions[-4:]))
        return Match(
            0, length + 16, length, length, np.zeros(0, np.int64), np.zeros(0, np.uint64), EXACT,
            (), MissReason.NONE, -1, checkpoints,
        )  # fmt: skip

    def sample(self, texts: TaskGenerator, task: str, length: int, counts: list[Count]) -> None:
        lab = self.labs[length]
        sample, match = texts.sample(task, length), self.match(length)
        every = ReplayRequest(ReplayMode.BOUNDED, ANY)
        starts = {plan.start for plan in replay_plans(every, match, self.policy)}
        lab.prefill(sample.prefix, sorted(starts))
        rows = np.flatnonzero(sample.answer_mask)
        rows = rows[rows > 0] - 1
        lab.exact()
        reference = lab.ask(sample.suffix, rows)
        for count in counts:
            request = ReplayRequest(ReplayMode.BOUNDED, count.limit)
            count.samples += 1
            for plan in replay_plans(request, match, self.policy):
                if plan.source is ReplaySource.RECOMPUTE or plan.start == 0:
                    count.recompute += 1
                    break
                split = plan.source is ReplaySource.SPLIT
                if split:
                    lab.split_start(plan.start, self.codec)
                else:
                    lab.zero_start(length - plan.start)
                norms = state_norms(self.bundle.spec, lab.kept[plan.start]) if split else None
                decay = tail_decay(lab, plan.start)
                gate = self.calibration.split if split else self.calibration.zero
                promised = gate.bound(self.estimator.estimate(decay, norms, split=split))
                if promised > count.limit:
                    count.moved_on += 1
                    continue
                error = float(kl(reference, lab.ask(sample.suffix, rows)).mean())
                count.violations += error > promised
                count.split += split
                count.tail += not split
                break


def report_gate(
    bundles: list[Bundle], console: Console, json_path: Path | None, samples: int
) -> None:
    """Print violations and how often each source was chosen."""
    rows: list[Count] = []
    for bundle in bundles:
        counts = [Count(bundle.name, limit) for limit in LIMITS]
        rows += counts
        if not bundle.calibration.known:
            console.print(f"{bundle.name}: {bundle.calibration.verdict}; always exact")
            continue
        judge, texts = Judge(bundle), TaskGenerator(77)
        steps = [(t, n) for _ in range(samples) for t in TASKS for n in LENGTHS]
        for task, length in track(steps, description=bundle.name, console=console, transient=True):
            judge.sample(texts, task, length, counts)
    table = Table(title="Error gate on unseen samples")
    for name in (
        "model",
        "limit",
        "samples",
        "violations",
        "split",
        "tail",
        "recompute",
        "moved on",
    ):
        table.add_column(name, justify="right")
    for c in rows:
        accepted = c.split + c.tail
        share = f"{c.violations} ({c.violations / max(accepted, 1):.1%} of accepted)"
        table.add_row(
            c.model, f"{c.limit:g}", str(c.samples), share, str(c.split), str(c.tail),
            str(c.recompute), str(c.moved_on),
        )  # fmt: skip
    console.print(table)
    if json_path:
        json_path.write_text(json.dumps([asdict(c) for c in rows], indent=1))
