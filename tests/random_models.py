"""Small random checkpoints in the Hugging Face layout, with heads that remember."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

# Odd sizes throughout; the vocabulary differs from every projection width.
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 6,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_olmo_hybrid(path: Path, seed: int = 0, shard: str = "1GB", **changes: Any) -> Path:
    """At their random start all heads forget within 32 tokens, and a wrong state would go
    unnoticed: here they remember from 3 to 3000."""
    torch.manual_seed(seed)
    model = OlmoHybridForCausalLM(OlmoHybridConfig(**(SMALL | changes)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-8, -1, len(weight)))
            elif name.endswith("dt_bias"):
                weight.fill_(0.5)
            elif weight.ndim > 1:
                weight.mul_(5.0)
    model.save_pretrained(path, max_shard_size=shard)
    return path
