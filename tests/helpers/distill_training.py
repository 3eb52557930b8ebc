"""Distillation steps with DeepSpeed, and the same steps in plain PyTorch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from preference_training import Trained
from tiny_training import LEARNING_RATE, OPTIM, Items, Layout, load_policy, make_engine, make_sequences, weights_of
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.backends.training.frozen_teacher import FrozenTeacher
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.readings import Reading, TaughtPack
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.models.policy import parameter_groups
from rlhf_cli.models.student import StudentModel
from rlhf_cli.trainers.offline.distill import DistillObjective, TeacherPreparation
from rlhf_cli.trainers.offline.loop import bind

LogitsOf = Callable[[torch.nn.Module, TokenSequence], torch.Tensor]
"""(model, sequence) -> logits [K, V] that predict the trained tokens."""
STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]]
MIXED = DistillObjective(DivergenceSettings(0.5, 0.9, 3), kd_coef=0.7)


def save_teacher(folder: Path, *, vocab_size: int = 300, tokenizer: Any = None, seed: int = 11) -> Path:
    """Save a random language model that is wider than the tiny policy."""
    # Processes of ranks import this module without pytest's path.
    from conftest import make_tiny_tokenizer

    torch.manual_seed(seed)
    size = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokenizer = tokenizer or make_tiny_tokenizer()
    size |= {"num_key_value_heads": 2, "vocab_size": vocab_size, "eos_token_id": tokenizer.eos_token_id}
    Qwen2ForCausalLM(Qwen2Config(**size, initializer_range=0.2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def distill_steps(
    model: str,
    teacher: str,
    stage: int,
    layout: Layout,
    *,
    teacher_stage: int = 0,
    objective: DistillObjective = MIXED,
    steps: Sequence[Sequence[int]] = STEPS,
    sequences: Sequence[TokenSequence] | None = None,
) -> Trained:
    """Run distillation steps from a student folder to a teacher folder."""
    size = layout.ranks_per_sequence
    of_teacher = DeepSpeedConfig(zero_stage=teacher_stage, sequence_parallel_size=size)  # type: ignore[arg-type]
    frozen = FrozenTeacher(ModelConfig(pretrain=teacher, param_dtype="fp32"), of_teacher)
    prepare = TeacherPreparation([frozen])
    hf_model, _ = load_policy(model, stage)
    ranks = sequence_ranks(DeepSpeedConfig(sequence_parallel_size=size), hf_model.config)
    engine = make_engine(StudentModel(hf_model, ranks), stage, **layout.together())
    metrics, items = [], Items(list(sequences or make_sequences(10)))
    for indices in steps:
        packs, totals = layout.share().micro_batches(items, np.array(indices))
        metrics.append(
            engine.train_step(
                prepare(engine, [TaughtPack(one, (Reading(one),)) for one in packs]), bind(objective, totals)
            )
        )
    return Trained(metrics, weights_of(engine, hf_model), engine)


def distill_plainly(
    model: str,
    teacher: str,
    *,
    beta: float,
    temperature: float,
    sequences: Sequence[TokenSequence] | None = None,
    steps: Sequence[Sequence[int]] = STEPS,
    auto_class: Any = AutoModelForCausalLM,
    logits_of: LogitsOf | None = None,
) -> list[float]:
    """Return the losses of the same steps with transformers models, one sequence at a time, with all logits in
    memory.
    """
    student, frozen = (auto_class.from_pretrained(path, dtype=torch.float32) for path in (model, teacher))
    adam = torch.optim.AdamW(parameter_groups(student, OPTIM.l2), lr=LEARNING_RATE, betas=OPTIM.adam_betas)
    losses, sequences = [], sequences or make_sequences(10)
    for indices in steps:
        chosen = [sequences[index] for index in indices]
        pairs = [_logits(student, frozen, sequence, logits_of or text_logits) for sequence in chosen]
        found = torch.cat([_dense(own, taught, beta, temperature) for own, taught in pairs])
        adam.zero_grad()
        found.mean().backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), OPTIM.max_norm)
        adam.step()
        losses.append(found.mean().item())
    return losses


def _logits(
    student: torch.nn.Module, frozen: torch.nn.Module, sequence: TokenSequence, logits_of: LogitsOf
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        taught = logits_of(frozen, sequence.teacher_reads or sequence)
    return logits_of(student, sequence), taught


def text_logits(model: torch.nn.Module, sequence: TokenSequence) -> torch.Tensor:
    logits: torch.Tensor = model(torch.from_numpy(sequence.token_ids).long()[None]).logits[0, :-1]
    return logits[torch.from_numpy(sequence.loss_mask)[1:]]


def _dense(own_KV: torch.Tensor, taught_KV: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """Return the divergence per trained token [K], with the GKD formula."""
    own, teacher = (F.log_softmax(logits / temperature, -1) for logits in (own_KV, taught_KV))
    mixture = torch.log((1 - beta) * own.exp() + beta * teacher.exp())
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * (own.exp() * (own - mixture)).sum(-1)
