"""Engines over hybrid-tiny. The oracle is a cold run of one request at a time."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.engine.engine import Engine, EngineConfig
from serving.engine.model import Model, Step
from serving.engine.prefix import Prefixes, make_cache
from serving.engine.requests import Request, SamplingParams, Stream, Token
from serving.engine.slots import SlotClass
from serving.prefix_cache import CacheConfig, PrefixCache

Answer = list[tuple[int, float | None]]
LEASES = ("leases_read", "leases_write", "blocks_pinned", "blocks_reserved")


def prompt(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng((seed, length)).integers(0, 256, length, np.int32)


def greedy(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens, log_probs=True, **changes)


def answer(stream: Stream) -> Answer:
    """Token ids and exact log-probabilities."""
    return [(e.token_id, e.log_prob) for e in stream if isinstance(e, Token)]


def run(engine: Engine, request: Request) -> Answer:
    return answer(engine.submit(request))


def wait_idle(engine: Engine) -> None:
    """The last events are out a moment before the slots are back."""
    deadline = time.monotonic() + 10
    while any(engine.load().values()):
        assert time.monotonic() < deadline, engine.load()
        time.sleep(0.001)


class Stepper:
    """A model whose runs wait for the test; once ``open`` they no longer do."""

    def __init__(self, model: Model) -> None:
        self.model, self.spec, self.bundle = model, model.spec, model.bundle
        self.new_slots = model.new_slots
        self.steps: list[Step] = []
        self._arrived, self._permits = threading.Semaphore(0), threading.Semaphore(0)
        self._open = self._fail = False

    def run(self, slots: SlotClass, row: int, step: Step, **options: Any) -> Any:
        self.steps.append(step)
        self._arrived.release()
        if not self._open:
            self._permits.acquire()
        if self._fail:
            self._fail = False
            raise RuntimeError("planted")
        return self.model.run(slots, row, step, **options)

    def next(self) -> Step:
        """Wait until a run is about to start, and say which."""
        assert self._arrived.acquire(timeout=10), "no run came"
        return self.steps[-1]

    def permit(self) -> None:
        self._permits.release()

    def go(self) -> Step:
        """Let that run go on; returns the next one."""
        self.permit()
        return self.next()

    def fail(self) -> None:
        """The run that waits now will raise."""
        self._fail = True

    def open(self) -> None:
        """Let all runs go on."""
        self._open = True
        self._permits.release()

    def close(self) -> None:
        """Hold runs again, when none is under way."""
        self._open = False
        self._arrived, self._permits = threading.Semaphore(0), threading.Semaphore(0)


class Lab:
    """Makes engines and caches, and checks at the end that nothing stayed pinned."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._engines: list[Engine] = []
        self._caches: list[PrefixCache] = []

    def cache(self, model: Model | None = None, **sizes: Any) -> PrefixCache:
        name = f"test-{uuid.uuid4().hex}"
        sizes = {"kv_bytes": 16 << 20, "state_bytes": 16 << 20} | sizes
        self._caches.append(
            make_cache((model or self.model).bundle, CacheConfig(name=name, **sizes))
        )
        return self._caches[-1]

    def engine(self, cache: PrefixCache | None = None, model: Any = None, **sizes: Any) -> Engine:
        model = model or self.model
        prefixes = Prefixes(model.bundle, cache) if cache is not None else None
        config = EngineConfig(**({"max_seq_len": 2048, "max_batch": 4} | sizes))
        self._engines.append(Engine(model, config, prefixes))
        return self._engines[-1]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
            assert engine.load() == {"waiting": 0, "running": 0, "rows": 0}
        for cache in self._caches:
            stats = cache.stats()
            cache.check()
            cache.arena.unlink()
            assert all(stats[name] == 0 for name in LEASES), stats


@pytest.fixture
def lab(tiny_model: Model) -> Iterator[Lab]:
    lab = Lab(tiny_model)
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def solo(tiny_model: Model) -> Iterator[Callable[[Request], Answer]]:
    """The answer to a request that has a cold engine to itself."""
    with Engine(tiny_model, EngineConfig(max_seq_len=2048, max_batch=1)) as engine:
        yield lambda request: run(engine, request)
