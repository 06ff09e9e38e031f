"""What goes into the engine and what comes out: requests, events, the stream between them."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import HybridServeError, RequestError
from serving.kv_compression.config import CompressionConfig
from serving.prefix_cache.planner import ReplayRequest

MAX_TOKENS_LIMIT = 1 << 20
EXACT_REPLAY = ReplayRequest()


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Raises RequestError naming the field and its value.

    temperature 0 is greedy; top_k 0 and top_p 1 keep everything; ``stop_tokens`` end the answer
    once ``min_tokens`` were made (they are not part of it).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    log_probs: bool = False

    def __post_init__(self) -> None:
        self._within("max_tokens", 1, MAX_TOKENS_LIMIT)
        self._within("min_tokens", 0, self.max_tokens)
        self._within("temperature", 0.0, 100.0)
        self._within("top_k", 0, 1 << 31)
        self._within("top_p", 0.0, 1.0)
        self._within("repetition_penalty", 0.01, 100.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0.0, expected more than 0.0, up to 1.0")
        if self.seed is not None:
            self._within("seed", 0, (1 << 63) - 1)

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        kinds = (int, float) if isinstance(low, float) else (int,)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        if not (number and low <= value <= high):  # NaN is not within anything
            kind = "a number" if isinstance(low, float) else "an integer"
            raise RequestError(f"{name} is {value!r}, expected {kind} from {low} to {high}")


@dataclass(frozen=True)
class CompressionRequest:
    """What a request says of its K/V (see CompressionConfig); None = as the engine is set."""

    mode: str | None = None
    budget: float | None = None
    epsilon: float | None = None

    def over(self, default: CompressionConfig) -> CompressionConfig:
        given = {k: v for k, v in vars(self).items() if v is not None}
        return replace(default, **given)


@dataclass(frozen=True)
class Request:
    """One sequence to continue. ``tokens`` [n]: the prompt, n >= 1."""

    tokens: NDArray[np.int32]
    sampling: SamplingParams = SamplingParams()
    replay: ReplayRequest = EXACT_REPLAY
    compression: CompressionRequest = CompressionRequest()
    cache_salt: str = ""
    use_cache: bool = True


@dataclass
class Usage:
    """What one answer cost; seconds are measured from submission.

    ``generated_tokens`` counts a final stop token, which is not part of the answer. kv_kept: bytes
    of K/V and summaries after compaction over dense; kv_rows_read of kv_rows_held by its steps,
    kv_selected_more head steps whose first selection was not enough, kv_all_read those that read
    all of them, kv_fetched steps that read evicted rows, kv_dense returns to dense, kv_expansions
    both of these; kv_error: largest bound of an attention output's relative error.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    replay_source: str = "recompute"
    replay_error: float = 0.0
    replay_reason: str = ""
    miss_reason: str = ""
    derived: bool = False
    kv_kept: float = 1.0
    kv_freed_bytes: int = 0
    kv_error: float = 0.0
    kv_rows_read: int = 0
    kv_rows_held: int = 0
    kv_selected_more: int = 0
    kv_all_read: int = 0
    kv_fetched: int = 0
    kv_dense: int = 0
    kv_expansions: int = 0
    queue_seconds: float = 0.0
    load_seconds: float = 0.0
    first_token_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Token:
    """One generated token."""

    token_id: int
    log_prob: float | None = None


@dataclass(frozen=True)
class Finish:
    """The end of an answer: ``length`` (max_tokens), ``stop`` (a stop token) or ``cancelled``."""

    reason: str
    usage: Usage


Event = Token | Finish | HybridServeError


@dataclass(eq=False)
class Stream:
    """The events of one request, in order; ends with Finish, or raises the request's error."""

    request: Request
    usage: Usage = field(default_factory=Usage)
    submitted: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def put(self, *events: Event) -> None:
        """Events that belong together: a transport may send them as one message."""
        for event in events:
            self._events.put(event)

    def cancel(self) -> None:
        """Give the request up: its slot, blocks and pins return within one step."""
        self.cancelled = True

    def get(self, timeout: float | None = None) -> Token | Finish:
        """The next event. Raises the request's HybridServeError, queue.Empty on time-out."""
        event = self._events.get(timeout=timeout)
        if isinstance(event, HybridServeError):
            raise event
        return event

    def __iter__(self) -> Iterator[Token | Finish]:
        while True:
            event = self.get()
            yield event
            if isinstance(event, Finish):
                return

    def tokens(self) -> list[int]:
        """Wait for the whole answer."""
        return [e.token_id for e in self if isinstance(e, Token)]
