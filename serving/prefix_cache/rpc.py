"""The index's calls over any request/reply transport: a JSON text and a few arrays each way.

``handle`` runs beside the ``PrefixCache``; ``RemoteIndex`` stands in for it elsewhere and maps the
same arena. Every reply names the arena it is about, so a restarted cache is noticed at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import CacheError
from serving.prefix_cache.arena import Arena
from serving.prefix_cache.contract import (
    CacheKey,
    Ids,
    Match,
    MissReason,
    Provenance,
    Reservation,
    StateRef,
    Words,
)
from serving.prefix_cache.index import PrefixCache

NO_TOKENS = np.zeros(0, np.int32)


class Call(NamedTuple):
    """op and its arguments as JSON, the tokens [n] int32 it is about."""

    text: str
    tokens: NDArray[np.int32] = NO_TOKENS


class Reply(NamedTuple):
    """A JSON result, the blocks [m] and generations [m] it names."""

    text: str
    blocks: Ids = np.zeros(0, np.int64)
    generations: Words = np.zeros(0, np.uint64)


def handle(cache: PrefixCache, call: Call) -> Reply:
    """Run one call. Errors travel as data: ``{"error": ...}``."""
    try:
        request = json.loads(call.text)
        operation = _OPERATIONS[request.pop("op")]
        result, blocks, generations = operation(cache, call.tokens, request)
    except Exception as e:
        return Reply(json.dumps({"error": f"{type(e).__name__}: {e}"}))
    result["arena"] = str(cache.arena.path)
    return Reply(json.dumps(result), blocks, generations)


Result = tuple[dict[str, Any], Ids, Words]
_NOTHING = Reply("")


def _key(args: dict[str, Any]) -> CacheKey:
    return CacheKey(**args["key"])


def _match(cache: PrefixCache, tokens: NDArray[np.int32], args: dict[str, Any]) -> Result:
    m = cache.match(_key(args), tokens, exact_only=args["exact_only"])
    result = {name: getattr(m, name) for name in _MATCH_FIELDS}
    return result, m.blocks, m.generations


def _reserve(cache: PrefixCache, tokens: NDArray[np.int32], args: dict[str, Any]) -> Result:
    r = cache.reserve(
        _key(args),
        tokens,
        provenance=Provenance(*args["provenance"]),
        state_positions=args["state_positions"],
        checkpoint_positions=args["checkpoint_positions"],
    )
    result = {name: getattr(r, name) for name in _RESERVE_FIELDS}
    return result, r.blocks, r.generations


def _simple(name: str) -> Callable[[PrefixCache, NDArray[np.int32], dict[str, Any]], Result]:
    def run(cache: PrefixCache, tokens: NDArray[np.int32], args: dict[str, Any]) -> Result:
        value = getattr(cache, name)(**args)
        return {"value": value}, _NOTHING.blocks, _NOTHING.generations

    return run


_MATCH_FIELDS = (
    "lease", "prompt_len", "hit_len", "exact_hit_len", "provenance", "states", "miss_reason",
    "diverged_at", "checkpoints",
)  # fmt: skip
_RESERVE_FIELDS = ("lease", "start", "end", "states", "checkpoints")
_OPERATIONS: dict[str, Callable[[PrefixCache, NDArray[np.int32], dict[str, Any]], Result]] = {
    "match": _match,
    "reserve": _reserve,
    **{n: _simple(n) for n in ("publish", "abort", "release", "renew", "report_corrupt", "stats")},
}


class RemoteIndex:
    """``PrefixCache`` at the other end of ``send``. Raises CacheError when a call fails."""

    def __init__(self, send: Callable[[Call], Reply]) -> None:
        self._send = send
        self._arena: Arena | None = None

    @property
    def arena(self) -> Arena:
        """The arena of the last reply."""
        if self._arena is None:
            raise CacheError("no call has told where the arena is")
        return self._arena

    def match(self, key: CacheKey, tokens: NDArray[np.int32], *, exact_only: bool) -> Match:
        args = {"key": _key_args(key), "exact_only": exact_only}
        result, blocks, generations = self._call("match", args, tokens)
        return Match(
            lease=result["lease"],
            prompt_len=result["prompt_len"],
            hit_len=result["hit_len"],
            exact_hit_len=result["exact_hit_len"],
            blocks=blocks,
            generations=generations,
            provenance=Provenance(*result["provenance"]),
            states=_states(result["states"]),
            miss_reason=MissReason(result["miss_reason"]),
            diverged_at=result["diverged_at"],
            checkpoints=_states(result["checkpoints"]),
        )

    def reserve(
        self,
        key: CacheKey,
        tokens: NDArray[np.int32],
        *,
        provenance: Provenance,
        state_positions: Sequence[int] = (),
        checkpoint_positions: Sequence[int] = (),
    ) -> Reservation:
        args = {
            "key": _key_args(key),
            "provenance": provenance,
            "state_positions": list(state_positions),
            "checkpoint_positions": list(checkpoint_positions),
        }
        result, blocks, generations = self._call("reserve", args, tokens)
        return Reservation(
            lease=result["lease"],
            start=result["start"],
            end=result["end"],
            blocks=blocks,
            generations=generations,
            states=_states(result["states"]),
            checkpoints=_states(result["checkpoints"]),
        )

    def publish(self, lease: int) -> int:
        return int(self._value("publish", lease=lease))

    def abort(self, lease: int) -> bool:
        return bool(self._value("abort", lease=lease))

    def release(self, lease: int) -> bool:
        return bool(self._value("release", lease=lease))

    def renew(self, lease: int) -> bool:
        return bool(self._value("renew", lease=lease))

    def report_corrupt(
        self, lease: int, *, block: int | None = None, state: int | None = None,
        checkpoint: int | None = None,
    ) -> object:  # fmt: skip
        what = {"block": block, "state": state, "checkpoint": checkpoint}
        return self._value("report_corrupt", lease=lease, **what)

    def stats(self) -> dict[str, int]:
        return dict(self._value("stats"))

    def _value(self, op: str, **args: Any) -> Any:
        return self._call(op, args, NO_TOKENS)[0]["value"]

    def _call(self, op: str, args: dict[str, Any], tokens: NDArray[np.int32]) -> Result:
        reply = self._send(Call(json.dumps({"op": op, **args}), tokens))
        result = json.loads(reply.text)
        if "error" in result:
            raise CacheError(result["error"], where=f"prefix cache: {op}")
        path = Path(result["arena"])
        if self._arena is None or self._arena.path != path:
            self._arena = Arena.open(path)
        return result, reply.blocks, reply.generations


def _key_args(key: CacheKey) -> dict[str, str]:
    return {"model": key.model, "layout": key.layout, "salt": key.salt, "adapter": key.adapter}


def _states(rows: list[list[Any]]) -> tuple[StateRef, ...]:
    return tuple(StateRef(p, slot, gen, Provenance(*prov)) for p, slot, gen, prov in rows)
