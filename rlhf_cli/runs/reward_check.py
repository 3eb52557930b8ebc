"""Reward checks before anything heavy starts: labels, per-row verifiers, trial calls of the reward file and a judge."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.judge_model import JudgeModel

# Two prompts show whether a reward depends on the prompt.
_TRIED_PROMPTS = 2
# A judge that cannot read images is found before the run, unless later prompts are the first with images.
_PICTURED_PROMPTS = 64
_MADE_UP = ("Step 1: think.\n\nThe answer is \\boxed{1}.\n\n#### 1", "<think>no</think><answer>no</answer>")
"""Sample responses for each trial prompt."""


def check_rewards(
    reward: RewardConfig, *sets: Sequence[Prompt], is_episode: bool = False, judge: JudgeModel | None = None
) -> None:
    """Raise UsageError if the rewards cannot score these prompts, and print notices.

    With `is_episode`, a reward file receives messages, as in training. `judge` is not started yet.
    """
    # A separate scorer: the run starts another one later, when the output is redirected to a log.
    with Scorer(reward) as scorer:
        check_with(scorer, *sets, is_episode=is_episode)
    if judge is not None:
        judge.check(_trial_requests(sets[0], is_episode=is_episode)[: len(_MADE_UP)])


def check_with(scorer: Scorer, *sets: Sequence[Prompt], is_episode: bool = False) -> None:
    """Run the checks with a scorer that stays open."""
    for prompts in sets:
        scorer.check_labels([prompt.label for prompt in prompts], [prompt.data_source for prompt in prompts])
        scorer.check_rubrics([prompt.row for prompt in prompts])
    tried = _trial_requests(sets[0], is_episode=is_episode)
    for line in filter(None, (scorer.form, scorer.try_file(tried), scorer.try_judge(tried[: len(_MADE_UP)]))):
        print(f"rlhf: {line}", file=sys.stderr, flush=True)


def _trial_requests(prompts: Sequence[Prompt], *, is_episode: bool = False) -> list[ScoreRequest]:
    """Create requests with sample responses to the first prompts, one with images before others.

    The prompt's tokens stand in for response tokens.
    """
    first = list(islice(prompts, _PICTURED_PROMPTS))
    first.sort(key=lambda prompt: not prompt.pictures)
    return [
        replace(
            made_up_request(prompt, response, prompt.prompt_ids, group=str(number), is_episode=is_episode),
            sample=sample,
            group_size=len(_MADE_UP),
        )
        for number, prompt in enumerate(first[:_TRIED_PROMPTS])
        for sample, response in enumerate(_MADE_UP)
    ]


def made_up_request(
    prompt: Prompt, response: str, token_ids: Sequence[int], *, group: str, is_episode: bool = False
) -> ScoreRequest:
    """Create a request with a made-up response, the only one of its group. An episode has one turn."""
    return ScoreRequest(
        query=prompt.text + response,
        prompt=prompt.text,
        response=response,
        label=prompt.label,
        num_tokens=len(token_ids),
        truncated=False,
        group=group,
        sample=0,
        group_size=1,
        source=prompt.data_source,
        row=prompt.row,
        token_ids=token_ids,
        pictures=tuple(placed.picture for placed in prompt.pictures),
        messages=({"role": "assistant", "content": response},) if is_episode else (),
    )
