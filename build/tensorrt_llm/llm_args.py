"""A mirror of the LLM arguments that a tree sets, so that mistakes show here and not on the GPU.

Fields, defaults and limits as in TensorRT-LLM's ``TorchLlmArgs`` and ``KvCacheConfig``, of which it
has only what both lines of releases know; what our package needs is narrowed to a literal.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from engine_configs.errors import ConfigError

Fraction = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KvCacheConfig(_Strict):
    """The attention layers' K/V. free_gpu_memory_fraction is of what the weights left free."""

    enable_block_reuse: Literal[True] = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    tokens_per_block: Literal[8, 16, 32, 64, 128] = 32
    max_tokens: PositiveInt | None = None
    free_gpu_memory_fraction: Fraction = 0.8
    host_cache_size: Annotated[int, Field(ge=0)] | None = None
    dtype: Literal["auto"] = "auto"


class LlmArgs(_Strict):
    """``LLM(**arguments)`` beside the model's own path.

    cuda_graph_config: the package's step is made on the host, so no graph can hold it;
    disable_overlap_scheduler: states must have seen a step before the next one is planned;
    enable_chunked_prefill: chunks end where a checkpoint is due.
    """

    backend: Literal["pytorch"] = "pytorch"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    tensor_parallel_size: Literal[1] = 1
    pipeline_parallel_size: Literal[1] = 1
    max_batch_size: PositiveInt = 16
    max_num_tokens: PositiveInt = 8192
    max_seq_len: PositiveInt
    max_beam_width: Literal[1] = 1
    enable_chunked_prefill: Literal[True] = True
    disable_overlap_scheduler: Literal[True] = True
    cuda_graph_config: None = None
    trust_remote_code: Literal[False] = False
    kv_cache_config: KvCacheConfig = KvCacheConfig()

    @model_validator(mode="after")
    def _room(self) -> LlmArgs:
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} holds less than one token of each of "
                f"max_batch_size {self.max_batch_size} sequences"
            )
        return self


class TritonConfig(_Strict):
    """``triton_config`` of model.yaml; the llmapi model does not batch by itself."""

    max_batch_size: Literal[0] = 0
    decoupled: bool = True
    cancellation_check_period_ms: PositiveInt = 100


class ModelYaml(LlmArgs):
    """``1/model.yaml`` of Triton's llmapi model. model: path of the Hugging Face directory,
    relative to the file's folder."""

    model: str
    triton_config: TritonConfig = TritonConfig()


def parse(text: str, where: str, kind: type[LlmArgs] = LlmArgs) -> LlmArgs:
    """Read and check YAML. Raises ConfigError naming every key that is wrong."""
    try:
        data: Any = yaml.safe_load(text)
        return kind.model_validate(data)
    except yaml.YAMLError as e:
        raise ConfigError(f"not YAML: {e}", where=where) from None
    except ValidationError as e:
        wrong = "; ".join(
            f"{'.'.join(map(str, x['loc'])) or 'arguments'}: {x['msg']} (value {x['input']!r})"
            for x in e.errors()
        )
        raise ConfigError(wrong, where=where) from None


def to_yaml(arguments: LlmArgs) -> str:
    return str(yaml.safe_dump(arguments.model_dump(), sort_keys=False))
