"""``python -m perf.ttft``: time to first token of a cold prompt and of hits of several kinds.

In process, one request at a time, prefixes of 2K to 32K tokens and a 64-token suffix:

    hybrid-tiny      trained: what ``prefix_hits`` lists, the KL of each replay, where the time goes
    random Qwen3.5   150M parameters in int8, against the same model on llama.cpp's server (Q8_0)
                     and on transformers: what ``peers`` lists

``--quick``: hybrid-tiny at 4K only. The peers' wheels come with ``make peers``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from build.bundles import bundle_of
from perf import peer_model
from perf.peers import (
    PART,
    QUESTION,
    RANDOM,
    LlamaServer,
    Ours,
    PeerRow,
    Race,
    Transformers,
    check_conversion,
)
from perf.prefix_hits import (
    BEYOND,
    LONG,
    SPLIT_HIT,
    SUFFIX,
    Part,
    Row,
    breakdown,
    measure,
    pairs,
)
from serving.engine.bundle import Bundle
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM
from serving.prefix_cache import CacheConfig, ReplayMode, ReplayRequest

RECOMPUTED_UP_TO = 4096  # transformers runs (ii) and (iii) like cold prompts: timed up to here
COLUMNS = ("prefix", "method", "from", "TTFT ms", "cold / TTFT", "run", "load ms", "of TTFT")
QUALITY = ("KL answers", "KL text", "right", "cold")
PEER_COLUMNS = ("prefix", "prompt", "engine", "shares", "reused", "run", "TTFT s", "over ours")
console = Console(width=132)


@dataclass(frozen=True)
class Options:
    """Of one run; see ``main``."""

    model: str
    bundle: Path | None
    prefixes: list[int]
    model_prefixes: list[int]
    repeats: int
    ratio: float
    tail: int
    threads: int
    with_pairs: bool
    checkpoint_step: int


def run_tiny(options: Options, progress: Progress) -> dict[str, Any]:
    """The trained model: rows, profile of the longest prefix's split hit, pairs, claims."""
    bundle = Bundle.open(options.bundle) if options.bundle else bundle_of(options.model)
    lengths = options.prefixes
    task = progress.add_task(bundle.name, total=len(lengths) + options.with_pairs)
    rows, parts, two = list[Row](), list[Part](), ()
    with _open(bundle, lengths, options.threads, BEYOND + SUFFIX) as llm:
        for length in lengths:
            rows += measure(llm, length, options.repeats, options.ratio)
            progress.advance(task)
        split = [row for row in rows if row.method == SPLIT_HIT]
        if split:
            parts = breakdown(llm, split[-1])
        if options.with_pairs and split:
            two = pairs(llm, lengths[-1])
            progress.advance(task)
    console.print(_table(bundle.name, rows))
    if parts:
        console.print(_parts_table(split[-1], parts))
    notes = list(_tiny_claims(split, two))
    _print(notes)
    return {
        "model": bundle.name,
        "rows": [asdict(row) for row in rows],
        "profile": [asdict(part) for part in parts],
        "notes": notes,
    }


def run_peers(options: Options, progress: Progress) -> dict[str, Any]:
    """The random model on every engine, one prefix length after the other."""
    lengths = options.model_prefixes
    task = progress.add_task("random Qwen3.5", total=3 * len(lengths) + 1)
    source = peer_model.checkpoint()
    bundle = peer_model.bundle(source)
    vocab = bundle.spec.vocab_size
    rows, notes = list[PeerRow](), list[str]()
    tail = ReplayRequest(ReplayMode.TOKENS, options.tail)
    ratio = ReplayRequest(ReplayMode.RATIO, options.ratio)
    with ExitStack() as stack:
        ours = Ours(stack.enter_context(_open(bundle, lengths, options.threads, QUESTION)))
        reference = Transformers(source, options.threads)
        server = _llama(options, source, stack)
        if server:
            check = check_conversion(server, reference, vocab)
            notes.append(check.text())
        else:
            notes.append("llama.cpp is not installed here: `make peers`, then again")
        progress.advance(task)
        for length in lengths:
            race = Race(length, vocab)
            rows += race.ours(ours, tail, ratio)
            progress.advance(task)
            rows += race.peer(server) if server else ()
            progress.advance(task)
            rows += race.peer(reference, skip_parts=length > RECOMPUTED_UP_TO)
            progress.advance(task)
        refusal = reference.refuses_to_crop()
    rows = over_ours(rows, options.tail)
    console.print(_peer_table(bundle, rows))
    parity = bundle.manifest["parity"]["prefill"]["logit_kl"]
    notes.append(f"our int8 against transformers: KL {parity:.1e}")
    notes.append(
        f"transformers reuses its cache for the same prompt only ({refusal[:60] or 'crops it'}...):"
        f" (ii) and (iii) are cold runs, timed up to {RECOMPUTED_UP_TO} tokens"
    )
    if server:
        notes += _peer_claims(rows, f"ours, {options.ratio:.0%}", valid=check.right)
    _print(notes)
    return {"model": bundle.name, "rows": [asdict(row) for row in rows], "notes": notes}


