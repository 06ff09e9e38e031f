"""How the two models are trained: rounds of a learning-rate cycle over growing lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Until this share of the round's steps, sequences of `shortest` to `longest` tokens."""

    until: float
    shortest: int
    longest: int


@dataclass(frozen=True)
class Round:
    """One cycle: warm-up, full rate, linear cooldown; optimizers start afresh."""

    steps: int
    stages: tuple[Stage, ...]
    mixture: dict[str, float]
    rate: float = 1.0
    cooldown: float = 0.5
    forget_share: float = 0.0
    """Share of steps in which the linear states are dropped, late in the sequence."""


@dataclass(frozen=True)
class Recipe:
    """How one model is started and trained."""

    attention_retrieval: bool
    memory_lengths: tuple[float, float]
    rounds: tuple[Round, ...]
    batch_tokens: int = 2560
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    warmup_steps: int = 40
    text_weight: float = 0.1
    seed: int = 1

    @property
    def steps(self) -> int:
        return sum(r.steps for r in self.rounds)


RECIPES = {
    "hybrid-tiny": Recipe(
        attention_retrieval=True,
        memory_lengths=(300.0, 1000.0),
        rounds=(
            Round(
                steps=600,
                stages=(Stage(0.3, 128, 224), Stage(0.6, 192, 384), Stage(1.0, 320, 512)),
                mixture={
                    "needle": 0.14,
                    "mqar": 0.18,
                    "lww": 0.38,
                    "copy": 0.1,
                    "text": 0.12,
                    "repeat": 0.08,
                },
                forget_share=0.25,
            ),
            Round(
                steps=280,
                stages=(Stage(0.3, 384, 640), Stage(0.6, 512, 1024), Stage(1.0, 768, 1280)),
                mixture={
                    "needle": 0.04,
                    "mqar": 0.26,
                    "lww": 0.46,
                    "copy": 0.16,
                    "text": 0.08,
                },
                rate=0.5,
                cooldown=0.85,
                forget_share=0.9,
            ),
        ),
    ),
    "hybrid-tiny-linear": Recipe(
        attention_retrieval=False,
        memory_lengths=(3000.0, 10000.0),
        rounds=(
            Round(
                steps=400,
                stages=(Stage(0.4, 128, 192), Stage(0.7, 160, 320), Stage(1.0, 512, 1024)),
                mixture={
                    "needle": 0.3,
                    "mqar": 0.1,
                    "lww": 0.35,
                    "copy": 0.05,
                    "text": 0.12,
                    "repeat": 0.08,
                },
            ),
            Round(
                steps=250,
                stages=(Stage(0.4, 192, 384), Stage(1.0, 384, 1024)),
                mixture={
                    "needle": 0.45,
                    "mqar": 0.12,
                    "lww": 0.2,
                    "copy": 0.08,
                    "text": 0.1,
                    "repeat": 0.05,
                },
                rate=0.5,
                cooldown=0.7,
            ),
        ),
    ),
}
