"""A hybrid model in plain torch around our kernels, with random weights: what perf.gpu times.

One sequence. Its K/V rows lie in pages, its linear states in rows, as an engine keeps them. A run
is one step of an engine: a prefill chunk, a replay (queries read the cached K/V, write none, and
their K and V are not even projected) or a single token. Everything is in bf16 but the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine_configs.spec import Attention, GatedDeltaNet, HybridSpec, Mamba2, Mixer, Mlp, Norm
from plugins.compressed_sparse_attention.kernel import append_rows, attend
from plugins.linear_state_replay.kernel import linear_state_replay

PAGE = 32
Tensors = dict[str, torch.Tensor]


@triton.jit
def _conv_silu(
    x, weight, out, T, channels, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """out [T, C] = silu(causal convolution) of x [W - 1 + T, C] with weight [W, C]."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (c < channels)[None, :]
    acc = tl.zeros([BT, BC], tl.float32)
    for w in tl.range(0, W):
        place = (t + w).to(tl.int64)[:, None] * channels + c[None, :]
        taps = tl.load(weight + w * channels + c, mask=c < channels, other=0.0).to(tl.float32)
        acc += tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * taps[None, :]
    place = t.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out + place, (acc / (1 + tl.exp(-acc))).to(out.dtype.element_ty), mask=inside)


@dataclass
class Layer:
    """One residual block: its mixer, fused input projection and what it keeps of the sequence."""

    mixer: Mixer
    pre_norm: Norm | None
    post_norm: Norm | None
    weights: Tensors
    split: list[int] = field(default_factory=list)
    state: torch.Tensor | None = None
    conv: torch.Tensor | None = None
    pools: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Step:
    """``count`` tokens up to position ``total``; ``ready``: called with the number of an attention
    layer before it reads its K/V."""

    count: int
    total: int
    append: bool
    total_lens: torch.Tensor
    block_table: torch.Tensor
    ready: Callable[[int], None]


