"""Which rows of a head stay together in a slot, and which go together."""

from __future__ import annotations

import numpy as np

from plugins.compressed_sparse_attention.ref import BLOCK
from serving.kv_compression.grouping import Floats, Rows, clusters, features, similar_groups
from serving.kv_compression.history import Mask, Stats
from serving.kv_compression.summaries import Seen, summarise_groups

# Of the rows a head may keep: left for groups that would be asked for first.
_SECOND_LOOK = 0.15


def arrange(
    stats: Stats,
    head: int,
    seen: Seen,
    scores: Floats,
    pinned: Mask,
    rows: int,
    group: int,
    recent: int,
    max_groups: int | None,
) -> tuple[Rows, int, list[Rows]]:
    """Slot order of the rows that stay, how many of them come first and are pinned (filled up to
    whole blocks with the best of the others), and the groups of those that go."""
    body = np.arange(max(stats.length - recent, 0))
    tail = np.arange(len(body), stats.length)
    always, rest = body[pinned[body]], body[~pinned[body]]
    best = np.argsort(-scores[rest], kind="stable")[: -len(always) % BLOCK]
    always, rest = np.concatenate([always, rest[best]]), np.delete(rest, best)
    if not len(rest):
        return np.concatenate([always, tail]), len(always), []
    x = features(stats.keys[head, rest], stats.values[head, rest], stats.queries[head])
    label = clusters(x)
    free = max(0, rows - len(always) - len(tail))
    reserve = int(free * _SECOND_LOOK)
    blocks = (free - reserve) // BLOCK
    share = _blocks_by_cluster(scores[rest], label, blocks)
    order = np.lexsort((-scores[rest], label))
    first = np.cumsum(np.bincount(label)) - np.bincount(label)
    stays = np.arange(len(order)) - first[label[order]] < share[label[order]] * BLOCK
    stay, go = order[stays], order[~stays]
    kept = [stay[g] for g in similar_groups(x[stay], BLOCK, label=label[stay])]
    gone = [go[g] for g in similar_groups(x[go], group, step=4, label=label[go])]
    more = free // BLOCK - blocks
    back = _second_look(stats, head, seen, [rest[g] for g in gone], more * BLOCK)
    if back:
        stay = np.concatenate([gone[e] for e in back])
        gone = [g for e, g in enumerate(gone) if e not in back]
        # Whole blocks of similar rows again; what is left over goes.
        made = [stay[g] for g in similar_groups(x[stay], BLOCK)]
        whole = sum(len(g) == BLOCK for g in made[:more])
        kept, gone = kept + made[:whole], gone + made[whole:]
    groups = [np.sort(rest[g]) for g in gone]
    _merge(groups, max_groups)
    order = np.concatenate([always, *(rest[g] for g in kept), tail])
    return order, len(always), groups


def _second_look(
    stats: Stats, head: int, seen: Seen, groups: list[Rows], reserve: int
) -> list[int]:
    """Of groups that would go: those, ``reserve`` rows or a little more, that stay after all, since
    recent queries would have asked for them most."""
    if not groups or not reserve:
        return []
    made = summarise_groups(stats.keys[head], stats.values[head], groups)
    sizes = np.array([len(g) for g in groups])
    order = np.argsort(-seen.judge(groups, *made)[1] / sizes)
    before = np.cumsum(sizes[order]) - sizes[order]
    return sorted(order[before < reserve].tolist())


def _merge(groups: list[Rows], most: int | None) -> None:
    """Join neighbours, the smallest pair first, until there are at most ``most``."""
    while most is not None and len(groups) > max(most, 1):
        sizes = np.array([len(g) for g in groups])
        i = int(np.argmin(sizes[:-1] + sizes[1:]))
        groups[i : i + 2] = [np.concatenate(groups[i : i + 2])]


def _blocks_by_cluster(scores: Floats, label: Rows, blocks: int) -> Rows:
    """[clusters]: whole blocks of each that stay: as many as the ``blocks`` * 32 best rows would
    take, remainders given to those with the largest."""
    top = np.argsort(-scores, kind="stable")[: blocks * BLOCK]
    size = int(label.max(initial=-1)) + 1
    wanted = np.bincount(label[top], minlength=size)
    share = wanted // BLOCK
    room = np.bincount(label, minlength=size) // BLOCK - share
    more = np.argsort(-(wanted % BLOCK) * (room > 0), kind="stable")
    share[more[: min(blocks - share.sum(), (room > 0).sum())]] += 1
    return np.asarray(share, np.int64)
