"""The path of one request, as a generator: ``RequestPath.serve``. Read this first.

It yields the step it needs next and is resumed with what that step returned; the engine's loop
runs the steps of all sequences together. Only the generator touches its sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from serving.engine.compression import LAST, Compacted, Compression, Watch
from serving.engine.prefix import Hit, Prefixes
from serving.engine.requests import Finish, Request, Stream, Token
from serving.engine.runner import Runner
from serving.engine.sampling import Sampler
from serving.engine.slots import Slots
from serving.prefix_cache import EXACT, Provenance, ReplayMode, ReplayPlan, ReplaySource

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
# A full state at the end of a shared prefix pays off from about this length on.
MARK_TOKENS = 64


@dataclass(frozen=True)
class Prefill:
    """Run tokens [start, end) of the prompt; ``append`` False is a replay. Returns the summed
    log-decay [units] of every layer and the queries where asked for (see ``Model.run``)."""

    start: int
    end: int
    append: bool
    decay_sums: bool = False
    queries: bool = False


@dataclass(frozen=True)
class Decode:
    """Feed one token at ``position``; returns its logits [V]."""

    token: int
    position: int


@dataclass(frozen=True)
class Wait:
    """Nothing to run: another sequence is computing this prefix."""

    leader: Sequence


Step = Prefill | Decode | Wait
Result = Floats | dict[str, Floats] | None
Life = Generator[Step, Result, None]


@dataclass(eq=False)
class Sequence:
    """One request on its way. filling: its prompt is not in the cache yet; kept: states and
    checkpoint records by position, until the next time it is stored."""

    stream: Stream
    slots: Slots
    life: Life = field(init=False)
    step: Step | None = None
    filling: bool = True
    provenance: Provenance = EXACT
    compacted: Compacted | None = None
    states: dict[int, list[Floats]] = field(default_factory=dict)
    checkpoints: dict[int, list[NDArray[np.generic]]] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        return self.stream.request

    @property
    def row(self) -> int:
        return self.slots.row_of(self)


class RequestPath:
    """Serves sequences of one model; ``prefixes`` None = no prefix cache."""

    def __init__(
        self,
        model: Runner,
        chunk: int,
        prefixes: Prefixes | None,
        compression: Compression | None = None,
    ) -> None:
        self.model, self.prefixes, self.compression = model, prefixes, compression
        self.interval = prefixes.interval if prefixes else 0
        # Chunks end where checkpoints are taken.
        self.chunk = min(chunk, self.interval) if self.interval else chunk

    def serve(self, seq: Sequence) -> Life:
        """match → plan → load → replay → suffix → (compact) → decode → commit."""
        request, usage = seq.request, seq.stream.usage
        prompt, count = request.tokens, len(request.tokens)
        watch = self.compression.watch(request) if self.compression else None
        hit_len = yield from self._reuse(seq, watch)
        for low, high in _chunks(hit_len, count - 1, self.chunk, origin=0, also=seq.states):
            found = yield Prefill(low, high, append=True, queries=watch is not None)
            if watch:
                assert isinstance(found, dict)
                watch.observe(seq.slots, seq.row, low, found)
            self._snapshot(seq, high)
        self._keep(seq, prompt[:-1])
        seq.filling = False
        if watch:
            yield from self._compact(seq, watch)

        sampler = Sampler(request.sampling, prompt, self.model.spec.vocab_size)
        fed, made, token = count - 1, list[int](), int(prompt[-1])
        seq.slots.activate(seq)
        while True:
            logits = yield Decode(token, fed)
            fed += 1
            assert isinstance(logits, np.ndarray)
            if self.interval and fed % self.interval == 0 and not usage.kv_freed_bytes:
                self._snapshot(seq, fed)
            token, log_prob = sampler.choose(logits)
            if not made:
                usage.first_token_seconds = time.monotonic() - seq.stream.submitted
            made.append(token)
            usage.generated_tokens = len(made)
            if token in request.sampling.stop_tokens:
                seq.stream.put(Finish("stop", usage))
                break
            if len(made) == request.sampling.max_tokens:
                seq.stream.put(Token(token, log_prob), Finish("length", usage))
                break
            seq.stream.put(Token(token, log_prob))
        # The caller has its answer; whatever it sends next is served after this.
        if not usage.kv_freed_bytes:  # a compacted slot does not hold the rows
            context = np.concatenate([prompt, np.asarray(made[:-1], np.int32)])
            self._keep(seq, context[:fed])

    def _compact(self, seq: Sequence, watch: Watch) -> Generator[Step, Result, None]:
        """Move to a smaller slot. A prompt that was a hit to its end has shown too few queries:
        its last tokens run once more, from zero states, only to be looked at."""
        assert self.compression is not None
        end = len(seq.request.tokens) - 1
        if watch.seen < LAST:
            states = {name: array[seq.row].copy() for name, array in seq.slots.states.items()}
            seq.slots.zero_states(seq.row)
            start = max(0, end - 2 * LAST)
            found = yield Prefill(start, end, append=False, queries=True)
            assert isinstance(found, dict)
            watch.observe(seq.slots, seq.row, start, found)
            for name, array in seq.slots.states.items():
                array[seq.row][...] = states[name]
        self.compression.compact(seq, watch)

    def _reuse(self, seq: Sequence, watch: Watch | None) -> Generator[Step, Result, int]:
        """Bring as much of the prompt into the slot as may be reused; returns how many tokens."""
        usage = seq.stream.usage
        usage.computed_tokens = usage.prompt_tokens
        if self.prefixes is None or not seq.request.use_cache:
            usage.miss_reason = "off"
            return 0
        before = time.monotonic()
        hit = self.prefixes.find(seq.request)
        if hit is None:
            usage.miss_reason = "cache_failure"
            return 0
        usage.miss_reason = str(hit.match.miss_reason)
        try:
            if hit.plans[0].source is not ReplaySource.RECOMPUTE and not self._load(seq, hit):
                usage.miss_reason, usage.replay_reason = "stale", "a cached block was stale"
                return 0
            usage.load_seconds = time.monotonic() - before
            for plan in hit.plans:
                if (yield from self._replay(seq, hit, plan, watch)):
                    if seq.slots.confirm(seq.row):
                        return self._settled(seq, hit, plan)
                    usage.miss_reason, usage.replay_reason = "stale", "a cached block was stale"
                    seq.slots.zero_states(seq.row)
                    return 0
        finally:
            self.prefixes.release(hit)
        raise AssertionError("the last plan always works")

    def _load(self, seq: Sequence, hit: Hit) -> bool:
        assert self.prefixes is not None
        return self.prefixes.load_kv(hit, seq.slots, seq.row)

    def _replay(
        self, seq: Sequence, hit: Hit, plan: ReplayPlan, watch: Watch | None
    ) -> Generator[Step, Result, bool]:
        """Set the state up as planned and replay; False = not good enough, try the next plan."""
        assert self.prefixes is not None
        usage = seq.stream.usage
        usage.replay_reason = plan.reason
        loaded = self.prefixes.load_state(hit, plan, seq.slots, seq.row)
        if loaded is None:
            return False
        guess = plan.source in (ReplaySource.SPLIT, ReplaySource.TAIL) and plan.start > 0
        total: dict[str, Floats] = {}
        for low, high in _chunks(plan.start, _replay_end(plan), self.chunk, origin=plan.start):
            found = yield Prefill(low, high, append=False, decay_sums=guess, queries=bool(watch))
            assert isinstance(found, dict)
            if watch:
                watch.observe(seq.slots, seq.row, low, found)
            for name, value in found.items():
                if name.startswith("decay_sum_"):
                    total[name] = value[0] + total.get(name, 0)
        error = plan.error
        if guess:
            error = self.prefixes.replay_error(plan, total, loaded) if total else math.inf
        usage.replay_error = error if math.isfinite(error) else -1.0
        bounded = seq.request.replay.mode is ReplayMode.BOUNDED
        return error <= seq.request.replay.amount if guess and bounded else True

    def _settled(self, seq: Sequence, hit: Hit, plan: ReplayPlan) -> int:
        """Note what was reused; where another request may part ways again, keep the state."""
        usage = seq.stream.usage
        usage.cached_tokens, usage.replayed_tokens = plan.hit_len, plan.replayed
        usage.computed_tokens, usage.replay_source = plan.computed, str(plan.source)
        usage.derived = not plan.provenance.exact
        if usage.derived:  # what is stored from here on carries the error that was seen
            error = usage.replay_error if usage.replay_error >= 0 else math.inf
            seq.provenance = plan.provenance._replace(estimate=error)
        shared = hit.match.exact_hit_len if plan.provenance.exact else plan.hit_len
        if shared >= MARK_TOKENS and all(s.position != shared for s in hit.match.states):
            seq.states[shared] = []
        end = _replay_end(plan)
        self._snapshot(seq, end)
        return end

    def _snapshot(self, seq: Sequence, position: int) -> None:
        """Copy what must be stored of the state after ``position`` tokens."""
        if self.prefixes is None or not seq.request.use_cache:
            return
        states = {name: array[seq.row] for name, array in seq.slots.states.items()}
        if position in seq.states:
            seq.states[position] = [array.copy() for array in states.values()]
        if self.interval and position and position % self.interval == 0:
            seq.checkpoints[position] = self.prefixes.encode(states)

    def _keep(self, seq: Sequence, tokens: Ints) -> None:
        if self.prefixes is not None and seq.request.use_cache:
            self.prefixes.keep(seq.request, tokens, seq)
            seq.states.clear()
            seq.checkpoints.clear()


def _replay_end(plan: ReplayPlan) -> int:
    """An exact replay leaves an odd last token to be appended again: see ``prefill_step``."""
    odd = plan.replayed % 2 if plan.provenance.exact else 0
    return plan.hit_len - odd


def _chunks(
    start: int, end: int, size: int, origin: int, also: Iterable[int] = ()
) -> Iterator[tuple[int, int]]:
    """[start, end) cut wherever the distance to ``origin`` is a multiple of ``size``, and at
    ``also``."""
    if start < end:
        first = start + size - (start - origin) % size
        inside = {c for c in also if start < c < end}
        yield from pairwise(sorted({start, *range(first, end, size), *inside, end}))
