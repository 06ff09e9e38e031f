"""Finds out, with the engine itself, how a model's prefix hits may be replayed.

Retrieval tasks are what quality is judged by: a model whose retrieval is dead still predicts text
well. Steps: rank units by what losing each one costs; take the fewest slow units and the smallest
tail that keep the target; the smallest dtype that still does; the shortest interval the byte
budget allows; then measure on fresh samples and fit the gates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build.lab import Floats, Lab, kl
from build.tasks import Sample, TaskGenerator
from engine_configs.errors import ConfigError
from engine_configs.spec import HybridSpec
from serving.engine.model import Model
from serving.replay.calibration import (
    UNCALIBRATED,
    Calibration,
    LayerUnits,
    Point,
    fit_gate,
    from_json,
)
from serving.replay.checkpoint import DTYPES, CheckpointCodec, unit_norms
from serving.replay.gate import Estimator

TASKS = ("needle", "mqar", "lww", "copy", "split", "text")
LENGTHS = (1024, 2048)
TAILS = (16, 32, 64, 128)
RANKING_TAIL = 32
ZERO_RATIOS = (0.01, 0.02, 0.05, 0.1)
SAFE_RATIO = 0.05
# A model that answers less than this share of the questions says nothing about what replay costs.
NEEDED_ACCURACY = 0.3
INTERVALS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
Unit = tuple[int, int]  # (layer, unit)


@dataclass(frozen=True)
class CalibrationOptions:
    """target_*: what a replay must keep; slow_state_budget: bytes of checkpoints over KV bytes;
    samples: per task and length, once to choose and once to measure; seconds: time box."""

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

    def judge(self, trial: Trial) -> float:
        """Ask after a replay; returns the mean KL."""
        logits = self.lab.ask(self.sample.suffix, self.rows)
        divergence = kl(self.reference, logits)
        if self.sample.task != "text":
            trial.asked += len(self.want)
            trial.right += int((logits.argmax(1) == self.want).sum())
            trial.exact += int((self.reference.argmax(1) == self.want).sum())
        trial.kl += divergence.tolist()
        return float(divergence.mean())


def can_calibrate(spec: HybridSpec) -> bool:
    """The generated tasks speak the vocabulary of the trained tiny models."""
    from build.tasks import VOCAB_SIZE

    return spec.vocab_size == VOCAB_SIZE and bool(spec.state_layers())


def calibrate(
    model: Model, options: CalibrationOptions = CalibrationOptions(),
    advance: Callable[[], None] = lambda: None,
) -> Calibration:  # fmt: skip
    """Calls ``advance`` once per sample and pass (see ``num_steps``)."""
    deadline = time.monotonic() + options.seconds
    labs = {length: Lab(model, length + 512) for length in LENGTHS}
    effects, norms = _rank(labs, options, advance, deadline)
    order = sorted(effects, key=lambda u: -effects[u])
    trials = _search(labs, options, order, advance, deadline)
    seen = next(iter(trials.values()))
    if seen.exact < NEEDED_ACCURACY * seen.asked:
        share = f"{seen.exact} of {seen.asked} questions"
        return replace(UNCALIBRATED, verdict=f"cannot be judged: the model answers only {share}")
    count, tail = _fewest(trials, len(order), options)
    slow = _by_layer(order[:count])
    dtype = _smallest_dtype(trials, options)
    layers = _layer_units(model.spec, slow, effects, norms)
    found = Calibration(
        status="measured",
        interval=shortest_interval(
            model.spec, CheckpointCodec(model.spec, slow, dtype), options.slow_state_budget
        ),
        min_tail=tail,
        dtype=dtype,
        layers=layers,
        target_answers=options.target_answers,
        target_kl=options.target_kl,
    )
    return _measure(labs, found, options, advance, deadline)


def num_steps(options: CalibrationOptions) -> int:
    return 3 * options.samples * len(TASKS) * len(LENGTHS)


def _prepare(
    labs: dict[int, Lab], options: CalibrationOptions, seed: int, tails: Sequence[int],
    advance: Callable[[], None], deadline: float,
) -> Iterator[Prepared]:  # fmt: skip
    """Samples one by one, each prefilled with exact states kept ``tails`` before its end.

    Stops early at the deadline, but never before every task was seen once.
    """
    texts = TaskGenerator(seed)
    for i in range(options.samples):
        for length, lab in labs.items():
            for task in TASKS:
                if i and time.monotonic() > deadline:
                    return
                sample = texts.sample(task, length)
                lab.prefill(sample.prefix, [length - t for t in tails])
                rows = np.flatnonzero(sample.answer_mask)
                rows = rows[rows > 0] - 1
                lab.exact()
                reference = lab.ask(sample.suffix, rows)
                yield Prepared(lab, sample, rows, sample.suffix[rows + 1], reference)
                advance()


def _rank(
    labs: dict[int, Lab], options: CalibrationOptions, advance: Callable[[], None], deadline: float
) -> tuple[dict[Unit, float], dict[Unit, float]]:
    """Per unit: mean KL when it alone is lost ``RANKING_TAIL`` before the end, and its norm."""
    spec = next(iter(labs.values())).model.spec
    units = {i: m.units() for i, m in spec.state_layers() if m.recurrent_state()}
    effects: dict[Unit, list[float]] = {(i, u): [] for i, n in units.items() for u in range(n)}
    norms: dict[Unit, list[float]] = {unit: [] for unit in effects}
    half = time.monotonic() + (deadline - time.monotonic()) / 2
    for done in _prepare(labs, options, options.seed, [RANKING_TAIL], advance, half):
        start = done.lab.length - RANKING_TAIL
        for i, count in units.items():
            sizes = unit_norms(done.lab.kept[start][f"recurrent_state_{i}"], count)
            for u in range(count):
                norms[i, u].append(float(sizes[u]))
                done.lab.without(start, i, u, count)
                effects[i, u].append(done.judge(Trial()))
    return (
        {unit: float(np.mean(values)) for unit, values in effects.items()},
        {unit: float(np.mean(values)) for unit, values in norms.items()},
    )


def _counts(total: int) -> list[int]:
    steps = [0, *(2**i for i in range(1 + int(math.log2(total)))), 3 * total // 4, total]
    return sorted(set(steps))


def _search(
    labs: dict[int, Lab], options: CalibrationOptions, order: list[Unit],
    advance: Callable[[], None], deadline: float,
) -> dict[tuple[int, int, str], Trial]:  # fmt: skip
    """Trials by (slow units, tail, dtype): all counts in fp32, the dtypes at every count."""
    spec = next(iter(labs.values())).model.spec
    trials: dict[tuple[int, int, str], Trial] = {}
    for done in _prepare(labs, options, options.seed + 1, TAILS, advance, deadline):
        for count in _counts(len(order)):
            slow = _by_layer(order[:count])
            for dtype in DTYPES if count else ("fp16",):
                codec = CheckpointCodec(spec, slow, dtype)
                for tail in TAILS:
                    trial = trials.setdefault((count, tail, dtype), Trial())
                    done.lab.split_start(done.lab.length - tail, codec)
                    done.judge(trial)
    return trials


def _fewest(
    trials: dict[tuple[int, int, str], Trial], total: int, options: CalibrationOptions
) -> tuple[int, int]:
    """The fewest slow units, then the shortest tail, that keep the target in some dtype."""
    for count in _counts(total):
        for tail in TAILS:
            kinds = [t for (c, r, _), t in trials.items() if (c, r) == (count, tail)]
            if any(t.keeps(options) for t in kinds):
                return count, tail
    return total, TAILS[-1]


def _smallest_dtype(trials: dict[tuple[int, int, str], Trial], options: CalibrationOptions) -> str:
    total = max(count for count, _, _ in trials)
    count, tail = _fewest(trials, total, options)
    kept = [d for d in DTYPES if (t := trials.get((count, tail, d))) and t.keeps(options)]
    return kept[0] if kept else ("fp16" if count == 0 else "fp32")


def shortest_interval(spec: HybridSpec, codec: CheckpointCodec, budget: float) -> int:
    """Tokens between checkpoints whose bytes stay within ``budget`` of the KV bytes."""
    for interval in INTERVALS:
        if codec.nbytes() <= budget * interval * spec.kv_bytes_per_token():
            return interval
    return INTERVALS[-1]


def _layer_units(
    spec: HybridSpec, slow: dict[int, list[int]], effects: dict[Unit, float],
    norms: dict[Unit, float],
) -> tuple[LayerUnits, ...]:  # fmt: skip
    total = sum(effects.values()) or 1.0
    return tuple(
        LayerUnits(
            layer=i,
            slow=tuple(sorted(slow.get(i, ()))),
            norm=tuple(norms[i, u] for u in range(m.units())),
            weight=tuple(effects[i, u] / total for u in range(m.units())),
        )
        for i, m in spec.state_layers()
        if m.recurrent_state()
    )


def _measure(
    labs: dict[int, Lab], found: Calibration, options: CalibrationOptions,
    advance: Callable[[], None], deadline: float,
) -> Calibration:  # fmt: skip
    """Fresh samples: the curve, both gates, and the verdict."""
    spec = next(iter(labs.values())).model.spec
    codec, estimator = CheckpointCodec.of(spec, found), Estimator(found)
    split_tails = sorted({max(1, found.min_tail // 2), found.min_tail, 2 * found.min_tail})
    zero_tails = {length: [math.ceil(r * length) for r in ZERO_RATIOS] for length in labs}
    curve: dict[tuple[int, int, float], Trial] = {}
    pairs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    def run(done: Prepared, tail: int, ratio: float, split: bool) -> None:
        start = done.lab.length - tail
        if split:
            done.lab.split_start(start, codec)
        else:
            done.lab.zero_start(tail)
        key = (found.slow_units if split else -1, 0 if ratio else tail, ratio)
        error = done.judge(curve.setdefault(key, Trial()))
        norms = state_norms(spec, done.lab.kept[start])
        estimate = estimator.estimate(tail_decay(done.lab, start), norms, split=split)
        pairs[split].append((estimate, error))

    tails = [*split_tails, *(t for ts in zero_tails.values() for t in ts)]
    for done in _prepare(labs, options, options.seed + 2, tails, advance, deadline):
        for tail in split_tails:
            run(done, tail, 0.0, split=True)
        for ratio, tail in zip(ZERO_RATIOS, zero_tails[done.lab.length], strict=True):
            run(done, tail, ratio, split=False)
    points = tuple(
        Point(max(0, slow), tail, ratio, trial.answers, trial.kl95)
        for (slow, tail, ratio), trial in sorted(curve.items())
    )
    safe = next(t for (s, _, r), t in curve.items() if s < 0 and r == SAFE_RATIO)
    gates = {split: fit_gate(found_pairs) for split, found_pairs in pairs.items()}
    result = replace(
        found, curve=points, split=gates[True], zero=gates[False], safe=safe.keeps(options)
    )
    final = curve[found.slow_units, found.min_tail, 0.0]
    return replace(result, verdict=verdict(result, final, safe, spec, codec))


def state_norms(spec: HybridSpec, states: dict[str, Floats]) -> dict[int, Floats]:
    """‖S_u‖ [units] of each recurrent layer."""
    return {
        i: unit_norms(states[f"recurrent_state_{i}"], m.units())
        for i, m in spec.state_layers()
        if m.recurrent_state()
    }


def tail_decay(lab: Lab, start: int) -> dict[int, Floats]:
    """Σ log-decay [units] by layer over [start, end of the prefix)."""
    before, after = lab.decay[start], lab.decay[lab.length]
    return {int(k.rsplit("_", 1)[1]): after[k] - before.get(k, 0) for k in after}


def verdict(
    found: Calibration, split: Trial, zero: Trial, spec: HybridSpec, codec: CheckpointCodec
) -> str:
    """Plain words for the person who converts the model."""
    total = sum(m.units() for _, m in spec.state_layers())
    share = codec.nbytes() / max(1, found.interval * spec.kv_bytes_per_token())
    kept = (
        f"split replay with {found.slow_units} of {total} units in {found.dtype} every "
        f"{found.interval} tokens (+{share:.1%} of KV bytes) and a tail of at least "
        f"{found.min_tail} keeps {split.answers:.1%} of the answers, KL {split.kl95:.1e}"
    )
    zero_text = (
        f"zero-start tail replay at {SAFE_RATIO:.0%} keeps {zero.answers:.1%} of the answers, "
        f"KL {zero.kl95:.1e}"
    )
    if found.safe:
        return f"replay-safe: {zero_text}; {kept}"
    if split.answers >= found.target_answers and split.kl95 <= found.target_kl:
        return f"safe with split replay only: {zero_text}; {kept}"
    return f"not replay-safe, use exact: {zero_text}; {kept}"


def _by_layer(units: Sequence[Unit]) -> dict[int, list[int]]:
    layers: dict[int, list[int]] = {}
    for layer, unit in units:
        layers.setdefault(layer, []).append(unit)
    return layers


def summary(found: Calibration) -> list[dict[str, Any]]:
    """The measured curve as rows."""
    return [
        {
            "slow units": p.slow,
            "tail": f"{p.ratio:.0%} of L" if p.ratio else str(p.tail),
            "answers kept": p.answers,
            "KL p95": p.kl,
        }
        for p in found.curve
    ]


def import_calibration(path: Path) -> Calibration:
    """A calibration measured elsewhere: its JSON, or the manifest of a bundle that holds one.

    Raises ConfigError where the file is neither.
    """
    try:
        data = json.loads(path.read_text())
        data = data.get("calibration", data)
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(f"not a calibration: {e}", where=str(path)) from None
    found = from_json(data, str(path))
    return replace(found, status="imported") if found.known else found
