"""A sequence's own, smaller view of its K/V: compacted after prefill, grown when a step asks.

The prompt's K/V stays in the prefix cache, pinned: that is the host copy from which evicted rows
come back, and what the next request with the same prefix hits in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec
from plugins.compressed_sparse_attention.ref import BLOCK
from serving.engine.compact_slots import GROUP, RECENT, CompactSlots
from serving.engine.requests import Request
from serving.engine.slots import SlotClass
from serving.kv_compression.bounds import rows_within
from serving.kv_compression.compact import CompactLayer, compact
from serving.kv_compression.config import CompressionConfig
from serving.kv_compression.history import AttentionHistory
from serving.kv_compression.retention import ReasoningAware, outstanding
from serving.prefix_cache import Match

if TYPE_CHECKING:
    from serving.engine.path import Sequence
    from serving.engine.prefix import Prefixes

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]
# One query in this many shows what a prompt's tokens look at; of its last ones, each.
EVERY, LAST = 16, 32
SINKS = 4
# Free slot rows for what comes back, over what is kept.
HEADROOM = 0.25
POLICY = ReasoningAware()


class Watch:
    """What the queries of a prompt [n] look at, by attention layer."""

    def __init__(self, spec: HybridSpec, length: int) -> None:
        self._layers, self._length, self.seen = spec.attention_layers(), length, 0
        self.history = {
            i: AttentionHistory(m.num_kv_heads, length, m.scale, LAST) for i, m in self._layers
        }

    def observe(self, seq: Sequence, start: int, found: Mapping[str, Floats]) -> None:
        """Queries [1, T, Hq*dk] of tokens start.. of a prefill or replay that has just run."""
        slots, row = seq.slots, seq.row
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
    of each of these; read [Hk, C / 32]: the last step that read a slot block."""

    rows: int
    groups: list[list[Positions]]
    positions: Positions
    read: NDArray[np.int32]
    own: list[NDArray[np.int32]] = field(default_factory=list)


@dataclass(eq=False)
class Compacted:
    """A compacted sequence. match: its prompt of ``length`` tokens, pinned; layers[i]: its heads in
    attention layer i; stuck: what its steps ask for cannot be had."""

    match: Match
    length: int
    layers: dict[int, CompactHeads]
    steps: int = 0
    stuck: bool = False


