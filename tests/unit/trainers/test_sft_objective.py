"""Losses in rlhf sft, loss weights, and embedding noise."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.models.embedding_noise import EmbeddingNoise
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.trainers.offline.sft import SFTObjective

TOTALS = StepTotals(num_tokens=4, num_sequences=2)


def sequence(*token_ids: int, weights: list[float] | None = None) -> TokenSequence:
    """Return a sequence that is trained on all tokens but the first."""
    columns = {} if weights is None else {"weights": np.array(weights, np.float32)}
    return TokenSequence(np.array(token_ids, np.int32), np.arange(len(token_ids)) > 0, columns=columns)


def loss_of(objective: SFTObjective, probabilities: list[float], batch: Pack):
    """Return the loss, its gradient with respect to the log-probs, and the metrics."""
    logprobs_K = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    loss, metrics = objective(lambda pack: (logprobs_K, None), batch, TOTALS)  # type: ignore[arg-type]
    (gradient_K,) = torch.autograd.grad(loss, logprobs_K)
    return float(loss.detach()), gradient_K.tolist(), {name: float(value) for name, value in metrics.items()}


def test_losses_by_hand() -> None:
    """Three tokens with probabilities 1/2, 1/4, 1/4; a fourth token is in another micro-batch."""
    batch, half = pack([sequence(1, 2, 3, 4)]), math.log(2)
    loss, gradient, metrics = loss_of(SFTObjective(), [0.5, 0.25, 0.25], batch)
    assert loss == pytest.approx(5 * half / 4)
    assert gradient == pytest.approx([-1 / 4] * 3)
    assert metrics == {"loss": pytest.approx(loss)}
    # dft: 1/2 * 1 + 1/4 * 2 + 1/4 * 2 halvings
    loss, gradient, metrics = loss_of(SFTObjective("dft"), [0.5, 0.25, 0.25], batch)
    assert loss == pytest.approx(1.5 * half / 4)
    assert gradient == pytest.approx([-0.5 / 4, -0.25 / 4, -0.25 / 4])
    assert metrics == {"loss": pytest.approx(loss), "nll": pytest.approx(5 * half / 4)}
    weighted = pack([sequence(1, 2, 3, 4, weights=[2.0, 0.5, 1.0])])
    loss, gradient, metrics = loss_of(SFTObjective(), [0.5, 0.25, 0.25], weighted)
    assert loss == pytest.approx(5 * half / 4)  # 2 * 1 + 0.5 * 2 + 1 * 2
    assert gradient == pytest.approx([-2 / 4, -0.5 / 4, -1 / 4])
    loss, gradient, _ = loss_of(SFTObjective("dft"), [0.5, 0.25, 0.25], weighted)
    assert gradient == pytest.approx([-1 / 4, -0.125 / 4, -0.25 / 4])


@pytest.fixture(scope="module")
def model(tiny_model_dir) -> PolicyModel:
    return PolicyModel(load_causal_lm(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32"))).train()


def test_noise_has_the_bound_of_the_sequence_and_depends_on_seed_step_and_tokens() -> None:
    noise = EmbeddingNoise(alpha=5.0, seed=1, step=1)
    batch = pack([sequence(*range(1, 65)), sequence(1, 2, 3, 4)])
    found = noise.of(batch, dimension=16)
    for values, length in ((found[:64], 64), (found[64:], 4)):
        bound = 5.0 / math.sqrt(length * 16)
        assert 0.9 * bound < float(values.abs().max()) <= bound
        assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
    # Packing does not change it.
    assert torch.equal(noise.of(pack([sequence(1, 2, 3, 4)]), dimension=16), found[64:])
    for other in (replace(noise, seed=2), replace(noise, step=2)):
        assert not torch.equal(other.of(batch, dimension=16)[64:], found[64:])
    assert not torch.equal(noise.of(pack([sequence(1, 2, 3, 5)]), dimension=16), found[64:])


def test_noise_is_in_training_only_and_the_same_in_every_packing(model) -> None:
    objective, sequences = SFTObjective(noise_alpha=10.0, seed=3), [sequence(5, 6, 7), sequence(8, 9, 4, 3)]
    totals = StepTotals(num_tokens=5, num_sequences=2, step=1)

    def loss(packs: list[Pack], step: int | None) -> float:
        with torch.no_grad():
            return float(sum(objective(model, one, replace(totals, step=step))[0] for one in packs))

    together, apart = [pack(sequences)], [pack([one]) for one in sequences[::-1]]
    plain = float(sum(SFTObjective()(model, one, totals)[0].detach() for one in together))
    assert loss(together, None) == plain
    assert loss(together, 1) == loss(together, 1)
    assert loss(together, 1) == pytest.approx(loss(apart, 1), rel=1e-6)
    assert abs(loss(together, 1) - plain) > 1e-5
    assert abs(loss(together, 1) - loss(together, 2)) > 1e-5


def test_noise_is_what_the_embedding_adds(model) -> None:
    """Against a hook on the embedding, as in TRL, for one sequence."""
    batch, noise = pack([sequence(5, 6, 7, 8)]), EmbeddingNoise(10.0, 3, 7)
    embedding = model.model.get_input_embeddings()
    added = noise.of(batch, dimension=embedding.embedding_dim)
    handle = embedding.register_forward_hook(lambda module, args, output: output + added)
    expected, _ = model(batch)
    handle.remove()
    found, _ = model(batch, noise=noise)
    torch.testing.assert_close(found, expected)
