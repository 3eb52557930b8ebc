"""Losses, advantages and spans against functions in TRL 1.16, verl 0.9.1 and transformers, on random numbers.

Skipped without the packages: `pip install --no-deps trl==1.16.0 verl==0.9.1 tensordict codetiming pyvers orjson
hydra-core omegaconf antlr4-python3-runtime==4.9.3`.
"""

from collections import defaultdict
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from rlhf_cli.algorithms import groups
from rlhf_cli.algorithms.advantages import gae, over_spans, returns_to_go, whiten
from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.divergence import divergence
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.kl import kl_estimate
from rlhf_cli.algorithms.objective import LossWeights, policy_objective
from rlhf_cli.algorithms.policy_loss import PolicyColumns, ppo_clip
from rlhf_cli.algorithms.preference import PreferenceSettings, aot_partners
from rlhf_cli.algorithms.token_selection import clip_cov_tokens, covariances, high_entropy_tokens, kl_cov_tokens
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import KLTerm
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.tokenizing.alignment import shared_spans
from rlhf_cli.models.embedding_noise import EmbeddingNoise
from rlhf_cli.trainers.offline.dpo import DPOObjective, pair_logprobs

LENGTHS = (3, 1, 6, 4, 5, 2, 7, 4)
CU = torch.tensor(np.cumsum([0, *LENGTHS]))
LONGEST = max(LENGTHS)
MASK = torch.tensor([[float(place < length) for place in range(LONGEST)] for length in LENGTHS]).double()
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def padded(values_K: Tensor) -> Tensor:
    return torch.zeros_like(MASK, dtype=values_K.dtype).masked_scatter(MASK.bool(), values_K)


