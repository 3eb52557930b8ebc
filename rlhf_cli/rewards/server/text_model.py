"""A reward model that reads texts with its own tokenizer, packed, in this process.

Reward models on token ids are a role of the online commands (backends/roles).
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.data.packing.packs import TokenSequence, at_targets, only_end, pack, plan_packs
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser
from rlhf_cli.models.loading import load_reward_model
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.reward_model import RewardModelPlan


class TextRewardModel:
    """Owns a reward model on this process's GPU, or on the CPU if there is none.

    A text of more than `max_len` tokens has no score. `max_tokens` bounds a packed forward pass.
    """

    def __init__(
        self, model: RewardModelPlan, tokenizer: PreTrainedTokenizerBase, *, max_len: int, max_tokens: int
    ) -> None:
        self._tokeniser = Tokeniser(tokenizer)
        self._end: int = tokenizer.eos_token_id
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        hf_model = load_reward_model(model.source, device=self._device)
        self._module = ValueModel(hf_model).to(self._device).requires_grad_(False).eval()
        self._model, self._max_len, self._max_tokens = model, max_len, max_tokens

    def scores(self, texts: Sequence[str]) -> list[float | str]:
        """Return the score of each text, read at its end, or why it has none.

        A text gets the tokenizer's beginning of text and end of sequence if it lacks them: a reward model learned to
        read its score there, and responses come as texts without it. A response that was cut gets one too, unlike in
        the reward role: its text alone does not show it.
        """
        ids = [self._ended(prompt) for prompt in self._tokeniser.prompts(list(texts), plain=True)]
        problems = [self._problem(row) for row in ids]
        fitting = [row for row, problem in zip(ids, problems, strict=True) if not problem]
        scores = iter(self._scores([np.array(row, dtype=np.int32) for row in fitting]))
        return [problem or next(scores) for problem in problems]

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [self._end] else [*ids, self._end]

    def _problem(self, ids: list[int]) -> str:
        if len(ids) > self._max_len:
            return f"the text has {len(ids):,} tokens, more than --max_len {self._max_len}"
        return "" if len(ids) > 1 else "the text is empty"

    @torch.inference_mode()
    def _scores(self, rows: list[np.ndarray]) -> list[float]:
        scores_B = torch.zeros(len(rows))
        sequences = [only_end(TokenSequence(row, np.zeros(len(row), dtype=bool))) for row in rows]
        (bins,) = plan_packs(
            [len(row) for row in rows],
            max_tokens=self._max_tokens,
            num_ranks=1,
            quadratic_cost=self._model.quadratic_cost,
        )
        for members in bins:
            batch = at_targets(pack([sequences[i] for i in members]).to(self._device))
            scores_B[members] = self._module(batch).float().cpu()
        if self._model.statistics is not None:
            scores_B = normalised_scores(scores_B, mean=self._model.statistics.mean, std=self._model.statistics.std)
        return [float(score) for score in scores_B]
