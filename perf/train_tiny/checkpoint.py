"""Hugging Face layout: weights, config, byte-level tokenizer with the task symbols, chat template.

`save` proves that transformers loads the directory with no key missing or left over and computes
the same logits; `load` proves it again before anything is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from build.tasks import BOS, EOS, NUM_BYTES, PAD, SYMBOLS, VOCAB_SIZE, heldout_text
from perf.train_tiny.model import TinyConfig, TinyHybrid

MAX_LOGIT_ERROR = 1e-4
MAX_POSITIONS = 65536
_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>")
# A question is answered right after it: no assistant marker stands between them.
CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- message['content'] + '<|eos|>' -}}
{%- else -%}
{{- '<|user|>' + message['content'] -}}
{%- endif -%}
{%- endfor -%}
"""


def hf_config(config: TinyConfig) -> dict[str, Any]:
    """The config.json of transformers' OlmoHybridConfig for this shape (no RoPE)."""
    return {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        # A plain null would be filled with the default rope_theta; a null rope_theta is NoPE.
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "linear_num_key_heads": config.num_heads,
        "linear_num_value_heads": config.num_heads,
        "linear_key_head_dim": config.head_dim,
        "linear_value_head_dim": config.head_dim,
        "linear_conv_kernel_dim": config.conv_width,
        "linear_allow_neg_eigval": True,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, in byte order (as in GPT-2's byte-level BPE)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(NUM_BYTES)]


def make_tokenizer() -> Tokenizer:
    """Token id = byte value, then the symbols; only the turn markers are `special`, so answers
    survive `skip_special_tokens`."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(s, special=s in _SPECIAL, normalized=False) for s in SYMBOLS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def save(model: TinyHybrid, directory: Path) -> float:
    """Writes the whole layout; returns the largest logit error against transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SYMBOLS[BOS - NUM_BYTES],
        "eos_token": SYMBOLS[EOS - NUM_BYTES],
        "pad_token": SYMBOLS[PAD - NUM_BYTES],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    for name, content in (
        ("config.json", hf_config(model.config)),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    return check_against_transformers(model, directory)


def load(directory: Path) -> TinyHybrid:
    """The model saved in `directory`, proved equal to what transformers loads from there."""
    raw = json.loads((directory / "config.json").read_text())
    config = TinyConfig(vocab_size=raw["vocab_size"])
    expected = hf_config(config)
    if wrong := {key for key in expected if raw.get(key) != expected[key]}:
        raise ValueError(f"{directory}/config.json is not a tiny hybrid: {sorted(wrong)} differ")
    model = TinyHybrid(config)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    check_against_transformers(model, directory)
    return model


@torch.no_grad()
def check_against_transformers(model: TinyHybrid, directory: Path) -> float:
    """Largest absolute logit error against `AutoModelForCausalLM`, over text and then symbols.

    Raises RuntimeError when keys are missing or unexpected, or the error exceeds 1e-4.
    """
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    if bad := {kind: keys for kind, keys in info.items() if keys}:
        raise RuntimeError(f"{directory}: transformers does not load all keys: {bad}")
    symbols = torch.arange(NUM_BYTES, VOCAB_SIZE)
    tokens = torch.cat([torch.from_numpy(heldout_text(300)), symbols])[None]
    error = (model(tokens)[0] - theirs(tokens).logits).abs().max().item()
    if not error <= MAX_LOGIT_ERROR:
        raise RuntimeError(f"{directory}: logits differ from transformers by {error:.1e}")
    return error
