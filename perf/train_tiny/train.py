"""Recipes and the training loop; one core, fixed seed, a fixed number of steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from build.tasks import VOCAB_SIZE
from perf.train_tiny.batches import Batch, BatchGenerator
from perf.train_tiny.init import initialise
from perf.train_tiny.model import CHUNK, TinyConfig, TinyHybrid, forget_linear
from perf.train_tiny.muon import Muon


@dataclass(frozen=True)
class Stage:
    """Until this share of all steps, sequences of `shortest` to `longest` tokens."""

    until: float
    shortest: int
    longest: int


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    attention_retrieval: bool
    steps: int
    stages: tuple[Stage, ...]
    memory_lengths: tuple[float, float] = (300.0, 1000.0)
    mixture: dict[str, float] = field(
        default_factory=lambda: {
            "needle": 0.14,
            "mqar": 0.18,
            "lww": 0.38,
            "copy": 0.1,
            "text": 0.12,
            "repeat": 0.08,
        }
    )
    batch_tokens: int = 2560
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    warmup_steps: int = 40
    cooldown: float = 0.5
    forget_share: float = 0.0
    """Share of steps in which the linear states are dropped somewhere in the first 3/4."""
    text_weight: float = 0.1
    seed: int = 1


RECIPES = {
    "hybrid-tiny": Recipe(
        attention_retrieval=True,
        steps=800,
        stages=(Stage(0.3, 128, 224), Stage(0.6, 192, 384), Stage(1.0, 320, 512)),
        forget_share=0.5,
    ),
    "hybrid-tiny-linear": Recipe(
        attention_retrieval=False,
        steps=800,
        stages=(Stage(0.4, 128, 192), Stage(0.7, 160, 320), Stage(1.0, 512, 1024)),
        memory_lengths=(3000.0, 10000.0),
        mixture={
            "needle": 0.3,
            "mqar": 0.1,
            "lww": 0.35,
            "copy": 0.05,
            "text": 0.12,
            "repeat": 0.08,
        },
    ),
}


@dataclass(frozen=True)
class Progress:
    """What one step reports: recent mean accuracy per task, text loss in nats, CPU seconds."""

    step: int
    accuracy: dict[str, float]
    text_loss: float
    seconds: float


def optimizers(model: TinyHybrid, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon on the layers' matrices, AdamW on the rest (embeddings, head, gates, conv, norms)."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        gate = "a_proj" in name or "b_proj" in name
        is_matrix = parameter.ndim == 2 and ".layers." in name and not gate
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def losses(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the answers (each sample counts the same) and of the text."""
    targets = batch.tokens[:, 1:]
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    entropy = entropy.view_as(batch.answers)
    answer = (entropy * batch.answers).sum(1) / batch.answers.sum(1).clamp(min=1)
    return answer.mean(), (entropy * batch.text).sum() / batch.text.sum().clamp(min=1)


def draw(batches: BatchGenerator, recipe: Recipe, done: float) -> Batch:
    stage = next(s for s in recipe.stages if done < s.until)
    length = int(batches.tasks.rng.integers(stage.shortest, stage.longest + 1)) // CHUNK * CHUNK
    return batches.draw(max(2, recipe.batch_tokens // length), length + 1)


def run(model: TinyHybrid, batch: Batch, forget_at: int | None) -> Tensor:
    """Logits [B, T - 1, V]; linear states start anew at `forget_at` / 32 of the tokens."""
    inputs = batch.tokens[:, :-1]
    if forget_at is None:
        return model(inputs)[0]
    cut = inputs.shape[1] * forget_at // 32
    before, states = model(inputs[:, :cut])
    after, _ = model(inputs[:, cut:], forget_linear(states))
    return torch.cat([before, after], 1)


def train(recipe: Recipe, report: Callable[[Progress], None]) -> TinyHybrid:
    """Trains a fresh model; calls `report` after each step."""
    torch.manual_seed(recipe.seed)
    model = TinyHybrid(TinyConfig(VOCAB_SIZE))
    initialise(
        model,
        attention_retrieval=recipe.attention_retrieval,
        memory_lengths=recipe.memory_lengths,
    )
    batches = BatchGenerator(recipe.seed, recipe.mixture)
    rules = optimizers(model, recipe)
    peaks = [rule.param_groups[0]["lr"] for rule in rules]
    recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=60))
    started = time.process_time()
    for step in range(recipe.steps):
        done = step / recipe.steps
        rate = min(1.0, (step + 1) / recipe.warmup_steps, (1 - done) / recipe.cooldown + 0.02)
        for rule, peak in zip(rules, peaks, strict=True):
            rule.param_groups[0]["lr"] = peak * rate
        batch = draw(batches, recipe, done)
        forget = batches.tasks.rng.random() < recipe.forget_share
        logits = run(model, batch, int(batches.tasks.rng.integers(8, 25)) if forget else None)
        answer_loss, text_loss = losses(logits, batch)
        (answer_loss + recipe.text_weight * text_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for rule in rules:
            rule.step()
            rule.zero_grad()
        hits = (logits.detach().argmax(-1) == batch.tokens[:, 1:]) * batch.answers
        for task, right, asked in zip(batch.tasks, hits.sum(1), batch.answers.sum(1), strict=True):
            recent[task].append(float(right / asked.clamp(min=1)))
        accuracy = {task: float(np.mean(recent[task])) for task in recipe.mixture if task != "text"}
        report(Progress(step + 1, accuracy, text_loss.item(), time.process_time() - started))
    return model.eval()
