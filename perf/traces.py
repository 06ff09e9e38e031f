"""``python -m perf.traces``: KV compression on synthetic traces, every policy on the same ones.

Each trace has a history of queries (every 16th, what all policies see) and decode steps, four of
which ask for a row that nobody asked for before. Ours is calibrated on the first traces of a regime
and judged on the others. Published beside: how many rows an oracle needs, and the paper's row.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from build.bounded_steps import Entries
from perf.traces_data import DIM, HEADS, KV_HEADS, SCALE, Trace, make_trace
from perf.traces_latency import Times, attention_op, measure
from perf.traces_steps import Outcome, TraceTruth, bounded, evict
from serving.kv_compression.bounds import calibrated_factor
from serving.kv_compression.compact import CompactLayer
from serving.kv_compression.history import AttentionHistory, Stats
from serving.kv_compression.policy import POLICY, SINKS, compact_layer, rows_kept
from serving.kv_compression.retention import (
    H2O,
    KeepEnds,
    RandomKeepPrompt,
    SlidingWindow,
    SnapKV,
    keep_top,
)

# Of the bytes of dense rows: what every policy may keep. Ours is below it: fetched rows count too.
SAVED, OURS = 0.655, 0.335
EPSILON, ALPHA = 0.014, 0.05
FACTORS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.6, 1.8, 2.2, 3.0, 5.0)
# How many traces of each length, of ten.
MIX = {4096: 4, 8192: 3, 16384: 2, 32768: 1}
OUR_NAME, SOUND_NAME = "ours, calibrated", "ours, sound"
PAPER = {"bytes": 0.655, "further": 0.707, "latency": 0.752, "mass": 0.986, "recall": 1.0}
PAPER |= {"error": 0.014}
RESULTS = Path(__file__).parent / "results" / "traces.json"
console = Console(width=220)


@dataclass(frozen=True)
class Row:
    """A line of the table: shares unless said otherwise; low, high: of violations, 95 %, traces
    drawn anew; further: rows not read of those retained, with_summaries: their bytes counted too;
    stages: of head steps; latency: over dense, as many traces of each length; selection: over the
    bounded step."""

    regime: str
    method: str
    traces: int
    head_steps: int
    bytes_saved: float
    mass_read: float
    mass_estimated: float
    recall: float
    further: float
    with_summaries: float
    error_mean: float
    error_p99: float
    violations: float
    low: float
    high: float
    stages: tuple[float, ...]
    fetched: float
    bound_held: float
    oracle_rows: float
    latency: float | None = None
    selection: float | None = None


def lengths(count: int) -> Iterator[int]:
    """Of each ten traces as MIX says, spread evenly."""
    order = [n for n, times in MIX.items() for _ in range(times)]
    for i in range(count):
        yield order[(3 * i) % len(order)]


def history(trace: Trace) -> Stats:
    length = trace.keys.shape[1]
    seen = AttentionHistory(KV_HEADS, length, SCALE, weighed=length)
    seen.observe(trace.history, trace.history_at, trace.keys)
    return seen.stats(trace.keys, trace.values, trace.prompt_len)


def our_layer(stats: Stats, *, sound: bool = False) -> tuple[CompactLayer, Any]:
    """Compacted as ours; and the slots."""
    rows = rows_kept(OURS, stats.length, DIM, DIM)
    slots = tuple(np.empty((KV_HEADS, rows + 96, DIM), np.float32) for _ in range(2))
    return compact_layer(stats, rows, *slots, sound=sound), slots


def baselines(stats: Stats, seed: int) -> dict[str, Any]:
    """Kept rows [Hk, T] of each policy."""
    count = int((1 - SAVED) * stats.length)
    policies = {
        "sliding window + sinks": KeepEnds(SlidingWindow(), SINKS, 0),
        "H2O": KeepEnds(H2O(), 0, count // 2),
        "SnapKV": KeepEnds(SnapKV(), 0, 64),
        "random + keep prompt": KeepEnds(RandomKeepPrompt(seed), 0, 64),
        "ours, evicted rows dropped": KeepEnds(POLICY, SINKS),
    }
    return {name: keep_top(p.scores(stats), count) for name, p in policies.items()}


def run_trace(task: tuple[str, int, int, tuple[float, ...], bool]) -> tuple[Any, float]:
    """Outcomes by method (ours: by factor too) and the oracle's rows of one trace."""
    regime, length, seed, factors, everything = task
    trace = make_trace(regime, length, seed)
    stats, truth = history(trace), TraceTruth(trace)
    layer, _ = our_layer(stats)
    entries = [Entries(truth, layer, h, False) for h in range(KV_HEADS)]
    out: dict[Any, Outcome] = {f: bounded(truth, layer, entries, EPSILON, f) for f in factors}
    if everything:
        box = [Entries(truth, layer, h, True) for h in range(KV_HEADS)]
        out[SOUND_NAME] = bounded(truth, layer, box, EPSILON, 1.0)
        out |= {name: evict(truth, kept) for name, kept in baselines(stats, seed).items()}
    return out, float(truth.oracle.mean())


