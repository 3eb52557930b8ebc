"""Forward and backward passes of all objectives on the fake device, with tiny models.

Prints a JSON line per case: its error or null, waits of the host, and the number of operators. Arguments are parts of
names of cases; by default all run except those with similar models.
"""

import itertools
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from device import CUDA, fake_device
from models import model_on_gpu, vision_model_on_gpu, with_adapter
from preference_training import TASKS, Task, dpo_task, kto_task
from tiny_causal_models import sequences, tiny_config
from tiny_vision import save_tiny_vision
from vision_sequences import vision_sequences

from rlhf_cli.algorithms.aggregation import CORRECT, OBSERVED, PROMPT_TOKENS, StepTotals, combine_metrics
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.kto import UNPAIRED_LOSSES
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.backends.roles.loss_inputs import with_places
from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank
from rlhf_cli.backends.roles.selected_tokens import COVARIANT, KEPT
from rlhf_cli.backends.training.deepspeed_engine import _spreading_nan
from rlhf_cli.config.policy import KLEstimator, PolicyConfig
from rlhf_cli.config.preference import PAIR_LOSSES
from rlhf_cli.config.roles import CriticConfig, KLTerm
from rlhf_cli.data.packing.packs import MicroBatch, TokenSequence, micro_batch, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.sequence_parallel.shards import Mode, SequenceRanks
from rlhf_cli.models.student import HiddenStateModel, StudentModel, TeacherStates
from rlhf_cli.trainers.offline import dpo, kto
from rlhf_cli.trainers.offline.distill import DistillBatch, DistillObjective
from rlhf_cli.trainers.offline.sft import sft_objective

Result = tuple[torch.nn.Module, torch.Tensor]
"""A model and its loss."""
TOTALS = StepTotals(num_tokens=100, num_sequences=4)
COLUMNS = ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "old_values", "returns")
MODEL_TYPES = (
    *("llama", "qwen3", "gemma2", "phi3", "olmo2", "qwen3_moe", "gpt_oss", "deepseek_v3"),
    *("qwen3_5_text", "bamba", "lfm2"),
)
"""Besides qwen2, one type of each kind of layer: norms, softcaps, joint projections, mixtures of experts, sinks, latent
attention, delta rules, state spaces, convolutions."""
SIMILAR_TYPES = ("mistral", "gemma3_text", "smollm3", "cohere", "granite", "glm4", "mixtral", "kimi_linear")
"""Types whose layers are similar to those of `MODEL_TYPES`."""
SIMILAR = "similar "
"""Start of the names of cases that run only if they are requested."""


UNREAD = ("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm.")
"""Parts of LLaVA's vision encoder behind the layer whose output it reads."""


def with_columns(several: list[TokenSequence]) -> list[TokenSequence]:
    return [replace(one, columns={name: np.zeros(one.num_trained, np.float32) for name in COLUMNS}) for one in several]


def batch_of(several: list[TokenSequence], *, shares: bool = False) -> MicroBatch:
    return micro_batch(with_columns(several), names=COLUMNS, pack_sequences=pack_groups if shares else pack)


def samples_of_one_prompt() -> list[TokenSequence]:
    return [TokenSequence(np.arange(3, 3 + length, dtype=np.int32), np.arange(length) >= 20) for length in (30, 40, 25)]


def policy(kind: str = "qwen2", **options: Any) -> PolicyModel:
    return PolicyModel(model_on_gpu(tiny_config(kind), **options))


def actor(
    module: PolicyModel, batch: MicroBatch, *, entropy: float = 0.0, kl: KLEstimator = "k1", **settings: Any
) -> Result:
    weights = LossWeights({"ref": KLTerm(0.1, kl)}, EntropyState(entropy))
    role = SimpleNamespace(
        settings=SimpleNamespace(policy=PolicyConfig(**settings), temperature=0.9, max_new_tokens=64), record=None
    )
    loss, metrics = ActorRank._loss(role, TOTALS, weights)(module, batch)  # type: ignore[arg-type]
    combine_metrics(metrics, metrics)
    return module, loss


def value_model(head: str = "score") -> ValueModel:
    return ValueModel(model_on_gpu(tiny_config("qwen2"), head=head))


