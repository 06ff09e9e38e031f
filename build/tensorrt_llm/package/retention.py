"""Which K/V blocks a decode step reads: sinks, recent ones, and those that may weigh most.

A block's score for a query bounds every score in it: Σ_d max(q_d min_d, q_d max_d) over the block's
key range (Tang et al., "Quest", arXiv 2406.10774, eq. 2). Nothing is dropped: every step selects
anew, so what is read may grow again. Pages stay with TensorRT-LLM, whose KV compression is a closed
list of methods, none of them for models with linear states.
"""

from __future__ import annotations

import torch

from .settings import Sparse
from .step import Step, Storage


class Retention:
    """Selects blocks by key ranges; `select` is what ``HybridModel.hidden`` takes."""

    def __init__(self, sparse: Sparse, storage: Storage) -> None:
        self.sparse, self.storage = sparse, storage

    def select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor | None:
        """q [B, Hq, dk] → blocks [B, Hk, S] int32, -1 = none; None where all would be read."""
        keys = self.storage.keys[layer]
        count = (step.total_lens + step.page - 1).div(step.page, rounding_mode="floor")
        wide = step.block_table.shape[1]
        keep = self.sparse.sinks + self.sparse.recent + self.sparse.budget
        if wide <= keep:
            return None
        low, high = _ranges(keys, step)
        grouped = q.float().reshape(len(q), keys.shape[2], -1, q.shape[-1])
        bound = torch.maximum(
            torch.einsum("bhgd,bmhd->bhgmd", grouped, low),
            torch.einsum("bhgd,bmhd->bhgmd", grouped, high),
        ).sum(-1)
        score = bound.amax(2)  # [B, Hk, M]
        block = torch.arange(wide, device=q.device)
        always = (block < self.sparse.sinks) | (block >= count[:, None] - self.sparse.recent)
        score = score.masked_fill(always[:, None], torch.inf)
        score = score.masked_fill((block >= count[:, None])[:, None], -torch.inf)
        top = score.topk(keep, -1)
        return torch.where(top.values == -torch.inf, -1, top.indices).int()


def _ranges(keys: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest key [B, M, Hk, dk] of each block, over the rows in use."""
    rows = keys[step.block_table.long()].float()  # [B, M, page, Hk, dk]
    place = torch.arange(rows.shape[1] * rows.shape[2], device=keys.device)
    used = (place.reshape(1, *rows.shape[1:3]) < step.total_lens[:, None, None])[..., None, None]
    low = torch.where(used, rows, torch.inf).amin(2)
    high = torch.where(used, rows, -torch.inf).amax(2)
    empty = low > high  # blocks beyond the sequence
    return low.masked_fill(empty, 0), high.masked_fill(empty, 0)