def published_factor(regime: str) -> float:
    """Of the last full run: so few traces as --quick has cannot be calibrated on."""
    found = json.loads(RESULTS.read_text())["regimes"] if RESULTS.exists() else {}
    return float(found.get(regime, {"factor": FACTORS[-1]})["factor"])


def losses(outcomes: list[dict[float, Outcome]], factor: float) -> Any:
    return np.array([(o[factor].error > EPSILON).mean() for o in outcomes])


def row(regime: str, method: str, outcomes: list[Outcome], oracle: float) -> Row:
    def all_of(name: str) -> Any:
        return np.concatenate([np.ravel(getattr(o, name)) for o in outcomes])

    error, kept = all_of("error"), all_of("kept")
    broken = np.array([(o.error > EPSILON).mean() for o in outcomes])
    draws = np.random.default_rng(0).integers(0, len(broken), (2000, len(broken)))
    low, high = np.quantile(broken[draws].mean(1), (0.025, 0.975))
    summaries = np.array([o.summary_bytes for o in outcomes])
    bound = all_of("bound")
    return Row(
        regime, method, len(outcomes), len(error),
        1 - kept.mean() - summaries.mean(),
        all_of("read").mean(), all_of("estimated").mean(), all_of("recalled").mean(),
        1 - np.mean([o.rows.mean() / o.kept.mean() for o in outcomes]),
        1 - np.mean([(o.rows.mean() + o.summary_bytes) / o.kept.mean() for o in outcomes]),
        error.mean(), float(np.quantile(error, 0.99)), broken.mean(), float(low), float(high),
        tuple(float((all_of("stage") == i).mean()) for i in range(4)), all_of("fetched").mean(),
        float((error <= bound + 1e-5).mean()) if np.isfinite(bound).any() else float("nan"),
        oracle,
    )  # fmt: skip


def time_steps(regime: str, factor: float, each: int) -> dict[str, list[tuple[int, Times]]]:
    """Times on ``each`` traces of every length; empty without the kernels."""
    op = attention_op()
    found: dict[str, list[tuple[int, Times]]] = {OUR_NAME: [], SOUND_NAME: []}
    if op is None:
        return found
    tasks = [(n, seed) for n in MIX for seed in range(10_000, 10_000 + each)]
    for length, seed in track(tasks, f"latency, {regime}", console=console, transient=True):
        trace = make_trace(regime, length, seed)
        stats = history(trace)
        for name, sound in ((OUR_NAME, False), (SOUND_NAME, True)):
            layer, slots = our_layer(stats, sound=sound)
            times = measure(op, trace, layer, slots, EPSILON, 0.0 if sound else factor)
            found[name].append((length, times))
    return found


def with_times(line: Row, times: list[tuple[int, Times]]) -> Row:
    if not times:
        return line
    dense, ours, choice = (
        sum(getattr(t, n) for _, t in times) for n in ("dense", "bounded", "selection")
    )
    return Row(**{**asdict(line), "latency": ours / dense, "selection": choice / ours})


def study(regime: str, count: int, calibration: int, latency: int, workers: int) -> Any:
    """Rows of a regime, its factor, and times by length."""
    sizes = list(lengths(count))
    with ProcessPoolExecutor(workers) as pool:
        first = [(regime, n, i, FACTORS, False) for i, n in enumerate(sizes[:calibration])]
        done = list(
            track(
                pool.map(run_trace, first),
                f"calibration, {regime}",
                len(first),
                console=console,
                transient=True,
            )
        )
        factor = calibrated_factor(lambda f: losses([o for o, _ in done], f), FACTORS, ALPHA)
        usable = factor if np.isfinite(factor) else published_factor(regime)
        rest = [
            (regime, n, i, (usable,), True) for i, n in enumerate(sizes[calibration:], calibration)
        ]
        held = list(
            track(
                pool.map(run_trace, rest),
                f"traces, {regime}",
                len(rest),
                console=console,
                transient=True,
            )
        )
    oracle = float(np.mean([o for _, o in held]))
    times = time_steps(regime, usable, latency)
    names = {usable: OUR_NAME}
    rows = []
    for key in held[0][0]:
        name = names.get(key, key)
        line = row(regime, name, [o[key] for o, _ in held], oracle)
        rows.append(with_times(line, times.get(name, [])))
    return rows, usable, {name: by_length(t) for name, t in times.items()}


