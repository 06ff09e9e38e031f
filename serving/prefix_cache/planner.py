"""From a match to replay plans: how much is reused, where the linear layers start, from what.

Sources: a cached full state; **split replay**, slow units from a checkpoint and fast ones from
zero; the paper's tail replay, everything from zero; recomputing. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from engine_configs.errors import ReplayRefusedError
from serving.prefix_cache.contract import EXACT, Match, Provenance, StateRef


class ReplayMode(StrEnum):
    EXACT = "exact"
    BOUNDED = "bounded"  # the cheapest within an error of ``amount``
    RATIO = "ratio"  # r = ceil(amount * L)
    TOKENS = "tokens"  # r = amount


class ReplaySource(StrEnum):
    """What the linear layers start from at ``ReplayPlan.start``."""

    STATE = "state"  # a cached full state
    SPLIT = "split"  # slow units and conv from a checkpoint, fast units from zero
    TAIL = "tail"  # zeros
    RECOMPUTE = "recompute"  # zeros at token 0, nothing reused


@dataclass(frozen=True)
class ReplayRequest:
    """What the client asks. force: also run r = 0, which is not a replay at all."""

    mode: ReplayMode = ReplayMode.EXACT
    amount: float = 0.0
    force: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.amount) and self.amount >= 0):
            raise ReplayRefusedError(
                f"amount = {self.amount}", where="replay", fix="Give a finite number >= 0."
            )
        fixed = self.mode in (ReplayMode.RATIO, ReplayMode.TOKENS)
        if fixed and self.amount == 0 and not self.force:
            raise ReplayRefusedError(
                "0 replayed tokens leave the linear layers without any context",
                where="replay",
                fix="Ask for at least one token, or set force.",
            )

    def tail_tokens(self, hit_len: int) -> int:
        """r, 0 <= r <= L; at least 1 unless 0 was forced."""
        if self.amount == 0:
            return 0
        share = self.amount * hit_len if self.mode is ReplayMode.RATIO else self.amount
        return min(hit_len, max(1, math.ceil(share)))


@dataclass(frozen=True)
class CostModel:
    """Seconds of a run, measured when a model is loaded: per token, per token and K/V row it
    attends to, and per K/V row loaded from the cache."""

    token: float = 1.0
    attended: float = 0.0
    loaded: float = 0.0

    def seconds(self, start: int, hit_len: int, prompt_len: int) -> float:
        """Run tokens [start, prompt_len) after loading ``hit_len`` rows."""
        attended = (prompt_len**2 - start**2) / 2
        ran = prompt_len - start
        return self.token * ran + self.attended * attended + self.loaded * hit_len


@dataclass(frozen=True)
class ReplayPolicy:
    """What calibration allows on one model; the default allows nothing approximate on its own.

    min_tail: r_min of split replay, split_error: its error; zero: (share of L, error) of zero-start
    tails, shortest first.
    """

    min_tail: int = 0
    split_error: float = math.inf
    zero: tuple[tuple[float, float], ...] = ()
    cost: CostModel = CostModel()


@dataclass(frozen=True)
class ReplayPlan:
    """0 <= start <= hit_len < prompt_len. [start, hit_len) is replayed against cached K/V,
    [hit_len, prompt_len) is computed; all of it yields ``provenance``. state: the full state or
    checkpoint it starts from; expected: error of this replay alone; cost in seconds."""

    prompt_len: int
    hit_len: int
    start: int
    source: ReplaySource
    state: StateRef | None
    provenance: Provenance
    reason: str
    expected: float = 0.0
    cost: float = 0.0

    @property
    def error(self) -> float:
        """Expected of this replay and of its context together."""
        return self.provenance.estimate

    @property
    def replayed(self) -> int:
        return self.hit_len - self.start

    @property
    def computed(self) -> int:
        """Tokens that run through the model: replayed ones and the suffix."""
        return self.prompt_len - self.start


NO_POLICY = ReplayPolicy()


def replay_plans(
    request: ReplayRequest, match: Match, policy: ReplayPolicy = NO_POLICY
) -> list[ReplayPlan]:
    """What may be tried, cheapest first; the last one reuses nothing and always works.

    exact: from the deepest exact state over exact blocks. bounded: any source whose expected error
    keeps the limit. ratio, tokens: the last r of L tokens from zero, unless a full state lies at
    or after L - r: that is cheaper and no worse.
    """
    plans: list[ReplayPlan] = []
    if request.mode is ReplayMode.BOUNDED:
        plans = [p for p in _bounded(match, policy) if p.error <= request.amount]
        plans.sort(key=lambda p: p.cost)
    else:
        plans = [plan_replay(request, match)]
    reason = plans[0].reason if plans else _why_not(match, policy)
    if not plans or plans[-1].source is not ReplaySource.RECOMPUTE:
        plans.append(_recompute(match, reason if not plans else "nothing cheaper was good enough"))
    return plans


def plan_replay(request: ReplayRequest, match: Match, *, estimate: float = 0.0) -> ReplayPlan:
    """The one plan of the modes ``exact``, ``ratio`` and ``tokens``.

    r >= L starts at token 0: the linear states are those of a cold run. ``estimate``: error
    estimate of the zero-start tail.
    """
    exact = request.mode is ReplayMode.EXACT
    hit_len = match.exact_hit_len if exact else match.hit_len
    start = 0 if exact else hit_len - request.tail_tokens(hit_len)
    if hit_len == 0:
        return _recompute(match, str(match.miss_reason))
    # From token 0 the replay itself is exact: an approximate state would only make it worse.
    only_exact = exact or start == 0
    usable = [
        s for s in match.states
        if 0 < s.position <= hit_len and s.position >= start
        and (s.provenance.exact or not only_exact)
    ]  # fmt: skip
    if usable:
        # the deeper start is cheaper, but an approximation is never preferred to its absence
        best = min(usable, key=lambda s: (s.provenance.chain, -s.position))
        return _from_state(match, hit_len, best, NO_POLICY)
    if exact:
        return _recompute(match, "no exact state")
    return _from_zero(match, hit_len, start, estimate, NO_POLICY)


def _bounded(match: Match, policy: ReplayPolicy) -> Iterator[ReplayPlan]:
    """Every way to reuse the whole hit, or its exact part."""
    for hit_len in sorted({match.hit_len, match.exact_hit_len} - {0}):
        for state in match.states:
            if state.position <= hit_len:
                yield _from_state(match, hit_len, state, policy)
        for state in match.checkpoints:
            if state.position <= hit_len - policy.min_tail:
                yield _split(match, hit_len, state, policy)
        for share, error in policy.zero:
            start = hit_len - min(hit_len, math.ceil(share * hit_len))
            yield _from_zero(match, hit_len, start, error, policy)
        yield _from_zero(match, hit_len, 0, 0.0, policy)


def _context(match: Match, hit_len: int) -> Provenance:
    """Of the K/V rows [0, hit_len)."""
    return EXACT if hit_len <= match.exact_hit_len else match.provenance


def _from_state(match: Match, hit_len: int, state: StateRef, policy: ReplayPolicy) -> ReplayPlan:
    provenance = _context(match, hit_len).worst(state.provenance)
    return ReplayPlan(
        match.prompt_len, hit_len, state.position, ReplaySource.STATE, state, provenance,
        f"state at {state.position}", 0.0,
        policy.cost.seconds(state.position, hit_len, match.prompt_len),
    )  # fmt: skip


def _split(match: Match, hit_len: int, state: StateRef, policy: ReplayPolicy) -> ReplayPlan:
    provenance = approximate(_context(match, hit_len).worst(state.provenance), policy.split_error)
    return ReplayPlan(
        match.prompt_len, hit_len, state.position, ReplaySource.SPLIT, state, provenance,
        f"checkpoint at {state.position}", policy.split_error,
        policy.cost.seconds(state.position, hit_len, match.prompt_len),
    )  # fmt: skip


def _from_zero(
    match: Match, hit_len: int, start: int, error: float, policy: ReplayPolicy
) -> ReplayPlan:
    provenance = _context(match, hit_len)
    if start > 0:
        provenance = approximate(provenance, error)
    return ReplayPlan(
        match.prompt_len, hit_len, start, ReplaySource.TAIL, None, provenance,
        f"last {hit_len - start} of {hit_len} tokens", error if start > 0 else 0.0,
        policy.cost.seconds(start, hit_len, match.prompt_len),
    )  # fmt: skip


def approximate(context: Provenance, error: float) -> Provenance:
    """One more approximation on top of ``context``."""
    return Provenance(context.chain + 1, context.estimate + error)


def _why_not(match: Match, policy: ReplayPolicy) -> str:
    if match.hit_len == 0:
        return str(match.miss_reason)
    return "uncalibrated" if policy is NO_POLICY else "nothing within the error limit"


def _recompute(match: Match, reason: str) -> ReplayPlan:
    return ReplayPlan(match.prompt_len, 0, 0, ReplaySource.RECOMPUTE, None, EXACT, reason)
