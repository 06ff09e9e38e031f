"""Linear states beside a K/V cache that knows nothing of them.

A row of the states belongs to each live request; what finished chunks leave behind (checkpoints of
the slow units, full states at ends of prompts and turns) is kept on the host by the tokens that led
to it. Only exact sequences leave anything behind, so there is nothing derived to keep apart.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_configs.errors import OverloadedError
from engine_configs.spec import HybridSpec
from serving.prefix_cache.contract import EXACT, Match, MissReason, StateRef
from serving.prefix_cache.planner import (
    CostModel,
    ReplayPlan,
    ReplayRequest,
    ReplaySource,
    replay_plans,
)
from serving.replay.calibration import Calibration
from serving.replay.checkpoint import CheckpointCodec, Record
from serving.replay.policy import policy_of

from .step import Storage

STATE, CHECKPOINT = "state", "checkpoint"
_DEEPEST = 64  # positions looked up for one prompt


class RecordStore:
    """Records by kind, position and the tokens before it; the least recently used go first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget, self.used = budget_bytes, 0
        self._records: OrderedDict[tuple[str, int, bytes], Record] = OrderedDict()
        self._positions: dict[str, Counter[int]] = {STATE: Counter(), CHECKPOINT: Counter()}

    def put(self, kind: str, scope: bytes, tokens: Sequence[int], record: Record) -> None:
        """A record of what came after ``tokens``; ``scope`` keeps tenants and adapters apart."""
        key = (kind, len(tokens), _digests(scope, tokens, [len(tokens)])[0])
        if key not in self._records:
            self.used += _nbytes(record)
            self._positions[kind][len(tokens)] += 1
        self._records[key] = record
        self._records.move_to_end(key)
        while self.used > self.budget and self._records:
            (old, position, _), gone = self._records.popitem(last=False)
            self.used -= _nbytes(gone)
            self._positions[old][position] -= 1

    def find(self, kind: str, scope: bytes, tokens: Sequence[int], limit: int) -> dict[int, Record]:
        """Records at positions up to ``limit`` on the way of ``tokens``, by position."""
        known = (p for p, n in self._positions[kind].items() if n and p <= limit)
        positions = sorted(known)[-_DEEPEST:]
        keys = zip(positions, _digests(scope, tokens, positions), strict=True)
        found = {p: self._records.get((kind, p, digest)) for p, digest in keys}
        for position, digest in zip(positions, _digests(scope, tokens, positions), strict=True):
            if found[position] is not None:
                self._records.move_to_end((kind, position, digest))
        return {p: r for p, r in found.items() if r is not None}


@dataclass
class Live:
    """A request's row; hit_len: K/V rows that were cached when it came, which stay as they are;
    position: tokens that its states have seen; exact: so are its states and its K/V; fresh: its
    states are zeros, nothing ran yet."""

    slot: int
    hit_len: int
    position: int
    exact: bool
    scope: bytes
    plan: ReplayPlan | None
    fresh: bool = True


