"""A sequence's own, smaller view of its K/V: compacted after prefill, grown when steps keep asking.

The prompt's K/V stays in the prefix cache, pinned: the host copy, in which steps read evicted rows,
from which they come back, and which the next request with the same prefix hits in full.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec
from plugins.compressed_sparse_attention.ref import BLOCK
from serving.engine.compact_slots import RECENT, CompactSlots
from serving.engine.host_copy import HostCopy
from serving.engine.requests import Request
from serving.engine.slots import SlotClass, Slots
from serving.kv_compression.compact import CompactLayer
from serving.kv_compression.config import CompressionConfig
from serving.kv_compression.history import AttentionHistory
from serving.kv_compression.policy import compact_layer, rows_kept
from serving.prefix_cache import Match

if TYPE_CHECKING:
    from serving.engine.path import Sequence
    from serving.engine.prefix import Prefixes

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]
# One query in this many shows what a prompt's tokens look at; of its last ones, each.
EVERY, LAST = 16, 32
# Free slot rows for what comes back, over what is kept.
HEADROOM = 0.25
# Steps within which a group is asked for twice if it comes back.
RETURN = 8
# So many steps in a row that read over so much of the context, and the sequence goes dense again.
DENSE_STEPS, DENSE_SHARE = 4, 0.5
# Seconds between renewals of a pin.
RENEW = 15.0
_NONE: Positions = np.zeros(0, np.int64)


class Watch:
    """What the queries of a prompt [n] look at, by attention layer."""

    def __init__(self, spec: HybridSpec, length: int) -> None:
        self._layers, self._length, self.seen = spec.attention_layers(), length, 0
        self.history = {
            i: AttentionHistory(m.num_kv_heads, length, m.scale, LAST) for i, m in self._layers
        }

    def observe(self, slots: Slots, row: int, start: int, found: Mapping[str, Floats]) -> None:
        """Queries [1, T, Hq*dk] of tokens start.. of a prefill or replay that has just run."""
        assert isinstance(slots, SlotClass)
        count = found[f"query_{self._layers[0][0]}"].shape[1]
        at = np.arange(start, min(start + count, self._length))
        at = at[(at % EVERY == 0) | (at >= self._length - LAST)]
        if not len(at):
            return
        self.seen += len(at)
        for i, m in self._layers:
            queries = found[f"query_{i}"][0, at - start].reshape(len(at), -1, m.head_dim)
            self.history[i].observe(queries, at, slots.kv[f"past_key_{i}"][row])


@dataclass(eq=False)
class CompactHeads:
    """rows: slot rows a head is meant to keep; groups[h][e]: positions of an evicted group, empty
    where it is back; positions [Hk, C]: of slot rows, -1 for tokens made since; own: slot rows [Hk]
    of each of these; read [Hk, S]: the last step that read an entry's rows."""

    rows: int
    groups: list[list[Positions]]
    positions: Positions
    read: NDArray[np.int32]
    own: list[NDArray[np.int32]] = field(default_factory=list)


@dataclass(eq=False)
class Compacted:
    """A compacted sequence. match: its prompt of ``length`` tokens, pinned in ``host``, renewed at
    ``renewed``; layers[i]: its heads in attention layer i; lost: the host copy is gone; wide: last
    steps, in a row, that read about everything."""

    match: Match
    host: HostCopy
    length: int
    layers: dict[int, CompactHeads]
    renewed: float = field(default_factory=time.monotonic)
    steps: int = 0
    lost: bool = False
    wide: int = 0