def critic(module: ValueModel, batch: MicroBatch) -> Result:
    settings = SimpleNamespace(policy=PolicyConfig(), critic=CriticConfig(), max_new_tokens=64)
    loss, _ = CriticRank._loss(SimpleNamespace(settings=settings), TOTALS)(module, batch)  # type: ignore[arg-type]
    return module, loss


def offline(task: Task, module: Any = None, *, num_items: int = 3) -> Result:
    """Run an objective of tests/helpers/preference_training, with columns of a reference."""
    reads_scores = task.is_reward_model
    module = module or (value_model() if reads_scores else policy())
    batch = task.items.collate(list(range(num_items)))
    if isinstance(batch, kto.LabelledBatch):
        batch = replace(batch.with_columns(**{kto.REF: torch.zeros(num_items)}), baseline=0.1)
    elif not reads_scores:
        rows = torch.zeros(num_items)
        columns = {dpo.REF: torch.zeros(num_items, 2), dpo.PARTNER: rows, dpo.DELTA: rows}
        batch = MicroBatch(batch.pack, batch.columns | columns)
    loss, _ = task.objective(module, batch.to(CUDA), TOTALS)
    return module, loss


def distill(settings: DivergenceSettings, coef: float) -> Result:
    student = StudentModel(model_on_gpu(tiny_config("qwen2")))
    teacher = HiddenStateModel(model_on_gpu(tiny_config("llama")).eval())
    batch = pack(sequences()).to(CUDA)
    with torch.no_grad():
        states = teacher(batch)
    objective = DistillObjective(settings, kd_coef=coef)
    return student, objective(student, DistillBatch(batch, (TeacherStates(states, teacher.head.weights()),)), TOTALS)[0]


def sequence_parallel(mode: Mode) -> Result:
    """Run the actor as one of two ranks whose collectives do nothing."""
    module = policy()
    module.sequence_ranks = SequenceRanks(dist.group.WORLD, mode)  # type: ignore[arg-type]
    return actor(module, batch_of(sequences()).to(CUDA))


def of_samples(**settings: Any) -> Result:
    return actor(policy(), batch_of(sequences()).to(CUDA), **settings)


def of_selected_tokens(**settings: Any) -> Result:
    """Run the actor with the columns that ranks compute before the step."""
    batch = batch_of(sequences())
    is_even_K = torch.arange(len(batch.columns["advantages"])) % 2 == 0
    selected = {KEPT: is_even_K, COVARIANT: is_even_K, PROMPT_TOKENS: torch.full(is_even_K.shape, 9.0)}
    selected |= {CORRECT: is_even_K.float()}
    if "observation_nll_coef" in settings:
        selected[OBSERVED] = 1 - is_even_K.float()
    return actor(policy(), with_places(MicroBatch(batch.pack, batch.columns | selected)).to(CUDA), **settings)