def by_length(times: list[tuple[int, Times]]) -> dict[int, dict[str, float]]:
    """Mean over the traces of a length: milliseconds a step dense and bounded, and their ratio."""
    out = {}
    for length in sorted({n for n, _ in times}):
        some = [t for n, t in times if n == length]
        dense, ours = sum(t.dense for t in some), sum(t.bounded for t in some)
        each = len(some) * 16 / 1e3
        out[length] = {"dense_ms": dense / each, "bounded_ms": ours / each, "ratio": ours / dense}
    return out


def table(rows: list[Row]) -> Table:
    out = Table(
        title=f"KV compression on synthetic traces, error allowed {EPSILON:.1%} of the output"
    )
    columns = (
        "regime",
        "method",
        "bytes saved",
        "mass read",
        "+ estimated",
        "anchors",
        "further saved",
        "with summaries",
        "latency saved",
        "selection",
        "error",
        "p99",
        "violations",
        "retained / all / fetched / dense",
        "oracle rows",
    )
    for name in columns:
        out.add_column(name, justify="left" if name in ("regime", "method") else "right")
    for r in rows:
        stages = " / ".join(f"{s:.0%}" for s in r.stages)
        out.add_row(
            r.regime, r.method, f"{r.bytes_saved:.1%}", f"{r.mass_read:.1%}",
            f"{r.mass_read + r.mass_estimated:.1%}", f"{r.recall:.1%}", f"{r.further:.1%}",
            f"{r.with_summaries:.1%}", "" if r.latency is None else f"{1 - r.latency:.1%}",
            "" if r.selection is None else f"{r.selection:.0%}", f"{r.error_mean:.2%}",
            f"{r.error_p99:.1%}", f"{r.violations:.1%} [{r.low:.1%}, {r.high:.1%}]", stages,
            f"{r.oracle_rows:.0%}",
        )  # fmt: skip
    out.add_section()
    p = PAPER
    out.add_row(
        "", "the paper's", f"{p['bytes']:.1%}", "", f"{p['mass']:.1%}", f"{p['recall']:.0%}",
        f"{p['further']:.1%}", "", f"{p['latency']:.1%}", "", f"{p['error']:.2%}",
    )  # fmt: skip
    return out


def main(
    traces: Annotated[int, typer.Option(help="In all; six of ten are mixed")] = 1000,
    workers: Annotated[int, typer.Option(help="Processes")] = 2,
    latency: Annotated[int, typer.Option(help="Traces of each length that are timed")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="At most a minute")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Bytes, mass, recall, compute, latency and error of every policy in three regimes."""
    start = time.perf_counter()
    if quick:
        traces, latency = 20, 1
    rows, extra = [], {}
    for regime in ("mixed", "peaky", "flat"):
        count = max(traces * (6 if regime == "mixed" else 2) // 10, 6)
        timed = 0 if quick and regime != "mixed" else latency
        found, factor, times = study(regime, count, max(count // 3, 3), timed, workers)
        rows += found
        extra[regime] = {"factor": factor, "milliseconds": times}
        if json_path:
            data = {"rows": [asdict(r) for r in rows], "paper": PAPER, "regimes": extra}
            data |= {"epsilon": EPSILON, "alpha": ALPHA, "load": os.getloadavg()[0]}
            json_path.write_text(json.dumps(data, indent=1, default=float))
    console.print(table(rows))
    for regime, more in extra.items():
        by_size = more["milliseconds"].get(OUR_NAME, {})
        saved = {n: f"{1 - t['ratio']:.0%}" for n, t in by_size.items()} or "not measured"
        console.print(f"{regime}: factor {more['factor']:g}, latency saved by length {saved}")
    seconds, load = time.perf_counter() - start, os.getloadavg()[0]
    console.print(
        f"latency: a layer of {KV_HEADS} kv heads and {HEADS} query heads, one thread, "
        f"reads of the host copy included; {seconds:.0f} s, load {load:.1f}"
    )


if __name__ == "__main__":
    typer.run(main)
