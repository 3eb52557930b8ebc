"""Reward model for text input (and images, for vision models), with packed batches, in this process.

Reward models that read token IDs are a role in online commands (backends/roles).
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.data.packing.packs import TokenSequence, at_targets, only_end, pack, plan_packs
from rlhf_cli.data.pictures.placing import placed_pictures
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_reward_model
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.reward_model import RewardModelPlan
from rlhf_cli.models.vision.families.table import find_family
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture


class TextRewardModel:
    """A reward model on the GPU, or on the CPU without one.

    Texts longer than `max_len` tokens are not scored. `max_tokens` limits each packed forward pass.
    """

    def __init__(
        self, model: RewardModelPlan, tokenizer: PreTrainedTokenizerBase, *, max_len: int, max_tokens: int
    ) -> None:
        self._tokeniser = Tokeniser(tokenizer)
        self._family = find_family(
            model.found.path,
            model.found.architecture,
            tokenizer,
            trust_remote_code=model.source.trust_remote_code,
        )
        self._end: int = tokenizer.eos_token_id
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        hf_model = load_reward_model(model.source, device=self._device)
        self._module = ValueModel(hf_model).to(self._device).requires_grad_(False).eval()
        self._model, self._max_len, self._max_tokens = model, max_len, max_tokens

    @property
    def takes_images(self) -> bool:
        """Whether the model supports images."""
        return self._family is not None

    def scores(self, texts: Sequence[str], pictures: Sequence[Sequence[Picture]] | None = None) -> list[float | str]:
        """Score each text at the last token. Returns a string with the reason for texts that cannot be scored.

        Missing BOS and EOS tokens are added. Truncated responses get an EOS token too, unlike in the reward role,
        because text does not show truncation. Images replace placeholders in the text; text models ignore them.
        """
        # The model was trained to predict the score at the EOS token, and clients send text without it.
        ids = [self._ended(prompt) for prompt in self._tokeniser.prompts(list(texts), plain=True)]
        images = pictures if pictures is not None and self._family is not None else [()] * len(ids)
        inputs = [self._sequence(row, shown) for row, shown in zip(ids, images, strict=True)]
        scores = iter(self._scores([sequence for sequence in inputs if isinstance(sequence, TokenSequence)]))
        return [next(scores) if isinstance(sequence, TokenSequence) else sequence for sequence in inputs]

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [self._end] else [*ids, self._end]

    def _sequence(self, ids: list[int], pictures: Sequence[Picture]) -> TokenSequence | str:
        """Build the model input, or return the reason if the text cannot be scored."""
        placed: tuple[PlacedPicture, ...] = ()
        if self._family is not None:
            try:
                ids, placed = placed_pictures(ids, pictures, self._family)
            except UsageError as error:
                return str(error)
        if len(ids) > self._max_len:
            return f"the text has {len(ids):,} tokens, more than --max_len {self._max_len}"
        # One token is the EOS added above.
        if len(ids) <= 1:
            return "the text is empty"
        return only_end(TokenSequence(np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=bool), placed))

    @torch.inference_mode()
    def _scores(self, sequences: list[TokenSequence]) -> list[float]:
        scores_B = torch.zeros(len(sequences))
        (bins,) = plan_packs(
            [len(sequence) for sequence in sequences],
            patches=[sequence.patches for sequence in sequences],
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
