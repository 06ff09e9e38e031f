"""Collects a model's layers together with where each of their weights comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_configs.families.config import ConfigReader
from engine_configs.families.weights import Family, Source, Sources, conv1d, named, stacked
from engine_configs.spec import Block, HybridSpec, Norm

ATTENTION = {n: f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
MLP = {n: f"{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}


class Stack:
    """``roots``: spellings of the prefix of all tensors ('model', 'model.language_model')."""

    def __init__(self, *roots: str, embed: str = "embed_tokens", norm: str = "norm") -> None:
        self.roots = roots
        self.layers: list[tuple[Block, ...]] = []
        self.sources: dict[str, Sources] = {
            "embed": named(*(f"{r}.{embed}.weight" for r in roots)),
            "final_norm": named(*(f"{r}.{norm}.weight" for r in roots)),
            "lm_head": named("lm_head.weight"),
        }
        self.unused: list[str] = []

    def layer(self, *blocks: Block) -> None:
        """Start the next layer; what follows names its weights."""
        self.layers.append(blocks)

    def paths(self, name: str) -> list[str]:
        """Spellings of a tensor of the current layer."""
        return [f"{root}.layers.{len(self.layers) - 1}.{name}" for root in self.roots]

    def put(self, weight: str, sources: Sources) -> None:
        self.sources[f"layers.{len(self.layers) - 1}.{weight}"] = sources

    def take(self, ours: str, theirs: str, names: Mapping[str, str]) -> None:
        """``ours.<name>`` is the tensor ``theirs.<value>`` as it is (``ours`` '': no prefix)."""
        for name, tensor in names.items():
            weight = f"{ours}.{name}" if ours else name
            self.put(weight, named(*self.paths(f"{theirs}.{tensor}" if theirs else tensor)))

    def conv(self, weight: str, theirs: str) -> None:
        self.put(weight, tuple(conv1d(p) for p in self.paths(f"{theirs}.weight")))

    def experts(self, weight: str, theirs: str, count: int, parts: Sequence[str]) -> None:
        """A tensor per expert and part (``theirs.3.up_proj.weight``), stacked."""
        sources: list[Source] = []
        for path in self.paths(theirs):
            groups = [[f"{path}.{e}.{part}.weight" for e in range(count)] for part in parts]
            sources.append(stacked(*groups))
        self.put(weight, self.sources.get(self._key(weight), ()) + tuple(sources))

    def _key(self, weight: str) -> str:
        return f"layers.{len(self.layers) - 1}.{weight}"

    def family(
        self,
        config: ConfigReader,
        model_type: str,
        hidden: int,
        final_norm: Norm,
        *,
        max_position: int,
        tied: bool = False,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> Family:
        spec = HybridSpec(
            model_type=model_type,
            vocab_size=config.positive("vocab_size"),
            hidden_size=hidden,
            layers=tuple(self.layers),
            final_norm=final_norm,
            max_position=max_position,
            tie_embeddings=config.take("tie_word_embeddings", bool, tied),
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
            eos_token_ids=config.token_ids("eos_token_id"),
        )
        return Family(spec, self.sources, tuple(self.unused))
