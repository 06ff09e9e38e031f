"""Equal means bit-equal: token ids and log-probabilities, whoever else is being served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from serving.engine.engine import Engine
from serving.engine.requests import Request, Token
from serving.engine.slots import SlotClass
from tests.serving.engine.conftest import Answer, Lab, Stepper, answer, greedy, prompt, run

Solo = Callable[[Request], Answer]
BLOCK = 32

# Prompt and answer lengths: both slot classes, single tokens, block and chunk borders.
MIXED = [(1, 40), (5, 9), (33, 25), (64, 3), (300, 12), (17, 30), (1100, 10), (2, 1), (129, 20)]


def mixed_requests() -> list[Request]:
    return [Request(prompt(n, i), greedy(m)) for i, (n, m) in enumerate(MIXED)]


def serve_joining(engine: Engine, requests: list[Request]) -> list[Answer]:
    """Half of them at once, the others one by one while those are being answered."""
    half = len(requests) // 2
    streams = [engine.submit(r) for r in requests[:half]]
    first: Answer = []
    for event in streams[0]:
        if isinstance(event, Token):
            first.append((event.token_id, event.log_prob))
            if len(streams) < len(requests) and len(first) % 5 == 2:
                streams.append(engine.submit(requests[len(streams)]))
    streams += [engine.submit(r) for r in requests[len(streams) :]]
    return [first, *(answer(s) for s in streams[1:])]


@pytest.mark.parametrize("max_batch", [2, 4, 16])
def test_a_batch_that_sequences_join_and_leave(lab: Lab, solo: Solo, max_batch: int) -> None:
    requests = mixed_requests()
    answers = serve_joining(lab.engine(max_batch=max_batch, chunk=64), requests)
    for request, got in zip(requests, answers, strict=True):
        assert got == solo(request)


def test_nothing_is_read_from_slots_before_it_is_written(
    lab: Lab, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot is NaN before its first use, and again after each."""

    def poison(slots: SlotClass, row: int) -> None:
        for array in slots.buffers().values():
            array[row] = np.nan

    release = SlotClass.release

    def release_poisoned(slots: SlotClass, owner: object) -> None:
        release(slots, owner)
        for row, held in enumerate(slots._owner):
            if held is None:
                poison(slots, row)

    monkeypatch.setattr(SlotClass, "release", release_poisoned)
    engine = lab.engine(max_batch=3, chunk=64)
    for slots in engine.classes:
        for row in range(slots.rows):
            poison(slots, row)
    requests = mixed_requests()
    for request, got in zip(requests, serve_joining(engine, requests), strict=True):
        assert got == solo(request)


def test_a_half_prefilled_neighbour_changes_nothing(lab: Lab, solo: Solo) -> None:
    """Decode steps run between the chunks of another prompt."""
    stepper = Stepper(lab.model)
    engine = lab.engine(model=stepper, chunk=64)
    short, long = Request(prompt(20), greedy(10)), Request(prompt(700, 1), greedy(10))
    first = engine.submit(short)
    stepper.next()
    second = engine.submit(long)
    kinds = [stepper.go().tokens.shape[1] for _ in range(12)]
    assert 64 in kinds[1:]
    assert 1 in kinds[kinds.index(64) :]
    stepper.open()
    assert answer(first) == solo(short)
    assert answer(second) == solo(long)


@pytest.mark.parametrize("chunk", [2, 34, 64, 256])
def test_any_chunking(lab: Lab, solo: Solo, chunk: int) -> None:
    engine = lab.engine(chunk=chunk)
    for length in (2, 3, 65, 66, 67, 130, 131, 194, 258, 259, 322):
        request = Request(prompt(length), greedy(4))
        assert run(engine, request) == solo(request)


LENGTHS = [BLOCK * k + d for k in (1, 2, 4) for d in (-1, 0, 1, 2)]


@pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])
@pytest.mark.parametrize("length", [1, 2, *LENGTHS])
def test_lengths_around_blocks_and_chunks(lab: Lab, solo: Solo, length: int, cached: bool) -> None:
    """Chunks of 64 are two blocks, so these are the borders of both."""
    engine = lab.engine(lab.cache() if cached else None, chunk=64)
    request = Request(prompt(length), greedy(6))
    want = solo(request)
    assert run(engine, request) == want
    again = engine.submit(request)
    assert answer(again) == want
    assert again.usage.cached_tokens == (length - 1 if cached else 0)


def test_a_seed_gives_the_same_answer_in_any_company(lab: Lab, solo: Solo) -> None:
    sampling = greedy(20, temperature=1.0, top_k=50, top_p=0.9, seed=7)
    request = Request(prompt(50), sampling)
    engine = lab.engine()
    streams = [engine.submit(replace(request, sampling=replace(sampling, seed=s))) for s in (8, 7)]
    streams += [engine.submit(Request(prompt(30, 2), greedy(25, temperature=1.0)))]
    answers = [answer(s) for s in streams]
    assert answers[1] == solo(request) == run(engine, request)
    assert answers[0] != answers[1]
