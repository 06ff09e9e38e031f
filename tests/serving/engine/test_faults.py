"""Cancelling, failing and closing: slots, blocks and pins come back, the others are served on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_configs.errors import CancelledError, HybridServeError
from serving.engine import path as path_module
from serving.engine.requests import Finish, Request, Stream
from serving.engine.sampling import Sampler
from serving.prefix_cache import ReplayMode, ReplayRequest
from tests.serving.engine.conftest import (
    LEASES,
    Answer,
    Lab,
    Stepper,
    answer,
    greedy,
    prompt,
    run,
    wait_idle,
)

Solo = Callable[[Request], Answer]
LONG = Request(prompt(200), greedy(30))


def reason(stream: Stream) -> str:
    *_, last = list(stream)
    assert isinstance(last, Finish)
    return last.reason


def assert_nothing_held(engine: Any, cache: Any) -> None:
    wait_idle(engine)
    stats = cache.stats()
    assert all(stats[name] == 0 for name in LEASES), stats
    assert all(slots.num_active == 0 for slots in engine.classes)
    cache.check()


@pytest.mark.parametrize(
    ("steps", "kind"), [(0, "prefill"), (3, "prefill"), (4, "decode"), (9, "decode")]
)
def test_cancel_while_running(lab: Lab, solo: Solo, steps: int, kind: str) -> None:
    """The prompt takes four runs."""
    stepper, cache = Stepper(lab.model), lab.cache()
    engine = lab.engine(cache, stepper, chunk=64)
    stream = engine.submit(LONG)
    stepper.next()
    for _ in range(steps):
        stepper.go()
    assert (stepper.steps[-1].tokens.shape[1] == 1) == (kind == "decode")
    stream.cancel()
    stepper.open()
    assert reason(stream) == "cancelled"
    assert_nothing_held(engine, cache)
    assert run(engine, LONG) == solo(LONG)


def test_cancel_while_replaying(lab: Lab, solo: Solo) -> None:
    stepper, cache = Stepper(lab.model), lab.cache()
    engine = lab.engine(cache, stepper, chunk=64)
    stepper.open()
    run(engine, LONG)
    stepper.close()
    other = np.concatenate([LONG.tokens[:150], prompt(20, 8)])
    stream = engine.submit(Request(other, greedy(3), ReplayRequest(ReplayMode.RATIO, 1.0)))
    assert not stepper.next().append
    assert not stepper.go().append
    stream.cancel()
    stepper.open()
    assert reason(stream) == "cancelled"
    assert_nothing_held(engine, cache)
    assert run(engine, LONG) == solo(LONG)


def test_cancel_in_the_queue(lab: Lab, solo: Solo) -> None:
    """Also behind a request that still waits for its slot."""
    stepper, cache = Stepper(lab.model), lab.cache()
    engine = lab.engine(cache, stepper, max_batch=1, max_seq_len=512)
    running = engine.submit(LONG)
    stepper.next()
    waiting = [engine.submit(replace(LONG, cache_salt=s)) for s in "ab"]
    waiting[1].cancel()
    stepper.go()
    stepper.go()
    assert engine.load()["waiting"] == 1
    assert reason(waiting[1]) == "cancelled"
    assert waiting[1].usage.queue_seconds == 0
    stepper.open()
    assert answer(running) == answer(waiting[0]) == solo(LONG)
    assert_nothing_held(engine, cache)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_cancel_while_waiting_for_the_same_prefix(lab: Lab, solo: Solo, who: str) -> None:
    stepper, cache = Stepper(lab.model), lab.cache()
    engine = lab.engine(cache, stepper, chunk=64)
    leader = engine.submit(LONG)
    stepper.next()
    follower, third = engine.submit(LONG), engine.submit(LONG)
    stepper.go()
    assert engine.load() == {"waiting": 0, "running": 3, "rows": 3}
    (leader if who == "leader" else follower).cancel()
    stepper.open()
    gone, left = (leader, follower) if who == "leader" else (follower, leader)
    assert reason(gone) == "cancelled"
    assert answer(left) == answer(third) == solo(LONG)
    assert_nothing_held(engine, cache)


def test_cancelling_twice_and_after_the_end_is_harmless(lab: Lab) -> None:
    cache = lab.cache()
    engine = lab.engine(cache)
    stream = engine.submit(Request(prompt(9), greedy(2)))
    assert reason(stream) == "length"
    stream.cancel()
    stream.cancel()
    assert_nothing_held(engine, cache)


class FailingSampler(Sampler):
    """Fails at the fourth token of a request whose seed is 666."""

    def choose(self, logits: Any) -> Any:
        if self.params.seed == 666 and self._made == 3:
            raise ZeroDivisionError("planted")
        return super().choose(logits)


def test_a_failing_request_ends_alone(
    lab: Lab, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_module, "Sampler", FailingSampler)
    cache = lab.cache()
    engine = lab.engine(cache, max_batch=3)
    good = [Request(prompt(20 + i, i), greedy(20)) for i in range(4)]
    bad = Request(prompt(25), greedy(20, seed=666))
    streams = [engine.submit(r) for r in (*good[:2], bad, *good[2:])]
    with pytest.raises(HybridServeError, match="internal error: ZeroDivisionError"):
        answer(streams[2])
    for request, stream in zip(good, streams[:2] + streams[3:], strict=True):
        assert answer(stream) == solo(request)
    assert_nothing_held(engine, cache)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_failing_run_ends_its_requests_alone(lab: Lab, solo: Solo, kind: str) -> None:
    stepper, cache = Stepper(lab.model), lab.cache()
    engine = lab.engine(cache, stepper, chunk=64)
    requests = [Request(prompt(30, i), greedy(8)) for i in range(2)]
    first = [engine.submit(r) for r in requests]
    step = stepper.next()
    while kind == "decode" and len(step.tokens) < 2:
        step = stepper.go()
    stepper.fail()
    stepper.open()
    failed = 2 if kind == "decode" else 1
    for stream in first[:failed]:
        with pytest.raises(HybridServeError, match="internal error: RuntimeError"):
            answer(stream)
    for request, stream in zip(requests[failed:], first[failed:], strict=True):
        assert answer(stream) == solo(request)
    assert_nothing_held(engine, cache)
    assert [run(engine, r) for r in requests] == [solo(r) for r in requests]


def test_closing_ends_everything_in_flight(lab: Lab) -> None:
    stepper, cache = Stepper(lab.model), lab.cache()
    engine = lab.engine(cache, stepper, max_batch=2, max_seq_len=512, chunk=64)
    streams = [engine.submit(replace(LONG, cache_salt=str(i))) for i in range(5)]
    for _ in range(12):  # two decode, three wait
        stepper.next()
        stepper.permit()
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine._stopping:
        time.sleep(0.001)
    stepper.open()
    closer.join(10)
    for stream in streams:
        with pytest.raises(CancelledError, match="shutting down"):
            list(stream)
    assert_nothing_held(engine, cache)


def test_a_step_of_the_loop_that_fails_is_survived(
    lab: Lab, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a fault of the engine itself may leave callers waiting for ever."""
    engine = lab.engine()
    settle, faults = engine._settle, iter([True])

    def fail_once() -> None:
        settle()
        if engine._running and next(faults, False):
            raise MemoryError("planted")

    monkeypatch.setattr(engine, "_settle", fail_once)
    with pytest.raises(HybridServeError, match="internal error: MemoryError"):
        run(engine, LONG)
    wait_idle(engine)
    assert run(engine, LONG) == solo(LONG)
