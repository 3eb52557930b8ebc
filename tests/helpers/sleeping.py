"""Three DeepSpeed steps of a tiny bfloat16 policy, with an action after each."""

from collections.abc import Callable

import torch
from adapted_models import load
from tiny_training import OPTIM, Items, Layout, make_sequences, train, weights_of

from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.policy import PolicyModel

AfterStep = Callable[[], None]


def do_nothing(engine: DeepSpeedEngine, module: PolicyModel) -> AfterStep:
    """Do nothing between steps."""
    return lambda: None


def trained_weights(
    model: str,
    stage: int,
    *,
    lora_rank: int,
    between: Callable[[DeepSpeedEngine, PolicyModel], AfterStep] = do_nothing,
    sleeps: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the weights after three steps; `between` is called after each step."""
    module = PolicyModel(load(model, stage, lora_rank=lora_rank, dtype="bf16"))
    engine = DeepSpeedEngine(
        module,
        DeepSpeedConfig(zero_stage=stage),
        optim=OPTIM,
        learning_rate=1e-3,
        total_steps=3,
        param_dtype="bf16",
        sleeps=sleeps,
    )
    after_step, items = between(engine, module), Items(make_sequences(4))
    for _ in range(3):
        train(engine, items, [[0, 1, 2, 3]], Layout())
        after_step()
    return weights_of(engine, module)


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Assert that all weights are bit-identical."""
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
