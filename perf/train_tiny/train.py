"""The training loop; one core, fixed seed, a fixed number of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from build.tasks import VOCAB_SIZE
from perf.train_tiny.batches import Batch, BatchGenerator
from perf.train_tiny.init import initialise
from perf.train_tiny.model import CHUNK, TinyConfig, TinyHybrid, forget_linear
from perf.train_tiny.muon import Muon
from perf.train_tiny.recipe import Recipe, Round, Stage


@dataclass(frozen=True)
class Progress:
    """What each step reports: recent mean accuracy per task, text loss in nats."""

    accuracy: dict[str, float]
    text_loss: float


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


def draw(batches: BatchGenerator, stages: Sequence[Stage], done: float, num_tokens: int) -> Batch:
    """About `num_tokens` tokens of the length that the stage at `done` (0-1) asks for."""
    stage = next(s for s in stages if done < s.until)
    length = int(batches.tasks.rng.integers(stage.shortest, stage.longest + 1)) // CHUNK * CHUNK
    return batches.draw(max(2, num_tokens // length), length + 1)


def run(model: TinyHybrid, batch: Batch, forget_at: int | None) -> Tensor:
    """Logits [B, T - 1, V]; linear states start anew at `forget_at` / 32 of the tokens."""
    inputs = batch.tokens[:, :-1]
    if forget_at is None:
        return model(inputs)[0]
    cut = inputs.shape[1] * forget_at // 32
    before, states = model(inputs[:, :cut])
    after, _ = model(inputs[:, cut:], forget_linear(states))
    return torch.cat([before, after], 1)


def start(recipe: Recipe) -> TinyHybrid:
    """A fresh model, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    model = TinyHybrid(TinyConfig(VOCAB_SIZE))
    initialise(
        model,
        attention_retrieval=recipe.attention_retrieval,
        memory_lengths=recipe.memory_lengths,
    )
    return model


def train_round(
    model: TinyHybrid, recipe: Recipe, cycle: Round, seed: int, report: Callable[[Progress], None]
) -> None:
    """Trains `model` in place for one cycle; calls `report` after each step."""
    batches = BatchGenerator(seed, cycle.mixture)
    rng = batches.tasks.rng
    rules = optimizers(model, recipe)
    peaks = [rule.param_groups[0]["lr"] * cycle.rate for rule in rules]
    recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=60))
    for step in range(cycle.steps):
        done = step / cycle.steps
        rate = min(1.0, (step + 1) / recipe.warmup_steps, (1 - done) / cycle.cooldown + 0.02)
        for rule, peak in zip(rules, peaks, strict=True):
            rule.param_groups[0]["lr"] = peak * rate
        batch = draw(batches, cycle.stages, done, recipe.batch_tokens)
        forget = rng.random() < cycle.forget_share
        logits = run(model, batch, int(rng.integers(24, 31)) if forget else None)
        answer_loss, text_loss = losses(logits, batch)
        (answer_loss + recipe.text_weight * text_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for rule in rules:
            rule.step()
            rule.zero_grad()
        hits = (logits.detach().argmax(-1) == batch.tokens[:, 1:]) * batch.answers
        for task, right, asked in zip(batch.tasks, hits.sum(1), batch.answers.sum(1), strict=True):
            recent[task].append(float(right / asked.clamp(min=1)))
        accuracy = {task: float(np.mean(recent[task])) for task in recent if task != "text"}
        report(Progress(accuracy, text_loss.item()))


def train(recipe: Recipe, report: Callable[[Progress], None]) -> TinyHybrid:
    """Trains a fresh model through all rounds."""
    model = start(recipe)
    for index, cycle in enumerate(recipe.rounds):
        train_round(model, recipe, cycle, recipe.seed + index, report)
    return model.eval()