class Compression:
    """Compacts sequences of one engine; ``slots``: the classes they move to, smallest first;
    ``factor``: of the calibrated bound."""

    def __init__(
        self,
        spec: HybridSpec,
        prefixes: Prefixes,
        slots: list[CompactSlots],
        default: CompressionConfig,
        factor: float,
    ) -> None:
        self.spec, self.prefixes, self.slots = spec, prefixes, slots
        self.default, self.factor = default, factor
        self._layers = spec.attention_layers()
        self._host: HostCopy | None = None

    def watch(self, request: Request) -> Watch | None:
        """To be shown the queries of the prompt; None: this request stays dense."""
        config = request.compression.over(self.default)
        length = len(request.tokens) - 1
        if config.mode == "off" or length < config.min_tokens or not request.use_cache:
            return None
        return Watch(self.spec, length)

    def compact(self, seq: Sequence, watch: Watch) -> None:
        """Move a prefilled sequence to a smaller slot, if there is one and its prompt is cached."""
        config = seq.request.compression.over(self.default)
        length = len(seq.request.tokens) - 1
        source = seq.slots
        assert isinstance(source, SlotClass)
        rows = {
            i: rows_kept(config.budget, length, m.head_dim, m.head_dim) for i, m in self._layers
        }
        wanted = int(max(rows.values()) * (1 + HEADROOM)) + seq.request.sampling.max_tokens
        target = next((s for s in self.slots if s.capacity >= wanted and s.free_rows()), None)
        match = self.prefixes.pin(seq.request) if target else None
        if target is None or match is None:
            return
        if match.hit_len < length or target.row_bytes >= source.row_bytes:
            self.prefixes.unpin(match)
            return
        to = target.allocate(seq)
        try:
            view = self._move(seq, watch, config, match, rows, target, to)
        except BaseException as e:
            target.release(seq)
            self.prefixes.unpin(match)
            if not isinstance(e, ValueError):  # the rows that must stay do not fit
                raise
            return
        source.release(seq)
        seq.slots, seq.compacted = target, view

    def _move(
        self, seq: Sequence, watch: Watch, config: CompressionConfig, match: Match,
        rows: Mapping[int, int], target: CompactSlots, to: int,
    ) -> Compacted:  # fmt: skip
        """Fill the row ``to`` of ``target`` from the sequence's dense slot."""
        source, row, usage = seq.slots, seq.row, seq.stream.usage
        assert isinstance(source, SlotClass)
        length, sound = len(seq.request.tokens) - 1, config.alpha == 0
        target.epsilon[to], target.factor[to] = config.epsilon, 0.0 if sound else self.factor
        view = Compacted(match, self._host_copy(), length, {})
        kept = dense = 0
        for i, m in self._layers:
            keys, values = (source.kv[f"past_{n}_{i}"][row, :, :length] for n in ("key", "value"))
            stats = watch.history[i].stats(keys, values, length)
            made = compact_layer(
                stats, rows[i], *target.layer(to, i), sound=sound, max_groups=target.groups
            )
            target.take(to, i, made)
            view.layers[i] = _heads(made, rows[i], target)
            for h in range(m.num_kv_heads):
                self._place(target, view, to, i, h)
            kept += int(made.rows().sum()) * 8 * m.head_dim + made.summary_bytes()
            dense += m.num_kv_heads * length * 8 * m.head_dim
        for name, states in target.states.items():
            states[to] = source.states[name][row]
        usage.kv_kept, usage.kv_freed_bytes, usage.derived = kept / dense, dense - kept, True
        return view

    def _host_copy(self) -> HostCopy:
        """Of the cache as it is now, which steps of all classes read from now on."""
        host = self.prefixes.host_copy()
        if host is not self._host:
            self._host = host
            for slots in self.slots:
                slots.read_from(host.memory())
        return host

    def _place(self, slots: CompactSlots, view: Compacted, row: int, i: int, h: int) -> None:
        groups = view.layers[i].groups[h]
        sizes = np.cumsum([len(g) for g in groups])[:-1]
        at = view.host.addresses(view.match, i, h, np.concatenate([*groups, _NONE]))
        slots.place(row, i, h, np.split(at, sizes) if groups else [])

    def before(self, slots: CompactSlots, batch: list[Any]) -> None:
        """A step of these sequences is about to run."""
        for row, seq in enumerate(batch):
            view, now = seq.compacted, time.monotonic()
            if view.lost:
                continue
            still_there = view.host.holds(view.match)
            if not still_there or view.host is not self._host:
                view.lost = True
                slots.lose_host(row)
            elif now > view.renewed + RENEW:
                self.prefixes.renew(view.match)
                view.renewed = now
        slots.grow(len(batch))

    def after(
        self, slots: CompactSlots, batch: list[Any], found: Mapping[str, NDArray[Any]]
    ) -> list[Any]:
        """Note how a step was answered, bring back what is asked for again and again; returns the
        sequences that had better be dense."""
        wide = []
        for row, seq in enumerate(batch):
            usage, view = seq.stream.usage, seq.compacted
            view.steps += 1
            fetched = total = 0
            for i, heads in view.layers.items():
                rows, read = slots.counts[f"kv_rows_{i}"][row], found[f"rows_read_{i}"][row]
                marks = found[f"chosen_{i}"][row]
                chosen = marks > 0
                heads.own.append(rows - 1)
                usage.kv_rows_held += int(rows.sum())
                usage.kv_rows_read += int(read.sum())
                total += int(read.sum())
                usage.kv_selected_more += int((marks > 1).any(1).sum())
                in_slot = chosen[:, : slots.blocks].sum(1)
                usage.kv_all_read += int((in_slot == -(-rows // BLOCK)).sum())
                usage.kv_error = max(usage.kv_error, float(found[f"error_bound_{i}"][row].max()))
                again = chosen & (heads.read > view.steps - RETURN)
                heads.read[chosen] = view.steps
                if chosen[:, slots.blocks :].any():
                    fetched += 1
                    self._bring_back(slots, seq, row, i, again[:, slots.blocks :])
            usage.kv_fetched += fetched > 0
            usage.kv_expansions += fetched > 0
            everything = sum(m.num_kv_heads for _, m in self._layers) * (view.length + view.steps)
            view.wide = view.wide + 1 if total > DENSE_SHARE * everything else 0
            if view.wide >= DENSE_STEPS:
                wide.append(seq)
        return wide

    def _bring_back(
        self, slots: CompactSlots, seq: Sequence, row: int, i: int, again: NDArray[np.bool_]
    ) -> None:
        """Groups ``again`` [Hk, S - C / 32] of a layer, in place of what was read longest ago where
        there is no room."""
        view = seq.compacted
        assert view is not None
        if view.lost:
            return
        to_come = seq.request.sampling.max_tokens - seq.stream.usage.generated_tokens
        heads = view.layers[i]
        for h in np.flatnonzero(again.any(1)).tolist():
            entries = [e for e in np.flatnonzero(again[h]).tolist() if len(heads.groups[h][e])]
            positions = np.concatenate([*(heads.groups[h][e] for e in entries), _NONE])
            if not self._make_room(slots, view, (row, i, h), len(positions), to_come):
                continue
            start = slots.bring_back(
                row, i, h, entries, *view.host.rows(view.match, i, h, positions)
            )
            heads.positions[h, start : start + len(positions)] = positions
            heads.read[h, start // BLOCK : (start + len(positions)) // BLOCK + 1] = view.steps
            for e in entries:
                heads.groups[h][e] = _NONE

    def _make_room(
        self,
        slots: CompactSlots,
        view: Compacted,
        at: tuple[int, int, int],
        more: int,
        to_come: int,
    ) -> bool:
        """For ``more`` rows of (row, layer, head) and the tokens to come; the kept set shrinks to
        what it is meant to be where it has outgrown that."""
        row, i, h = at
        held = int(slots.counts[f"kv_rows_{i}"][row, h])
        meant = int(view.layers[i].rows * (1 + HEADROOM))
        excess = max(held + more + to_come - slots.capacity, held + more - meant)
        if excess > 0:
            self._shrink(slots, view, at, excess)
        return int(slots.counts[f"kv_rows_{i}"][row, h]) + more + to_come <= slots.capacity

    def _shrink(
        self, slots: CompactSlots, view: Compacted, at: tuple[int, int, int], excess: int
    ) -> None:
        """Evict about ``excess`` rows: blocks of prompt rows that no step needs by rule, those read
        longest ago."""
        row, i, h = at
        heads = view.layers[i]
        full = int(slots.counts[f"kv_rows_{i}"][row, h]) // BLOCK - RECENT
        pinned = np.isinf(slots.summaries[f"stats_{i}"][row, h, : max(full, 0), 1])
        prompt = heads.positions[h, : max(full, 0) * BLOCK].reshape(-1, BLOCK).min(1) >= 0
        free = np.flatnonzero(prompt & ~pinned)
        free = free[np.argsort(heads.read[h, free], kind="stable")][: -(-excess // BLOCK)]
        groups = heads.groups[h]
        groups += [np.zeros(0, np.int64)] * (slots.groups - len(groups))
        entries = np.array([e for e, g in enumerate(groups) if not len(g)], np.int64)[: len(free)]
        blocks = free[: len(entries)]
        for block, e in zip(blocks, entries, strict=True):
            groups[e] = heads.positions[h, block * BLOCK : (block + 1) * BLOCK].copy()
        left = slots.evict(row, i, h, blocks, entries)
        heads.positions[h, : len(left)] = heads.positions[h, left]
        heads.positions[h, len(left) :] = -1
        heads.read[h, slots.blocks + entries] = heads.read[h, blocks]
        stay = np.setdiff1d(np.arange(slots.blocks), blocks)
        heads.read[h, : len(stay)] = heads.read[h, stay]
        for rows in heads.own:
            rows[h] = np.searchsorted(left, rows[h])
        self._place(slots, view, row, i, h)

    def dense_again(self, seq: Sequence, target: SlotClass) -> bool:
        """Move a compacted sequence to a dense slot, everything as if it had never left."""
        view, slots, row = seq.compacted, seq.slots, seq.row
        assert view is not None
        assert isinstance(slots, CompactSlots)
        if view.lost:
            return False
        blocks = np.arange(-(-view.length // self.prefixes.block_size))
        arrays = self.prefixes.read_blocks(view.match, blocks)
        if arrays is None:
            return False
        to = target.allocate(seq)
        for n, (i, m) in enumerate(self._layers):
            heads = np.arange(m.num_kv_heads)
            for name, copy, held in zip(
                ("key", "value"), arrays[2 * n :][:2], slots.layer(row, i), strict=True
            ):
                to_rows = target.kv[f"past_{name}_{i}"][to]
                to_rows[:, : view.length] = copy[:, : view.length]
                for position, rows in enumerate(view.layers[i].own, view.length):
                    to_rows[:, position] = held[heads, rows]
        target.hold(to, np.array([view.length + view.steps]))
        for name, states in target.states.items():
            states[to] = slots.states[name][row]
        self.forget(seq)
        slots.release(seq)
        seq.slots = target
        target.activate(seq)
        seq.stream.usage.kv_dense += 1
        seq.stream.usage.kv_expansions += 1
        return True

    def forget(self, seq: Sequence) -> None:
        """Unpin the host copy, unless its cache is gone: another one's leases are others."""
        if seq.compacted is not None:
            if seq.compacted.host is self.prefixes.host_copy():
                self.prefixes.unpin(seq.compacted.match)
            seq.compacted = None


def _heads(made: CompactLayer, rows: int, slots: CompactSlots) -> CompactHeads:
    positions = np.full((len(made.positions), slots.capacity), -1, np.int64)
    for h, held in enumerate(made.positions):
        positions[h, : len(held)] = held
    read = np.full((len(positions), slots.blocks + slots.groups), -RETURN, np.int32)
    return CompactHeads(rows, made.groups, positions, read)
