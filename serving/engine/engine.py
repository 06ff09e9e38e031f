"""Continuous batching: the loop that runs the steps of all sequences (their path is ``path.py``).

In turn, one chunk of one prefill or replay (B = 1) and one decode over all sequences that have a
token to feed (a batch per slot class).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
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
from serving.engine.compact_slots import CompactSlots, can_compress
from serving.engine.compression import HEADROOM, Compression
from serving.engine.model import Model, decode_step, prefill_step
from serving.engine.path import Life, Prefill, RequestPath, Result, Sequence, Wait
from serving.engine.prefix import Prefixes
from serving.engine.requests import Finish, Request, Stream
from serving.engine.runner import Runner
from serving.engine.slots import SlotClass, Slots, class_capacities
from serving.kv_compression.config import CompressionConfig

log = logging.getLogger(__name__)
# Waiting for another sequence's prefill pays off when it brings at least this many more tokens.
SHARED_PREFILL_TOKENS = 64
# Of the calibrated bound where conversion did not find one: as large as any model's so far.
UNKNOWN_FACTOR = 6.0
# Room in a compact slot for what is still to be generated.
ANSWER_TOKENS = 512


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine.

    max_seq_len: longest sequence served; slots: how many of each capacity class (None: as many
    as ``slot_bytes`` allows, at most ``max_batch``); chunk: tokens of one prefill run, chunks end
    at absolute multiples of it; max_waiting: requests admitted but without a slot; threads: of
    the runtime (0 = all cores); calibration: let ``convert.py --calibrate-on`` run steps here;
    kv_compression (off | bounded), kv_budget, kv_epsilon, kv_alpha, kv_min_tokens: of requests that
    do not say (see CompressionConfig); kv_factor: of the calibrated bound (0: what
    conversion found for kv_alpha); kv_slots: keep slots for compacted sequences, as far as the CPU
    kernels are there.
    """

    max_seq_len: int = 8192
    max_batch: int = 16
    slot_bytes: int = 2 << 30
    chunk: int = 512
    max_waiting: int = 256
    threads: int = 0
    calibration: bool = False
    kv_compression: str = "off"
    kv_budget: float = 0.345
    kv_epsilon: float = 0.05
    kv_alpha: float = 0.05
    kv_min_tokens: int = 1024
    kv_factor: float = 0.0
    kv_slots: bool = True

    def compression(self) -> CompressionConfig:
        return CompressionConfig(
            self.kv_compression, self.kv_budget, self.kv_epsilon, self.kv_alpha, self.kv_min_tokens
        )

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch", "slot_bytes", "chunk", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}, must be >= 1", where="engine")
        if self.chunk % 2:
            raise ConfigError(f"chunk = {self.chunk}, must be even", where="engine")
        self.compression()


