"""One random Qwen3.5 of about 150M parameters in three forms: a Hugging Face checkpoint, our int8
bundle of it, and a GGUF file in Q8_0. No quality is claimed for its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from build.bundles import ARTIFACTS
from build.checkpoint import Checkpoint
from build.pipeline import Options, Silent, byte_tokenizer, convert
from engine_configs.families import read_checkpoint_config
from serving.engine.bundle import Bundle

HOME = ARTIFACTS / "peers"
SITE = ARTIFACTS.parent / ".venv" / "peers"  # wheels, not of the environment: `make peers`
NAME = "qwen35-150m"
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    # As many key heads as value heads: llama.cpp stores other ratios in another order.
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 65536,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
Floats = NDArray[np.float32]
# llama.cpp's names of a layer's tensors, by their place in the checkpoint.
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
_MODEL = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
# Small, and they set decays: fp32 in our bundle, too.
_FLOAT = ("ssm_alpha", "ssm_beta", "ssm_conv1d")


def checkpoint(path: Path = HOME / NAME, **shape: int) -> Path:
    """The random model as transformers saves it; made once."""
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE | shape)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):  # heads that remember from 5 to 5,000 tokens
                p.copy_(torch.linspace(-9, -2, p.numel()))
    path.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(model.config.vocab_size).save(str(path / "tokenizer.json"))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def bundle(source: Path, output: Path = HOME / f"{NAME}-int8") -> Bundle:
    """Ours: int8, not calibrated."""
    options = Options(NAME, read_checkpoint_config(source), source, output, dtype="int8")
    return convert(options, Silent())


def gguf_file(source: Path, output: Path = HOME / f"{NAME}-q8_0.gguf") -> Path:
    """llama.cpp's: every large matrix in Q8_0; made once. Needs the wheel ``gguf``."""
    if output.exists():
        return output
    sys.path.append(str(SITE))
    import gguf
    from gguf.quants import quantize

    q8 = gguf.GGMLQuantizationType.Q8_0
    partial = output.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen35")
    _write_metadata(writer, json.loads((source / "config.json").read_text()))
    weights = Checkpoint(source)
    for name in sorted(weights.names()):
        tensor, value = gguf_tensor(name, weights.read(name))
        if value.ndim == 2 and not any(part in tensor for part in _FLOAT):
            writer.add_tensor(tensor, quantize(value, q8), raw_dtype=q8)
        else:
            writer.add_tensor(tensor, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(output)


def gguf_tensor(name: str, value: Floats) -> tuple[str, Floats]:
    """A tensor of the checkpoint as llama.cpp wants it (architecture ``qwen35``).

    It multiplies norms by their weight where the model has 1 + weight (the gated norm of the
    linear layers excepted), and stores A = -exp(A_log). Raises KeyError for an unknown name.
    """
    rest = name.removeprefix("model.")
    if rest in _MODEL:
        return _MODEL[rest], value + 1 if rest == "norm.weight" else value
    _, layer, place = rest.split(".", 2)
    if place in _WHOLE:
        return f"blk.{layer}.{_WHOLE[place]}", -np.exp(value) if "A_log" in place else value
    place = place.removesuffix(".weight")
    if place == "linear_attn.conv1d":
        value = value.squeeze(1)  # [C, 1, W]
    elif place.endswith("norm") and place != "linear_attn.norm":
        value = value + 1
    return f"blk.{layer}.{_LAYER[place]}.weight", np.ascontiguousarray(value)


def _write_metadata(writer: Any, config: dict[str, Any]) -> None:
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    rotary = int(head_dim * rope["partial_rotary_factor"])
    third = rotary // 2 // 3
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary)
    # Text has one position, not three: how the channels are shared out does not matter.
    writer.add_rope_dimension_sections([rotary // 2 - 2 * third, third, third, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
    # Prompts are token ids; the server only needs a vocabulary to start.
    names = sorted(ByteLevel.alphabet())
    names += [f"<{i}>" for i in range(len(names), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([1] * len(names))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
