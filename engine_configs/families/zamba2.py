"""Zamba2: Mamba-2 throughout; some layers run one of a few shared transformers ahead of it."""

from __future__ import annotations

from engine_configs.errors import ConfigError
from engine_configs.families.config import ConfigReader
from engine_configs.families.mamba import take_mamba2, time_step_limit
from engine_configs.families.stack import Stack
from engine_configs.families.weights import Array, Family, Source, Sources, named
from engine_configs.spec import Attention, Block, Branch, Mamba2, Mlp, Norm, SharedTransformer

# Derived from other keys in transformers, and only written out.
_DERIVED = ["attention_hidden_size", "attention_head_dim", "head_dim", "kv_channels"]
_DERIVED += ["mamba_headdim", "num_query_groups", "hybrid_layer_ids", "layer_types"]


def zamba2(config: ConfigReader) -> Family:
    """transformers/models/zamba2."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    norm = Norm(config.take("rms_norm_eps", float, 1e-5))
    config.expect("hidden_act", "gelu")
    config.expect("add_bias_linear", False)
    config.expect("use_long_context", False)
    config.expect("use_conv_bias", True)
    config.ignore("chunk_size", "use_mamba_kernels", "use_mem_eff_path", "num_logits_to_keep")
    config.ignore("time_step_min", "time_step_max", "time_step_floor", *_DERIVED)
    head_dim = 2 * hidden // heads
    rope = config.rope(head_dim, default_theta=10_000.0)
    transformer = SharedTransformer(
        Attention(
            num_heads=heads,
            num_kv_heads=config.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            scale=(head_dim / 2) ** -0.5,
            rope=rope if config.take("use_mem_rope", bool, False) else None,
        ),
        Mlp(config.positive("intermediate_size", 4 * hidden), "gelu"),
        norm,
    )
    mamba = _mamba2(config, hidden)
    blocks = config.positive("num_mem_blocks", 1)
    rank = config.positive("adapter_rank", 128)
    adapted = config.take("use_shared_attention_adapter", bool, False)
    older = {"mamba": "linear_attention"}
    types = [older.get(t, t) for t in config.take("layers_block_type", list)]
    if len(types) != config.positive("num_hidden_layers"):
        raise ConfigError(f"layers_block_type has {len(types)} entries", where=config.where)

    stack = Stack("model", norm="final_layernorm")
    shared: list[int] = []  # layers that hold the weights of a shared transformer
    uses = 0
    for i, kind in enumerate(types):
        if kind == "linear_attention":
            stack.layer(Block("linear", mamba, norm))
            here = ""
        elif kind == "hybrid":
            stack.layer(Block("linear", mamba, norm, ahead=Branch("shared", transformer)))
            here = "mamba_decoder."
            if uses < blocks:
                shared.append(i)
            weights = _SharedWeights(shared[uses % blocks], uses, rank, hidden, transformer)
            weights.put(stack, adapted=adapted)
            stack.take("shared", "", {"out_proj": "linear.weight"})
            uses += 1
        else:
            raise ConfigError(f"layers_block_type[{i}] is {kind!r}", where=config.where)
        take_mamba2(stack, mamba, "linear", f"{here}mamba")
        stack.take("linear", "", {"pre_norm": f"{here}input_layernorm.weight"})
    return stack.family(
        config,
        "zamba2",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 4096),
        tied=True,
    )


def _mamba2(config: ConfigReader, hidden: int) -> Mamba2:
    heads = config.positive("n_mamba_heads", 8)
    low, high = time_step_limit(config, "time_step_limit")
    return Mamba2(
        num_heads=heads,
        head_dim=config.positive("mamba_expand", 2) * hidden // heads,
        state_size=config.positive("mamba_d_state", 64),
        num_groups=config.positive("mamba_ngroups", 1),
        conv_width=config.positive("mamba_d_conv", 4),
        norm=Norm(1e-5),  # fixed in the modeling code, not in the config
        dt_min=low,
        dt_max=high,
    )


class _SharedWeights:
    """Tensors of the ``use``-th use of a shared transformer, which lie with layer ``layer``."""

    def __init__(self, layer: int, use: int, rank: int, hidden: int, m: SharedTransformer) -> None:
        self.root, self.use, self.rank = f"model.layers.{layer}.shared_transformer", use, rank
        self.hidden, self.m = hidden, m

    def put(self, stack: Stack, *, adapted: bool) -> None:
        plain = {
            "input_norm": "input_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "attn.o_proj": "self_attn.o_proj",
            "mlp.down_proj": "feed_forward.down_proj",
        }
        for ours, theirs in plain.items():
            stack.put(f"shared.{ours}", named(f"{self.root}.{theirs}.weight"))
        for name in ("q", "k", "v"):
            shape = self.m.attention.weights(2 * self.hidden)[f"{name}_proj"]
            adapter = f"self_attn.linear_{name}_adapter_list" if adapted else ""
            source = self._merged(f"self_attn.{name}_proj", adapter, shape, slice(None))
            stack.put(f"shared.attn.{name}_proj", source)
        size = self.m.mlp.intermediate
        for ours, rows in (("gate_proj", slice(0, size)), ("up_proj", slice(size, None))):
            adapter = "feed_forward.gate_up_proj_adapter_list"
            shape = (2 * size, self.hidden)
            source = self._merged("feed_forward.gate_up_proj", adapter, shape, rows)
            stack.put(f"shared.mlp.{ours}", source)

    def _merged(self, tensor: str, adapter: str, shape: tuple[int, ...], rows: slice) -> Sources:
        """Rows of ``W + B A``; the adapter is a list with an entry per use."""
        names, shapes = [f"{self.root}.{tensor}.weight"], [shape]
        if adapter:
            names += [f"{self.root}.{adapter}.{self.use}.{n}.weight" for n in (0, 1)]
            shapes += [(self.rank, shape[1]), (shape[0], self.rank)]

        def read(w: Array, *low_rank: Array) -> Array:
            if low_rank:
                a, b = low_rank
                w = w + b @ a
            return w[rows]

        return (Source(tuple(names), read, shapes=tuple(shapes)),)