def over_ours(rows: list[PeerRow], tail: int) -> list[PeerRow]:
    """Every row's TTFT over that of ours for the same prompt: our fixed tail where it has one."""
    names = ("ours", f"ours, r = {tail}")
    base = {(r.prefix, r.kind): r.ttft for r in rows if r.engine in names}
    return [replace(r, over_ours=r.ttft / base[r.prefix, r.kind]) for r in rows]


def _open(bundle: Bundle, lengths: list[int], threads: int, more: int) -> LLM:
    longest = max(lengths) + more
    engine = EngineConfig(max_seq_len=longest, max_batch=2, threads=threads)
    kv_bytes = max(1 << 29, 3 * longest * bundle.spec.kv_bytes_per_token())
    return LLM.open(bundle.path, engine, CacheConfig("hybrid-serve-perf-ttft", kv_bytes))


def _llama(options: Options, source: Path, stack: ExitStack) -> LlamaServer | None:
    if not (peer_model.SITE / "xllamacpp").exists():
        return None
    context = max(options.model_prefixes) + 2 * QUESTION
    server = LlamaServer(
        peer_model.gguf_file(source), context, options.threads, options.checkpoint_step
    )
    return stack.enter_context(server)


def _tiny_claims(split: list[Row], two: tuple[float, ...]) -> Iterator[str]:
    if split:
        last, speed = split[-1], [1 / row.over_cold for row in split]
        worst = max(last.kl_answers, last.kl_text)
        text = f"split hit at {last.prefix}: {speed[-1]:.1f}x over cold, KL {worst:.1e}"
        met = speed[-1] >= 14.3 and worst <= 0.01
        yield _claim(f"{text} (the paper's 14.3x, 0.01)", met) if last.prefix >= LONG else text
        if len(speed) > 1:
            text = " → ".join(f"{s:.1f}x" for s in speed)
            yield _claim(f"it grows with the prefix: {text}", speed == sorted(speed))
        share = last.load / last.ttft
        yield _claim(f"K/V copy is {share:.0%} of TTFT (target 10 %)", share <= 0.1)
    if two:
        yield _claim(f"two hits on one prefix take {two[0]:.2f}x one (target 1.3x)", two[0] <= 1.3)
        yield _claim(f"two hits on two take {two[1]:.2f}x one (target 2.1x)", two[1] <= 2.1)


def _peer_claims(rows: list[PeerRow], share: str, *, valid: bool) -> Iterator[str]:
    paper = {(r.prefix, r.kind): r.ttft for r in rows if r.engine == share}
    for row in rows:
        if row.engine == LlamaServer.name and row.kind in (PART, RANDOM):
            other = row.ttft / paper[row.prefix, row.kind]
            text = (
                f"{row.prefix}, {row.kind}: llama.cpp takes {row.over_ours:.1f}x as long as ours, "
                f"{other:.1f}x as long as {share}"
            )
            claimed = valid and row.prefix >= LONG
            yield _claim(f"{text} (target 5x)", row.over_ours >= 5) if claimed else text


def _claim(text: str, met: bool) -> str:
    return f"{text}: {'met' if met else 'NOT met'}"