class Engine:
    """Runs requests against one model. ``submit`` may be called from any thread."""

    def __init__(
        self, model: Runner, config: EngineConfig = EngineConfig(), prefixes: Prefixes | None = None
    ) -> None:
        self.model, self.config, self._prefixes = model, config, prefixes
        self.max_seq_len = min(config.max_seq_len, model.spec.max_position)
        self.classes = _slot_classes(model, config, self.max_seq_len)
        self._compression = _compression(model, config, prefixes, self.max_seq_len)
        self._path = RequestPath(model, config.chunk, prefixes, self._compression)
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
        classes = [*self.classes, *(self._compression.slots if self._compression else ())]
        rows = sum(c.rows - c.free_rows() for c in classes)
        return {"waiting": len(self._waiting), "running": len(self._running), "rows": rows}

    def _validate(self, request: Request) -> None:
        count, vocab = len(request.tokens), self.model.spec.vocab_size
        if count == 0:
            raise RequestError("the prompt is empty", fix="Send at least one token")
        if request.compression.mode == "bounded" and self._compression is None:
            raise RequestError(
                "kv_compression is bounded, this engine keeps K/V dense",
                fix="Send off, or serve it with the CPU kernels (`make native`)",
            )
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

    def _life(self, seq: Sequence) -> Life:
        while leader := self._leader(seq):
            yield Wait(leader)
        yield from self._path.serve(seq)

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
        if self._compression:
            for compact in self._compression.slots:
                self._run_compact(self._compression, compact)

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
            seq.life = self._life(seq)
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
            _, found = self.model.run(
                seq.slots, seq.row, step, decay_sums=part.decay_sums, queries=part.queries
            )
        except Exception as e:
            self._end(seq, _internal(e))
            return
        self._resume(seq, found)

    def _run_decode(self, slots: Slots) -> None:
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

    def _run_compact(self, compression: Compression, slots: CompactSlots) -> None:
        """As ``_run_decode``; sequences that read about everything go to a dense slot."""
        batch: list[Any] = slots.owners()
        if not batch:
            return
        step = decode_step([s.step.token for s in batch], [s.step.position for s in batch])
        try:
            compression.before(slots, batch)
            logits, found = self.model.run(slots, 0, step)
            for seq in compression.after(slots, batch, found):
                self._dense_again(compression, seq)
        except Exception as e:
            for seq in batch:
                self._end(seq, _internal(e))
            return
        for i, seq in enumerate(batch):
            self._resume(seq, logits[i])

    def _dense_again(self, compression: Compression, seq: Sequence) -> None:
        """To a dense slot, where one is free."""
        needed = len(seq.request.tokens) + seq.request.sampling.max_tokens
        target = next((c for c in self.classes if c.capacity >= needed and c.free_rows()), None)
        if isinstance(target, SlotClass):
            compression.dense_again(seq, target)

    def _resume(self, seq: Sequence, result: Result) -> None:
        try:
            seq.step = seq.life.send(result)
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
        if self._compression:
            self._compression.forget(seq)
        seq.slots.release(seq)
        self._running.remove(seq)


def _slot_classes(model: Runner, config: EngineConfig, longest: int) -> list[Slots]:
    """Every class gets an equal share of the slot bytes, between 1 row and ``max_batch``."""
    capacities = class_capacities(longest + 1)
    share = config.slot_bytes // len(capacities)
    spec = model.spec
    classes = []
    for capacity in capacities:
        row_bytes = capacity * spec.kv_bytes_per_token() + spec.state_bytes()
        rows = max(1, min(config.max_batch, share // row_bytes))
        classes.append(model.new_slots(capacity, rows))
    return classes


def _compression(
    model: Runner, config: EngineConfig, prefixes: Prefixes | None, longest: int
) -> Compression | None:
    """None where K/V stays dense: without kernels, without a cache to bring rows back from, or
    with layers that look at some rows only. There is a smaller class for each dense one; together
    they take a quarter of the slot bytes."""
    fits = all(can_compress(m) for _, m in model.spec.attention_layers())
    if not (isinstance(model, Model) and model.native and prefixes and config.kv_slots and fits):
        if config.kv_compression != "off":
            raise ConfigError(
                "kv_compression needs the CPU kernels, a prefix cache and full attention layers",
                where="engine",
                fix="Run `make native` and convert again, or set kv_compression to off",
            )
        return None
    kept = config.kv_budget * (1 + HEADROOM)
    capacities = [int(kept * c) + ANSWER_TOKENS for c in class_capacities(longest + 1)]
    share = config.slot_bytes // (4 * len(capacities))
    classes = []
    for capacity in capacities:
        row_bytes = CompactSlots(model.spec, capacity, 1, longest).row_bytes
        rows = max(1, min(config.max_batch, share // row_bytes))
        classes.append(CompactSlots(model.spec, capacity, rows, longest))
    factor = config.kv_factor or model.bundle.bounds.factor(config.kv_alpha) or UNKNOWN_FACTOR
    return Compression(model.spec, prefixes, classes, config.compression(), factor)


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
