"""Split replay in the engine, from checkpoints it stored itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serving.engine.model import Model
from serving.engine.requests import Request
from serving.prefix_cache import EXACT, ReplayMode, ReplayRequest
from serving.prefix_cache.planner import replay_plans
from serving.replay.calibration import Calibration, Gate, LayerUnits, Point
from serving.replay.policy import policy_of
from tests.serving.engine.conftest import Answer, Lab, answer, greedy, prompt
from tests.serving.engine.conftest import lab as lab
from tests.serving.engine.conftest import solo as solo

Solo = Callable[[Request], Answer]
ANY_ERROR = ReplayRequest(ReplayMode.BOUNDED, 100.0)


def calibrated(model: Model, slow: int, dtype: str, **changes: Any) -> Model:
    """The model with a made-up calibration: the first ``slow`` units of each layer are kept."""
    layers = tuple(
        LayerUnits(i, tuple(range(slow)), (1.0,) * m.units(), (1.0,) * m.units())
        for i, m in model.spec.state_layers()
    )
    always = Gate((float("inf"),), (0.001,))
    found = Calibration(
        status="measured", interval=64, min_tail=4, dtype=dtype, layers=layers, split=always,
        zero=always, curve=(Point(slow, 4, 0.0, 1.0, 0.001),), **changes,
    )  # fmt: skip
    bundle = replace(
        model.bundle, manifest={**model.bundle.manifest, "calibration": found.to_json()}
    )
    copy = object.__new__(Model)
    copy.__dict__.update(model.__dict__)
    copy.bundle = bundle
    return copy


def parted(shared: int) -> np.ndarray[Any, Any]:
    """A prompt that shares ``shared`` tokens with ``prompt(300)``."""
    other = np.array([(int(prompt(300)[shared]) + 1) % 256], np.int32)
    return np.concatenate([prompt(300)[:shared], other, prompt(20, 7)])


@pytest.mark.parametrize("shared", [70, 140, 200, 255])
def test_all_units_in_full_are_a_classic_checkpoint(
    lab: Lab, solo: Solo, tiny_model: Model, shared: int
) -> None:
    model = calibrated(tiny_model, 4, "fp32")
    cache = lab.cache(model)
    engine = lab.engine(cache, model)
    answer(engine.submit(Request(prompt(300), greedy(3))))
    request = Request(parted(shared), greedy(8), ANY_ERROR)
    stream = engine.submit(request)
    got, usage = answer(stream), stream.usage
    assert got == solo(request)
    assert usage.replay_source == "split"
    assert usage.cached_tokens == shared
    assert usage.replayed_tokens == shared - (shared - 4) // 64 * 64
    assert usage.derived  # units came through a checkpoint: never shown to exact requests
    assert run_exact(engine, parted(shared)) == solo(Request(parted(shared), greedy(8)))


def run_exact(engine: Any, tokens: Any) -> Answer:
    return answer(engine.submit(Request(tokens, greedy(8))))


def test_no_slow_units_is_the_papers_replay_with_its_convolution(
    lab: Lab, solo: Solo, tiny_model: Model
) -> None:
    model = calibrated(tiny_model, 0, "fp16")
    engine = lab.engine(lab.cache(model), model)
    answer(engine.submit(Request(prompt(300), greedy(3))))
    stream = engine.submit(Request(parted(140), greedy(8), ANY_ERROR))
    answer(stream)
    assert (stream.usage.replay_source, stream.usage.replayed_tokens) == ("split", 140 - 128)
    assert stream.usage.replay_error == pytest.approx(0.001)


def test_a_replay_that_may_be_too_far_off_moves_on(lab: Lab, solo: Solo, tiny_model: Model) -> None:
    """The curve promises little error, the gate knows better: everything is replayed."""
    model = calibrated(tiny_model, 1, "int8")
    found = replace(model.bundle.calibration, split=Gate((float("inf"),), (0.5,)))
    model.bundle.manifest["calibration"] = found.to_json()
    model.bundle.__dict__.pop("calibration", None)
    engine = lab.engine(lab.cache(model), model)
    answer(engine.submit(Request(prompt(300), greedy(3))))
    request = Request(parted(200), greedy(8), ReplayRequest(ReplayMode.BOUNDED, 0.01))
    stream = engine.submit(request)
    assert answer(stream) == solo(request)
    usage = stream.usage
    assert (usage.cached_tokens, usage.replayed_tokens, usage.replay_error) == (200, 200, 0.0)
    assert not usage.derived


def test_a_shared_prefix_is_replayed_once(lab: Lab, tiny_model: Model) -> None:
    """The state at its end is kept, so the next request that parts there replays nothing."""
    model = calibrated(tiny_model, 4, "fp32")
    engine = lab.engine(lab.cache(model), model)
    answer(engine.submit(Request(prompt(300), greedy(3))))
    first = engine.submit(Request(parted(200), greedy(2), ANY_ERROR))
    answer(first)
    tokens = np.concatenate([parted(200)[:200], prompt(9, 77)])
    second = engine.submit(Request(tokens, greedy(2), ANY_ERROR))
    answer(second)
    assert first.usage.replayed_tokens > 0
    assert (second.usage.cached_tokens, second.usage.replayed_tokens) == (200, 0)
    assert second.usage.derived


def test_exact_requests_leave_a_state_where_prompts_part(lab: Lab, solo: Solo) -> None:
    engine = lab.engine(lab.cache())
    for seed, cached in ((1, 0), (2, 0), (3, 150)):
        request = Request(np.concatenate([prompt(150), prompt(40, seed)]), greedy(4))
        stream = engine.submit(request)
        assert answer(stream) == solo(request)
        assert stream.usage.cached_tokens == cached


def test_checkpoints_made_while_decoding_serve_too(lab: Lab, solo: Solo, tiny_model: Model) -> None:
    model = calibrated(tiny_model, 4, "fp32")
    engine = lab.engine(lab.cache(model), model)
    made = [t for t, _ in answer(engine.submit(Request(prompt(100), greedy(60))))]
    context = np.concatenate([prompt(100), np.array(made, np.int32)])
    request = Request(np.concatenate([context[:140], prompt(12, 3)]), greedy(5), ANY_ERROR)
    stream = engine.submit(request)
    got = answer(stream)
    assert [t for t, _ in got] == [t for t, _ in solo(request)]
    assert stream.usage.replay_source == "split"
    assert stream.usage.replayed_tokens == 140 - 128


def test_plans_are_cheapest_first_and_end_with_recompute(tiny_model: Model) -> None:
    from serving.prefix_cache import Match, MissReason, StateRef
    from serving.prefix_cache.planner import CostModel

    policy = policy_of(calibrated(tiny_model, 1, "int8").bundle.calibration, CostModel())
    match = Match(
        1, 1000, 900, 900, np.zeros(0, np.int64), np.zeros(0, np.uint64), EXACT,
        (StateRef(500, 0, 0, EXACT),), MissReason.NONE, -1,
        (StateRef(896, 1, 0, EXACT), StateRef(832, 2, 0, EXACT)),
    )  # fmt: skip
    plans = replay_plans(ANY_ERROR, match, policy)
    assert [(str(p.source), p.start) for p in plans] == [
        ("split", 896), ("split", 832), ("state", 500), ("tail", 0), ("recompute", 0),
    ]  # fmt: skip
    strict = replay_plans(ReplayRequest(ReplayMode.BOUNDED, 0.0), match, policy)
    assert [str(p.source) for p in strict] == ["state", "tail", "recompute"]
