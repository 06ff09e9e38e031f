"""Mimetic initialisation: the model starts as one that could already retrieve, a little.

From a default initialisation these tasks stay at chance for hundreds of steps; started with heads
that look one and two tokens back, retrieval is learned in a minute or two. Every linear layer gets

    head 0   key = the token before, query = this token: recalls what followed it   slow decay
    head 1   the same over the two tokens before                                    slow decay
    head 2   passes on the value of the token before                                fast decay
    head 3   passes on the value two tokens before                                  fast decay

and, if facts shall live in attention, each attention layer reads the residual so that its query
matches this token (and the one before) with the token before (and the one before that) of every
cached position: an induction head. It is post-norm here, so it reads the raw residual, to which
heads 2 and 3 of its group's first linear layer write along fixed orthonormal directions. Without
positions attention cannot tell the last write from the first, so head 0 of layer 0 becomes a clock
that ticks with every `<|write|>`: its state turns from what `<|bos|>` wrote to what the writes
write. Keys carry the clock with them, so a cached key keeps its time when the linear state is lost.

If facts shall live in the linear state, attention starts almost flat instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from build.tasks import BOS, WRITE
from perf.train_tiny.model import Attention, AttentionLayer, GatedDeltaNet, LinearLayer, TinyHybrid

_SHIFT_DECAY_LENGTHS = (4.0, 12.0)
_SHARP, _FLAT = 2.0, 0.5
"""Initial scale of attention's normed queries: with and without induction heads."""
_CONSTANT = 3.0
"""Value of residual feature 0 of every token: opens the gates of shift and clock heads."""
_BOS_FEATURE, _WRITE_FEATURE, _CLOCK_FEATURE, _NUM_RESERVED = 1, 2, 3, 4
_MARK = 10.0
"""Value of their own feature in `<|bos|>` and `<|write|>`."""
_CLOCK_RATE, _CLOCK_SCALE = 1 / 8, 1.25
"""Share of its remaining way that the clock turns with each tick, and what makes a tick about 1."""
_CLOCK_DECAY_LENGTH = 1e5


@torch.no_grad()
def initialise(
    model: TinyHybrid, *, attention_retrieval: bool, memory_lengths: tuple[float, float]
) -> None:
    """Fills every parameter from torch's global generator, then plants the mimetic structure.

    `memory_lengths` are the first decay lengths of heads 0 and 1, in tokens.
    """
    _random(model)
    layers = list(model.model.layers)
    linear = [layer for layer in layers if isinstance(layer, LinearLayer)]
    for layer in linear:
        _plant_memory(layer.linear_attn, memory_lengths)
    if not attention_retrieval:
        for layer in layers:
            if isinstance(layer, AttentionLayer):
                layer.self_attn.q_norm.weight.fill_(_FLAT)
        return
    embedding = model.model.embed_tokens.weight
    embedding[:, :_NUM_RESERVED] = 0
    embedding[:, 0] = _CONSTANT
    embedding[BOS, _BOS_FEATURE] = embedding[WRITE, _WRITE_FEATURE] = _MARK
    _plant_clock(linear[0].linear_attn)
    source = linear[0]
    for before, layer in zip([None, *layers], layers, strict=False):
        if isinstance(layer, LinearLayer) and not isinstance(before, LinearLayer):
            source = layer
        elif isinstance(layer, AttentionLayer):
            _plant_induction(source.linear_attn, layer.self_attn)


def _random(model: TinyHybrid) -> None:
    depth_scale = 1 / math.sqrt(2 * len(model.config.layer_types))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for layer in model.model.layers:
        mixer = layer.linear_attn if isinstance(layer, LinearLayer) else layer.self_attn
        mixer.o_proj.weight.mul_(depth_scale)
        layer.mlp.down_proj.weight.mul_(depth_scale)
        if isinstance(layer, AttentionLayer):
            layer.post_feedforward_layernorm.weight.fill_(depth_scale)
    nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    nn.init.normal_(model.lm_head.weight, std=0.02)


