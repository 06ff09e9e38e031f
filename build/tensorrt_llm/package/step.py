"""What one forward pass works on: packed sequences, their pages and their rows of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine_configs.spec import HybridSpec


@dataclass(frozen=True)
class Step:
    """B sequences, packed: sequence b is the rows starts[b] .. starts[b] + lengths[b] of N tokens.

    positions [N]; total_lens [B]: tokens visible to each sequence's last query; block_table [B, M]:
    pages of each; slots [B]: rows of the states; written [W]: rows of the N whose K/V is stored, at
    kv_rows [W] (page * page size + place). Rows that are not written are a replay: they read the
    K/V that is cached for them. All int32 but positions, written and kv_rows.
    """

    positions: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    total_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    written: torch.Tensor
    kv_rows: torch.Tensor
    max_length: int
    decode: bool
    page: int

    @cached_property
    def sequence(self) -> torch.Tensor:
        """Sequence [N] of each row."""
        number = torch.arange(len(self.lengths), device=self.lengths.device)
        return number.repeat_interleave(self.lengths)

    def conv_sources(self, width: int) -> torch.Tensor:
        """Rows [N, width] that the taps of a causal convolution read, oldest first, in
        ``[states of the B sequences, width - 1 rows each | the N rows]``."""
        offset = torch.arange(len(self.positions), device=self.lengths.device)
        offset = offset - self.starts[self.sequence]
        return self._rows(self.sequence[:, None], offset[:, None] - width + 1, width)

    def conv_tail(self, width: int) -> torch.Tensor:
        """Rows [B, width - 1] that are the states after this step, numbered likewise."""
        number = torch.arange(len(self.lengths), device=self.lengths.device)
        return self._rows(number[:, None], self.lengths[:, None] - width + 1, width - 1, width)

    def _rows(
        self, b: torch.Tensor, first: torch.Tensor, count: int, width: int = 0
    ) -> torch.Tensor:
        """``count`` rows of sequences b [n, 1] from their token ``first`` [n, 1] on; those before
        token 0 are in the state."""
        past = (width or count) - 1
        token = first + torch.arange(count, device=first.device)
        new = len(self.lengths) * past + self.starts[b] + token
        return torch.where(token < 0, b * past + past + token, new)


def make_step(
    lengths: Sequence[int],
    starts_at: Sequence[int],
    write_from: Sequence[int],
    block_table: Sequence[Sequence[int]],
    slots: Sequence[int],
    page: int,
    device: torch.device | str = "cpu",
) -> Step:
    """``lengths`` tokens of each sequence from its position ``starts_at`` on; K/V of positions
    before ``write_from`` is cached and stays as it is."""
    positions, written, kv_rows, starts = list[int](), list[int](), list[int](), list[int]()
    for length, start, keep, pages in zip(lengths, starts_at, write_from, block_table, strict=True):
        starts.append(len(positions))
        for position in range(start, start + length):
            if position >= keep:
                written.append(len(positions))
                kv_rows.append(pages[position // page] * page + position % page)
            positions.append(position)
    wide = max(map(len, block_table))
    table = [[*pages, *[0] * (wide - len(pages))] for pages in block_table]

    def ints(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    totals = [s + n for s, n in zip(starts_at, lengths, strict=True)]
    small = torch.int32
    return Step(
        ints(positions, torch.int64),
        ints(starts, small),
        ints(lengths, small),
        ints(totals, small),
        ints(table, small),
        ints(slots, small),
        ints(written, torch.int64),
        ints(kv_rows, torch.int64),
        max(lengths),
        all(n == 1 for n in lengths),
        page,
    )


@dataclass
class Storage:
    """K/V pools by attention layer [P, page, Hk, d], conv [S, W-1, channels] and recurrent
    [S, Hv, dk, dv] (always fp32) states by layer; written in place."""

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @classmethod
    def states(
        cls, spec: HybridSpec, slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Storage:
        """Zero states, and no pools yet."""
        conv, recurrent = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for i, m in spec.state_layers():
            if shape := m.conv_state():
                conv[i] = torch.zeros(slots, *shape, dtype=dtype, device=device)
            if shape := m.recurrent_state():
                recurrent[i] = torch.zeros(slots, *shape, device=device)
        return cls({}, {}, conv, recurrent)

    def add_pools(
        self, spec: HybridSpec, pages: int, page: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        """Pools of its own, for tests and for engines that bring none."""
        for i, m in spec.attention_layers():
            shape = (pages, page, m.num_kv_heads)
            self.keys[i] = torch.zeros(*shape, m.head_dim, dtype=dtype, device=device)
            self.values[i] = torch.zeros(*shape, m.head_dim, dtype=dtype, device=device)
