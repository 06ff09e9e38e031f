"""Continuous batching. The path of a request is ``Engine._serve``, one generator per sequence.

A generator yields the step it needs next and is resumed with that step's logits. The loop runs,
in turn, one chunk of one prefill or replay (B = 1) and one decode over all sequences that have
a token to feed (a batch per slot class).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import (
    CancelledError,
    ConfigError,
    HybridServeError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)
from serving.engine.model import Model, decode_step, prefill_step
from serving.engine.prefix import Hit, Prefixes
from serving.engine.requests import Finish, Request, Stream, Token
from serving.engine.sampling import Sampler
from serving.engine.slots import SlotClass, class_capacities
from serving.prefix_cache import EXACT, Provenance, ReplaySource

log = logging.getLogger(__name__)
# Waiting for another sequence's prefill pays off when it brings at least this many more tokens.
SHARED_PREFILL_TOKENS = 64


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine.

    max_seq_len: longest sequence served; slots: how many of each capacity class (None: as many
    as ``slot_bytes`` allows, at most ``max_batch``); chunk: tokens of one prefill run, chunks end
    at absolute multiples of it; max_waiting: requests admitted but without a slot; threads: of
    the runtime (0 = all cores).
    """

    max_seq_len: int = 8192
    max_batch: int = 16
    slot_bytes: int = 2 << 30
    chunk: int = 512
    max_waiting: int = 256
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch", "slot_bytes", "chunk", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}, must be >= 1", where="engine")
        if self.chunk % 2:
            raise ConfigError(f"chunk = {self.chunk}, must be even", where="engine")


@dataclass(frozen=True)
class Prefill:
    """Run tokens [start, end) of the prompt; ``append`` False is a replay."""

    start: int
    end: int
    append: bool


@dataclass(frozen=True)
class Decode:
    """Feed one token at ``position`` and return its logits [V]."""

    token: int
    position: int


@dataclass(frozen=True)
class Wait:
    """Nothing to run: another sequence is computing this prefix."""

    leader: Sequence


Life = Generator["Prefill | Decode | Wait", NDArray[np.float32] | None, None]


@dataclass(eq=False)
class Sequence:
    """One request on its way through the engine."""

    stream: Stream
    slots: SlotClass
    life: Life = field(init=False)
    step: Prefill | Decode | Wait | None = None
    filling: bool = True  # its prompt is not in the cache yet
    hit: Hit | None = None

    @property
    def request(self) -> Request:
        return self.stream.request


