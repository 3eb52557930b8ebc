"""Samples by hand."""

from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.rewards.records import Score
from rlhf_cli.trainers.online.samples import Sample

ZERO = Score(0.0, "scored")


def sample_of(
    prompt: Prompt, response: Generation, score: Score = ZERO, *, group: int = 0, index: int | None = 0, text: str = ""
) -> Sample:
    return Sample(prompt, group, index, response, text, score)
