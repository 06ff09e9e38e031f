"""Jamba: Mamba-1, every few layers attention without positions; MLPs and experts in turn."""

from __future__ import annotations

from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import ATTENTION, MLP, Stack
from engine_configs.families.weights import Family
from engine_configs.spec import Attention, Block, Mamba1, Mixer, Mlp, Moe, Norm

_MAMBA = {
    "A_log": "A_log",
    "D": "D",
    "in_proj": "in_proj.weight",
    "x_proj": "x_proj.weight",
    "dt_proj": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "o_proj": "out_proj.weight",
    "dt_norm": "dt_layernorm.weight",
    "b_norm": "b_layernorm.weight",
    "c_norm": "c_layernorm.weight",
}


def jamba(config: ConfigReader) -> Family:
    """transformers/models/jamba."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    norm = Norm(config.take("rms_norm_eps", float, 1e-6))
    config.expect("hidden_act", "silu")
    config.expect("sliding_window", None)
    config.ignore("router_aux_loss_coef", "output_router_logits", "num_logits_to_keep")
    config.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    config.ignore("calc_logits_for_entire_prompt")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=hidden // heads,
        scale=(hidden // heads) ** -0.5,
    )
    mamba = _mamba1(config, hidden, norm)
    mlp = Mlp(config.positive("intermediate_size"))
    experts = config.positive("num_experts", 16)
    moe = Moe(experts, config.positive("num_experts_per_tok", 2), mlp.intermediate, normalize=False)
    every, first = config.positive("attn_layer_period", 8), config.take("attn_layer_offset", int, 4)
    sparse = (config.positive("expert_layer_period", 2), config.take("expert_layer_offset", int, 1))

    stack = Stack("model", norm="final_layernorm")
    for i in range(config.positive("num_hidden_layers")):
        second: Mixer = moe if experts > 1 and i % sparse[0] == sparse[1] else mlp
        after = Block(second.kind, second, norm)
        if i % every == first:
            stack.layer(Block("attn", attention, norm), after)
            stack.take("attn", "self_attn", ATTENTION)
        else:
            stack.layer(Block("linear", mamba, norm), after)
            stack.take("linear", "mamba", _MAMBA)
            if mamba.conv_bias:
                stack.take("linear", "mamba", {"conv_bias": "conv1d.bias"})
            stack.conv("linear.conv", "mamba.conv1d")
        stack.take(stack.layers[-1][0].name, "", {"pre_norm": "input_layernorm.weight"})
        stack.take(after.name, "", {"pre_norm": "pre_ff_layernorm.weight"})
        if second is mlp:
            stack.take("mlp", "feed_forward", MLP)
        else:
            stack.take("moe", "feed_forward", {"router": "router.weight"})
            theirs = ("feed_forward.experts", experts)
            stack.experts("moe.experts.in_proj", *theirs, ["gate_proj", "up_proj"])
            stack.experts("moe.experts.down_proj", *theirs, ["down_proj"])
    return stack.family(
        config,
        "jamba",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 262144),
    )


def _mamba1(config: ConfigReader, hidden: int, norm: Norm) -> Mamba1:
    config.expect("mamba_proj_bias", False)
    config.expect("mamba_inner_layernorms", True)
    if config.data.get("mamba_dt_rank", "auto") == "auto":
        config.ignore("mamba_dt_rank")
        rank = -(-hidden // 16)
    else:
        rank = config.positive("mamba_dt_rank")
    return Mamba1(
        inner=config.positive("mamba_expand", 2) * hidden,
        state_size=config.positive("mamba_d_state", 16),
        dt_rank=rank,
        conv_width=config.positive("mamba_d_conv", 4),
        norm=norm,
        conv_bias=config.take("mamba_conv_bias", bool, True),
    )