class Model:
    """``spec``'s first ``num_layers`` layers; room for ``max_tokens``."""

    def __init__(self, spec: HybridSpec, device: str, max_tokens: int, num_layers: int) -> None:
        self.spec, self.device = spec, device
        self.layers = [
            self._layer(block.mixer, block.pre_norm, block.post_norm)
            for blocks in spec.layers[:num_layers]
            for block in blocks
        ]
        self.embed = self._random(spec.vocab_size, spec.hidden_size)
        self.head = self._random(spec.vocab_size, spec.hidden_size)
        pages = -(-max_tokens // PAGE)
        order = torch.randperm(pages, device=device, dtype=torch.int32)
        self.block_table = order[None].contiguous()
        for layer in self.attention_layers():
            assert isinstance(layer.mixer, Attention)
            shape = (pages, PAGE, layer.mixer.num_kv_heads, layer.mixer.head_dim)
            layer.pools = (self._random(*shape), self._random(*shape))
        self.reset()

    def attention_layers(self) -> list[Layer]:
        return [x for x in self.layers if isinstance(x.mixer, Attention)]

    def reset(self) -> None:
        """Zero states: the start of a sequence, or of a replay."""
        for layer in self.layers:
            if shape := layer.mixer.recurrent_state():
                layer.state = torch.zeros(1, *shape, device=self.device)
            if shape := layer.mixer.conv_state():
                layer.conv = torch.zeros(shape, device=self.device, dtype=torch.bfloat16)

    def state_bytes(self) -> int:
        states = [x.state for x in self.layers if x.state is not None]
        return sum(4 * s.numel() for s in states)

    def run(
        self,
        tokens: torch.Tensor,
        total: int,
        *,
        append: bool,
        ready: Callable[[int], None] = lambda _: None,
    ) -> torch.Tensor:
        """Run tokens [T], the last at position total - 1; returns the logits [V] of the last."""
        lens = torch.tensor([total], device=self.device, dtype=torch.int32)
        step = Step(len(tokens), total, append, lens, self.block_table, ready)
        x, attention = F.embedding(tokens, self.embed), 0
        for layer in self.layers:
            h = _rms(x, layer.weights.get("pre_norm"), layer.pre_norm)
            match layer.mixer:
                case Attention():
                    step.ready(attention)
                    attention += 1
                    h = _attention(layer, layer.mixer, h, step)
                case GatedDeltaNet():
                    h = _gated_delta_net(layer, layer.mixer, h)
                case Mamba2():
                    h = _mamba2(layer, layer.mixer, h)
                case Mlp():
                    h = _mlp(layer, layer.mixer, h)
            x = x + _rms(h, layer.weights.get("post_norm"), layer.post_norm)
        return F.linear(_rms(x[-1:], None, self.spec.final_norm), self.head)[0]

    def _layer(self, mixer: Mixer, pre: Norm | None, post: Norm | None) -> Layer:
        """Projections that read the layer's input become one, ``in_proj``, q first."""
        hidden = self.spec.hidden_size
        shapes = mixer.weights(hidden)
        weights: Tensors = {}
        if pre:
            weights["pre_norm"] = torch.ones(hidden, device=self.device, dtype=torch.bfloat16)
        if post:
            weights["post_norm"] = torch.ones(hidden, device=self.device, dtype=torch.bfloat16)
        names = ["q_proj", "g_proj", "gate_proj", "up_proj", "in_proj", "k_proj", "v_proj"]
        inputs = [n for n in [*names, "a_proj", "b_proj"] if n in shapes]
        split = [shapes[n][0] for n in inputs]
        weights["in_proj"] = self._random(sum(split), hidden)
        for name, shape in shapes.items():
            if name in inputs:
                continue
            if name == "conv":
                weights[name] = self._random(*reversed(shape), std=0.5)
            elif len(shape) == 1:
                value = {"A_log": 0.5, "dt_bias": -4.0}.get(name, 1.0)
                fp32 = name in ("A_log", "dt_bias", "D")
                kind = torch.float32 if fp32 else torch.bfloat16
                weights[name] = torch.full(shape, value, device=self.device, dtype=kind)
            else:
                weights[name] = self._random(*shape)
        return Layer(mixer, pre, post, weights, split)

    def _random(self, *shape: int, std: float = 0.0) -> torch.Tensor:
        """Of a size that keeps activations at theirs."""
        empty = torch.empty(shape, device=self.device, dtype=torch.bfloat16)
        return empty.normal_(std=std or shape[-1] ** -0.5)


def _rms(x: torch.Tensor, weight: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, norm.eps) if norm else x


def _convolve(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x [T, C] through the short convolution and SiLU; its last inputs are kept."""
    assert layer.conv is not None
    weight = layer.weights["conv"]
    padded, out = torch.cat([layer.conv, x]), torch.empty_like(x)
    T, channels = x.shape
    _conv_silu[(triton.cdiv(T, 32), triton.cdiv(channels, 128))](
        padded, weight, out, T, channels, W=len(weight), BT=32, BC=128
    )
    layer.conv = padded[len(padded) - len(layer.conv) :].clone()
    return out


def _attention(layer: Layer, m: Attention, x: torch.Tensor, step: Step) -> torch.Tensor:
    assert layer.pools is not None
    T, d = len(x), m.head_dim
    queries = layer.split[0] * (2 if m.gated else 1)
    weight = layer.weights["in_proj"]
    projected = F.linear(x, weight if step.append else weight[:queries])
    q = _turn(projected[:, : layer.split[0]].reshape(T, m.num_heads, d), m, step)
    if step.append:
        k, v = projected[:, queries:].reshape(T, 2, m.num_kv_heads, d).unbind(1)
        k = _turn(k, m, step)
        append_rows(k[None].contiguous(), v[None].contiguous(), *layer.pools, step.block_table,
                    step.total_lens)  # fmt: skip
    o, _ = attend(
        q[None].contiguous(), *layer.pools, step.block_table, step.total_lens, scale=m.scale,
        window=m.window or 0,
    )  # fmt: skip
    o = o.reshape(T, -1)
    if m.gated:
        o = o * torch.sigmoid(projected[:, layer.split[0] : queries])
    return F.linear(o, layer.weights["o_proj"])


def _turn(x: torch.Tensor, m: Attention, step: Step) -> torch.Tensor:
    """QK-norm and rotary embedding of x [T, H, d]."""
    if m.qk_norm:
        x = _rms(x, None, m.qk_norm)
    if m.rope is None:
        return x
    half = len(m.rope.inv_freq)
    at = torch.arange(step.total - step.count, step.total, device=x.device, dtype=torch.float32)
    angle = at[:, None, None] * torch.tensor(m.rope.inv_freq, device=x.device)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _gated_delta_net(layer: Layer, m: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    T, Hk, Hv = len(x), m.num_k_heads, m.num_v_heads
    q, gate, k, v, a, b = F.linear(x, layer.weights["in_proj"]).split(layer.split, -1)
    mixed = _convolve(layer, torch.cat([q, k, v], -1)).split([Hk * m.key_dim] * 2 + [len(v[0])], -1)
    q, k = (F.normalize(t.reshape(1, T, Hk, m.key_dim), dim=-1) for t in mixed[:2])
    v = mixed[2].reshape(1, T, Hv, m.value_dim)
    log_decay = -layer.weights["A_log"].exp() * F.softplus(a.float() + layer.weights["dt_bias"])
    beta = m.beta_scale * torch.sigmoid(b.float())
    assert layer.state is not None
    o, _ = linear_state_replay(
        q.contiguous(), k.contiguous(), v.contiguous(), layer.state, log_decay[None].contiguous(),
        beta[None].contiguous(), update_rule="gated_delta", scale=m.key_dim**-0.5,
        present_state=layer.state,
    )  # fmt: skip
    o = F.rms_norm(o[0], (m.value_dim,), layer.weights["o_norm"], m.norm_eps).reshape(T, -1)
    return F.linear(o * F.silu(gate), layer.weights["o_proj"])


def _mamba2(layer: Layer, m: Mamba2, x: torch.Tensor) -> torch.Tensor:
    T, width = len(x), m.num_groups * m.state_size
    z, mixed, dt = F.linear(x, layer.weights["in_proj"]).split(
        [m.inner, m.conv_channels, m.num_heads], -1
    )
    values, k, q = _convolve(layer, mixed.contiguous()).split([m.inner, width, width], -1)
    q, k = (t.reshape(1, T, m.num_groups, m.state_size).contiguous() for t in (q, k))
    dt = F.softplus(dt.float() + layer.weights["dt_bias"])
    values = values.reshape(1, T, m.num_heads, m.head_dim)
    v = (values * dt[None, ..., None]).to(x.dtype)
    assert layer.state is not None
    o, _ = linear_state_replay(
        q, k, v, layer.state, (-layer.weights["A_log"].exp() * dt)[None].contiguous(),
        update_rule="gated", scale=1.0, present_state=layer.state,
    )  # fmt: skip
    o = (o + values * layer.weights["D"].to(x.dtype)[:, None]).reshape(T, -1) * F.silu(z)
    return F.linear(_rms(o, None, m.norm), layer.weights["o_proj"])


def _mlp(layer: Layer, m: Mlp, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, layer.weights["in_proj"])
    if m.gated:
        gate, up = h.chunk(2, -1)
        h = F.silu(gate) * up
    else:
        h = F.relu(h).square()
    return F.linear(h, layer.weights["down_proj"])