@dataclass(frozen=True)
class Wanted:
    """Evicted groups that a step of the sequence in ``row`` would have read."""

    row: int
    layer: int
    head: int
    entries: list[int]
    positions: Positions


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
            i: rows_within(config.budget, length, m.head_dim, m.head_dim, GROUP)
            for i, m in self._layers
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
        view = Compacted(match, length, {})
        kept = dense = 0
        for i, m in self._layers:
            keys, values = (source.kv[f"past_{n}_{i}"][row, :, :length] for n in ("key", "value"))
            stats = watch.history[i].stats(keys, values, length)
            pinned = outstanding(stats, POLICY.distinct, POLICY.heavy)
            pinned[:, :SINKS] = True
            made = compact(
                stats, POLICY.scores(stats), pinned, rows[i], *target.layer(to, i),
                group=GROUP, max_groups=target.groups, sound=sound,
            )  # fmt: skip
            target.take(to, i, made)
            view.layers[i] = _heads(made, rows[i], target)
            kept += int(made.rows().sum()) * 8 * m.head_dim + made.summary_bytes()
            dense += m.num_kv_heads * length * 8 * m.head_dim
        for name, states in target.states.items():
            states[to] = source.states[name][row]
        usage.kv_kept, usage.kv_freed_bytes, usage.derived = kept / dense, dense - kept, True
        return view

    def asked(
        self, slots: CompactSlots, batch: list[Any], found: Mapping[str, NDArray[Any]]
    ) -> list[Wanted]:
        """Evicted groups that a step would have read."""
        wanted = []
        for i, _ in self._layers:
            chosen = found[f"chosen_{i}"][:, :, slots.blocks :]
            for row, head in np.argwhere(chosen.any(2)).tolist():
                view = batch[row].compacted
                groups = [] if view.stuck else view.layers[i].groups[head]
                entries = np.flatnonzero(chosen[row, head, : len(groups)]).tolist()
                if entries := [e for e in entries if len(groups[e])]:
                    positions = np.concatenate([groups[e] for e in entries])
                    wanted.append(Wanted(row, i, head, entries, positions))
        return wanted

    def fetch(self, slots: CompactSlots, batch: list[Any], wanted: list[Wanted]) -> list[int]:
        """Bring groups back from the host copy, in place of what was read longest ago where there
        is no room; returns the rows of sequences for which that was not possible."""
        failed = []
        for row in sorted({w.row for w in wanted}):
            seq, mine = batch[row], [w for w in wanted if w.row == row]
            to_come = seq.request.sampling.max_tokens - seq.stream.usage.generated_tokens
            fits = all(self._make_room(slots, seq.compacted, w, to_come) for w in mine)
            if not (fits and self._bring_back(slots, seq.compacted, mine)):
                failed.append(row)
                continue
            seq.stream.usage.kv_fetched += 1
            seq.stream.usage.kv_expansions += 1
        return failed

    def _make_room(self, slots: CompactSlots, view: Compacted, w: Wanted, to_come: int) -> bool:
        """For the rows of ``w`` and the tokens to come; the kept set shrinks to what it is meant to
        be where it has outgrown that."""
        held = int(slots.counts[f"kv_rows_{w.layer}"][w.row, w.head])
        need = held + len(w.positions) + to_come
        meant = int(view.layers[w.layer].rows * (1 + HEADROOM))
        excess = max(need - slots.capacity, held + len(w.positions) - meant)
        return excess <= 0 or self._shrink(slots, view, w, excess) or need <= slots.capacity

    def _shrink(self, slots: CompactSlots, view: Compacted, w: Wanted, excess: int) -> bool:
        """Evict blocks of prompt rows that no step needs by rule and none read lately; True where
        ``excess`` rows went."""
        heads, h = view.layers[w.layer], w.head
        full = int(slots.counts[f"kv_rows_{w.layer}"][w.row, h]) // BLOCK - RECENT
        pinned = np.isinf(slots.summaries[f"stats_{w.layer}"][w.row, h, : max(full, 0), 1])
        prompt = heads.positions[h, : max(full, 0) * BLOCK].reshape(-1, BLOCK).min(1) >= 0
        free = np.flatnonzero(prompt & ~pinned)
        free = free[np.argsort(heads.read[h, free], kind="stable")][: -(-excess // BLOCK)]
        groups = heads.groups[h]
        groups += [np.zeros(0, np.int64)] * (slots.groups - len(groups))
        entries = np.array([e for e, g in enumerate(groups) if not len(g)], np.int64)[: len(free)]
        blocks = free[: len(entries)]
        for block, e in zip(blocks, entries, strict=True):
            groups[e] = heads.positions[h, block * BLOCK : (block + 1) * BLOCK].copy()
        left = slots.evict(w.row, w.layer, h, blocks, entries)
        heads.positions[h, : len(left)] = heads.positions[h, left]
        heads.positions[h, len(left) :] = -1
        stay = np.setdiff1d(np.arange(heads.read.shape[1]), blocks)
        heads.read[h, : len(stay)] = heads.read[h, stay]
        for rows in heads.own:
            rows[h] = np.searchsorted(left, rows[h])
        return len(blocks) * BLOCK >= excess

    def _bring_back(self, slots: CompactSlots, view: Compacted, wanted: list[Wanted]) -> bool:
        size = self.prefixes.block_size
        blocks = np.unique(np.concatenate([w.positions for w in wanted]) // size)
        arrays = self.prefixes.read_blocks(view.match, blocks)
        if arrays is None:
            return False
        at = {i: 2 * n for n, (i, _) in enumerate(self._layers)}
        for w in wanted:
            heads = view.layers[w.layer]
            places = np.searchsorted(blocks, w.positions // size) * size + w.positions % size
            keys, values = (a[w.head, places] for a in arrays[at[w.layer] :][:2])
            start = slots.bring_back(w.row, w.layer, w.head, w.entries, keys, values)
            heads.positions[w.head, start : start + len(places)] = w.positions
            heads.read[w.head, start // BLOCK : (start + len(places)) // BLOCK + 1] = view.steps
            for e in w.entries:
                heads.groups[w.head][e] = np.zeros(0, np.int64)
        return True

    def stepped(self, slots: CompactSlots, batch: list[Any], found: Mapping[str, Any]) -> None:
        """Note where the rows of this step's tokens went, and how it was answered."""
        for row, seq in enumerate(batch):
            usage, view = seq.stream.usage, seq.compacted
            view.steps += 1
            for i, heads in view.layers.items():
                rows = slots.counts[f"kv_rows_{i}"][row]
                heads.own.append(rows - 1)
                heads.read[found[f"chosen_{i}"][row, :, : slots.blocks] > 0] = view.steps
                read = found[f"rows_read_{i}"][row]
                usage.kv_rows_read += int(read.sum())
                usage.kv_rows_held += int(rows.sum())
                usage.kv_all_read += int((read == rows).sum())
                usage.kv_error = max(usage.kv_error, float(found[f"error_bound_{i}"][row].max()))

    def dense_again(self, seq: Sequence, target: SlotClass) -> bool:
        """Move a compacted sequence to a dense slot, everything as if it had never left."""
        view, slots, row = seq.compacted, seq.slots, seq.row
        assert view is not None
        assert isinstance(slots, CompactSlots)
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
        """Unpin the host copy."""
        if seq.compacted is not None:
            self.prefixes.unpin(seq.compacted.match)
            seq.compacted = None


def _heads(made: CompactLayer, rows: int, slots: CompactSlots) -> CompactHeads:
    positions = np.full((len(made.positions), slots.capacity), -1, np.int64)
    for h, held in enumerate(made.positions):
        positions[h, : len(held)] = held
    return CompactHeads(
        rows, made.groups, positions, np.zeros((len(positions), slots.blocks), np.int32)
    )
