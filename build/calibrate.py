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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from build.lab import Floats, Lab
from build.remote import RemoteModel
from build.tasks import BOS, CONTROLS, TaskGenerator
from build.text_tasks import TextTasks
from build.trials import LENGTHS, TASKS, CalibrationOptions, Prepared, Tasks, Trial, Trials
from engine_configs.errors import ConfigError
from engine_configs.spec import HybridSpec
from serving.engine.bundle import Bundle
from serving.engine.model import Model
from serving.engine.text import Text
from serving.kv_compression.calibration import BoundCalibration
from serving.kv_compression.calibration import from_json as bounds_from_json
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

TAILS = (16, 64)
RANKING_TAIL = 32
# A tail of this share of the interval adds little to the way back to the last checkpoint.
TAIL_OF_INTERVAL = 1 / 8
ZERO_RATIOS = (0.01, 0.02, 0.05, 0.1)
SAFE_RATIO = 0.05
# A model that answers less than this share of the questions says nothing about what replay costs.
NEEDED_ACCURACY = 0.3
NEEDED_ROUNDS = 6
# Units whose effect is measured; a model may have thousands.
RANKED = 64
# Choices that fail on fresh samples are followed by the next larger one, this often in all.
MAX_TRIES = 2
INTERVALS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
Unit = tuple[int, int]  # (layer, unit)


def tasks_of(bundle: Bundle) -> Callable[[int], Tasks]:
    """The trained tiny models speak symbols of their own; every other model gets English."""
    text = Text(bundle.path)
    if text.tokenizer.token_to_id(CONTROLS[0]) == BOS:
        return TaskGenerator
    return lambda seed: TextTasks(text.tokenizer, seed, text.encode(""))


def calibrate(
    model: Model | RemoteModel,
    tasks: Callable[[int], Tasks],
    options: CalibrationOptions,
    advance: Callable[[], None] = lambda: None,
) -> Calibration:
    """``tasks``: makes a generator from a seed; calls ``advance`` once per sample and pass (see
    ``num_steps``)."""
    labs = {length: Lab(model, length + 512) for length in LENGTHS}
    trials = Trials(labs, tasks, options, advance, time.monotonic() + options.seconds)
    if reason := _cannot(trials):
        return replace(UNCALIBRATED, verdict=reason)
    effects, norms = _rank(trials)
    order = sorted(effects, key=lambda u: -effects[u])
    found, seen = UNCALIBRATED, _search(trials, order)
    for count, tail in _keeping(seen, options)[:MAX_TRIES]:
        slow, dtype = _by_layer(order[:count]), _smallest_dtype(seen, count, tail, options)
        codec = CheckpointCodec(model.spec, slow, dtype)
        interval = shortest_interval(model.spec, codec, options.slow_state_budget)
        planned = Calibration(
            status="measured",
            interval=interval,
            min_tail=max(tail, int(interval * TAIL_OF_INTERVAL)),
            dtype=dtype,
            layers=_layer_units(model.spec, slow, effects, norms),
            target_answers=options.target_answers,
            target_kl=options.target_kl,
        )
        found, kept = _measure(trials, planned)
        if kept or time.monotonic() > trials.deadline:
            break
    return found


def num_steps(options: CalibrationOptions) -> int:
    return (1 + 3 * options.samples) * len(TASKS) * len(LENGTHS)


def _cannot(trials: Trials) -> str:
    """Why this model, or this machine, gives no calibration; '' if it does. One round."""
    started, right, asked = time.monotonic(), 0, 0
    for done in trials.run(0, [], rounds=1):
        if done.sample.task != "text":
            right, asked = right + done.right, asked + len(done.want)
    seconds = time.monotonic() - started
    if right < NEEDED_ACCURACY * asked:
        return f"cannot be judged: the model answers only {right} of {asked} questions"
    if seconds * NEEDED_ROUNDS > trials.options.seconds:
        return (
            f"not calibrated: one round of samples takes {seconds:.0f} s here, too long for a "
            f"total of {trials.options.seconds:.0f} s; try --calibrate-on or --calibrate-seconds"
        )
    return ""


