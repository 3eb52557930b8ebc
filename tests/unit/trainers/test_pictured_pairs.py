"""Preference losses on pairs with images: equal to plain models, with one vision tower pass per pair."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import save_tiny_vision
from vision_sequences import MIXED, plain_logprobs, vision_sequences

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.preference import PreferenceSettings, mixed_loss
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.preference import PAIR_LOSSES
from rlhf_cli.data.packing.packs import MicroBatch, TokenSequence
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.trainers.offline.dpo import REF, DPOObjective, PairPreparation, batch_logprobs, pair_logprobs

NUM_PAIRS = len(MIXED)
TOTALS = StepTotals(num_tokens=1, num_sequences=NUM_PAIRS)


@dataclass(frozen=True)
class Pairs:
    """Pairs whose prompts have zero to two images: model, micro-batch, and log-probs of the plain model."""

    model: PolicyModel
    batch: MicroBatch
    plain_B: torch.Tensor


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    folder = save_tiny_vision("idefics3", tmp_path_factory.mktemp("pairs") / "model")
    rng, trees, whole = np.random.default_rng(0), [], []
    for sequence in vision_sequences(folder):
        prompt = sequence.token_ids[~sequence.loss_mask]
        answers = [rng.integers(0, 200, int(rng.integers(2, 6))).astype(np.int32) for _ in range(2)]
        chosen, rejected = (Continuation(answer, np.ones(answer.size, dtype=bool)) for answer in answers)
        trees.append(Tree(prompt, (chosen, rejected), sequence.pictures))
        for answer in answers:
            ids = np.concatenate([prompt, answer])
            whole.append(TokenSequence(ids, np.arange(ids.size) >= prompt.size, sequence.pictures))
    bounds = np.cumsum([sequence.loss_mask.sum() for sequence in whole])[:-1]
    plain_K = plain_logprobs(folder, whole)[0].detach()
    plain_B = torch.stack([part.sum() for part in plain_K.tensor_split(torch.from_numpy(bounds))])
    reference_P2 = plain_B.unflatten(0, (-1, 2)) + torch.from_numpy(rng.normal(size=(NUM_PAIRS, 2))).float()
    batch = MicroBatch(pack_trees(trees, share_prompts=True, read_ends=False), {REF: reference_P2})
    model = PolicyModel(load_causal_lm(ModelConfig(pretrain=str(folder), param_dtype="fp32")))
    return Pairs(model, batch, plain_B)


class AskedModel:
    """A model for inference."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model

    @torch.no_grad()
    def infer(self, micro_batches: list[Any], forward: Any) -> list[torch.Tensor]:
        return [forward(self._model, batch) for batch in micro_batches]


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_on_pairs_with_pictures_is_that_of_the_plain_models_logprobs_and_trains_the_tower(
    name: str, pairs: Pairs
) -> None:
    objective = DPOObjective((name,), (1.0,), PreferenceSettings())
    (batch,) = PairPreparation(objective, None, lambda table: (table, 0))(AskedModel(pairs.model), [pairs.batch])
    pairs.model.zero_grad()
    loss, _ = objective(pairs.model, batch, TOTALS)
    loss.backward()
    losses_P = mixed_loss((name,), (1.0,), pair_logprobs(pairs.plain_B, batch), objective.settings)
    assert loss.item() == pytest.approx(losses_P.mean().item(), rel=1e-4, abs=1e-5)
    tower = pairs.model.model.model.vision_model
    assert sum(float(parameter.grad.norm()) for parameter in tower.parameters() if parameter.grad is not None) > 0


def test_the_tower_sees_each_picture_of_a_pair_once(pairs: Pairs) -> None:
    seen: list[int] = []

    def count(module: object, arguments: tuple[object, ...], named: dict[str, torch.Tensor]) -> None:
        seen.append(len(named["pixel_values"]))

    hook = pairs.model.model.model.vision_model.register_forward_pre_hook(count, with_kwargs=True)
    with hook, torch.no_grad():
        found_B = batch_logprobs(pairs.model, pairs.batch)
    assert seen == [sum(map(len, MIXED))]
    torch.testing.assert_close(found_B, pairs.plain_B, atol=1e-4, rtol=0)
