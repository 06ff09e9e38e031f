"""Hits of several kinds on prefixes of one length: time to first token, and KL to a cold run.

Each prompt is a prefix of task text and a 64-token suffix: some text, then questions about the
facts hidden in the prefix, with their answers.

    cold        nothing cached
    exact hit   the prefix was a prompt of its own, so a full state lies at its end
    5 % hit     another continuation was served, no state is near: the paper's tail replay
    split hit   the same, in ``bounded`` mode: slow units from a checkpoint, a short tail

The last two part ways a little earlier with every repeat, so that the states they leave behind are
never of use to the next one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from build.lab import Lab, kl
from build.tasks import FIRST_VALUE, Sample, TaskGenerator
from serving.engine.llm import LLM
from serving.engine.model import decode_step, prefill_step
from serving.engine.requests import EXACT_REPLAY, Request, SamplingParams, Usage
from serving.engine.slots import SlotClass
from serving.prefix_cache import ReplayMode, ReplayRequest
from serving.replay.checkpoint import CheckpointCodec
from serving.replay.policy import default_replay

SUFFIX = 64
BEYOND = 1024  # how far the continuation that filled the cache goes on
STEP = 13  # tokens by which each repeat parts ways earlier
LONG = 16384  # from here on one cold run is enough
COLD_REPEATS = 3
PAIRS = 6  # a multiple of the three orders
Tokens = NDArray[np.int32]
EXACT_HIT, SPLIT_HIT = "exact hit", "split hit"


@dataclass(frozen=True)
class Row:
    """Medians over repeats, seconds; ``tokens`` ran through the model. KL to the cold logits, mean
    over the answers' tokens and over the text's; answers: right ones, and cold ones (-1: no
    replay, nothing to compare)."""

    method: str
    source: str
    prefix: int
    ttft: float
    load: float
    tokens: int
    over_cold: float
    kl_answers: float = 0.0
    kl_text: float = 0.0
    answers: float = -1.0
    cold_answers: float = -1.0


@dataclass
class Prefix:
    """A prefix [length] with facts in it, and suffixes [64] that ask for them."""

    length: int
    seed: int = 0
    sample: Sample = field(init=False)
    texts: TaskGenerator = field(init=False)

    def __post_init__(self) -> None:
        self.texts = TaskGenerator(self.length + self.seed)
        self.sample = self.texts.sample("needle", self.length)
        self.base: Tokens = self.sample.prefix.astype(np.int32)

    def suffix(self, number: int, shared: int | None = None) -> Tokens:
        """Suffixes of different numbers differ, and from the prefix at ``shared``, at once."""
        questions = self.sample.suffix
        first = FIRST_VALUE + number
        if shared is not None and shared < self.length and self.base[shared] == first:
            first += 1
        text = self.texts.text(SUFFIX - 1 - len(questions))
        return np.concatenate([[first], text, questions]).astype(np.int32)

    def beyond(self) -> Tokens:
        """The prefix and another continuation of it."""
        return np.concatenate([self.base, self.texts.text(BEYOND)]).astype(np.int32)

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Suffix positions whose logits predict an answer's token, and a text's."""
        at = SUFFIX - len(self.sample.suffix)
        answers = at + np.flatnonzero(self.sample.answer_mask) - 1
        return answers, np.arange(at - 1)


def serve(llm: LLM, tokens: Tokens, salt: str, replay: ReplayRequest = EXACT_REPLAY) -> Usage:
    sampling = SamplingParams(max_tokens=1)
    stream = llm.engine.submit(Request(tokens, sampling, replay, cache_salt=salt))
    stream.tokens()
    return stream.usage


def measure(llm: LLM, length: int, repeats: int, ratio: float) -> list[Row]:
    """The methods at one prefix length."""
    prefix = Prefix(length)
    tail, bounded = ReplayRequest(ReplayMode.RATIO, ratio), default_replay(llm.bundle.calibration)
    methods = {EXACT_HIT: EXACT_REPLAY, f"{ratio:.0%} hit": tail}
    if bounded.mode is ReplayMode.BOUNDED:
        methods[SPLIT_HIT] = bounded
    for name, replay in methods.items():
        serve(llm, prefix.base if replay is EXACT_REPLAY else prefix.beyond(), name)
    usages: dict[str, list[Usage]] = {name: [] for name in ("cold", *methods)}
    suffixes: dict[str, list[Tokens]] = {name: [] for name in methods}
    for i in range(repeats):  # interleaved, so that a busy moment hits all of them
        if i < (1 if length >= LONG else COLD_REPEATS):
            prompt = np.concatenate([prefix.base, prefix.suffix(0)])
            usages["cold"].append(serve(llm, prompt, f"cold{i}"))
        for name, replay in methods.items():
            shared = length if replay is EXACT_REPLAY else length - 1 - STEP * i
            suffixes[name].append(prefix.suffix(i, shared))
            prompt = np.concatenate([prefix.base[:shared], suffixes[name][-1]])
            usages[name].append(serve(llm, prompt, name, replay))
    cold = statistics.median(u.first_token_seconds for u in usages["cold"])
    judged = judge(llm, prefix, usages, suffixes)
    rows = []
    for name, got in usages.items():
        ttft = statistics.median(u.first_token_seconds for u in got)
        load = statistics.median(u.load_seconds for u in got)
        source, tokens = got[0].replay_source, got[0].computed_tokens
        quality = judged.get(name, ())
        rows.append(Row(name, source, length, ttft, load, tokens, ttft / cold, *quality))
    return rows