def _plant_memory(mixer: GatedDeltaNet, memory_lengths: tuple[float, float]) -> None:
    mixer.q_proj.weight.copy_(mixer.k_proj.weight)
    nn.init.normal_(mixer.conv1d.weight, std=0.06)
    # Taps of each head as {lag: weight}, for q, k and v.
    now, last, both, older = {0: 1.0}, {1: 1.0}, {0: 0.8, 1: 0.8}, {1: 0.8, 2: 0.8}
    taps = (
        (now, both, now, now),
        (last, older, now, now),
        (now, now, last, {2: 1.0}),
    )
    dim, width = mixer.config.head_dim, mixer.config.width
    for part, heads in enumerate(taps):
        for head, lags in enumerate(heads):
            start = part * width + head * dim
            for lag, weight in lags.items():
                mixer.conv1d.weight[start : start + dim, 0, -1 - lag] += weight
    step = 1 / torch.tensor(memory_lengths + _SHIFT_DECAY_LENGTHS)
    mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus⁻¹


def _plant_clock(mixer: GatedDeltaNet) -> None:
    """Head 0 writes to its residual feature a time that rises with every tick from `<|bos|>` on."""
    dim, width, hidden = mixer.config.head_dim, mixer.config.width, mixer.config.hidden_size
    rows = slice(0, dim)
    for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj):
        projection.weight[rows] *= 0.02
        projection.weight[rows, 0] = 1.0
    # Half of the value's channels are lit by <|bos|>, the other half, which is read, by the rest:
    # the reading is zero in text without writes, and rises almost evenly with the first dozen.
    read = (torch.arange(dim) >= dim // 2).float()
    mixer.v_proj.weight[rows, 0] = 2 * read - 1
    mixer.v_proj.weight[rows, _BOS_FEATURE] = 1 - 2 * read
    # What the input norm makes of the constant and the mark in a marked token.
    rms = math.sqrt(1 + (_CONSTANT**2 + _MARK**2) / hidden)
    constant, mark = _CONSTANT / rms, _MARK / rms
    rest, first, tick = -12.0, 4.0, math.log(_CLOCK_RATE / (2 - _CLOCK_RATE))  # β = 2 sigmoid
    mixer.b_proj.weight[0] = 0
    mixer.b_proj.weight[0, 0] = rest / constant
    mixer.b_proj.weight[0, _BOS_FEATURE] = (first - rest) / mark
    mixer.b_proj.weight[0, _WRITE_FEATURE] = (tick - rest) / mark
    mixer.a_proj.weight[0] = 0
    mixer.dt_bias[0] = -math.log(_CLOCK_DECAY_LENGTH)
    taps = mixer.conv1d.weight.unflatten(0, (3, width))[:, rows, 0]  # q, k and v: no shift
    taps.zero_()
    taps[..., -1] = 1
    mixer.o_proj.weight[:, rows] = 0
    mixer.o_proj.weight[_CLOCK_FEATURE, rows] = _CLOCK_SCALE * read / math.sqrt(dim / 2)


def _orthonormal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns))[0]


def _plant_induction(shift: GatedDeltaNet, attention: Attention) -> None:
    config = attention.config
    dim, hidden = config.head_dim, config.hidden_size
    head = [slice(h * dim, (h + 1) * dim) for h in range(config.num_heads)]

    # Heads 2 and 3 send the same reading of their token along their own directions.
    reading = shift.v_proj.weight[head[2]].clone()
    reading[:, :_NUM_RESERVED] = 0
    directions = _orthonormal(hidden, 2 * dim)
    directions[:_NUM_RESERVED] = 0
    one_back, two_back = directions[:, :dim], directions[:, dim:]
    for h, direction in ((2, one_back), (3, two_back)):
        shift.v_proj.weight[head[h]] = reading
        shift.o_proj.weight[:, head[h]] = direction
        shift.g_proj.weight[head[h]] *= 0.1
        shift.g_proj.weight[head[h], 0] = 1.0

    turn = _orthonormal(dim, dim)
    attention.k_proj.weight[head[0]] = one_back.T
    attention.k_proj.weight[head[1]] = one_back.T + turn @ two_back.T
    attention.q_norm.weight.fill_(_SHARP)
    groups = config.num_heads // config.num_kv_heads
    for h in range(config.num_heads):
        pair = h >= groups
        attention.q_proj.weight[head[h]] = reading + (0.4 * turn @ one_back.T if pair else 0.0)
        value = attention.v_proj.weight[head[h // groups]]
        attention.o_proj.weight[:, head[h]] = 0.7 * value.T
    # Keys of the one-token heads carry the clock; one of their queries prefers the latest.
    time = torch.randn(dim) * dim**-0.5
    attention.q_proj.weight[head[1], 0] = 1.5 * time
    attention.q_norm.weight[head[1]] = 3 * _SHARP
    attention.k_proj.weight[head[0], _CLOCK_FEATURE] = time
