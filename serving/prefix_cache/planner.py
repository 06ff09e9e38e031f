"""From a match to a replay plan: how much is reused, where the linear layers start, from what.

Source: tail replay, r = the last tokens of the hit, run from a zero state against the cached
K/V. Pure functions; errors: ReplayRefusedError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from engine_configs.errors import ReplayRefusedError
from serving.prefix_cache.contract import EXACT, Match, Provenance, StateRef


class ReplayMode(StrEnum):
    EXACT = "exact"
    RATIO = "ratio"  # r = ceil(amount * L)
    TOKENS = "tokens"  # r = amount


class ReplaySource(StrEnum):
    """What the linear layers start from at ``ReplayPlan.start``."""

    STATE = "state"  # a cached full state
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
        if self.mode is not ReplayMode.EXACT and self.amount == 0 and not self.force:
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
class ReplayPlan:
    """0 <= start <= hit_len < prompt_len. [start, hit_len) is replayed against cached K/V,
    [hit_len, prompt_len) is computed; all of it yields ``provenance``."""

    prompt_len: int
    hit_len: int
    start: int
    source: ReplaySource
    state: StateRef | None
    provenance: Provenance
    reason: str

    @property
    def replayed(self) -> int:
        return self.hit_len - self.start

    @property
    def computed(self) -> int:
        """Tokens that run through the model: replayed ones and the suffix."""
        return self.prompt_len - self.start


def plan_replay(request: ReplayRequest, match: Match, *, estimate: float = 0.0) -> ReplayPlan:
    """The cheapest plan the request allows.

    exact: from the deepest exact state over exact blocks, else recompute everything.
    ratio, tokens: the last r of L tokens from zero, unless a full state lies at or after
    L - r: that is cheaper and no worse. r >= L starts at token 0: the linear states are
    those of a cold run. ``estimate``: error estimate of the zero-start tail.
    """
    exact = request.mode is ReplayMode.EXACT
    hit_len = match.exact_hit_len if exact else match.hit_len
    context = EXACT if hit_len <= match.exact_hit_len else match.provenance
    start = 0 if exact else hit_len - request.tail_tokens(hit_len)
    usable = [
        s for s in match.states
        if 0 < s.position <= hit_len and s.position >= start and (s.provenance.exact or not exact)
    ]  # fmt: skip
    if hit_len == 0:
        return _recompute(match, str(match.miss_reason))
    if usable:
        # the deeper start is cheaper, but an approximation is never preferred to its absence
        best = min(usable, key=lambda s: (s.provenance.chain, -s.position))
        provenance = context.worst(best.provenance)
        return ReplayPlan(
            match.prompt_len, hit_len, best.position, ReplaySource.STATE, best, provenance,
            f"state at {best.position}",
        )  # fmt: skip
    if exact:
        return _recompute(match, "no exact state")
    if start > 0:
        context = Provenance(context.chain + 1, context.estimate + estimate)
    return ReplayPlan(
        match.prompt_len, hit_len, start, ReplaySource.TAIL, None, context,
        f"last {hit_len - start} of {hit_len} tokens",
    )  # fmt: skip


def _recompute(match: Match, reason: str) -> ReplayPlan:
    return ReplayPlan(match.prompt_len, 0, 0, ReplaySource.RECOMPUTE, None, EXACT, reason)