class Engine:
    """Runs requests against one model. ``submit`` may be called from any thread."""

    def __init__(
        self, model: Model, config: EngineConfig = EngineConfig(), prefixes: Prefixes | None = None
    ) -> None:
        self.model, self.config, self._prefixes = model, config, prefixes
        self.max_seq_len = min(config.max_seq_len, model.spec.max_position)
        self.classes = _slot_classes(model, config, self.max_seq_len)
        self._waiting: deque[Stream] = deque()
        self._running: list[Sequence] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, stream: Stream | None = None) -> Stream:
        """Queue a request; its events go to ``stream``, a new one unless given.

        Raises RequestError, PromptTooLongError, OverloadedError.
        """
        self._validate(request)
        stream = stream or Stream(request)
        stream.usage.prompt_tokens = len(request.tokens)
        with self._wake:
            if self._stopping:
                raise OverloadedError("the engine is shutting down")
            if len(self._waiting) >= self.config.max_waiting:
                raise OverloadedError(
                    f"{len(self._waiting)} requests are waiting already", fix="Try again later"
                )
            self._waiting.append(stream)
            self._wake.notify()
        return stream

    def close(self) -> None:
        """Stop; requests that are not done end with CancelledError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self) -> dict[str, int]:
        """Sequences waiting and running, and rows in use: all zero when idle."""
        rows = sum(c.rows - c.free_rows() for c in self.classes)
        return {"waiting": len(self._waiting), "running": len(self._running), "rows": rows}

    def _validate(self, request: Request) -> None:
        count, vocab = len(request.tokens), self.model.spec.vocab_size
        if count == 0:
            raise RequestError("the prompt is empty", fix="Send at least one token")
        sampling = request.sampling
        chosen = [*sampling.stop_tokens, *(t for bad in sampling.bad_tokens for t in bad)]
        for name, ids in (("prompt", request.tokens), ("stop_tokens or bad_tokens", chosen)):
            if len(ids) and not 0 <= np.min(ids) <= np.max(ids) < vocab:
                raise RequestError(f"a token id of {name} is outside 0 to {vocab - 1}")
        room = self.max_seq_len - count
        if sampling.max_tokens > room + 1:
            raise PromptTooLongError(
                f"prompt of {count} tokens + max_tokens {sampling.max_tokens} exceeds "
                f"{self.max_seq_len}",
                fix="Shorten the prompt or ask for fewer tokens",
            )

    # The path of one request ---------------------------------------------------------------

    def _serve(self, seq: Sequence) -> Life:
        request, usage, slots = seq.request, seq.stream.usage, seq.slots
        prompt, count = request.tokens, len(request.tokens)
        start, hit_len, provenance = 0, 0, EXACT
        while leader := self._leader(seq):
            yield Wait(leader)
        if hit := self._find(seq):
            start, hit_len, provenance = hit.plan.start, hit.plan.hit_len, hit.plan.provenance
            if provenance.exact:  # an odd last token is appended again: see prefill_step
                hit_len -= (hit_len - start) % 2
        for low, high in _chunks(start, hit_len, self.config.chunk, origin=start):
            yield Prefill(low, high, append=False)
        for low, high in _chunks(hit_len, count - 1, self.config.chunk, origin=0):
            yield Prefill(low, high, append=True)
        self._keep(seq, prompt[:-1], provenance)
        seq.filling = False

        sampler = Sampler(request.sampling, prompt, self.model.spec.vocab_size)
        fed, made, token = count - 1, list[int](), int(prompt[-1])
        slots.activate(seq)
        while True:
            logits = yield Decode(token, fed)
            fed += 1
            assert logits is not None
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
        context = np.concatenate([prompt, np.asarray(made[:-1], np.int32)])
        self._keep(seq, context[:fed], provenance)

    def _find(self, seq: Sequence) -> Hit | None:
        """The prefix to start from, loaded into the slot; None = recompute everything."""
        usage = seq.stream.usage
        usage.computed_tokens = usage.prompt_tokens
        if self._prefixes is None or not seq.request.use_cache:
            usage.miss_reason = "off"
            return None
        before = time.monotonic()
        hit = seq.hit = self._prefixes.find(seq.request)
        if hit is None:
            usage.miss_reason = "cache_failure"
            return None
        plan = hit.plan
        usage.miss_reason, usage.replay_reason = str(hit.match.miss_reason), plan.reason
        if plan.source is ReplaySource.RECOMPUTE:
            self._drop(seq)
            return None
        loaded = self._prefixes.load(hit, seq.slots, seq.slots.row_of(seq))
        self._drop(seq)
        if not loaded:
            seq.slots.zero_states(seq.slots.row_of(seq))
            usage.miss_reason = "stale"
            return None
        usage.load_seconds = time.monotonic() - before
        usage.cached_tokens, usage.replayed_tokens = plan.hit_len, plan.replayed
        usage.computed_tokens = plan.computed
        usage.replay_source = str(plan.source)
        usage.derived, usage.replay_error = not plan.provenance.exact, plan.provenance.estimate
        return hit

    def _drop(self, seq: Sequence) -> None:
        if seq.hit is not None and self._prefixes is not None:
            self._prefixes.release(seq.hit)
        seq.hit = None

    def _keep(self, seq: Sequence, tokens: NDArray[np.int32], provenance: Provenance) -> None:
        if self._prefixes is not None and seq.request.use_cache:
            row = seq.slots.row_of(seq)
            self._prefixes.keep(seq.request, tokens, provenance, seq.slots, row)

    def _leader(self, seq: Sequence) -> Sequence | None:
        """An earlier sequence that is computing a prefix this one could reuse."""
        if self._prefixes is None or not seq.request.use_cache:
            return None
        for other in self._running:
            if other is seq:
                return None
            same = (
                other.filling
                and other.request.use_cache
                and other.request.cache_salt == seq.request.cache_salt
                and other.request.replay == seq.request.replay
            )
            if same and _shared(other.request.tokens, seq.request.tokens) >= SHARED_PREFILL_TOKENS:
                return other
        return None

    # The loop --------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._stopping and not self._waiting and not self._running:
                    self._wake.wait()
                if self._stopping:
                    break
            try:
                self._turn()
            except Exception as e:  # not one request's fault: none of them can go on
                for seq in list(self._running):
                    self._end(seq, _internal(e))
        for seq in list(self._running):
            self._end(seq, CancelledError("the engine is shutting down"))
        while self._waiting:
            self._waiting.popleft().put(CancelledError("the engine is shutting down"))

    def _turn(self) -> None:
        self._settle()
        self._admit()
        self._run_prefill()
        for slots in self.classes:
            self._run_decode(slots)

    def _admit(self) -> None:
        """First come, first served, into the smallest class that holds the whole sequence."""
        while self._waiting:
            stream = self._waiting[0]
            request = stream.request
            length = len(request.tokens) + request.sampling.max_tokens
            slots = next((c for c in self.classes if c.capacity >= length and c.free_rows()), None)
            if slots is None:
                return
            self._waiting.popleft()
            stream.usage.queue_seconds = time.monotonic() - stream.submitted
            seq = Sequence(stream, slots)
            slots.allocate(seq)
            seq.life = self._serve(seq)
            self._running.append(seq)
            self._resume(seq, None)

    def _settle(self) -> None:
        """End what was cancelled; go on with those whose leader is done or gone."""
        with self._wake:
            for stream in [s for s in self._waiting if s.cancelled]:
                self._waiting.remove(stream)
                stream.put(Finish("cancelled", stream.usage))
        for seq in [s for s in self._running if s.stream.cancelled]:
            self._end(seq, None)
        for seq in [s for s in self._running if isinstance(s.step, Wait)]:
            assert isinstance(seq.step, Wait)
            if not seq.step.leader.filling or seq.step.leader not in self._running:
                self._resume(seq, None)

    def _run_prefill(self) -> None:
        seq = next((s for s in self._running if isinstance(s.step, Prefill)), None)
        if seq is None:
            return
        assert isinstance(seq.step, Prefill)
        part = seq.step
        tokens = seq.request.tokens[part.start : part.end]
        step = prefill_step(tokens, part.start, append=part.append)
        try:
            self.model.run(seq.slots, seq.slots.row_of(seq), step)
        except Exception as e:
            self._end(seq, _internal(e))
            return
        self._resume(seq, None)

    def _run_decode(self, slots: SlotClass) -> None:
        batch: list[Any] = slots.owners()
        if not batch:
            return
        step = decode_step([s.step.token for s in batch], [s.step.position for s in batch])
        try:
            logits, _ = self.model.run(slots, 0, step)
        except Exception as e:
            for seq in batch:
                self._end(seq, _internal(e))
            return
        for i, seq in enumerate(batch):
            self._resume(seq, logits[i])

    def _resume(self, seq: Sequence, logits: NDArray[np.float32] | None) -> None:
        try:
            seq.step = next(seq.life) if logits is None else seq.life.send(logits)
        except StopIteration:
            self._forget(seq)
        except Exception as e:
            self._end(seq, _internal(e))

    def _end(self, seq: Sequence, error: HybridServeError | None) -> None:
        """End a sequence before its time: with an error, or cancelled by its caller."""
        seq.life.close()
        self._forget(seq)
        seq.stream.put(error or Finish("cancelled", replace(seq.stream.usage)))

    def _forget(self, seq: Sequence) -> None:
        self._drop(seq)
        seq.slots.release(seq)
        self._running.remove(seq)


def _slot_classes(model: Model, config: EngineConfig, longest: int) -> list[SlotClass]:
    """Every class gets an equal share of the slot bytes, between 1 row and ``max_batch``."""
    capacities = class_capacities(longest + 1)
    share = config.slot_bytes // len(capacities)
    spec = model.spec
    classes = []
    for capacity in capacities:
        row_bytes = capacity * spec.kv_bytes_per_token() + spec.state_bytes()
        rows = max(1, min(config.max_batch, share // row_bytes))
        classes.append(SlotClass(spec, capacity, rows))
    return classes


def _chunks(start: int, end: int, size: int, origin: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut wherever the distance to ``origin`` is a multiple of ``size``."""
    if start < end:
        first = start + size - (start - origin) % size
        yield from pairwise([start, *range(first, end, size), end])


def _shared(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


def _internal(error: Exception) -> HybridServeError:
    if isinstance(error, HybridServeError):
        return error
    log.error("a request failed", exc_info=error)
    return HybridServeError(f"internal error: {type(error).__name__}")
