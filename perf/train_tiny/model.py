"""The tiny hybrid in plain torch: the `olmo_hybrid` architecture, parameter for parameter.

Names and shapes of the state dict are those of transformers' OlmoHybridForCausalLM (checked when a
checkpoint is saved or evaluated), but the delta rule is chunked for a CPU, and the layer states are
explicit, so that training, exact prefix reuse and tail replay are the same `forward`.

Shapes: B batch, T tokens, D hidden, H heads, dk/dv head dims, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 32


@dataclass(frozen=True)
class TinyConfig:
    """The shape of both tiny models; linear, linear, attention, twice."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 192
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    conv_width: int = 4
    layer_types: tuple[str, ...] = ("linear_attention", "linear_attention", "full_attention") * 2
    norm_eps: float = 1e-6
    o_norm_eps: float = 1e-5

    @property
    def width(self) -> int:
        """Width of all heads together, the same in linear and attention layers."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LinearState:
    """Conv inputs [B, conv_width - 1, 3·H·dk] and the recurrent state [B, H, dk, dv]."""

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True)
class AttentionState:
    """Cached keys and values, each [B, Hkv, L, dk]."""

    keys: Tensor
    values: Tensor


LayerState = LinearState | AttentionState


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule in chunks (Yang et al. 2024, "Gated Delta Networks", section 3.3).

    Per token: S ← e^g (I − β k kᵀ) S + β k vᵀ, o = Sᵀ q.

    Args: q, k [B, H, T, dk] (k of unit length), v [B, H, T, dv], log_decay g and beta [B, H, T],
        state S [B, H, dk, dv].
    Returns: o [B, H, T, dv] and the state after token T.
    """
    num_tokens = q.shape[2]
    pad = -num_tokens % CHUNK
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        log_decay, beta = (F.pad(x, (0, pad)) for x in (log_decay, beta))
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, H, N, C, d]
    beta = beta.unflatten(2, (-1, CHUNK)).unsqueeze(-1)
    total = log_decay.unflatten(2, (-1, CHUNK)).cumsum(-1)  # [B, H, N, C]
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    decay = total.exp().unsqueeze(-1)
    # Within a chunk each token's write corrects the writes before it: a triangular system.
    system = (k * beta @ k.transpose(-1, -2)) * pairwise
    writes = torch.linalg.solve_triangular(
        system.tril(-1), torch.cat([v, k * decay], -1) * beta, upper=False, unitriangular=True
    )
    fresh, erased = writes.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.transpose(-1, -2)) * pairwise
    q_in = q * decay
    k_out = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    carry = decay[..., -1:, :]
    outputs = []
    for n in range(q.shape[2]):
        delta = fresh[:, :, n] - erased[:, :, n] @ state
        outputs.append(q_in[:, :, n] @ state + scores[:, :, n] @ delta)
        state = state * carry[:, :, n] + k_out[:, :, n] @ delta
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :num_tokens], state