class LinearStates:
    """Rows of ``storage`` for live requests. One thread, the executor's, calls all of it."""

    def __init__(
        self,
        spec: HybridSpec,
        calibration: Calibration,
        storage: Storage,
        rows: int,
        budget_bytes: int,
        replay: ReplayRequest,
    ) -> None:
        self.storage, self.calibration, self.replay = storage, calibration, replay
        self._policy = policy_of(calibration, CostModel())
        self.store = RecordStore(budget_bytes)
        every = {i: range(m.units()) for i, m in spec.state_layers()}
        self._codecs = {
            STATE: CheckpointCodec(spec, every, "fp32"),
            CHECKPOINT: CheckpointCodec.of(spec, calibration),
        }
        self._free = list(range(rows))
        self._live: dict[int, Live] = {}

    def begin(
        self, request: int, tokens: Sequence[int], hit_len: int, scope: bytes = b""
    ) -> ReplayPlan:
        """Take a row for a prompt of which ``hit_len`` tokens have exact K/V, and put what the
        replay starts from into it. Raises OverloadedError where no row is free."""
        records = {
            kind: self.store.find(kind, scope, tokens, hit_len) for kind in (STATE, CHECKPOINT)
        }
        plan = replay_plans(
            self.replay,
            _match(len(tokens), hit_len, records),
            policy_of(self.calibration, CostModel()),
        )[0]
        slot = self._take(request)
        self._live[request] = Live(slot, hit_len, plan.start, plan.provenance.exact, scope, plan)
        self._zero(slot)
        if plan.source in (ReplaySource.STATE, ReplaySource.SPLIT):
            kind = STATE if plan.source is ReplaySource.STATE else CHECKPOINT
            self._write(slot, kind, records[kind][plan.start])
            self._live[request].fresh = False
        return plan

    def begin_dummy(self, request: int) -> None:
        """A row of zeros for a request that only warms up."""
        self._live[request] = Live(self._take(request), 0, 0, False, b"", None)
        self._zero(self._live[request].slot)

    def of(self, request: int) -> Live:
        return self._live[request]

    def __contains__(self, request: int) -> bool:
        return request in self._live

    def chunk(self, request: int, length: int, prompt_len: int, *, avoid: int = 0) -> int:
        """``length`` tokens cut where a checkpoint is due, and not to end at ``avoid``."""
        start, interval = self._live[request].position, self.calibration.interval
        end = min(start + length, prompt_len)
        if interval:
            end = min(end, (start // interval + 1) * interval)
        if avoid and end == avoid:
            end = end - 1 if end - 1 > start else min(end + 1, prompt_len)
        return end - start

    def advance(self, request: int, tokens: Sequence[int], position: int, *, ends: bool) -> None:
        """A run went as far as ``position`` of ``tokens``; ``ends``: it ended the prompt."""
        live = self._live[request]
        live.position, live.fresh = position, False
        if live.plan is None or not live.exact or position < live.hit_len:
            return
        interval = self.calibration.interval
        if interval and position % interval == 0:
            self._keep(live, CHECKPOINT, tokens[:position])
        if ends:
            self._keep(live, STATE, tokens[:position])

    def end(self, request: int, tokens: Sequence[int] = ()) -> None:
        """Give the row back; an exact turn leaves its last state behind."""
        live = self._live.pop(request, None)
        if live is None:
            return
        if live.plan is not None and live.exact and live.hit_len < live.position <= len(tokens):
            self._keep(live, STATE, tokens[: live.position])
        self._free.append(live.slot)

    def _take(self, request: int) -> int:
        if not self._free:
            raise OverloadedError(
                f"no row of linear states for request {request}",
                where=f"{len(self._live)} requests hold one each",
                fix="Lower max_batch_size, or give hybrid_serve.rows more",
            )
        return self._free.pop()

    def _zero(self, slot: int) -> None:
        for array in (*self.storage.conv.values(), *self.storage.recurrent.values()):
            array[slot] = 0

    def _arrays(self) -> dict[str, torch.Tensor]:
        conv = {f"conv_state_{i}": a for i, a in self.storage.conv.items()}
        return conv | {f"recurrent_state_{i}": a for i, a in self.storage.recurrent.items()}

    def _keep(self, live: Live, kind: str, tokens: Sequence[int]) -> None:
        states = {n: a[live.slot].float().cpu().numpy() for n, a in self._arrays().items()}
        self.store.put(kind, live.scope, tokens, self._codecs[kind].encode(states))

    def _write(self, slot: int, kind: str, record: Record) -> None:
        arrays = self._arrays()
        states = {n: np.zeros(tuple(a.shape[1:]), np.float32) for n, a in arrays.items()}
        self._codecs[kind].decode(record, states)
        for name, array in arrays.items():
            array[slot] = torch.from_numpy(states[name]).to(array)


def _match(prompt_len: int, hit_len: int, records: dict[str, dict[int, Record]]) -> Match:
    """What the planner wants to know; everything that is kept is exact."""
    refs = {
        kind: tuple(StateRef(p, 0, 0, EXACT) for p in sorted(found, reverse=True))
        for kind, found in records.items()
    }
    none = np.zeros(0, np.int64)
    return Match(
        0, prompt_len, hit_len, hit_len, none, none.astype(np.uint64), EXACT, refs[STATE],
        MissReason.COLD if hit_len == 0 else MissReason.NONE, -1, refs[CHECKPOINT],
    )  # fmt: skip


def _digests(scope: bytes, tokens: Sequence[int], positions: Sequence[int]) -> list[bytes]:
    """Hash of the tokens before each of the rising ``positions``."""
    ids = np.asarray(tokens[: positions[-1]] if positions else (), np.int64)
    running = hashlib.blake2b(len(scope).to_bytes(4, "little") + scope, digest_size=16)
    found, start = [], 0
    for position in positions:
        running.update(ids[start:position].tobytes())
        found.append(running.digest())
        start = position
    return found


def _nbytes(record: Record) -> int:
    return sum(a.nbytes for a in record)
