"""The mixers of a spec in PyTorch: one function and one row of ``MIXERS`` per kind.

They are what build/mixers/ writes as nodes, over packed rows [N, hidden] and with our ops. Matrix
products run in the weights' dtype; norms, gates, decays and states in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from engine_configs.mixers import AttentionMixer
from engine_configs.spec import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Lightning,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    ShortConv,
)
from plugins.compressed_sparse_attention.torch_op import (
    paged_attention,
    sparse_decode_attention,
    write_kv,
)
from plugins.linear_state_replay.torch_op import linear_state_replay

from .step import Step, Storage

Tensor = torch.Tensor
# (layer, queries [B, Hq, dk], step) → blocks read by each K/V head [B, Hk, S], or None: all.
Select = Callable[[int, Tensor, Step], Tensor | None]


@dataclass
class Context:
    """What a layer needs beside its input. decay_sums: Σ log-decay of this step [B, units]."""

    weights: Mapping[str, Tensor]
    step: Step
    storage: Storage
    select: Select | None = None
    decay_sums: dict[int, Tensor] = field(default_factory=dict)

    def linear(self, x: Tensor, path: str, *, bias: bool = False) -> Tensor:
        weight = self.weights[path]
        added = self.weights[f"{path}_bias"] if bias else None
        return F.linear(x.to(weight.dtype), weight, added).float()

    def rms_norm(self, x: Tensor, path: str, norm: Norm) -> Tensor:
        weight = self.weights[path].float() + norm.offset
        return F.rms_norm(x.float(), x.shape[-1:], weight, norm.eps)


def attention(c: Context, i: int, path: str, m: Attention, x: Tensor) -> Tensor:
    """K/V of the written rows goes to the pages; replayed rows read what is there."""
    new = x[c.step.written]
    q, k, v = (c.linear(t, f"{path}.{n}_proj") for n, t in (("q", x), ("k", new), ("v", new)))
    if m.qk_norm:
        q = _qk_norm(c, q, f"{path}.q_norm", m)
        k = _qk_norm(c, k, f"{path}.k_norm", m)
    q, k, v = (_heads(t, m.head_dim) for t in (q, k, v))
    if m.rope:
        q = _rotate(q, c.step.positions, m)
        k = _rotate(k, c.step.positions[c.step.written], m)
    keys, values = c.storage.keys[i], c.storage.values[i]
    write_kv(keys, values, c.step.kv_rows, k, v)
    o = _attend(c, i, m, q.to(keys.dtype), keys, values).float().flatten(1)
    if m.gated:
        o = o * c.linear(x, f"{path}.g_proj").sigmoid()
    return c.linear(o, f"{path}.o_proj", bias=m.out_bias)


def latent_attention(c: Context, i: int, path: str, m: LatentAttention, x: Tensor) -> Tensor:
    """Absorbed form, as in build/mixers/attention.py; V rows are K rows."""
    new = x[c.step.written]
    latent, shared = torch.split(c.linear(new, f"{path}.kv_a_proj"), [m.kv_rank, m.shared_dim], -1)
    k = torch.cat([c.rms_norm(latent, f"{path}.kv_norm", m.norm), shared], -1)[:, None]
    q = _heads(c.linear(x, f"{path}.q_proj"), m.nope_dim + m.shared_dim)
    nope, shared = torch.split(q, [m.nope_dim, m.shared_dim], -1)
    absorbed = torch.einsum("nhd,hdr->nhr", nope, c.weights[f"{path}.k_b"].float())
    q = torch.cat([absorbed, shared], -1)
    keys, values = c.storage.keys[i], c.storage.values[i]
    write_kv(keys, values, c.step.kv_rows, k, k)
    o = _attend(c, i, m, q.to(keys.dtype), keys, values).float()[..., : m.kv_rank]
    o = torch.einsum("nhr,hor->nho", o, c.weights[f"{path}.v_b"].float())
    return c.linear(o.flatten(1), f"{path}.o_proj")


def _attend(
    c: Context, i: int, m: AttentionMixer, q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    step = c.step
    selected = c.select(i, q, step) if c.select and step.decode else None
    o: Tensor
    if selected is not None:
        o, _ = sparse_decode_attention(
            q, keys, values, step.block_table, step.total_lens, selected, m.scale
        )
        return o
    o, _ = paged_attention(
        q, keys, values, step.block_table, step.starts, step.lengths, step.total_lens,
        step.max_length, m.scale, getattr(m, "window", None) or 0,
    )  # fmt: skip
    return o


def _qk_norm(c: Context, x: Tensor, path: str, m: Attention) -> Tensor:
    assert m.qk_norm is not None
    if m.qk_norm_over == "all":
        return c.rms_norm(x, path, m.qk_norm)
    return c.rms_norm(_heads(x, m.head_dim), path, m.qk_norm).flatten(-2)


def _rotate(x: Tensor, positions: Tensor, m: Attention) -> Tensor:
    """x [n, H, d]; the first 2 * len(inv_freq) dims turn, as two halves."""
    assert m.rope is not None
    half = len(m.rope.inv_freq)
    rates = torch.tensor(m.rope.inv_freq, dtype=torch.float32, device=x.device)
    angle = positions[:, None, None].float() * rates
    cos, sin = (t * m.rope.attention_factor for t in (angle.cos(), angle.sin()))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def gated_delta_net(c: Context, i: int, path: str, m: GatedDeltaNet, x: Tensor) -> Tensor:
    mixed = torch.cat([c.linear(x, f"{path}.{n}_proj") for n in ("q", "k", "v")], -1)
    mixed = F.silu(_causal_conv(c, i, path, mixed, m.conv_width))
    size = m.num_k_heads * m.key_dim
    q, k, v = torch.split(mixed, [size, size, m.num_v_heads * m.value_dim], -1)
    q, k = (_unit(_heads(t, m.key_dim)) for t in (q, k))
    dt = _dt(c, path, _projected(c, x, f"{path}.a", m.decay_rank))
    log_decay = _log_decay(c, i, path, dt, m.units() // m.num_v_heads)
    if m.decay_rank:
        log_decay = _heads(log_decay, m.key_dim)
    beta = c.linear(x, f"{path}.b_proj").sigmoid() * m.beta_scale
    o = _replay(c, i, q, k, _heads(v, m.value_dim), log_decay, beta, m.key_dim**-0.5)
    o = c.rms_norm(o, f"{path}.o_norm", Norm(m.norm_eps)).flatten(1)
    gate = _projected(c, x, f"{path}.g", m.gate_rank)
    gate = F.silu(gate) if m.gate == "silu" else gate.sigmoid()
    return c.linear(o * gate, f"{path}.o_proj")


def mamba2(c: Context, i: int, path: str, m: Mamba2, x: Tensor) -> Tensor:
    sizes = [m.inner, m.conv_channels, m.num_heads]
    z, mixed, dt = torch.split(c.linear(x, f"{path}.in_proj"), sizes, -1)
    mixed = F.silu(_causal_conv(c, i, path, mixed, m.conv_width, bias=m.conv_bias))
    groups = m.num_groups * m.state_size
    inner, k, q = torch.split(mixed, [m.inner, groups, groups], -1)
    dt = _dt(c, path, dt).clamp(m.dt_min, m.dt_max)
    log_decay = _log_decay(c, i, path, dt, 1)
    heads = _heads(inner, m.head_dim)
    q, k = (_heads(t, m.state_size) for t in (q, k))
    o = _replay(c, i, q, k, heads * dt[..., None], log_decay, None, 1.0)
    o = (o + heads * c.weights[f"{path}.D"].float()[:, None]).flatten(1)
    return c.linear(_gated_norm(c, path, m, o, F.silu(z)), f"{path}.o_proj")


def _gated_norm(c: Context, path: str, m: Mamba2, o: Tensor, gate: Tensor) -> Tensor:
    if m.norm is None:
        return o * gate
    if not m.norm_before_gate:
        o = o * gate
    grouped = _heads(o, m.inner // m.num_groups)
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=m.norm.eps).flatten(1)
    o = normed * c.weights[f"{path}.o_norm"].float()
    return o * gate if m.norm_before_gate else o


def lightning(c: Context, i: int, path: str, m: Lightning, x: Tensor) -> Tensor:
    q, k, v = (F.silu(_heads(c.linear(x, f"{path}.{n}_proj"), m.head_dim)) for n in ("q", "k", "v"))
    rates = torch.tensor(m.log_decay, dtype=torch.float32, device=x.device)
    log_decay = _summed(c, i, rates.expand(len(x), -1))
    o = _replay(c, i, q, k, v, log_decay, None, 1.0).flatten(1)
    o = c.rms_norm(o, f"{path}.o_norm", m.norm)
    return c.linear(o * c.linear(x, f"{path}.g_proj").sigmoid(), f"{path}.o_proj")


def short_conv(c: Context, i: int, path: str, m: ShortConv, x: Tensor) -> Tensor:
    b, gate, inner = c.linear(x, f"{path}.in_proj").chunk(3, -1)
    return c.linear(gate * _causal_conv(c, i, path, b * inner, m.conv_width), f"{path}.o_proj")


def mlp(c: Context, i: int, path: str, m: Mlp, x: Tensor) -> Tensor:
    inner = c.linear(x, f"{path}.up_proj", bias=m.bias)
    act = _ACTIVATIONS[m.activation]
    inner = act(c.linear(x, f"{path}.gate_proj", bias=m.bias)) * inner if m.gated else act(inner)
    return c.linear(inner, f"{path}.down_proj", bias=m.bias)


def moe(c: Context, i: int, path: str, m: Moe, x: Tensor) -> Tensor:
    """Every expert runs once, over the rows that chose it."""
    chosen, weights = _route(c, path, m, x)
    total = torch.zeros_like(x)
    in_proj, down_proj = (c.weights[f"{path}.experts.{n}_proj"] for n in ("in", "down"))
    act = _ACTIVATIONS[m.activation]
    for e in torch.unique(chosen).tolist():
        row, place = (chosen == e).nonzero(as_tuple=True)
        inner = F.linear(x[row].to(in_proj.dtype), in_proj[e]).float()
        if m.gated:
            gate, up = inner.chunk(2, -1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        out = F.linear(inner.to(down_proj.dtype), down_proj[e]).float()
        total.index_add_(0, row, out * weights[row, place, None])
    if m.shared:
        shared = mlp(c, i, f"{path}.shared", m.shared, x)
        if m.shared_gate:
            shared = shared * c.linear(x, f"{path}.shared_gate").sigmoid()
        total = total + shared
    return total


def _route(c: Context, path: str, m: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen experts [N, top_k] and their weights [N, top_k]."""
    logits = c.linear(x, f"{path}.router")
    scores = logits.softmax(-1) if m.scoring == "softmax" else logits.sigmoid()
    ranked = scores + c.weights[f"{path}.correction"].float() if m.correction else scores
    if m.num_groups > 1:
        groups = _heads(ranked, m.num_experts // m.num_groups)
        best = groups.topk(2, -1).values.sum(-1).topk(m.top_groups, -1).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        ranked = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = ranked.topk(m.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if m.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * m.scale


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _causal_conv(
    c: Context, i: int, path: str, x: Tensor, width: int, *, bias: bool = False
) -> Tensor:
    """Depthwise causal convolution of x [N, channels]; the last W-1 inputs stay in the state."""
    state = c.storage.conv[i]
    past = state[c.step.slots.long()].float()
    joined = torch.cat([past.flatten(0, 1), x])
    weight = c.weights[f"{path}.conv"].float()
    y = torch.einsum("nwc,cw->nc", joined[c.step.conv_sources(width)], weight)
    state[c.step.slots.long()] = joined[c.step.conv_tail(width)].to(state.dtype)
    return y + c.weights[f"{path}.conv_bias"].float() if bias else y


def _replay(
    c: Context,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    scale: float,
) -> Tensor:
    rule = "gated" if beta is None else "gated_delta"
    q, k, v = (t.to(c.weights["embed"].dtype) for t in (q, k, v))
    o: Tensor = linear_state_replay(
        q, k, v, c.storage.recurrent[i], log_decay.contiguous(), beta, c.step.starts,
        c.step.lengths, c.step.slots, c.step.max_length, rule, scale,
    )  # fmt: skip
    return o.float()


def _projected(c: Context, x: Tensor, path: str, rank: int) -> Tensor:
    if not rank:
        return c.linear(x, f"{path}_proj")
    return c.linear(c.linear(x, f"{path}_a_proj"), f"{path}_b_proj")


def _dt(c: Context, path: str, x: Tensor) -> Tensor:
    return F.softplus(x + c.weights[f"{path}.dt_bias"].float())


def _log_decay(c: Context, i: int, path: str, dt: Tensor, repeats: int) -> Tensor:
    rate = -c.weights[f"{path}.A_log"].float().exp()
    return _summed(c, i, dt * rate.repeat_interleave(repeats))


def _summed(c: Context, i: int, log_decay: Tensor) -> Tensor:
    total = log_decay.new_zeros(len(c.step.lengths), log_decay.shape[-1])
    c.decay_sums[i] = total.index_add_(0, c.step.sequence, log_decay)
    return log_decay


def _heads(x: Tensor, size: int) -> Tensor:
    """[..., H * size] → [..., H, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)  # x may have no rows


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


# Each takes (context, layer, path, mixer, x [N, hidden]) and returns [N, hidden].
MIXERS: dict[type, Callable[..., Tensor]] = {
    Attention: attention,
    LatentAttention: latent_attention,
    GatedDeltaNet: gated_delta_net,
    Mamba2: mamba2,
    Lightning: lightning,
    ShortConv: short_conv,
    Mlp: mlp,
    Moe: moe,
}
