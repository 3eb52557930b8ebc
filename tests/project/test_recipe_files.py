"""The example recipes fit the hardware that they name: placement, batches, sequence lengths, GPU and host memory.

Models are planned from their published shapes, without weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plans import engine_of
from transformers import PretrainedConfig

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.requirements import check_positions
from rlhf_cli.models.sequence_parallel.checks import check_sequence_parallel
from rlhf_cli.options import build_config
from rlhf_cli.planning.architectures import config_of, published
from rlhf_cli.planning.phases import sleeping_by_node
from rlhf_cli.planning.planner import Plan
from rlhf_cli.runs.online.checks import check_batches
from rlhf_cli.runs.plan import plan_with_changes
from rlhf_cli.settings_file import read_settings

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "examples" / "recipes"
GB = 10**9
GPU = "a100-80"
"""The smallest GPU of 80 GB in the table."""
ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Hardware:
    """Nodes with 80 GB GPUs, and host memory per node in GB."""

    nodes: int
    gpus: int
    host_gb: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.gpus


ONLINE = {
    "ppo/0.5b.yaml": Hardware(1, 1, host_gb=64),
    "ppo/1.5b.yaml": Hardware(1, 8, host_gb=256),
    "ppo/7b.yaml": Hardware(1, 8, host_gb=512),
    "ppo/32b.yaml": Hardware(2, 8, host_gb=1000),
}
OFFLINE = {
    "sft/8b.yaml": Hardware(1, 8),
    "sft/70b.yaml": Hardware(4, 8),
    "dpo/8b.yaml": Hardware(1, 8),
    "dpo/70b.yaml": Hardware(4, 8),
}


def read(name: str, hardware: Hardware) -> tuple[Any, Plan]:
    """Return the settings of a recipe, and its plan."""
    values = {key: value for file in read_settings(str(RECIPES / name)) for key, value in file.values.items()}
    given = {"gpu": GPU, "num_gpus": hardware.gpus, "num_nodes": hardware.nodes}
    given |= {} if hardware.host_gb is None else {"host_memory_gib": hardware.host_gb * GB / 2**30}
    config: Any = build_config(planned_class(name.partition("/")[0]), values | given)
    return config, plan_with_changes(config, config.plan)[0]


def architecture(config: Any) -> PretrainedConfig:
    return config_of(published()[config.model.pretrain])


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_recipe_fits_its_nodes(name):
    hardware = ONLINE[name]
    config, plan = read(name, hardware)
    check_batches(config, ESTIMATORS["ppo"])
    check_positions(architecture(config), config.prompts.max_len)
    assert plan.work.layout.num_gpus == hardware.num_ranks
    assert architecture(config).num_attention_heads % engine_of(plan).size == 0
    for role in ROLES:
        settings, num_ranks = config.deepspeed_of(role), plan.work.roles[role].num_ranks
        assert num_ranks == hardware.num_ranks
        check_deepspeed(settings, param_dtype=config.model.param_dtype)
        check_sequence_parallel(
            architecture(config), settings, num_ranks=num_ranks, attention=VARLEN, trust_remote_code=False
        )
    assert plan.fits
    assert plan.work.models_sleep  # otherwise memory must fit both roles at once
    assert 2 * max(sleeping_by_node(plan.work).values()) < (hardware.host_gb or 0) * GB  # pinned buffers are rounded up
    assert engine_of(plan).running(config.prompts.max_len) >= 16


@pytest.mark.parametrize("name", OFFLINE)
def test_an_offline_recipe_fits_its_nodes(name):
    hardware = OFFLINE[name]
    config, plan = read(name, hardware)
    settings = config.deepspeed
    check_deepspeed(settings, param_dtype=config.model.param_dtype)
    check_sequence_parallel(
        architecture(config), settings, num_ranks=hardware.num_ranks, attention=VARLEN, trust_remote_code=False
    )
    assert config.launch.num_processes == (hardware.gpus if hardware.nodes == 1 else 1)  # torchrun starts several nodes
    longest = config.data.max_len * (2 if config.command == "dpo" else 1)  # both responses of a pair, at most
    assert longest <= config.batch.max_tokens * settings.sequence_parallel_size
    assert plan.fits


def test_a_recipe_that_is_too_large_for_its_gpus_is_noticed():
    _, plan = read("sft/70b.yaml", Hardware(1, 8))
    assert not plan.fits


def test_every_recipe_is_checked_and_in_the_page():
    files = {str(file.relative_to(RECIPES)) for file in RECIPES.rglob("*.yaml")}
    bases = {name for name in files if name.endswith("base.yaml")}
    assert files - bases == ONLINE.keys() | OFFLINE.keys()
    page = (REPOSITORY / "docs" / "howto" / "recipes.md").read_text()
    assert [name for name in files - bases if f"--config examples/recipes/{name}" not in page] == []


def test_a_file_for_a_size_has_nothing_that_its_base_has():
    for name in [*ONLINE, *OFFLINE]:
        base, own = read_settings(str(RECIPES / name))
        assert [key for key in own.values if base.values.get(key) == own.values[key]] == []