def _print(notes: list[str]) -> None:
    for note in notes:
        console.print(note, highlight=False)


def _columns(table: Table, names: tuple[str, ...], left: tuple[str, ...]) -> Table:
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def _table(model: str, rows: list[Row]) -> Table:
    title = f"{model}: time to first token, {SUFFIX}-token suffix (medians)"
    out = _columns(Table(title=title), (*COLUMNS, *QUALITY), ("method", "from"))
    for row in rows:
        replayed = row.answers >= 0
        out.add_row(
            str(row.prefix),
            row.method,
            row.source,
            f"{row.ttft * 1e3:.1f}",
            f"{1 / row.over_cold:.1f}x",
            str(row.tokens),
            f"{row.load * 1e3:.2f}",
            f"{row.load / row.ttft:.0%}",
            f"{row.kl_answers:.1e}" if replayed else "",
            f"{row.kl_text:.1e}" if replayed else "",
            f"{row.answers:.2f}" if replayed else "",
            f"{row.cold_answers:.2f}" if replayed else "",
        )
    return out


def _parts_table(row: Row, parts: list[Part]) -> Table:
    title = f"Where the split hit's {row.ttft * 1e3:.0f} ms go at {row.prefix}"
    names = ("part", "tokens", "ms", "of TTFT", "of which attention over the prefix, ms")
    out = _columns(Table(title=title), names, ("part",))
    for part in parts:
        out.add_row(
            part.name,
            str(part.tokens or ""),
            f"{part.seconds * 1e3:.1f}",
            f"{part.seconds / row.ttft:.0%}",
            f"{part.attention * 1e3:.1f}" if part.attention else "",
        )
    return out


def _peer_table(bundle: Bundle, rows: list[PeerRow]) -> Table:
    size = bundle.spec.num_parameters() / 1e6
    title = f"{bundle.name}, {size:.0f}M random weights: time to first token by engine"
    out = _columns(Table(title=title), PEER_COLUMNS, ("prompt", "engine"))
    for row in rows:
        out.add_row(
            str(row.prefix),
            row.kind,
            row.engine,
            str(row.shared),
            str(row.cached),
            str(row.ran),
            f"{row.ttft:.3f}",
            f"{row.over_ours:.2f}x",
        )
    return out


def _lengths(text: str) -> list[int]:
    return sorted(int(part) for part in text.split(",") if part)


def main(
    model: Annotated[str, typer.Option(help="A trained model by name")] = "hybrid-tiny",
    bundle: Annotated[Path | None, typer.Option(help="A converted bundle in its place")] = None,
    prefixes: Annotated[str, typer.Option(help="Of it")] = "2048,4096,8192,16384,32768",
    model_prefixes: Annotated[
        str, typer.Option(help="Of the random model on all engines; empty = not measured")
    ] = "2048,4096,16384",
    repeats: Annotated[int, typer.Option(help="Of each hit on the trained model")] = 5,
    ratio: Annotated[float, typer.Option(help="The paper's share of the prefix")] = 0.05,
    tail: Annotated[int, typer.Option(help="Tokens replayed on the random model")] = 128,
    threads: Annotated[int, typer.Option(help="Of every engine")] = 1,
    with_pairs: Annotated[bool, typer.Option("--pairs/--no-pairs", help="Two hits at once")] = True,
    checkpoint_step: Annotated[
        int, typer.Option(help="llama.cpp's checkpoint_min_step; 0 = its default")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="hybrid-tiny at 4K only")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure TTFT by prefix length, kind of hit and engine."""
    lengths = [4096] if quick else _lengths(prefixes)
    others = [] if quick else _lengths(model_prefixes)
    options = Options(
        model, bundle, lengths, others, repeats, ratio, tail, threads, with_pairs, checkpoint_step
    )
    found: dict[str, Any] = {"threads": threads}
    parts = {"hits": (run_tiny, lengths), "peers": (run_peers, others)}
    with Progress(console=console, transient=True) as progress:
        for name, (run, wanted) in parts.items():
            found[name] = run(options, progress) if wanted else None
            if json_path:
                json_path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
