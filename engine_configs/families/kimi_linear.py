"""Kimi Linear: Kimi Delta Attention, every few layers latent attention; experts after layer 0."""

from __future__ import annotations

from typing import Any

from engine_configs.errors import ConfigError
from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import MLP, Stack
from engine_configs.families.weights import Array, Family, Source, joined_conv1d, named, part
from engine_configs.spec import Block, GatedDeltaNet, LatentAttention, Mlp, Moe, Norm

_DELTA = {n: f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj")}
_DELTA |= {"a_a_proj": "f_a_proj.weight", "a_b_proj": "f_b_proj.weight", "dt_bias": "dt_bias"}
_DELTA |= {n: f"{n}.weight" for n in ("g_a_proj", "g_b_proj", "o_norm")}
_LATENT = {
    "q_proj": "q_proj.weight",
    "kv_a_proj": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "o_proj": "o_proj.weight",
}


def kimi_linear(config: ConfigReader) -> Family:
    """transformers/models/kimi_linear, and Moonshot's own spelling of its config."""
    hidden = config.positive("hidden_size")
    norm = Norm(config.take("rms_norm_eps", float, 1e-5))
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("q_lora_rank", None)
    config.expect("mla_use_nope", True)
    config.expect("moe_router_activation_func", "sigmoid")
    config.expect("moe_layer_freq", 1)
    config.expect("num_nextn_predict_layers", 0)
    # No RoPE anywhere: its keys are left over from the model this one grew out of.
    config.ignore("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "qk_head_dim")
    config.ignore("num_key_value_heads", "pretraining_tp", "use_grouped_topk")
    config.ignore("output_router_logits")
    count = config.positive("num_hidden_layers")
    types, linear_attn = _layer_types(config, count)
    latent = LatentAttention(
        num_heads=config.positive("num_attention_heads"),
        nope_dim=config.positive("qk_nope_head_dim", 128),
        shared_dim=config.positive("qk_rope_head_dim", 64),
        output_dim=config.positive("v_head_dim", 128),
        kv_rank=config.positive("kv_lora_rank", 512),
        norm=Norm(1e-6),  # fixed in the modeling code, not in the config
    )
    delta = _delta(config, linear_attn, norm)
    mlp = Mlp(config.positive("intermediate_size"))
    moe = _moe(config)

    stack = Stack("model")
    for kind, dense in zip(types, _dense(config, count), strict=True):
        second = Block("mlp", mlp, norm) if dense else Block("moe", moe, norm)
        if kind == "full_attention":
            stack.layer(Block("attn", latent, norm), second)
            _latent_sources(stack, latent)
        else:
            stack.layer(Block("linear", delta, norm), second)
            _delta_sources(stack)
        stack.take(stack.layers[-1][0].name, "", {"pre_norm": "input_layernorm.weight"})
        stack.take(second.name, "", {"pre_norm": "post_attention_layernorm.weight"})
        if dense:
            for name, tensor in MLP.items():
                paths = stack.paths(f"mlp.{tensor}") + stack.paths(f"block_sparse_moe.{tensor}")
                stack.put(f"mlp.{name}", named(*paths))
        else:
            _moe_sources(stack, moe)
    length = config.first("model_max_length", "max_position_embeddings", kind=int, default=1 << 20)
    return stack.family(config, "kimi_linear", hidden, norm, max_position=length)


def _layer_types(config: ConfigReader, count: int) -> tuple[list[str], dict[str, Any]]:
    """``layer_types``, or Moonshot's ``linear_attn_config`` that numbers layers from 1."""
    linear_attn = config.take("linear_attn_config", dict, {})
    attending = linear_attn.get("full_attn_layers")
    if attending is None:
        attending = [i + 1 for i in range(count) if i and i % 4 == 0]
    default = ["full_attention" if i + 1 in attending else "linear_attention" for i in range(count)]
    known = {"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"}
    for key in sorted(set(linear_attn) - known):
        raise ConfigError(
            f"unknown key {key!r} (value {linear_attn[key]!r})",
            where=f"{config.where}: linear_attn_config",
        )
    return config.layer_types(count, default), linear_attn


def _delta(config: ConfigReader, linear_attn: dict[str, Any], norm: Norm) -> GatedDeltaNet:
    def size(key: str, older: str, default: int) -> int:
        return config.positive(key, linear_attn.get(older, default))

    dim = size("linear_head_dim", "head_dim", 128)
    heads = size("linear_num_heads", "num_heads", 32)
    return GatedDeltaNet(
        num_k_heads=heads,
        num_v_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        norm_eps=norm.eps,
        decay_rank=dim,
        gate_rank=dim,
        gate="sigmoid",
    )


def _dense(config: ConfigReader, count: int) -> list[bool]:
    first = config.take("first_k_dense_replace", int, 1)
    kinds = config.take("mlp_layer_types", list, ["dense"] * first + ["sparse"] * (count - first))
    return [kind == "dense" for kind in kinds]


def _moe(config: ConfigReader) -> Moe:
    intermediate = config.positive("moe_intermediate_size", 1024)
    shared = config.first("num_shared_experts", "n_shared_experts", kind=int, default=1)
    return Moe(
        num_experts=config.first("num_experts", "num_local_experts", kind=int),
        top_k=config.first("num_experts_per_token", "num_experts_per_tok", kind=int),
        intermediate=intermediate,
        shared=Mlp(intermediate * shared),
        scoring="sigmoid",
        correction=True,
        normalize=config.first("moe_renormalize", "norm_topk_prob", kind=bool, default=True),
        scale=config.take("routed_scaling_factor", float, 2.446),
        num_groups=config.first("num_expert_group", "n_group", kind=int, default=1),
        top_groups=config.positive("topk_group", 1),
    )


def _delta_sources(stack: Stack) -> None:
    stack.take("linear", "self_attn", _DELTA)
    (path,) = stack.paths("self_attn")
    stack.put("linear.conv", (joined_conv1d(*(f"{path}.{n}_conv1d.weight" for n in "qkv")),))
    rates = Source((f"{path}.A_log",), lambda a: a.reshape(-1), lambda s: (1, 1, s[0], 1))
    stack.put("linear.A_log", (rates,))


def _latent_sources(stack: Stack, m: LatentAttention) -> None:
    """kv_b_proj holds each head's key rows and then its value rows."""
    stack.take("attn", "self_attn", _LATENT)
    rows = m.nope_dim + m.output_dim
    full = (m.num_heads * rows, m.kv_rank)
    paths = stack.paths("self_attn.kv_b_proj.weight")

    def heads(w: Array) -> Array:
        return w.reshape(m.num_heads, rows, -1)

    stack.put("attn.k_b", part(full, lambda w: heads(w)[:, : m.nope_dim], *paths))
    stack.put("attn.v_b", part(full, lambda w: heads(w)[:, m.nope_dim :], *paths))


def _moe_sources(stack: Stack, m: Moe) -> None:
    theirs = "block_sparse_moe"
    names = {"router": "gate.weight", "correction": "gate.e_score_correction_bias"}
    stack.take("moe", theirs, names)
    stack.take("moe.shared", f"{theirs}.shared_experts", MLP)
    stack.experts("moe.experts.in_proj", f"{theirs}.experts", m.num_experts, ["w1", "w3"])
    stack.experts("moe.experts.down_proj", f"{theirs}.experts", m.num_experts, ["w2"])
