"""MiniMax-Text-01: lightning attention, every few layers softmax attention; experts throughout."""

from __future__ import annotations

from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import ATTENTION, Stack
from engine_configs.families.weights import Array, Family, part
from engine_configs.spec import Attention, Block, Lightning, Moe, Norm

_LIGHTNING = {
    "g_proj": "output_gate.weight",
    "o_norm": "norm.weight",
    "o_proj": "out_proj.weight",
}
# Constants of the decay, which a checkpoint repeats.
_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def minimax(config: ConfigReader) -> Family:
    """transformers/models/minimax. The residual is the *normed* input, scaled."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", hidden // heads)
    norm = Norm(config.take("rms_norm_eps", float, 1e-5))
    config.expect("hidden_act", "silu")
    config.expect("sliding_window", None)
    config.ignore("block_size", "router_aux_loss_coef", "router_jitter_noise")
    config.ignore("output_router_logits")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=1_000_000.0),
    )
    moe = Moe(
        num_experts=config.positive("num_local_experts", 8),
        top_k=config.positive("num_experts_per_tok", 2),
        intermediate=config.positive("intermediate_size"),
    )
    count = config.positive("num_hidden_layers")
    default = ["linear_attention" if i % 2 else "full_attention" for i in range(count)]
    factors = {
        kind: [config.take(f"{kind}_{name}_factor", float, 1.0) for name in ("alpha", "beta")]
        for kind in ("full_attn", "linear_attn", "mlp")
    }

    def block(name: str, mixer: Attention | Lightning | Moe, kind: str) -> Block:
        skip, scale = factors[kind]
        return Block(name, mixer, norm, residual_scale=scale, skip="normed", skip_scale=skip)

    stack = Stack("model")
    for i, kind in enumerate(config.layer_types(count, default)):
        experts = block("moe", moe, "mlp")
        if kind == "full_attention":
            stack.layer(block("attn", attention, "full_attn"), experts)
            stack.take("attn", "self_attn", ATTENTION)
        else:
            linear = Lightning(heads, head_dim, _log_decay(heads, i, count), Norm(1e-6))
            stack.layer(block("linear", linear, "linear_attn"), experts)
            _lightning_sources(stack, linear, hidden)
        stack.take(stack.layers[-1][0].name, "", {"pre_norm": "input_layernorm.weight"})
        stack.take("moe", "", {"pre_norm": "post_attention_layernorm.weight"})
        stack.take("moe", "block_sparse_moe", {"router": "gate.weight"})
        names = ("block_sparse_moe.experts", moe.num_experts)
        stack.experts("moe.experts.in_proj", *names, ["w1", "w3"])
        stack.experts("moe.experts.down_proj", *names, ["w2"])
    return stack.family(
        config,
        "minimax",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 131072),
    )


def _log_decay(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """-slope per head: a geometric row, shallower in deeper layers."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    base = 2 ** (-8 / heads)
    return tuple(-(base ** (h + 1)) * factor for h in range(heads))


def _lightning_sources(stack: Stack, m: Lightning, hidden: int) -> None:
    """qkv_proj holds each head's q, k and v rows."""
    stack.take("linear", "self_attn", _LIGHTNING)
    stack.unused += [path for name in _BUFFERS for path in stack.paths(f"self_attn.{name}")]
    full = (3 * m.num_heads * m.head_dim, hidden)
    for which, name in enumerate("qkv"):

        def read(w: Array, which: int = which) -> Array:
            split = w.reshape(m.num_heads, 3, m.head_dim, -1)[:, which]
            return split.reshape(m.num_heads * m.head_dim, -1)

        paths = stack.paths("self_attn.qkv_proj.weight")
        stack.put(f"linear.{name}_proj", part(full, read, *paths))