CASES: dict[str, Callable[[], Result]] = {
    **{
        f"actor {' '.join(chosen)}": lambda chosen=chosen: of_samples(  # type: ignore[misc]
            **dict(zip(("policy_loss", "loss_agg", "rollout_correction", "kl"), chosen, strict=True))
        )
        # Each value of each setting once.
        for chosen in [
            ("clip", "token_mean", "token_clip", "k1"),
            ("gspo", "seq_mean", "off", "k2"),
            ("cispo", "seq_sum_norm", "token_mask", "k3"),
            ("sapo", "token_mean", "seq_mask", "k1"),
            ("reinforce", "token_mean", "off", "k2"),
            ("dppo_tv", "seq_mean", "off", "k3"),
            ("dppo_kl", "token_mean", "off", "k3"),
            ("gmpo", "seq_mean", "off", "k3"),
            ("topr", "token_mean", "off", "k3"),
            ("vespo", "token_mean", "off", "k3"),
        ]
    },
    "actor clip_cov prompt_mean": lambda: of_selected_tokens(policy_loss="clip_cov", loss_agg="prompt_mean"),
    "actor kl_cov": lambda: of_selected_tokens(policy_loss="kl_cov"),
    "actor with observations": lambda: of_selected_tokens(correct_nll_coef=0.1, observation_nll_coef=0.05),
    "actor with an entropy bonus": lambda: of_samples(entropy=0.01),
    "actor with dual clip": lambda: of_samples(dual_clip=3.0),
    "actor with shared prompts": lambda: actor(policy(), batch_of(samples_of_one_prompt(), shares=True).to(CUDA)),
    "actor with an idle pack": lambda: actor(policy(), batch_of([]).to(CUDA)),
    "actor with recomputed layers": lambda: actor(policy(checkpointing=True), batch_of(sequences()).to(CUDA)),
    "actor with LoRA": lambda: actor(
        PolicyModel(with_adapter(model_on_gpu(tiny_config("qwen2")))), batch_of(sequences()).to(CUDA)
    ),
    "actor with LoRA and recomputed layers": lambda: actor(
        PolicyModel(with_adapter(model_on_gpu(tiny_config("qwen2"), checkpointing=True))),
        batch_of(sequences()).to(CUDA),
    ),
    "critic": lambda: critic(value_model(), batch_of(sequences()).to(CUDA)),
    "critic with an idle pack": lambda: critic(value_model(), batch_of([]).to(CUDA)),
    "sft": lambda: (module := policy(), sft_objective(module, pack(sequences()).to(CUDA), TOTALS)[0]),
    "rm": lambda: offline(TASKS["rm"]()),
    "prm": lambda: offline(TASKS["prm"]()),
    "prm with two classes": lambda: offline(TASKS["prm"](), value_model("classes")),
    f"dpo {' '.join(PAIR_LOSSES)}": lambda: offline(dpo_task(*PAIR_LOSSES)),
    **{f"kto {loss}": lambda loss=loss: offline(kto_task(loss)) for loss in UNPAIRED_LOSSES},  # type: ignore[misc]
    "distill forward KL": lambda: distill(DivergenceSettings(), 1.0),
    "distill JSD of the top 8 with NLL": lambda: distill(DivergenceSettings(beta=0.5, teacher_top_k=8), 0.5),
    **{f"sequence parallel {mode}": lambda mode=mode: sequence_parallel(mode) for mode in ("ulysses", "gather")},  # type: ignore[misc]
    **{
        f"model {kind}": lambda kind=kind: actor(policy(kind), batch_of(sequences()).to(CUDA))  # type: ignore[misc]
        for kind in MODEL_TYPES
    },
    **{
        f"{SIMILAR}{kind}": lambda kind=kind: actor(policy(kind), batch_of(sequences()).to(CUDA))  # type: ignore[misc]
        for kind in SIMILAR_TYPES
    },
}


def vision_cases(folder: Path) -> dict[str, Callable[[], Result]]:
    """Return cases with images. Their folders are written here, because reading files needs real tensors."""
    found: dict[str, Callable[[], Result]] = {}
    place = save_tiny_vision("llava", folder / "llava")
    several = vision_sequences(place)
    for what, chosen in (("images", several), ("text for a model of images", several[1:2])):
        found[what] = lambda chosen=chosen: actor(  # type: ignore[misc]
            PolicyModel(vision_model_on_gpu(place)), batch_of(chosen).to(CUDA)
        )
    return found


def result_of(run: Callable[[], Result]) -> dict[str, object]:
    with fake_device() as device:
        error = None
        try:
            module, loss = run()
            _spreading_nan(loss).backward()
            trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
            missing = [name for name, p in trained.items() if p.grad is None and not any(u in name for u in UNREAD)]
            wrong = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.device != CUDA]
            if missing or wrong:
                error = f"no gradient: {missing}, gradient elsewhere: {wrong}"
        except Exception as failure:
            frames = traceback.extract_tb(failure.__traceback__)
            lines = [f"{one.filename}:{one.lineno}" for one in frames if "/torch/" not in one.filename]
            error = f"{type(failure).__name__}: {failure} in {lines[-2:]}"
        return {"error": error, "waits": dict(device.waits), "operators": device.operators.total()}


def main(*parts: str) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with tempfile.TemporaryDirectory() as folder:
        for name, run in itertools.chain(CASES.items(), vision_cases(Path(folder)).items()):
            if any(part in name for part in parts) or not (parts or name.startswith(SIMILAR)):
                print(json.dumps({"name": name, **result_of(run)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
