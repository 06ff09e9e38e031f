"""``python -m perf.ttft``: time to first token of a cold prompt and of hits of several kinds.

In process, one request at a time. Each prompt is a prefix and a fresh 64-token suffix:

    cold        nothing cached
    exact hit   the prefix was a prompt of its own, so a full state lies at its end
    5 % hit     another continuation was served, no state is near: the paper's tail replay
    split hit   the same, in ``bounded`` mode: slow units from a checkpoint, a short tail

The last two part ways a little earlier with every repeat, so that the states they leave behind are
never of use to the next one. ``--pairs`` times two hits at once.
"""

from __future__ import annotations

import json
import statistics
import time
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
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM
from serving.engine.requests import EXACT_REPLAY, Request, SamplingParams, Usage
from serving.prefix_cache import CacheConfig, ReplayMode, ReplayRequest
from serving.replay.policy import default_replay

SUFFIX = 64
BEYOND = 1024  # how far the continuation that filled the cache goes on
STEP = 13  # tokens by which each repeat parts ways earlier
COLD_REPEATS = 3
console = Console(width=110)
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Row:
    """Medians over repeats, seconds; ``tokens`` ran through the model."""

    method: str
    source: str
    prefix: int
    ttft: float
    load: float
    tokens: int
    over_cold: float


def serve(llm: LLM, tokens: Tokens, salt: str, replay: ReplayRequest = EXACT_REPLAY) -> Usage:
    sampling = SamplingParams(max_tokens=1)
    stream = llm.engine.submit(Request(tokens, sampling, replay, cache_salt=salt))
    stream.tokens()
    return stream.usage


def measure(llm: LLM, prefix: int, repeats: int, ratio: float) -> list[Row]:
    """The methods at one prefix length."""
    rng = np.random.default_rng(prefix)
    vocab = llm.bundle.spec.vocab_size

    def draw(count: int) -> Tokens:
        return rng.integers(0, vocab, count, dtype=np.int32)

    base = draw(prefix)
    tail, bounded = ReplayRequest(ReplayMode.RATIO, ratio), default_replay(llm.bundle.calibration)
    methods = {"exact hit": ("exact", EXACT_REPLAY), f"{ratio:.0%} hit": ("ratio", tail)}
    if bounded.mode is ReplayMode.BOUNDED:
        methods["split hit"] = ("split", bounded)
    for salt, replay in methods.values():
        beyond = 0 if replay is EXACT_REPLAY else BEYOND
        serve(llm, np.concatenate([base, draw(beyond)]), salt)
    usages: dict[str, list[Usage]] = {name: [] for name in ("cold", *methods)}
    for i in range(repeats):  # interleaved, so that a busy moment hits all of them
        if i < COLD_REPEATS:
            usages["cold"].append(serve(llm, np.concatenate([base, draw(SUFFIX)]), f"cold{i}"))
        for name, (salt, replay) in methods.items():
            shared = prefix if replay is EXACT_REPLAY else prefix - 1 - STEP * i
            other = np.array([(base[shared - 1] + 1) % vocab], np.int32)
            prompt = np.concatenate([base[: shared - 1], other, draw(SUFFIX)])
            if replay is EXACT_REPLAY:
                prompt = np.concatenate([base, draw(SUFFIX)])
            usages[name].append(serve(llm, prompt, salt, replay))
    cold = statistics.median(u.first_token_seconds for u in usages["cold"])
    rows = []
    for name, got in usages.items():
        ttft = statistics.median(u.first_token_seconds for u in got)
        load = statistics.median(u.load_seconds for u in got)
        rows.append(
            Row(name, got[0].replay_source, prefix, ttft, load, got[0].computed_tokens, ttft / cold)
        )
    return rows


def pairs(llm: LLM, prefix: int) -> list[str]:
    """Two hits at once over one of the same kind, on one prefix and on two."""
    rng = np.random.default_rng(1)
    vocab = llm.bundle.spec.vocab_size
    replay = default_replay(llm.bundle.calibration)
    bases = [rng.integers(0, vocab, prefix, dtype=np.int32) for _ in range(2)]
    for base in bases:
        serve(llm, np.concatenate([base, rng.integers(0, vocab, BEYOND, dtype=np.int32)]), "pair")

    def together(prompts: list[Tokens]) -> float:
        started = time.monotonic()
        sampling = SamplingParams(max_tokens=1)
        requests = [Request(p, sampling, replay, cache_salt="pair") for p in prompts]
        for stream in [llm.engine.submit(r) for r in requests]:
            stream.tokens()
        return time.monotonic() - started

    def parted(base: Tokens, at: int) -> Tokens:
        return np.concatenate([base[: prefix - at], rng.integers(0, vocab, SUFFIX, dtype=np.int32)])

    at = iter(range(1, 1000, STEP))
    single = statistics.median(together([parted(bases[0], next(at))]) for _ in range(5))
    same, apart = [], []
    for _ in range(5):
        here = next(at)
        same.append(together([parted(bases[0], here), parted(bases[0], here)]))
        apart.append(together([parted(b, next(at)) for b in bases]))
    one, two = (statistics.median(times) / single for times in (same, apart))
    return [
        f"two hits on one {prefix}-token prefix take {one:.2f}x one hit",
        f"two hits on two prefixes take {two:.2f}x one hit",
    ]


def table(model: str, rows: list[Row]) -> Table:
    out = Table(title=f"{model}: time to first token, {SUFFIX}-token suffix (medians)")
    names = (
        "prefix",
        "method",
        "from",
        "TTFT ms",
        "cold / TTFT",
        "tokens run",
        "load ms",
        "of TTFT",
    )
    for column in names:
        out.add_column(column, justify="left" if column in ("method", "from") else "right")
    for row in rows:
        out.add_row(
            str(row.prefix),
            row.method,
            row.source,
            f"{row.ttft * 1e3:.1f}",
            f"{1 / row.over_cold:.1f}x",
            str(row.tokens),
            f"{row.load * 1e3:.2f}",
            f"{row.load / row.ttft:.0%}",
        )
    return out


def main(
    model: Annotated[str, typer.Option()] = "hybrid-tiny",
    prefixes: Annotated[str, typer.Option()] = "2048,4096,8192",
    repeats: Annotated[int, typer.Option()] = 7,
    ratio: Annotated[float, typer.Option()] = 0.05,
    with_pairs: Annotated[bool, typer.Option("--pairs", help="Two hits at once, too")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="4K only")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure TTFT by prefix length and kind of hit."""
    lengths = [4096] if quick else [int(p) for p in prefixes.split(",")]
    longest = max(lengths) + BEYOND + SUFFIX
    engine = EngineConfig(max_seq_len=longest, max_batch=2)
    cache = CacheConfig(name="hybrid-serve-perf-ttft", kv_bytes=1 << 30)
    rows, notes = list[Row](), list[str]()
    with LLM.open(bundle_of(model).path, engine, cache) as llm:
        for prefix in track(lengths, description="prefix lengths", console=console):
            rows += measure(llm, prefix, repeats, ratio)
        if with_pairs:
            notes = pairs(llm, max(lengths))
    console.print(table(model, rows))
    for note in notes:
        console.print(note)
    if json_path:
        data = {"rows": [asdict(r) for r in rows], "pairs": notes}
        json_path.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
