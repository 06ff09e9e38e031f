"""Replay plans: what each mode reuses, where it starts, and what that makes of the result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_configs.errors import ReplayRefusedError
from serving.prefix_cache import (
    EXACT,
    Match,
    MissReason,
    Provenance,
    ReplayMode,
    ReplayRequest,
    ReplaySource,
    StateRef,
    plan_replay,
)

DERIVED = Provenance(1, 0.25)


def match(
    prompt: int, hit: int, exact: int | None = None, states: dict[int, Provenance] | None = None
) -> Match:
    exact = hit if exact is None else exact
    refs = [StateRef(p, slot, 2, origin) for slot, (p, origin) in enumerate((states or {}).items())]
    return Match(
        lease=1, prompt_len=prompt, hit_len=hit, exact_hit_len=exact,
        blocks=np.empty(0, np.int64), generations=np.empty(0, np.uint64),
        provenance=EXACT if exact == hit else DERIVED,
        states=tuple(sorted(refs, key=lambda ref: -ref.position)),
        miss_reason=MissReason.COLD, diverged_at=-1,
    )  # fmt: skip


def ratio(x: float, force: bool = False) -> ReplayRequest:
    return ReplayRequest(ReplayMode.RATIO, x, force)


def tail(r: int) -> ReplayRequest:
    return ReplayRequest(ReplayMode.TOKENS, r)


def test_exact_starts_at_the_deepest_exact_state() -> None:
    plan = plan_replay(ReplayRequest(), match(100, 90, states={60: EXACT, 80: EXACT}))
    assert (plan.hit_len, plan.start, plan.replayed, plan.computed) == (90, 80, 10, 20)
    assert (plan.source, plan.state.position) == (ReplaySource.STATE, 80)  # type: ignore[union-attr]
    assert plan.provenance == EXACT


def test_exact_uses_nothing_derived() -> None:
    plan = plan_replay(ReplayRequest(), match(100, 90, 70, {60: EXACT, 85: DERIVED}))
    assert (plan.hit_len, plan.start, plan.provenance) == (70, 60, EXACT)
    plan = plan_replay(ReplayRequest(), match(100, 90, 70, {65: DERIVED}))
    assert (plan.hit_len, plan.start, plan.source) == (0, 0, ReplaySource.RECOMPUTE)
    plan = plan_replay(ReplayRequest(), match(100, 90, 70, {80: EXACT}))
    assert plan.source is ReplaySource.RECOMPUTE, "a state beyond the exact blocks"


def test_exact_without_a_state_recomputes_all() -> None:
    plan = plan_replay(ReplayRequest(), match(100, 90))
    assert (plan.hit_len, plan.start, plan.computed) == (0, 0, 100)
    assert (plan.source, plan.provenance) == (ReplaySource.RECOMPUTE, EXACT)
    assert plan.reason == "no exact state"


@pytest.mark.parametrize(
    ("request_", "hit", "start"),
    [
        (ratio(0.05), 1000, 950), (ratio(0.05), 1001, 950), (ratio(1e-9), 1000, 999),
        (ratio(0.05), 1, 0), (ratio(1.0), 1000, 0), (ratio(7.0), 1000, 0),
        (tail(64), 1000, 936), (tail(64), 64, 0), (tail(64), 10, 0), (tail(1), 10, 9),
        (ratio(0, force=True), 1000, 1000),
    ],
)  # fmt: skip
def test_tail_length(request_: ReplayRequest, hit: int, start: int) -> None:
    plan = plan_replay(request_, match(hit + 7, hit), estimate=0.5)
    assert (plan.hit_len, plan.start, plan.source) == (hit, start, ReplaySource.TAIL)
    assert plan.provenance == (EXACT if start == 0 else Provenance(1, 0.5))


def test_tail_over_derived_blocks_lengthens_the_chain() -> None:
    plan = plan_replay(ratio(0.1), match(1100, 1000, 300), estimate=0.5)
    assert plan.provenance == Provenance(2, 0.75)
    plan = plan_replay(ratio(1.0), match(1100, 1000, 300), estimate=0.5)
    assert (plan.start, plan.provenance) == (0, DERIVED)


def test_state_at_or_after_the_start_replaces_the_tail() -> None:
    for position, source in (
        (899, ReplaySource.TAIL),
        (900, ReplaySource.STATE),
        (1000, ReplaySource.STATE),
    ):
        plan = plan_replay(ratio(0.1), match(1100, 1000, states={position: EXACT}))
        assert plan.source is source
        assert plan.start == (position if source is ReplaySource.STATE else 900)
        assert plan.provenance.exact == (source is ReplaySource.STATE)


def test_derived_state_goes_on_as_it_was() -> None:
    """No new approximation; an exact state is preferred even where it costs some replay."""
    plan = plan_replay(ratio(0.1), match(1100, 1000, 300, {980: DERIVED}))
    assert (plan.start, plan.provenance) == (980, DERIVED)
    plan = plan_replay(ratio(0.1), match(1100, 1000, 1000, {980: DERIVED, 950: EXACT}))
    assert (plan.start, plan.provenance) == (950, EXACT)
    plan = plan_replay(ratio(0.1), match(1100, 1000, 990, {980: EXACT}))
    assert (plan.start, plan.provenance) == (980, DERIVED)


def test_no_hit_is_a_cold_run() -> None:
    for request in (ReplayRequest(), ratio(0.1), tail(5)):
        plan = plan_replay(request, match(100, 0))
        assert (plan.start, plan.hit_len, plan.source) == (0, 0, ReplaySource.RECOMPUTE)
        assert (plan.provenance, plan.reason) == (EXACT, "cold")


@pytest.mark.parametrize("mode", [ReplayMode.RATIO, ReplayMode.TOKENS])
def test_nothing_to_replay_is_refused_unless_forced(mode: ReplayMode) -> None:
    with pytest.raises(ReplayRefusedError, match="at least one token"):
        ReplayRequest(mode, 0)
    assert ReplayRequest(mode, 0, force=True).tail_tokens(100) == 0


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
def test_senseless_amounts_are_refused(amount: float) -> None:
    with pytest.raises(ReplayRefusedError, match="finite number"):
        ReplayRequest(ReplayMode.RATIO, amount, force=True)


@given(
    st.sampled_from(ReplayMode),
    st.floats(0, 2000),
    st.integers(0, 500),
    st.data(),
)
def test_plan_invariants(mode: ReplayMode, amount: float, hit: int, data: st.DataObject) -> None:
    exact = data.draw(st.integers(0, hit))
    places = data.draw(st.sets(st.integers(1, max(1, exact)), max_size=3 if exact else 0))
    plan = plan_replay(
        ReplayRequest(mode, amount, force=True),
        match(hit + data.draw(st.integers(1, 50)), hit, exact, dict.fromkeys(places, EXACT)),
    )
    assert 0 <= plan.start <= plan.hit_len < plan.prompt_len
    assert plan.replayed + (plan.prompt_len - plan.hit_len) == plan.computed
    assert mode is not ReplayMode.EXACT or plan.provenance.exact
    assert (plan.source is ReplaySource.STATE) == (plan.state is not None)


def test_replaying_everything_takes_no_approximate_state() -> None:
    """r = L is exact by itself; a derived state on the way would spoil it."""
    found = match(100, 90, states={80: DERIVED})
    plan = plan_replay(ratio(1.0), found)
    assert (plan.start, plan.source, plan.provenance) == (0, ReplaySource.TAIL, EXACT)
    assert plan_replay(ratio(0.5), found).start == 80
    plan = plan_replay(ratio(1.0), match(100, 90, states={80: EXACT}))
    assert (plan.start, plan.provenance) == (80, EXACT)