class GatedNorm(nn.Module):
    """RMS norm over the head, then times SiLU(gate)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)


class GatedDeltaNet(nn.Module):
    """Linear attention with a short convolution on q, k and v."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width, heads = config.hidden_size, config.width, config.num_heads
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.a_proj = nn.Linear(hidden, heads, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.g_proj = nn.Linear(hidden, width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.conv1d = nn.Conv1d(
            3 * width, 3 * width, config.conv_width, groups=3 * width, bias=False
        )
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.o_norm = GatedNorm(config.head_dim, config.o_norm_eps)

    def empty_state(self, batch: int) -> LinearState:
        config = self.config
        return LinearState(
            torch.zeros(batch, config.conv_width - 1, 3 * config.width),
            torch.zeros(batch, config.num_heads, config.head_dim, config.head_dim),
        )

    def log_decay(self, x: Tensor) -> Tensor:
        """Log-decay per token and head [B, T, H], below zero."""
        return -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)

    def forward(self, x: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        inputs = torch.cat([state.conv, F.linear(x, weight)], 1)
        mixed = F.silu(self.conv1d(inputs.transpose(1, 2))).transpose(1, 2)
        heads = mixed.unflatten(-1, (3, self.config.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)  # [B, H, T, d]
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * self.config.head_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        beta = 2.0 * self.b_proj(x).sigmoid()
        out, recurrent = gated_delta_rule(
            q, k, v, self.log_decay(x).transpose(1, 2), beta.transpose(1, 2), state.recurrent
        )
        gate = self.g_proj(x).unflatten(-1, (self.config.num_heads, -1))
        out = self.o_norm(out.transpose(1, 2), gate).flatten(2)
        keep = inputs[:, inputs.shape[1] - self.config.conv_width + 1 :]
        return self.o_proj(out), LinearState(keep, recurrent)


class Attention(nn.Module):
    """Softmax attention without positions (NoPE); q and k are normed over all heads together."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.k_norm = nn.RMSNorm(kv_width, config.norm_eps)

    def empty_state(self, batch: int) -> AttentionState:
        config = self.config
        empty = torch.zeros(batch, config.num_kv_heads, 0, config.head_dim)
        return AttentionState(empty, empty)

    def forward(
        self, x: Tensor, state: AttentionState, replay: bool
    ) -> tuple[Tensor, AttentionState]:
        """In replay the queries are the last T cached tokens; nothing is appended."""
        num_tokens = x.shape[1]

        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        q = split(self.q_norm(self.q_proj(x)))
        if not replay:
            keys = torch.cat([state.keys, split(self.k_norm(self.k_proj(x)))], 2)
            values = torch.cat([state.values, split(self.v_proj(x))], 2)
            state = AttentionState(keys, values)
        total = state.keys.shape[2]
        mask = None
        if total != num_tokens:
            mask = torch.ones(num_tokens, total, dtype=torch.bool).tril(total - num_tokens)
        groups = self.config.num_heads // self.config.num_kv_heads
        keys, values = (y.repeat_interleave(groups, 1) for y in (state.keys, state.values))
        out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), state


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LinearLayer(nn.Module):
    """Norm before each half: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.linear_attn = GatedDeltaNet(config)
        self.mlp = MLP(config)

    def empty_state(self, batch: int) -> LinearState:
        return self.linear_attn.empty_state(batch)

    def forward(self, x: Tensor, state: LinearState, replay: bool) -> tuple[Tensor, LinearState]:
        out, state = self.linear_attn(self.input_layernorm(x), state)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), state


class AttentionLayer(nn.Module):
    """Norm after each half: x + norm(mixer(x)), then x + norm(mlp(x))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def empty_state(self, batch: int) -> AttentionState:
        return self.self_attn.empty_state(batch)

    def forward(
        self, x: Tensor, state: AttentionState, replay: bool
    ) -> tuple[Tensor, AttentionState]:
        out, state = self.self_attn(x, state, replay)
        x = x + self.post_attention_layernorm(out)
        return x + self.post_feedforward_layernorm(self.mlp(x)), state


class Decoder(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        kinds = {"linear_attention": LinearLayer, "full_attention": AttentionLayer}
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(kinds[kind](config) for kind in config.layer_types)
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)


class TinyHybrid(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def empty_states(self, batch: int) -> list[LayerState]:
        return [layer.empty_state(batch) for layer in self.model.layers]

    def forward(
        self,
        input_ids: Tensor,
        states: list[LayerState] | None = None,
        *,
        replay: bool = False,
        logits_from: int = 0,
    ) -> tuple[Tensor, list[LayerState]]:
        """Runs T further tokens.

        Args: input_ids [B, T]; states per layer (empty when None; not changed);
            replay: the tokens are the last T cached ones: attention reads the cached keys and
            values and appends nothing, linear layers run from the given states.
        Returns: logits [B, T - logits_from, V] and the new states.
        """
        if states is None:
            states = self.empty_states(input_ids.shape[0])
        x = self.model.embed_tokens(input_ids)
        new_states: list[LayerState] = []
        for layer, state in zip(self.model.layers, states, strict=True):
            x, new_state = layer(x, state, replay)
            new_states.append(new_state)
        return self.lm_head(self.model.norm(x[:, logits_from:])), new_states


def forget_linear(states: list[LayerState]) -> list[LayerState]:
    """The states with every linear layer's conv and recurrent state set to zero."""
    return [
        replace(s, conv=torch.zeros_like(s.conv), recurrent=torch.zeros_like(s.recurrent))
        if isinstance(s, LinearState)
        else s
        for s in states
    ]