def random_tokens(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(int(CU[-1]), generator=generator, dtype=torch.float64)


class Batch:
    """Random log-probs in float64; advantages are equal within a response unless `by_token` is set."""

    def __init__(self, seed: int, *, spread: float = 0.4, by_token: bool = False) -> None:
        self.old_K = -random_tokens(seed, 2.0).abs() - 0.05
        self.logprobs_K = (self.old_K + random_tokens(seed + 1, spread)).clamp(max=-1e-3).requires_grad_()
        advantages_K = random_tokens(seed + 2)
        firsts = CU[:-1].repeat_interleave(torch.tensor(LENGTHS))
        self.advantages_K = advantages_K if by_token else advantages_K[firsts]
        self.entropy_K = random_tokens(seed + 3).abs()
        self.ref_K = self.old_K + random_tokens(seed + 4, 0.3)

    def objective(self, settings: PolicyConfig, *, kl_coef: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return this project's loss and its gradient."""
        columns = PolicyColumns(
            self.old_K,
            self.advantages_K,
            CU,
            self.old_K,
            frozen_K={"ref": self.ref_K} if kl_coef else {},
            kept_K=self._kept(settings),
            covariant_K=self._covariant(settings),
        )
        loss, _ = policy_objective(
            self.logprobs_K,
            None,
            columns,
            settings=settings,
            totals=StepTotals(int(CU[-1]), len(LENGTHS)),
            weights=LossWeights({"ref": KLTerm(kl_coef, "k3")} if kl_coef else {}, EntropyState(0.0)),
            max_new_tokens=LONGEST,
        )
        return self.with_gradient(loss)

    def as_floats(self) -> "Batch":
        """Return the batch in float32, in which TRL computes alpha divergences."""
        for name in ("old_K", "advantages_K", "entropy_K", "ref_K"):
            setattr(self, name, getattr(self, name).float())
        self.logprobs_K = self.logprobs_K.detach().float().requires_grad_()
        return self

    def pairs(self, **columns: Tensor) -> Any:
        """Return the responses as pairs of a chosen and a rejected one."""
        return SimpleNamespace(pack=SimpleNamespace(cu_trained=CU), columns=columns)

    def with_gradient(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        (gradient_K,) = torch.autograd.grad(loss, self.logprobs_K)
        return loss.detach(), gradient_K

    def _kept(self, settings: PolicyConfig) -> Tensor | None:
        fraction = settings.top_entropy_quantile
        return high_entropy_tokens(self.entropy_K, fraction) if fraction < 1 else None

    def _covariant(self, settings: PolicyConfig) -> Tensor | None:
        covariances_N = covariances(self.logprobs_K.detach(), self.advantages_K)
        if settings.policy_loss == "kl_cov":
            return kl_cov_tokens(covariances_N, settings)
        if settings.policy_loss != "clip_cov":
            return None
        columns = PolicyColumns(self.old_K, self.advantages_K, CU)
        _, flags = ppo_clip(self.logprobs_K.detach(), self.old_K, columns, settings)
        keys_N = torch.arange(len(covariances_N))
        return clip_cov_tokens(covariances_N, flags["clip_low"] + flags["clip_high"], keys_N, settings)


def off(**settings: Any) -> PolicyConfig:
    return PolicyConfig(rollout_correction="off", **settings)


@pytest.fixture(scope="module")
def verl() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def of_verl(verl: Any, name: str, batch: Batch, mode: str, **given: Any) -> tuple[Tensor, Tensor]:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    loss = {key: given.pop(key) for key in list(given) if key in PolicyLossConfig.__dataclass_fields__}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(**loss), **given
    )
    found, _ = verl.get_policy_loss_fn(name)(
        old_log_prob=padded(batch.old_K),
        log_prob=padded(batch.logprobs_K),
        advantages=padded(batch.advantages_K),
        response_mask=MASK,
        loss_agg_mode=mode,
        config=config,
    )
    return batch.with_gradient(found)


CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OF_VERL: dict[str, tuple[str, str, dict[str, Any], PolicyConfig]] = {
    "clip": ("vanilla", "token-mean", {**CLIP, "clip_ratio_c": 3.0}, off(eps_clip_low_high=(0.2, 0.28), dual_clip=3.0)),
    "seq_mean": (
        "vanilla",
        "seq-mean-token-mean",
        {**CLIP, "clip_ratio_c": 3.0},
        off(eps_clip_low_high=(0.2, 0.28), dual_clip=3.0, loss_agg="seq_mean"),
    ),
    "seq_sum_norm": (
        "vanilla",
        "seq-mean-token-sum-norm",
        {**CLIP, "clip_ratio_c": 3.0},
        off(eps_clip_low_high=(0.2, 0.28), dual_clip=3.0, loss_agg="seq_sum_norm"),
    ),
    "gspo": (
        "gspo",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
        off(policy_loss="gspo", eps_clip_low_high=(0.1, 0.15), loss_agg="seq_mean"),
    ),
    "sapo": ("sapo", "seq-mean-token-mean", {}, off(policy_loss="sapo", loss_agg="seq_mean")),
    "gmpo": (
        "geo_mean",
        "token-mean",
        {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3},
        off(policy_loss="gmpo", gmpo_log_clip=0.3, loss_agg="seq_mean"),
    ),
    "clip_cov": (
        "clip_cov",
        "token-mean",
        {**CLIP, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5},
        off(policy_loss="clip_cov", eps_clip_low_high=(0.2, 0.28), clip_cov_ratio=1.0, clip_cov_range=(0.2, 1.5)),
    ),
    "kl_cov": (
        "kl_cov",
        "token-mean",
        {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
        off(policy_loss="kl_cov", kl_cov_ratio=0.2, kl_cov_coef=0.7),
    ),
    "cispo": (
        "cispo",
        "token-mean",
        {"clip_ratio_low": 1.0, "clip_ratio_high": 0.2},
        off(policy_loss="cispo", cispo_eps_high=1.2),
    ),
}


@pytest.mark.parametrize("seed", [1, 11, 21])
@pytest.mark.parametrize("name", OF_VERL)
def test_policy_losses_equal_verl(verl, name, seed):
    function, mode, given, settings = OF_VERL[name]
    batch = Batch(seed, by_token=name in ("clip", "kl_cov", "clip_cov", "cispo"))
    expected = of_verl(verl, function, batch, mode, **given)
    for found, own in zip(batch.objective(settings), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", [1, 11, 21])
@pytest.mark.parametrize(("name", "limits"), [("dppo_tv", (0.05, 0.1)), ("dppo_kl", (0.01, 0.03))])
def test_trust_regions_by_divergence_have_the_gradient_of_verl(verl, name, limits, seed):
    """verl writes the loss as a detached ratio times the log-prob, so only gradients are equal."""
    batch = Batch(seed, by_token=True)
    given = {"clip_ratio_low": limits[0], "clip_ratio_high": limits[1], "clip_ratio_c": 1e9}
    _, expected_K = of_verl(verl, name, batch, "token-mean", **given)
    _, found_K = batch.objective(off(policy_loss=name, dppo_delta_low_high=limits))
    assert 0 < int((found_K == 0).sum()) < len(found_K)
    torch.testing.assert_close(found_K, expected_K, rtol=1e-6, atol=1e-9)


def at_ends(scores_B: Tensor) -> Tensor:
    """Return scores as rewards at the last tokens, [B, T]."""
    rewards = torch.zeros_like(MASK)
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = scores_B
    return rewards


def test_advantages_equal_verl(verl):
    scores_B = torch.tensor([1.0, 0.0, 0.5, 0.25, 2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    config = SimpleNamespace(gamma=0.9, get=lambda name, default=None: default)
    names = np.array(GROUPS.tolist())

    def of(function: str, **given: Any) -> Tensor:
        return getattr(verl, f"compute_{function}_outcome_advantage")(at_ends(scores_B), response_mask=MASK, **given)[0]

    def everywhere(values_B: Tensor) -> Tensor:
        return values_B[:, None] * MASK

    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    # verl adds 1e-6 to the standard deviation, independent of the score range.
    close(everywhere(groups.group_normalised(scores_B, GROUPS, scale=1.0)), of("grpo", index=names))
    close(
        everywhere(groups.less_group_mean(scores_B, GROUPS)),
        of("grpo", index=names, norm_adv_by_std_in_grpo=False),
    )
    close(
        everywhere(groups.best_over_second(scores_B, GROUPS, scale=1.0)), of("grpo_passk", index=names, config=config)
    )
    close(everywhere(groups.less_mean_of_others(scores_B, GROUPS)), of("rloo", index=names))
    rewards_N = at_ends(scores_B)[MASK.bool()]
    returns_N = returns_to_go(rewards_N, CU, gamma=0.9)
    close(padded(whiten(returns_N)), of("reinforce_plus_plus", config=config))
    baseline = groups.less_group_mean(scores_B, GROUPS).repeat_interleave(torch.tensor(LENGTHS))
    close(padded(whiten(baseline)), of("reinforce_plus_plus_baseline", index=names))
    values_N = random_tokens(5)
    advantages, returns = verl.compute_gae_advantage_return(at_ends(scores_B), padded(values_N), MASK, 0.99, 0.95)
    own, own_returns = gae(rewards_N, values_N, CU, gamma=0.99, lambd=0.95)
    close(padded(whiten(own)), advantages * MASK)
    close(padded(own_returns), returns * MASK)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_equal_verl(verl, kind):
    batch = Batch(3)
    found_K = kl_estimate(batch.logprobs_K, batch.ref_K, kind)
    torch.testing.assert_close(found_K, verl.kl_penalty(batch.logprobs_K, batch.ref_K, kind))


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1

    def __getattr__(self, name: str) -> Any:
        return lambda values, *args, **more: values


class FakeGRPOTrainer:
    """What TRL's loss reads, with given log-probs."""

    def __init__(self, trainer: Any, batch: Batch, loss_type: str, **given: Any) -> None:
        self._trainer, self._batch = trainer, batch
        self.loss_type = loss_type
        self.accelerator, self.model = Accelerator(), SimpleNamespace(training=True)
        names = {"delta": None, "steps_per_generation": 1, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
        names |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
        self.args = SimpleNamespace(**names, use_bias_correction_kl=given.pop("use_bias_correction_kl", False))
        self.__dict__.update(
            aux_loss_enabled=False,
            top_entropy_quantile=given.pop("top_entropy_quantile", 1.0),
            off_policy_mask_threshold=given.pop("off_policy_mask_threshold", None),
            importance_sampling_level=given.pop("importance_sampling_level", "token"),
            beta=given.pop("beta", 0.0),
            epsilon_low=given.pop("epsilon_low", 0.2),
            epsilon_high=given.pop("epsilon_high", 0.28),
            use_vllm=False,
            current_gradient_accumulation_steps=1,
            max_completion_length=LONGEST,
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(partial(defaultdict, list)),
        )
        assert not given

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._trainer, name)
        is_static = isinstance(vars(self._trainer).get(name), staticmethod)
        return function if is_static else partial(function, self)

    def _get_per_token_logps_and_entropies(self, *args: Any, **given: Any) -> tuple[Tensor, Tensor, None]:
        return padded(self._batch.logprobs_K), padded(self._batch.entropy_K), None

    def loss(self) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(len(LENGTHS), 1)
        inputs = {
            "prompt_ids": zeros,
            "prompt_mask": zeros,
            "completion_ids": MASK,
            "completion_mask": MASK,
            "advantages": self._batch.advantages_K[CU[:-1]],
            "old_per_token_logps": padded(self._batch.old_K),
            "ref_per_token_logps": padded(self._batch.ref_K),
            "num_items_in_batch": MASK.sum(),
        }
        return self._batch.with_gradient(self._trainer._compute_loss(self, None, inputs))


@pytest.fixture(scope="module")
def trl() -> Any:
    pytest.importorskip("trl")
    from trl import DPOTrainer, GRPOTrainer
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gold import GOLDTrainer
    from trl.experimental.gold.gold_trainer import ULDLoss

    return SimpleNamespace(grpo=GRPOTrainer, dpo=DPOTrainer, gkd=GKDTrainer, gold=GOLDTrainer, uld=ULDLoss)


BOUNDS = {"eps_clip_low_high": (0.2, 0.28)}
OF_TRL: dict[str, tuple[str, dict[str, Any], PolicyConfig, float, float]] = {
    # (loss type, settings there, settings here, KL coefficient, factor between both means)
    "token_mean": ("dapo", {}, off(**BOUNDS), 0.0, 1.0),
    "seq_mean": ("grpo", {}, off(**BOUNDS, loss_agg="seq_mean"), 0.0, 1.0),
    "seq_sum_norm": ("dr_grpo", {}, off(**BOUNDS, loss_agg="seq_sum_norm"), 0.0, 1.0),
    "vespo": ("vespo", {}, off(policy_loss="vespo"), 0.0, 1.0),
    "sapo": ("sapo", {}, off(policy_loss="sapo", loss_agg="seq_mean"), 0.0, 1.0),
    "cispo": ("cispo", {"epsilon_high": 1.2}, off(policy_loss="cispo", cispo_eps_high=1.2), 0.0, 1.0),
    "luspo": (
        "luspo",
        {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
        off(policy_loss="gspo", eps_clip_low_high=(0.1, 0.15)),
        0.0,
        sum(LENGTHS) / len(LENGTHS),
    ),
    "off-policy mask": (
        "dapo",
        {"off_policy_mask_threshold": 0.05},
        off(**BOUNDS, off_policy_mask_threshold=0.05),
        0.0,
        1.0,
    ),
    "high entropy": ("dapo", {"top_entropy_quantile": 0.3}, off(**BOUNDS, top_entropy_quantile=0.3), 0.0, 1.0),
    "KL": ("dapo", {"beta": 0.2}, off(**BOUNDS, use_kl_loss=True, kl_estimator="k3"), 0.2, 1.0),
    "unbiased KL": (
        "dapo",
        {"beta": 0.2, "use_bias_correction_kl": True},
        off(**BOUNDS, use_kl_loss=True, kl_estimator="k3", unbiased_kl=True),
        0.2,
        1.0,
    ),
}


@pytest.mark.parametrize("seed", [1, 11, 21])
@pytest.mark.parametrize("name", OF_TRL)
def test_policy_losses_equal_trl(trl, name, seed):
    loss_type, given, settings, kl_coef, factor = OF_TRL[name]
    batch = Batch(seed)
    expected = FakeGRPOTrainer(trl.grpo, batch, loss_type, **given).loss()
    for found, own in zip(batch.objective(settings, kl_coef=kl_coef), expected, strict=True):
        torch.testing.assert_close(factor * found, own, rtol=1e-6, atol=1e-8)


class FakeDPOTrainer:
    """What TRL's loss on pairs reads, with given log-probs: chosen responses first, then rejected ones."""

    def __init__(self, trainer: Any, batch: Batch, **given: Any) -> None:
        self.loss_types, self.loss_weights, self.args = [given.pop("loss")], [1.0], SimpleNamespace(discopop_tau=0.05)
        self.args.gradient_checkpointing_kwargs = None
        self.accelerator, self.model, self.ref_model = (
            Accelerator(),
            nn.Linear(1, 1),
            partial(self._outputs, batch.ref_K),
        )
        self.model.is_gradient_checkpointing = False
        self.aux_loss_enabled = self.precompute_ref_logps = False
        self.ld_alpha = self.f_alpha_divergence_coef = None
        self.beta, self.label_smoothing, self.f_divergence_type, self.use_weighting = 0.3, 0.0, "reverse_kl", False
        self._metrics: Any = defaultdict(partial(defaultdict, list))
        self._total_train_tokens, self._tp_size = 0, 1
        self.__dict__.update(given)
        self._batch, self._loss = batch, trainer._compute_loss
        self._order = [*range(0, len(LENGTHS), 2), *range(1, len(LENGTHS), 2)]

    def _outputs(self, logprobs_K: Tensor, **given: Any) -> SimpleNamespace:
        logprobs = padded(logprobs_K)[self._order]
        squares = -padded(self._batch.entropy_K)[self._order]
        zeros = torch.zeros_like(logprobs)
        more = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool(), "log_sum_sq_probs": squares}
        return SimpleNamespace(log_probs=logprobs, **more)

    def loss(self) -> tuple[Tensor, Tensor]:
        # One token of a prompt before each response.
        mask = torch.nn.functional.pad(MASK[self._order], (1, 0)).float()
        inputs = {"input_ids": mask.long(), "completion_mask": mask, "attention_mask": mask}
        model = partial(self._outputs, self._batch.logprobs_K)
        model.training = True  # type: ignore[attr-defined]
        return self._batch.with_gradient(self._loss(self, model, inputs, False))


PAIRS: list[dict[str, Any]] = [
    *({"loss": name} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "aot")),
    *({"loss": name, "label_smoothing": 0.1} for name in ("robust", "exo_pair", "discopop", "sigmoid_norm", "aot")),
    *(
        {"loss": name, "f_divergence_type": kind}
        for name in ("sigmoid", "ipo", "hinge", "discopop", "sigmoid_norm")
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    *({"loss": name, "ld_alpha": 0.3} for name in ("sigmoid", "apo_zero", "aot")),
    *({"loss": name, "use_weighting": True} for name in ("sigmoid", "nca_pair", "apo_zero")),
    {"loss": "sigmoid", "ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "js_divergence"},
]


@pytest.mark.parametrize("given", PAIRS, ids=lambda given: " ".join(map(str, given.values())))
def test_losses_on_pairs_equal_trl(trl, given):
    if given.get("f_divergence_type") == "alpha_divergence":
        given = given | {"f_alpha_divergence_coef": 0.4}
    smoothed = given["loss"] not in ("sigmoid_norm", "discopop")  # TRL smooths neither
    batch = Batch(7).as_floats()
    expected = FakeDPOTrainer(trl.dpo, batch, **given).loss()
    names = ("label_smoothing", "f_divergence_type", "f_alpha_divergence_coef")
    settings = {name: given[name] for name in names if name in given and (smoothed or name != "label_smoothing")}
    objective = DPOObjective(
        (given["loss"],),
        (1.0,),
        PreferenceSettings(beta=0.3, **settings),
        use_weighting=given.get("use_weighting", False),
        ld_alpha=given.get("ld_alpha", 1.0),
    )
    reference_P2 = objective.forward(lambda pack: (batch.ref_K, None), batch.pairs()).unflatten(0, (-1, 2))  # type: ignore[arg-type]
    pairs = batch.pairs(ref_logprobs=reference_P2)
    if given["loss"] == "aot":
        own_2P = objective.forward(lambda pack: (batch.logprobs_K.detach(), None), pairs)  # type: ignore[arg-type]
        pairs = batch.pairs(ref_logprobs=reference_P2, aot_partner=aot_partners(pair_logprobs(own_2P, pairs)))
    totals = StepTotals(int(CU[-1]), len(LENGTHS) // 2)
    loss, _ = objective(lambda pack, **more: (batch.logprobs_K, -batch.entropy_K), pairs, totals)  # type: ignore[arg-type]
    for found, own in zip(batch.with_gradient(loss), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_from_a_teacher_equal_trl(trl, beta):
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, 1, 6, 9, generator=generator, dtype=torch.float64)
    expected = trl.gkd.generalized_jsd_loss(student, teacher, beta=beta, temperature=0.7, reduction="sum")
    found = divergence((student[0] / 0.7).log_softmax(-1), (teacher[0] / 0.7).log_softmax(-1), beta)
    torch.testing.assert_close(found.sum(), expected)


@pytest.mark.parametrize("seed", range(8))
def test_spans_across_tokenizers_equal_gold(trl, seed):
    """A span of the policy has the probability that GOLD gives to the merged tokens."""
    generator = np.random.default_rng(seed)
    text = generator.bytes(40)

    def cut(count: int) -> list[bytes]:
        bounds = [0, *sorted(generator.choice(np.arange(1, 40), count, replace=False).tolist()), 40]
        return [text[start:stop] for start, stop in pairwise(bounds)]

    sides = cut(12), cut(17)
    rows = shared_spans(*sides)
    offsets = [list(pairwise(np.cumsum([0, *map(len, side)]).tolist())) for side in sides]
    expected = trl.uld._align_by_byte_offsets(*offsets)
    for column, groups_of_side in enumerate(expected):
        found = [list(range(first, first + count)) for first, count in rows[:, [column, column + 2]].tolist()]
        assert found == groups_of_side
    probs_NV = torch.rand(len(sides[0]), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = list(generator.integers(0, 5, len(sides[0])))
    fake = SimpleNamespace(token_merge_strategy="observed")
    merged = trl.uld._merge_probabilities_with_alignment_groups(fake, probs_NV, expected[0], ids)
    spans_N = torch.arange(len(rows)).repeat_interleave(torch.from_numpy(rows[:, 2]))
    sums_N = over_spans(probs_NV[torch.arange(len(ids)), ids].log(), spans_N)
    for number, first in enumerate(rows[:, 0].tolist()):
        torch.testing.assert_close(sums_N[first].exp(), merged[number, ids[first]])


def test_noise_on_embeddings_has_the_bounds_of_transformers():
    length, dimension, alpha = 50, 400, 5.0
    module = SimpleNamespace(training=True, neftune_noise_alpha=alpha)
    expected = neftune_post_forward_hook(module, None, torch.zeros(1, length, dimension))
    packed = pack([TokenSequence(np.arange(length, dtype=np.int32), np.arange(length) > 0)])
    found = EmbeddingNoise(alpha, seed=0, step=1).of(packed, dimension=dimension)
    for noise in (found, expected):
        assert float(noise.abs().max()) == pytest.approx(alpha / (length * dimension) ** 0.5, rel=1e-3)
        assert float(noise.std()) == pytest.approx(alpha / (3 * length * dimension) ** 0.5, rel=2e-2)
