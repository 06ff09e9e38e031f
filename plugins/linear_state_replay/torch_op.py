"""``hybrid::linear_state_replay`` for PyTorch: importing this module registers the op.

Sequences are packed one after the other and their states live in rows of a pool, as serving engines
keep them. On a CPU the op is ``ref.py`` itself, on a GPU the kernels of ``kernel.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from plugins.linear_state_replay import ref


@torch.library.custom_op(
    "hybrid::linear_state_replay", mutates_args=("states",), device_types="cpu"
)
def linear_state_replay(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    states: torch.Tensor,
    log_decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    max_length: int,
    update_rule: str,
    scale: float,
) -> torch.Tensor:
    """Run the recurrence over B packed sequences of N tokens in all; states change in place.

    q, k [N, Hq, dk], v [N, Hv, dv]; states [S, Hv, dk, dv] fp32, contiguous; log_decay [N, Hv] or
    [N, Hv, dk] and beta [N, Hv], fp32, where the rule has them. Sequence b is the rows starts[b] ..
    starts[b] + lengths[b] (at most ``max_length`` of them) and carries the state of row slots[b];
    starts, lengths, slots [B] int32. Returns o [N, Hv, dv], zero outside the sequences on a CPU
    and unwritten there on a GPU.
    """
    o = torch.zeros_like(v)
    for first, count, slot in zip(starts.tolist(), lengths.tolist(), slots.tolist(), strict=True):
        rows = slice(first, first + count)
        out, present = ref.linear_state_replay(
            q[rows][None].double().numpy(),
            k[rows][None].double().numpy(),
            v[rows][None].double().numpy(),
            states[slot][None].numpy(),
            None if log_decay is None else log_decay[rows][None].numpy(),
            None if beta is None else beta[rows][None].numpy(),
            update_rule=update_rule,
            scale=scale,
        )
        o[rows] = torch.from_numpy(out[0]).to(o.dtype)
        states[slot] = torch.from_numpy(present[0]).to(states.dtype)
    return o


@linear_state_replay.register_fake
def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(v)


@linear_state_replay.register_kernel("cuda")
def _on_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    states: torch.Tensor,
    log_decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    max_length: int,
    update_rule: str,
    scale: float,
) -> torch.Tensor:
    from plugins.linear_state_replay import kernel

    q, k, v = (t.contiguous()[None] for t in (q, k, v))
    log_decay, beta = (None if t is None else t.contiguous()[None] for t in (log_decay, beta))
    o, _ = kernel.linear_state_replay(
        q, k, v, states, log_decay, beta, update_rule=update_rule, scale=scale,
        present_state=states, starts=starts, lengths=lengths, slots=slots, max_length=max_length,
    )  # fmt: skip
    return o[0]
