"""``python -m perf.cache``: what the prefix cache's bookkeeping costs, and how often it hits.

The workload is that of an earlier comparison of public cache libraries (their figures are
printed beside, as measured then): the same seeds give the same requests, so the hit rates can
be compared as they are, the times only roughly. Index work is timed without bulk data: the
generation words are set as a writer would. The floor, comparing 32K tokens, is measured in the
same run; so is copying blocks out of the arena against a plain copy.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from serving.prefix_cache import (
    EXACT,
    Arena,
    ArenaLayout,
    CacheConfig,
    CacheKey,
    Match,
    PrefixCache,
    ReplayMode,
    ReplayPlan,
    ReplayRequest,
    plan_replay,
)

Tokens = NDArray[np.int32]
KEY = CacheKey("model", "fp32")
BLOCK = 32
VOCAB = 151_936
LONG = 32_768
FULL = 4 << 20  # tokens of the full cache that is evicted from and weighed
TRACE, CAPACITY = 10_000, 1_000_000
STATES = 1024  # full states kept during the trace
INTERVAL = 512  # tokens from one checkpoint to the next, where there are any
SESSIONS = 300

# match 32K, insert 32K, evict 32K of 4M [µs]; bytes per token; requests/s; hit rate
PEERS = {
    "nano-vllm": ("1407", "1098", "289", "42", "1578", ".751"),
    "mini-sglang radix": ("27", "53-164", "484-2627", "13-16", "3638", ".789"),
    "SGLang 0.5.23 RadixCache": ("60", "65-177", "1373-3882", "25", "6268", ".789"),
    "SGLang 0.5.23 unified, Rust": ("45", "122-213", "522-3347", "24-26", "9144", ".789"),
    "vLLM 0.33 KVCacheManager": ("5531", "3140", "1522", "17", "1204", ".787"),
    "SGLang hybrid, Rust": ("45", "94", "642", "18-20", "5161", ".710"),
    "SGLang 0.5.12 MambaRadixCache": ("1168", "99", "883", "50", "2453", ".710"),
}

console = Console(width=120)


@dataclass(frozen=True)
class Result:
    """One figure; ``limit``: what it must not exceed, or reach if ``at_least``.

    value: the median of the samples, if there are several; best: the best of them.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False
    samples: list[float] = field(default_factory=list)

    @property
    def best(self) -> float | None:
        if not self.samples:
            return None
        return max(self.samples) if self.unit.endswith("/s") else min(self.samples)

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


# -- the workload ---------------------------------------------------------------------------