def _rank(trials: Trials) -> tuple[dict[Unit, float], dict[Unit, float]]:
    """Per unit: mean KL when it alone is lost ``RANKING_TAIL`` before the end, and its norm.

    Only the slowest ``RANKED`` of the first sample are tried; what forgets faster is not missed.
    """
    spec = next(iter(trials.labs.values())).model.spec
    units = {i: m.units() for i, m in spec.state_layers() if m.recurrent_state()}
    norms: dict[Unit, list[float]] = {(i, u): [] for i, n in units.items() for u in range(n)}
    effects: dict[Unit, list[float]] = {}
    for done in trials.run(1, [RANKING_TAIL], share=0.25):
        start = done.lab.length - RANKING_TAIL
        if not effects:
            decay = tail_decay(done.lab, 0)
            slowest = sorted(norms, key=lambda unit: -float(decay[unit[0]][unit[1]]))
            effects = {unit: [] for unit in slowest[:RANKED]}
        for (i, u), found in effects.items():
            done.lab.without(start, i, u, units[i])
            found.append(done.judge(Trial()))
        for i, size in state_norms(spec, done.lab.kept[start]).items():
            for u in range(units[i]):
                norms[i, u].append(float(size[u]))
    return (
        {unit: float(np.mean(effects.get(unit) or [0.0])) for unit in norms},
        {unit: float(np.mean(values)) for unit, values in norms.items()},
    )


def _counts(total: int) -> list[int]:
    steps = [0, *(2**i for i in range(1 + int(math.log2(total)))), 3 * total // 4, total]
    return sorted(set(steps))


def _search(trials: Trials, order: list[Unit]) -> dict[tuple[int, int, str], Trial]:
    """Trials by (slow units, tail, dtype)."""
    spec = next(iter(trials.labs.values())).model.spec
    seen: dict[tuple[int, int, str], Trial] = {}
    for done in trials.run(2, TAILS, share=0.5):
        for count in _counts(len(order)):
            slow = _by_layer(order[:count])
            for dtype in DTYPES if count else ("fp16",):
                codec = CheckpointCodec(spec, slow, dtype)
                for tail in TAILS:
                    trial = seen.setdefault((count, tail, dtype), Trial())
                    done.lab.split_start(done.lab.length - tail, codec)
                    done.judge(trial)
    return seen


def _keeping(
    seen: dict[tuple[int, int, str], Trial], options: CalibrationOptions
) -> list[tuple[int, int]]:
    """(slow units, shortest tail) that keep the target in some dtype, fewest units first; all
    units where none do."""
    kept = [(c, r) for (c, r, _), trial in seen.items() if trial.keeps(options)]
    shortest = dict(sorted(kept, reverse=True))
    return sorted(shortest.items()) or [max((c, r) for c, r, _ in seen)]


def _smallest_dtype(
    seen: dict[tuple[int, int, str], Trial], count: int, tail: int, options: CalibrationOptions
) -> str:
    kinds = {d: t for d in DTYPES if (t := seen.get((count, tail, d)))}
    return next((d for d, t in kinds.items() if t.keeps(options)), list(kinds)[-1])


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


def _measure(trials: Trials, found: Calibration) -> tuple[Calibration, bool]:
    """Fresh samples: the curve, both gates, the verdict; and whether the target was kept."""
    labs, options = trials.labs, trials.options
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

    tails = {length: [*split_tails, *zero] for length, zero in zero_tails.items()}
    for done in trials.run(3, tails):
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
    text = verdict(result, final, safe, spec, codec)
    return replace(result, verdict=text), final.keeps(options)


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


def measured(replay: Calibration, bounds: BoundCalibration) -> dict[str, Any]:
    """As the manifest of a bundle holds them."""
    return {"calibration": replay.to_json(), "bound_calibration": bounds.to_json()}


def import_calibration(path: Path) -> Calibration:
    """A calibration measured elsewhere: its JSON, or the manifest of a bundle that holds one.

    Raises ConfigError where the file is neither.
    """
    data = _read(path)
    found = from_json(data.get("calibration", data), str(path))
    return replace(found, status="imported") if found.known else found


def import_bounds(path: Path) -> BoundCalibration:
    """That of K/V compression, if the file is a manifest that holds it."""
    data = _read(path).get("bound_calibration")
    return bounds_from_json(data, str(path)) if data else BoundCalibration()


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        data.get("calibration")
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(f"not a calibration: {e}", where=str(path)) from None
    return data
