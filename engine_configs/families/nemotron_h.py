"""Nemotron-H: one mixer a layer, Mamba-2, attention without positions, a plain MLP or experts."""

from __future__ import annotations

from engine_configs.errors import ConfigError
from engine_configs.families.config import ConfigReader
from engine_configs.families.mamba import take_mamba2, time_step_limit
from engine_configs.families.stack import ATTENTION, Stack
from engine_configs.families.weights import Family, named
from engine_configs.spec import Attention, Block, Mamba2, Mixer, Mlp, Moe, Norm

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NAMES = {"linear_attention": "linear", "full_attention": "attn"}
_PLAIN = {n: f"{n}.weight" for n in ("up_proj", "down_proj")}


def nemotron_h(config: ConfigReader) -> Family:
    """transformers/models/nemotron_h, and NVIDIA's own spelling of its config."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    norm = Norm(config.take("layer_norm_epsilon", float, 1e-5))
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        config.expect(key, False)
    config.expect("mamba_hidden_act", "silu")
    config.expect("mlp_hidden_act", "relu2")
    config.expect("sliding_window", None)
    config.ignore("rms_norm_eps", "num_logits_to_keep", "rescale_prenorm_residual", "expand")
    config.ignore("chunk_size", "mamba_chunk_size", "hidden_dropout", "use_mamba_kernels")
    config.ignore("mamba_ssm_cache_dtype", "num_nextn_predict_layers", "output_router_logits")
    config.ignore(*(k for k in config.data if k.startswith(("mtp_", "time_step_", "mamba_dt_"))))
    config.ignore("moe_shared_expert_overlap", "is_mamba2", "mlp_expand")
    head_dim = config.first("head_dim", "attention_head_dim", kind=int, default=128)
    mixers: dict[str, Mixer] = {
        "full_attention": Attention(
            num_heads=heads,
            num_kv_heads=config.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
        ),
        "linear_attention": _mamba2(config, norm),
        "mlp": Mlp(config.positive("intermediate_size"), "relu2", gated=False),
    }
    types = _layer_types(config)
    if "moe" in types:
        mixers["moe"] = _moe(config)
    else:
        config.ignore(*_EXPERT_KEYS)

    stack = Stack("backbone", "model", embed="embeddings", norm="norm_f")
    stack.unused.append("mtp.")
    for kind in types:
        name, mixer = _NAMES.get(kind, kind), mixers[kind]
        stack.layer(Block(name, mixer, norm))
        stack.take(name, "", {"pre_norm": "norm.weight"})
        if isinstance(mixer, Mamba2):
            take_mamba2(stack, mixer, name, "mixer")
        elif isinstance(mixer, Moe):
            _moe_sources(stack, mixer)
        else:
            stack.take(name, "mixer", ATTENTION if kind == "full_attention" else _PLAIN)
    return stack.family(
        config,
        "nemotron_h",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 4096),
    )


def _layer_types(config: ConfigReader) -> list[str]:
    """``layers_block_type``, or the older ``hybrid_override_pattern``, a letter a layer."""
    config.ignore("num_hidden_layers", "mtp_hybrid_override_pattern")
    pattern = config.take("hybrid_override_pattern", str, "")
    spelled = [_PATTERN.get(letter, letter) for letter in pattern]
    types = config.first("layers_block_type", "layer_types", kind=list, default=spelled)
    older = {"attention": "full_attention", "mamba": "linear_attention"}
    types = [older.get(t, t) for t in types]
    for i, kind in enumerate(types):
        if kind not in _PATTERN.values():
            raise ConfigError(f"layer {i} is of kind {kind!r}", where=config.where)
    if not types:
        raise ConfigError(
            "neither layers_block_type nor hybrid_override_pattern is there", where=config.where
        )
    return types


def _mamba2(config: ConfigReader, norm: Norm) -> Mamba2:
    low, high = time_step_limit(config, "time_step_limit", "mamba_dt_limit")
    groups = config.first("n_groups", "mamba_n_groups", "mamba_num_groups", kind=int, default=8)
    return Mamba2(
        num_heads=config.positive("mamba_num_heads", 128),
        head_dim=config.positive("mamba_head_dim", 64),
        state_size=config.first("ssm_state_size", "mamba_state_dim", kind=int, default=128),
        num_groups=groups,
        conv_width=config.first("conv_kernel", "mamba_d_conv", kind=int, default=4),
        norm=norm,
        conv_bias=config.first("use_conv_bias", "mamba_conv_bias", kind=bool, default=True),
        dt_min=low,
        dt_max=high,
    )


_EXPERT_KEYS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "moe_latent_size",
)


def _moe(config: ConfigReader) -> Moe:
    config.expect("moe_latent_size", None)
    config.ignore("n_shared_experts")
    shared = config.positive("moe_shared_expert_intermediate_size")
    return Moe(
        num_experts=config.positive("n_routed_experts"),
        top_k=config.positive("num_experts_per_tok"),
        intermediate=config.positive("moe_intermediate_size"),
        shared=Mlp(shared, "relu2", gated=False),
        scoring="sigmoid",
        correction=True,
        normalize=config.take("norm_topk_prob", bool, True),
        scale=config.take("routed_scaling_factor", float, 1.0),
        num_groups=config.positive("n_group", 1),
        top_groups=config.positive("topk_group", 1),
        activation="relu2",
        gated=False,
    )


def _moe_sources(stack: Stack, m: Moe) -> None:
    names = {"router": "gate.weight", "correction": "gate.e_score_correction_bias"}
    stack.take("moe", "mixer", names)
    stack.take("moe.shared", "mixer.shared_experts", _PLAIN)
    for weight, name in (("in_proj", "up_proj"), ("down_proj", "down_proj")):
        stack.put(f"moe.experts.{weight}", named(*stack.paths(f"mixer.experts.{name}")))
        stack.experts(f"moe.experts.{weight}", "mixer.experts", m.num_experts, [name])
