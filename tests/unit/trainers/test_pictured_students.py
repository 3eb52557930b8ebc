"""Students and teachers with images: steps equal plain PyTorch, with a teacher of another size."""

from pathlib import Path

import numpy as np
import pytest
from distill_training import distill_plainly, distill_steps
from test_student_rank import config_of, make_student, role_of
from tiny_training import Layout
from tiny_vision import save_larger_vision, save_tiny_vision
from transformers import AutoModelForImageTextToText
from vision_sequences import plain_logits, vision_sequences

from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.trainers.offline.distill import DistillObjective

pytestmark = pytest.mark.usefixtures("group_of_one")
STEPS = [[0, 1, 2], [1, 3], [4]]


@pytest.mark.parametrize(("kind", "stage", "teacher_stage"), [("idefics3", 2, 3), ("qwen2_5_vl", 0, 0)])
def test_steps_of_distill_and_gkd_on_pictures_are_those_of_plain_pytorch(
    kind: str, stage: int, teacher_stage: int, tmp_path: Path
) -> None:
    student = save_tiny_vision(kind, tmp_path / "student")
    teacher = save_larger_vision(student, tmp_path / "teacher")
    sequences = vision_sequences(student)
    expected = distill_plainly(
        str(student),
        str(teacher),
        beta=0.4,
        temperature=0.9,
        sequences=sequences,
        steps=STEPS,
        auto_class=AutoModelForImageTextToText,
        logits_of=plain_logits(student),
    )
    offline = distill_steps(
        str(student),
        str(teacher),
        stage,
        Layout(max_sequences=2),
        teacher_stage=teacher_stage,
        objective=DistillObjective(DivergenceSettings(0.4, 0.9)),
        steps=STEPS,
        sequences=sequences,
    )
    assert [metrics["loss"] for metrics in offline.metrics] == pytest.approx(expected, rel=1e-5, abs=3e-6)
    rank = make_student(config_of(str(student), str(teacher), zero_stage=str(stage)))
    found = role_of(rank).learn(sequences, [np.array(step) for step in STEPS])
    assert [metrics["loss"] for metrics in found] == pytest.approx(expected, rel=1e-5, abs=3e-6)
