"""Granite 4 hybrid: Mamba-2 or attention, then an MLP, or a mixture of them with a shared one."""

from __future__ import annotations

from engine_configs.families.config import ConfigReader
from engine_configs.families.mamba import read_mamba2, take_mamba2
from engine_configs.families.stack import ATTENTION, Stack
from engine_configs.families.weights import Family, part
from engine_configs.spec import Attention, Block, Mlp, Moe, Norm

_EXPERTS = {
    "router": "router.layer.weight",
    "experts.in_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}


def granitemoehybrid(config: ConfigReader) -> Family:
    """transformers/models/granitemoehybrid."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    norm = Norm(config.take("rms_norm_eps", float, 1e-6))
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("position_embedding_type", None, "nope", "rope")
    config.expect("normalization_function", "rmsnorm")
    rope = config.rope(hidden // heads, default_theta=10_000.0)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=hidden // heads,
        scale=config.take("attention_multiplier", float, 1.0),
        rope=rope if config.data.get("position_embedding_type") == "rope" else None,
    )
    mamba = read_mamba2(config, config.positive("mamba_expand", 2) * hidden, norm)
    shared = Mlp(config.positive("shared_intermediate_size", 1024))
    experts = config.take("num_local_experts", int, 8)
    if experts:
        mlp: Mlp | Moe = Moe(
            num_experts=experts,
            top_k=config.positive("num_experts_per_tok", 2),
            intermediate=config.positive("intermediate_size"),
            shared=shared,
        )
    else:
        mlp = shared
    config.ignore("intermediate_size", "num_experts_per_tok")
    config.ignore("router_aux_loss_coef", "output_router_logits", "init_method")
    scale = config.take("residual_multiplier", float, 1.0)
    count = config.positive("num_hidden_layers")
    default = ["linear_attention"] * count
    second = "moe" if experts else "mlp"

    stack = Stack("model")
    for kind in config.layer_types(count, default):
        if kind == "full_attention":
            first = Block("attn", attention, norm, residual_scale=scale)
            stack.layer(first, Block(second, mlp, norm, residual_scale=scale))
            stack.take("attn", "self_attn", ATTENTION)
        else:
            first = Block("linear", mamba, norm, residual_scale=scale)
            stack.layer(first, Block(second, mlp, norm, residual_scale=scale))
            take_mamba2(stack, mamba, "linear", "mamba")
        stack.take(first.name, "", {"pre_norm": "input_layernorm.weight"})
        stack.take(second, "", {"pre_norm": "post_attention_layernorm.weight"})
        if experts:
            stack.take("moe", "block_sparse_moe", _EXPERTS)
        _shared_sources(stack, "moe.shared" if experts else "mlp", shared, hidden)
    return stack.family(
        config,
        "granitemoehybrid",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 2048),
        embedding_scale=config.take("embedding_multiplier", float, 1.0),
        logit_scale=1.0 / config.take("logits_scaling", float, 1.0),
    )


def _shared_sources(stack: Stack, ours: str, mlp: Mlp, hidden: int) -> None:
    """input_linear holds the gate's rows and then those of up."""
    size, paths = mlp.intermediate, stack.paths("shared_mlp.input_linear.weight")
    full = (2 * size, hidden)
    stack.put(f"{ours}.gate_proj", part(full, lambda w: w[:size], *paths))
    stack.put(f"{ours}.up_proj", part(full, lambda w: w[size:], *paths))
    stack.take(ours, "shared_mlp", {"down_proj": "output_linear.weight"})