def random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def disjoint(total: int, each: int, seed: int) -> Iterator[Tokens]:
    """Prompts with nothing in common."""
    rng = np.random.default_rng(seed)
    for _ in range(total // each):
        yield random_tokens(rng, each)


def chats(count: int) -> Iterator[Tokens]:
    """Prompts of 512 tokens, the first 256 one of 32 system prompts."""
    rng = np.random.default_rng(1)
    systems = rng.integers(0, VOCAB, (32, 256), dtype=np.int32)
    for _ in range(count):
        yield np.concatenate([systems[rng.integers(32)], random_tokens(rng, 256)])


def conversations(count: int) -> list[Tokens]:
    """Requests of 1K-8K tokens in order of arrival.

    22 % open a session: one of 64 system prompts (Zipf) and a message. The others continue a
    recent session (geometric over its age) with the last answer and a new message; 15 % of
    them from an earlier turn, as after an edit. The order of random draws is part of it.
    """
    rng = np.random.default_rng(0)
    systems = [random_tokens(rng, int(rng.integers(512, 2049))) for _ in range(64)]
    weights = 1.0 / np.arange(1, 65)
    weights /= weights.sum()
    sessions: list[list[Tokens]] = []
    requests: list[Tokens] = []
    while len(requests) < count:
        if len(sessions) < 4 or rng.random() < 0.22:
            system = systems[int(rng.choice(64, p=weights))]
            message = random_tokens(rng, int(rng.integers(max(128, 1024 - len(system)), 2200)))
            prompt = np.concatenate([system, message])
            sessions = [*sessions, [prompt]][-SESSIONS:]
        else:
            session = sessions[-min(int(rng.geometric(1 / 60)), len(sessions))]
            base = session[-1]
            if len(session) > 1 and rng.random() < 0.15:
                base = session[int(rng.integers(len(session) - 1))]
            message = random_tokens(rng, int(rng.integers(150, 1200)))
            if len(base) + len(message) > 8192:
                sessions = [other for other in sessions if other is not session]
                continue
            prompt = np.concatenate([base, message])
            session.append(prompt)
        requests.append(prompt)
    return requests


# -- the client -----------------------------------------------------------------------------


def new_cache(tokens: int, states: int = 0, checkpoints: int = 0) -> PrefixCache:
    arena = Arena.without_data(BLOCK, tokens // BLOCK, states, checkpoints)
    return PrefixCache(CacheConfig(block_size=BLOCK), arena)


def insert(
    cache: PrefixCache,
    tokens: Tokens,
    states: tuple[int, ...] = (),
    checkpoints: Sequence[int] = (),
) -> None:
    """Checkpoint words are set in one go: writing 64 of them is the writer's time, not ours."""
    res = cache.reserve(
        KEY, tokens, provenance=EXACT, state_positions=states, checkpoint_positions=checkpoints
    )
    cache.arena.blocks.words[res.blocks] = res.generations
    for ref in res.states:
        cache.arena.states.words[ref.slot] = ref.generation
    for ref in res.checkpoints:
        cache.arena.checkpoints.words[ref.slot] = ref.generation
    cache.publish(res.lease)


def serve(cache: PrefixCache, tokens: Tokens, states: tuple[int, ...] = ()) -> Match:
    match = cache.match(KEY, tokens, exact_only=True)
    insert(cache, tokens, states)
    cache.release(match.lease)
    return match


def micros(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


class quiet:
    """No garbage collection within: its pauses belong to the benchmark's own objects."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()


def median(name: str, samples: list[float], limit: float | None = None) -> Result:
    rounded = [round(sample, 1) for sample in samples]
    return Result(name, round(statistics.median(samples), 1), "µs", limit, samples=rounded)


def rate(name: str, samples: list[float], limit: float | None = None) -> Result:
    rounded = [round(sample) for sample in samples]
    return Result(name, round(statistics.median(samples)), "requests/s", limit, True, rounded)


# -- the measurements -----------------------------------------------------------------------


def measure_floor() -> list[Result]:
    """Comparing 32K tokens, straight from memory as in a match, and once they are in cache."""
    pairs = [(p, p.copy()) for p in disjoint(64 * LONG, LONG, seed=5)]
    with quiet():
        cold = [micros(lambda a=a, b=b: np.array_equal(a, b)) for a, b in pairs]
        warm = [micros(lambda: np.array_equal(*pairs[0])) for _ in range(200)]
    return [
        median("floor: compare 32K int32, in memory", cold),
        median("floor: compare 32K int32, in cache", warm),
    ]


def measure_match(others: int) -> list[Result]:
    cache = new_cache((others + 6000) * 512 + 8 * LONG)
    for prompt in track(chats(others), "match", total=others, console=console, transient=True):
        serve(cache, prompt)
    whole = list(disjoint(7 * LONG, LONG, seed=2))
    turns = list(disjoint(3 * LONG, LONG, seed=11))
    fresh = list(disjoint(7 * LONG, LONG, seed=10))
    for prompt in whole:
        serve(cache, prompt)
    for prompt in turns:
        for end in range(512, LONG + 1, 512):
            serve(cache, prompt[:end])
    halves = zip(whole, fresh, strict=True)
    half = [np.concatenate([a[: LONG // 2], b[: LONG // 2]]) for a, b in halves]

    def timed(prompts: list[Tokens], expect: int) -> list[float]:
        samples = []
        for prompt in prompts:
            start = time.perf_counter_ns()
            match = cache.match(KEY, prompt, exact_only=True)
            samples.append((time.perf_counter_ns() - start) / 1e3)
            assert match.hit_len == expect, (match.hit_len, expect)
            cache.release(match.lease)
        return samples

    with quiet():
        return [
            median("match 32K, all cached", timed(whole * 3, LONG - 1), 100),
            median("match 32K, cached in 64 turns", timed(turns * 5, LONG - 1)),
            median("match 32K, half cached", timed(half * 3, LONG // 2)),
            median("match 32K, nothing cached", timed(fresh * 3, 0)),
            median("insert 32K", [micros(lambda p=p: insert(cache, p)) for p in fresh], 300),
        ]


def measure_checkpoints() -> list[Result]:
    """Match and insert of 32K with a checkpoint every 512 tokens: with room for all, and when
    each insert has to evict the blocks of another prompt and with them its checkpoints."""
    each = LONG // INTERVAL
    every = range(INTERVAL, LONG + 1, INTERVAL)
    cache = new_cache(8 * LONG, checkpoints=9 * each)
    first, second = (list(disjoint(7 * LONG, LONG, seed=seed)) for seed in (12, 13))

    def timed(prompts: list[Tokens]) -> list[float]:
        return [micros(lambda p=p: insert(cache, p, (), every)) for p in prompts]

    matched = []
    with quiet():
        fresh = timed(first)
        for prompt in first * 3:
            start = time.perf_counter_ns()
            match = cache.match(KEY, prompt, exact_only=True)
            matched.append((time.perf_counter_ns() - start) / 1e3)
            assert [ref.position for ref in match.checkpoints] == [*every][-2:-6:-1]
            cache.release(match.lease)
        insert(cache, next(disjoint(LONG, LONG, seed=14)), (), every)
        full = timed(second)
    assert cache.stats()["checkpoints_published"] == 15 * each
    assert cache.stats()["evicted_blocks"] == 7 * LONG // BLOCK
    return [
        median(f"match 32K, checkpoints every {INTERVAL}", matched, 100),
        median(f"insert 32K, checkpoints every {INTERVAL}", fresh, 300),
        median("insert 32K, the same, evicting 32K", full),
    ]


def measure_evict(each: int) -> list[Result]:
    cache = new_cache(FULL)
    prompts = disjoint(FULL, each, seed=4)
    total = FULL // each
    for prompt in track(prompts, "evict", total=total, console=console, transient=True):
        serve(cache, prompt)
    with quiet():
        samples = [micros(lambda: cache.evict(LONG // BLOCK)) for _ in range(7)]
    assert cache.blocks.free == 7 * LONG // BLOCK
    return [median(f"evict 32K of 4M tokens, leaves of {each}", samples, 500)]


def measure_memory(each: int) -> list[Result]:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = new_cache(FULL)
    prompts = disjoint(FULL, each, seed=4)
    total = FULL // each
    for prompt in track(prompts, "memory", total=total, console=console, transient=True):
        serve(cache, prompt)
    del prompt
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert cache.blocks.free == 0
    return [Result(f"memory, prompts of {each}", round(used / FULL, 2), "B/token", 25)]


def measure_trace(requests: list[Tokens], runs: int) -> list[Result]:
    """The whole cycle of each request; then again with replay plans and full states."""
    asked = sum(len(prompt) for prompt in requests)
    rates, cpu_rates, hit = [], [], 0
    for _ in track(range(runs), "trace", console=console, transient=True):
        cache = new_cache(CAPACITY)
        wall, cpu = time.perf_counter(), time.process_time()
        hit = sum([serve(cache, prompt).hit_len for prompt in requests])
        rates.append(len(requests) / (time.perf_counter() - wall))
        cpu_rates.append(len(requests) / (time.process_time() - cpu))
    ratio = trace_plans(requests, ReplayRequest(ReplayMode.RATIO, 0.05))
    exact = trace_plans(requests, ReplayRequest(ReplayMode.EXACT))
    ends = trace_plans(requests, ReplayRequest(ReplayMode.EXACT), branches=False)

    def share(name: str, tokens: int, limit: float | None = None) -> Result:
        return Result(name, round(tokens / asked, 4), "of tokens", limit, at_least=True)

    return [
        rate("trace, per second of one core", cpu_rates, 4000),
        rate("trace, by the clock", rates),
        share("hit rate", hit, 0.785),
        share("hit rate, 5 % replay plans", sum(plan.hit_len for plan in ratio), 0.785),
        share("  of it replayed", sum(plan.replayed for plan in ratio)),
        share(f"exact plans, {STATES} states: saved", sum(plan.start for plan in exact)),
        share("  with states at prompt ends only", sum(plan.start for plan in ends)),
    ]


def trace_plans(
    requests: list[Tokens], request: ReplayRequest, *, branches: bool = True
) -> list[ReplayPlan]:
    """Plans of a server that keeps full states at the end of each prompt and, with
    ``branches``, where it left a cached one."""
    cache, plans = new_cache(CAPACITY, STATES), []
    for prompt in requests:
        match = cache.match(KEY, prompt, exact_only=True)
        ends = (len(prompt) - 1, len(prompt))
        insert(cache, prompt, (match.hit_len, *ends) if branches else ends)
        cache.release(match.lease)
        plans.append(plan_replay(request, match))
    return plans


def measure_load(tokens: int) -> list[Result]:
    """Blocks out of the arena into a slot, 4 layers of 8 heads with 128 channels."""
    layout = ArenaLayout.of_model(BLOCK, [(8, 128, 128)] * 4)
    slot = [np.ones((8, tokens, 128), np.float32) for _ in layout.block]
    out = [np.zeros_like(array) for array in slot]
    size = sum(array.nbytes for array in slot)
    results = []
    with TemporaryDirectory(dir="/dev/shm") as folder:
        for checksum in (True, False):
            path = Path(folder) / "arena"
            arena = Arena.create(path, layout, tokens // BLOCK, 0, checksum=checksum)
            cache = PrefixCache(CacheConfig(), arena)
            prompt = np.zeros(tokens, np.int32)
            res = cache.reserve(KEY, prompt, provenance=EXACT)
            arena.write_blocks(res.blocks, res.generations, 0, tokens, slot)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                assert arena.read_blocks(res.blocks, res.generations, tokens, out) == tokens
                times.append(time.perf_counter() - start)
            name = "load blocks, verified" if checksum else "load blocks, words only"
            results.append(Result(name, round(size / min(times) / 1e9, 2), "GB/s"))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for one, two in zip(out, slot, strict=True):
            np.copyto(one, two)
        times.append(time.perf_counter() - start)
    return [*results, Result("floor: plain copy", round(size / min(times) / 1e9, 2), "GB/s")]


# -- the report -----------------------------------------------------------------------------


def show(results: list[Result]) -> None:
    load, cores = os.getloadavg()[0], os.cpu_count()
    caption = f"load average {load:.1f} on {cores} cores: times grow when other work runs"
    table = Table(title="Prefix cache, one core", caption=caption)
    for column in ("", "value", "best", "unit", "target", "met"):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    for r in results:
        target = "" if r.limit is None else f"{'≥' if r.at_least else '≤'} {r.limit:g}"
        met = {None: "", True: "yes", False: "[red]NO[/red]"}[r.met]
        best = "" if r.best is None else f"{r.best:g}"
        table.add_row(r.name, f"{r.value:g}", best, r.unit, target, met)
    console.print(table)
    peers = Table(title="Public cache libraries, same workload: from an earlier measurement")
    for column in ("", "match", "insert", "evict, µs", "B/token", "requests/s", "hit rate"):
        peers.add_column(column, justify="right" if column else "left")
    for name, row in PEERS.items():
        peers.add_row(name, *row)
    console.print(peers)


def main(
    quick: Annotated[bool, typer.Option(help="Fewer repeats, at most a minute.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
) -> None:
    """Time and weigh the prefix cache's index, and measure its hit rate."""
    results = measure_floor()
    results += measure_match(1000 if quick else 10_000)
    results += measure_checkpoints()
    for each in (512,) if quick else (512, 4096):
        results += measure_evict(each)
        results += measure_memory(each)
    with console.status("making the trace"):
        requests = conversations(TRACE)
    results += measure_trace(requests, 2 if quick else 5)
    results += measure_load(2048 if quick else 8192)
    show(results)
    if json_path:
        rows = [{**asdict(r), "met": r.met} for r in results]
        json_path.write_text(json.dumps({"results": rows, "peers_earlier": PEERS}, indent=1))


if __name__ == "__main__":
    typer.run(main)