def judge(
    llm: LLM, prefix: Prefix, usages: dict[str, list[Usage]], suffixes: dict[str, list[Tokens]]
) -> dict[str, tuple[float, float, float, float]]:
    """Per method the quality columns of ``Row``: the same replays, with all logits kept."""
    replays = [
        (usage, name, suffix)
        for name, tokens in suffixes.items()
        for usage, suffix in zip(usages[name], tokens, strict=True)
        if usage.replay_source in ("split", "tail")
    ]
    replays.sort(key=lambda replay: replay[0].cached_tokens)  # so that the lab only goes on
    starts = {usage.cached_tokens - usage.replayed_tokens for usage, *_ in replays}
    lab = Lab(llm.engine.model, prefix.length + SUFFIX)
    codec = CheckpointCodec.of(llm.bundle.spec, llm.bundle.calibration)
    answers, text = prefix.rows()
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for usage, name, suffix in replays:
        hit, start = usage.cached_tokens, usage.cached_tokens - usage.replayed_tokens
        lab.prefill(prefix.base[:hit].astype(np.int64), [p for p in starts if p <= hit])
        lab.exact()
        cold = lab.ask(suffix.astype(np.int64), np.arange(SUFFIX))
        if usage.replay_source == "split":
            lab.split_start(start, codec)
        else:
            lab.zero_start(hit - start)
        logits = lab.ask(suffix.astype(np.int64), np.arange(SUFFIX))
        divergence, want = kl(cold, logits), suffix[answers + 1]
        right = [float((x[answers].argmax(1) == want).mean()) for x in (logits, cold)]
        found.setdefault(name, []).append(
            (float(divergence[answers].mean()), float(divergence[text].mean()), *right)
        )
    return {name: tuple(np.mean(values, axis=0).tolist()) for name, values in found.items()}


@dataclass(frozen=True)
class Part:
    """Of a hit's TTFT: seconds in all, and those of attention over the prefix."""

    name: str
    tokens: int
    seconds: float
    attention: float = 0.0


def breakdown(llm: LLM, row: Row) -> list[Part]:
    """Where the time of a hit goes. Each run is timed at its place and with nothing before it:
    what is left is what attention over the prefix costs."""
    shared = row.prefix - 1
    replayed = row.tokens - SUFFIX
    slots = SlotClass(llm.bundle.spec, shared + SUFFIX, 1)
    for array in slots.kv.values():
        array[:] = 0
    chunk = llm.engine._path.chunk
    tokens = np.zeros(chunk, np.int64)

    def seconds(count: int, at: int, append: bool) -> float:
        step = prefill_step(tokens[:count], at, append=append)
        if count == 1:
            step = decode_step([0], [at])
        times = []
        for _ in range(5):
            started = time.perf_counter()
            llm.engine.model.run(slots, 0, step)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def part(name: str, start: int, end: int, append: bool) -> Part:
        cuts = [*range(start, end, chunk), end]
        far = sum(seconds(b - a, a, append) for a, b in pairwise(cuts))
        near = sum(seconds(b - a, 0, append) for a, b in pairwise(cuts))
        return Part(name, end - start, far, max(0.0, far - near))

    end = shared + SUFFIX
    parts = [
        Part("match, plan, copy K/V", 0, row.load),
        part("replay", shared - replayed, shared, False),
        part("suffix", shared, end - 1, True),
        part("last token", end - 1, end, True),
    ]
    rest = max(0.0, row.ttft - sum(p.seconds for p in parts))
    return [*parts, Part("everything else", 0, rest)]


def pairs(llm: LLM, length: int) -> tuple[float, float]:
    """Two hits at once over one of the same kind: on one prefix, and on two."""
    replay = default_replay(llm.bundle.calibration)
    prefixes = [Prefix(length, seed) for seed in (1, 2)]
    for prefix in prefixes:
        serve(llm, prefix.beyond(), "pair")

    def together(prompts: list[Tokens]) -> float:
        started = time.monotonic()
        sampling = SamplingParams(max_tokens=1)
        requests = [Request(p, sampling, replay, cache_salt="pair") for p in prompts]
        for stream in [llm.engine.submit(r) for r in requests]:
            stream.tokens()
        return time.monotonic() - started

    def parted(prefix: Prefix, at: int, number: int = 0) -> Tokens:
        shared = length - at
        return np.concatenate([prefix.base[:shared], prefix.suffix(number, shared)])

    one, two = prefixes
    at = iter(range(1, length))  # each hit is shorter than those before: see the module
    kinds = {
        "alone": lambda here: [parted(one, here)],
        "same": lambda here: [parted(one, here, 0), parted(one, here, 2)],
        "apart": lambda here: [parted(one, here), parted(two, here)],
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(PAIRS):  # in turn, so that a busy moment and a shorter tail hit all of them
        order = [*kinds][i % 3 :] + [*kinds][: i % 3]
        for name in order:
            times[name].append(together(kinds[name](next(at))))
    alone, same, apart = (statistics.median(times[name]) for name in kinds)
    return same / alone, apart / alone
