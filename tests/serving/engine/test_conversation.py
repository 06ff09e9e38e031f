"""Long conversations that branch, with exact and approximate requests mixed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_configs.errors import ReplayRefusedError
from serving.engine.requests import Request
from serving.prefix_cache import ReplayMode, ReplayRequest
from tests.serving.engine.conftest import Answer, Lab, answer, greedy, prompt, wait_idle

Solo = Callable[[Request], Answer]
Tokens = NDArray[np.int32]
RATIO = ReplayRequest(ReplayMode.RATIO, 0.05)
BLOCK = 32


def turns(base: Tokens, answers: list[Answer], turn: int) -> Tokens:
    """The prompt of turn ``turn``: every third one goes two turns back and takes another way."""
    before = [i for i in range(turn) if i % 3 != 2]
    if turn % 3 == 2:
        before = before[:-2]
    parts = [base]
    for i in before:
        parts += [question(i), np.array([t for t, _ in answers[i]], np.int32)]
    return np.concatenate([*parts, question(turn)])


def same_answer(got: Answer, want: Answer) -> None:
    """The same tokens. Their log-probabilities may differ in the last bits: a conversation's K/V
    was partly made one token at a time, and the attention kernel sums those in another order."""
    assert [t for t, _ in got] == [t for t, _ in want]
    for (_, a), (_, b) in zip(got, want, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def question(turn: int) -> Tokens:
    return prompt(17, 50 + turn)


def test_twelve_turns_in_exact_mode_equal_the_cold_run(lab: Lab, solo: Solo) -> None:
    cache = lab.cache()
    engine = lab.engine(cache, chunk=64)
    answers: list[Answer] = []
    saved = 0
    for turn in range(12):
        request = Request(turns(prompt(150), answers, turn), greedy(6))
        stream = engine.submit(request)
        got = answer(stream)
        same_answer(got, solo(request))
        assert not stream.usage.derived
        saved += stream.usage.cached_tokens
        answers.append(got)
    assert saved > 0
    assert cache.stats()["blocks_derived"] == 0


def test_exact_requests_among_approximate_ones_see_no_derived_block(lab: Lab, solo: Solo) -> None:
    cache = lab.cache()
    engine = lab.engine(cache, chunk=64)
    answers: list[Answer] = []
    derived = 0
    for turn in range(12):
        exact = turn % 4 == 3
        tokens = turns(prompt(150), answers, turn)
        if not exact:  # part ways where no state lies
            tokens = np.concatenate([tokens[: len(tokens) * 2 // 3], question(20 + turn)])
        request = Request(tokens, greedy(6), ReplayRequest() if exact else RATIO)
        stream = engine.submit(request)
        got = answer(stream)
        if exact:
            same_answer(got, solo(request))
            assert not stream.usage.derived
        derived += stream.usage.derived
        answers.append(got)
    assert derived >= 6
    assert cache.stats()["blocks_derived"] > 0


@pytest.mark.parametrize("shared", [480, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_shared_prefix_is_hit_whole(lab: Lab, shared: int) -> None:
    engine = lab.engine(lab.cache())
    answer(engine.submit(Request(prompt(shared + 50), greedy(2))))
    other = np.concatenate([prompt(shared + 50)[:shared], prompt(30, 9)])
    stream = engine.submit(Request(other, greedy(2), RATIO))
    answer(stream)
    assert stream.usage.cached_tokens == shared


def test_no_cliff_at_any_shared_length(lab: Lab) -> None:
    engine = lab.engine(lab.cache())
    answer(engine.submit(Request(prompt(4 * BLOCK), greedy(1))))
    for shared in range(1, 3 * BLOCK + 1):
        # Its own first token after the shared part, so that nothing longer can match.
        first = (int(prompt(4 * BLOCK)[shared]) + 1 + shared) % 256
        own = np.array([first, *prompt(3, shared)], np.int32)
        request = Request(np.concatenate([prompt(4 * BLOCK)[:shared], own]), greedy(1), RATIO)
        stream = engine.submit(request)
        answer(stream)
        assert stream.usage.cached_tokens == shared


def test_an_aborted_requests_text_never_reaches_another(lab: Lab, solo: Solo) -> None:
    """Cancelled in the middle of its answer, then the slot and blocks are used by another."""
    cache = lab.cache()
    engine = lab.engine(cache, max_batch=1)
    first = engine.submit(Request(prompt(100), greedy(400)))
    first.get(timeout=10)
    first.cancel()
    wait_idle(engine)
    for tokens in (prompt(100), prompt(90, 4), prompt(40)):
        request = Request(tokens, greedy(8))
        assert answer(engine.submit(request)) == solo(request)


def test_one_runs_then_another_hits_and_equals_itself_alone(lab: Lab, solo: Solo) -> None:
    engine = lab.engine(lab.cache())
    answer(engine.submit(Request(prompt(128), greedy(20))))
    request = Request(np.concatenate([prompt(128), prompt(20, 2)]), greedy(10))
    stream = engine.submit(request)
    assert answer(stream) == solo(request)
    assert stream.usage.cached_tokens > 0


def test_no_replay_at_all_is_refused_unless_forced(lab: Lab, solo: Solo) -> None:
    with pytest.raises(ReplayRefusedError):
        ReplayRequest(ReplayMode.RATIO, 0.0)
    engine = lab.engine(lab.cache())
    answer(engine.submit(Request(prompt(200), greedy(1))))
    other = np.concatenate([prompt(200)[:150], prompt(10, 3)])
    forced = Request(other, greedy(4), ReplayRequest(ReplayMode.RATIO, 0.0, force=True))
    stream = engine.submit(forced)
    got = answer(stream)
    assert (stream.usage.cached_tokens, stream.usage.replayed_tokens) == (150, 0)
    assert got != solo(Request(other, greedy(4)))


def test_a_damaged_block_is_a_miss(lab: Lab, solo: Solo) -> None:
    cache = lab.cache()
    engine = lab.engine(cache)
    request = Request(prompt(100), greedy(5))
    answer(engine.submit(request))
    wait_idle(engine)
    for view in cache.arena.blocks.arrays:
        view[:] += 1.0
    stream = engine.submit(request)
    assert answer(stream) == solo(request)
    assert stream.usage.miss_reason == "stale"
    assert cache.stats()["corrupt_blocks"] > 0
    again = engine.submit(request)  # recomputed blocks serve again
    assert answer(again) == solo(request)
    assert again.usage.cached_tokens == 99
