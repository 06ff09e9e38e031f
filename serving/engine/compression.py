"""A sequence's own, smaller view of its K/V: compacted after prefill, grown when a step asks.

The prompt's K/V stays in the prefix cache, pinned: that is the host copy from which evicted rows
come back, and what the next request with the same prefix hits in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec
from serving.engine.compact_slots import GROUP, CompactSlots
from serving.engine.requests import Request
from serving.engine.slots import SlotClass
from serving.kv_compression.bounds import rows_within
from serving.kv_compression.compact import compact
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
class Compacted:
    """A compacted sequence. match: its prompt of ``length`` tokens, pinned; groups[i][h][e]:
    positions of an evicted group of layer i, emptied when it is back; own[i]: slot rows [Hk] of
    each token made since; stuck: what its steps ask for cannot be had."""

    match: Match
    length: int
    groups: dict[int, list[list[Positions]]]
    own: dict[int, list[NDArray[np.int32]]]
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
        view = Compacted(match, length, {}, {i: [] for i, _ in self._layers})
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
            view.groups[i] = made.groups
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
                groups = [] if view.stuck else view.groups[i][head]
                entries = np.flatnonzero(chosen[row, head, : len(groups)]).tolist()
                if entries := [e for e in entries if len(groups[e])]:
                    positions = np.concatenate([groups[e] for e in entries])
                    wanted.append(Wanted(row, i, head, entries, positions))
        return wanted

    def fetch(self, slots: CompactSlots, batch: list[Any], wanted: list[Wanted]) -> list[int]:
        """Bring groups back from the host copy; returns the rows of sequences whose slot is too
        small for that, or whose host copy is gone."""
        failed = []
        for row in sorted({w.row for w in wanted}):
            seq, mine = batch[row], [w for w in wanted if w.row == row]
            to_come = seq.request.sampling.max_tokens - seq.stream.usage.generated_tokens
            fits = all(len(w.positions) <= slots.room(row, w.layer)[w.head] - to_come for w in mine)
            if not (fits and self._bring_back(slots, seq.compacted, mine)):
                failed.append(row)
                continue
            seq.stream.usage.kv_fetched += 1
            seq.stream.usage.kv_expansions += 1
        return failed

    def _bring_back(self, slots: CompactSlots, view: Compacted, wanted: list[Wanted]) -> bool:
        size = self.prefixes.block_size
        blocks = np.unique(np.concatenate([w.positions for w in wanted]) // size)
        arrays = self.prefixes.read_blocks(view.match, blocks)
        if arrays is None:
            return False
        at = {i: 2 * n for n, (i, _) in enumerate(self._layers)}
        for w in wanted:
            places = np.searchsorted(blocks, w.positions // size) * size + w.positions % size
            keys, values = (a[w.head, places] for a in arrays[at[w.layer] :][:2])
            slots.bring_back(w.row, w.layer, w.head, w.entries, keys, values)
            for e in w.entries:
                view.groups[w.layer][w.head][e] = np.zeros(0, np.int64)
        return True

    def stepped(self, slots: CompactSlots, batch: list[Any], found: Mapping[str, Any]) -> None:
        """Note where the rows of this step's tokens went, and how it was answered."""
        for row, seq in enumerate(batch):
            usage = seq.stream.usage
            for i, _ in self._layers:
                rows = slots.counts[f"kv_rows_{i}"][row]
                seq.compacted.own[i].append(rows - 1)
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
        made = len(next(iter(view.own.values())))
        for n, (i, m) in enumerate(self._layers):
            heads = np.arange(m.num_kv_heads)
            for name, copy, held in zip(
                ("key", "value"), arrays[2 * n :][:2], slots.layer(row, i), strict=True
            ):
                to_rows = target.kv[f"past_{name}_{i}"][to]
                to_rows[:, : view.length] = copy[:, : view.length]
                for position, rows in enumerate(view.own[i], view.length):
                    to_rows[:, position] = held[heads, rows]
        target.hold(to, np.array([view.length + made]))
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
