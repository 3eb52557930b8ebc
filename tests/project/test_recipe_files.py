"""The example recipes fit their hardware: placement, batches, sequence lengths, GPU and host memory.

Models have the published shapes without weights. Sizes are in bytes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from rlhf_cli.runs.online.sleep_memory import SleepingRole
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.cluster.placement import Layout, plan_layout
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.ppo import PPOConfig
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.requirements import check_positions
from rlhf_cli.models.sequence_parallel.checks import check_sequence_parallel
from rlhf_cli.options import build_config
from rlhf_cli.runs.online.checks import check_batches
from rlhf_cli.settings_file import read_settings

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "examples" / "recipes"
GB = 10**9
GPU_BYTES = 80 * GB
REST = 0.25
"""Share of a GPU reserved for communication buffers, one layer's activations and logits."""
ROLES = ("actor", "critic")


def qwen(hidden: int, layers: int, heads: int, key_heads: int, mlp: int, *, vocab: int = 152064) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=mlp,
        max_position_embeddings=32768,
        tie_word_embeddings=vocab < 152064,
    )


def llama(hidden: int, layers: int, heads: int, mlp: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=mlp,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )


@dataclass(frozen=True)
class Hardware:
    """Nodes with 80 GB GPUs, host memory per node, and the model shape for them."""

    architecture: PretrainedConfig
    nodes: int
    gpus: int
    host_gb: int = 0

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.gpus


LLAMA_8B, LLAMA_70B = llama(4096, 32, 32, 14336), llama(8192, 80, 64, 28672)
ONLINE = {
    "ppo/0.5b.yaml": Hardware(qwen(896, 24, 14, 2, 4864, vocab=151936), 1, 1, host_gb=64),
    "ppo/1.5b.yaml": Hardware(qwen(1536, 28, 12, 2, 8960, vocab=151936), 1, 8, host_gb=256),
    "ppo/7b.yaml": Hardware(qwen(3584, 28, 28, 4, 18944), 1, 8, host_gb=512),
    "ppo/32b.yaml": Hardware(qwen(5120, 64, 40, 8, 27648), 2, 8, host_gb=1000),
}
OFFLINE: dict[str, tuple[type, Hardware]] = {
    "sft/8b.yaml": (SFTConfig, Hardware(LLAMA_8B, 1, 8)),
    "sft/70b.yaml": (SFTConfig, Hardware(LLAMA_70B, 4, 8)),
    "dpo/8b.yaml": (DPOConfig, Hardware(LLAMA_8B, 1, 8)),
    "dpo/70b.yaml": (DPOConfig, Hardware(LLAMA_70B, 4, 8)),
}


def read(name: str, cls: Any, **given: str) -> Any:
    values = {key: value for file in read_settings(str(RECIPES / name)) for key, value in file.values.items()}
    return build_config(cls, {**values, **given})


def num_parameters(text: PretrainedConfig) -> int:
    """Count the weights of the decoder matrices, the embedding and the head; norms and biases are a thousandth of
    them.
    """
    hidden, heads, key_heads = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    attention = 2 * hidden * hidden + 2 * hidden * hidden * key_heads // heads
    layer = attention + 3 * hidden * text.intermediate_size
    return text.num_hidden_layers * layer + text.vocab_size * hidden * (1 if text.tie_word_embeddings else 2)


def trained_bytes(hardware: Hardware, settings: DeepSpeedConfig) -> int:
    """Return DeepSpeed's own memory estimate per GPU for a model in training."""
    total, text = num_parameters(hardware.architecture), hardware.architecture
    shape = {"num_gpus_per_node": hardware.gpus, "num_nodes": hardware.nodes, "cpu_offload": False}
    if settings.zero_stage < 3:
        return int(estimate_zero2_model_states_mem_needs(total, **shape)[1])
    largest = text.vocab_size * text.hidden_size
    return int(estimate_zero3_model_states_mem_needs(total, largest, **shape)[1])


def kept_activations(hardware: Hardware, max_tokens: int) -> int:
    """Return the size of all layer inputs in bf16, which gradient checkpointing keeps."""
    text = hardware.architecture
    return 2 * max_tokens * text.num_hidden_layers * text.hidden_size


def assert_fits(hardware: Hardware, settings: DeepSpeedConfig, max_tokens: int, *, besides: int = 0) -> None:
    needed = trained_bytes(hardware, settings) + kept_activations(hardware, max_tokens) + besides
    assert needed < (1 - REST) * GPU_BYTES, f"{needed / GB:.0f} GB"


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_recipe_fits_its_nodes(name):
    hardware = ONLINE[name]
    config = read(name, PPOConfig, prompt_data="prompts", output="run")
    check_batches(config, ESTIMATORS["ppo"])
    check_positions(hardware.architecture, config.prompts.max_len)
    layout = plan_layout(config.layout_settings(ROLES), node_gpus=[hardware.gpus] * hardware.nodes)
    assert layout.num_gpus == hardware.num_ranks
    assert hardware.architecture.num_attention_heads % config.engine.vllm_tensor_parallel_size == 0
    for role in ROLES:
        settings, num_ranks = config.deepspeed_of(role), config.num_ranks(role)
        assert num_ranks == hardware.num_ranks
        check_deepspeed(settings, param_dtype=config.model.param_dtype)
        check_sequence_parallel(
            hardware.architecture, settings, num_ranks=num_ranks, attention=VARLEN, trust_remote_code=False
        )
        assert_fits(hardware, settings, config.batch.max_tokens)
    assert config.placement.deepspeed_enable_sleep  # otherwise memory must fit both roles at once
    assert 2 * sleeping_bytes(hardware, config, layout) < hardware.host_gb * GB  # pinned buffers are rounded up
    share = config.engine.vllm_gpu_memory_utilization * config.engine.vllm_tensor_parallel_size
    assert 2 * num_parameters(hardware.architecture) < 0.6 * share * GPU_BYTES  # the rest is for the cache


def sleeping_bytes(hardware: Hardware, config: PPOConfig, layout: Layout) -> float:
    """Return the host memory of all sleeping roles on each node."""
    size = num_parameters(hardware.architecture)
    roles = [SleepingRole(size, size, 2, config.deepspeed_of(role).zero_stage, len(layout.of(role))) for role in ROLES]
    return sum(role.host_bytes for role in roles) / hardware.nodes


@pytest.mark.parametrize("name", OFFLINE)
def test_an_offline_recipe_fits_its_nodes(name):
    cls, hardware = OFFLINE[name]
    config = read(name, cls, dataset="rows", output="run")
    settings, max_tokens = config.deepspeed, config.batch.max_tokens
    check_deepspeed(settings, param_dtype=config.model.param_dtype)
    check_sequence_parallel(
        hardware.architecture, settings, num_ranks=hardware.num_ranks, attention=VARLEN, trust_remote_code=False
    )
    assert config.launch.num_processes == (hardware.gpus if hardware.nodes == 1 else 1)  # torchrun starts several nodes
    longest = config.data.max_len * (2 if cls is DPOConfig else 1)  # both responses of a pair, at most
    assert longest <= max_tokens * settings.sequence_parallel_size
    reference = 2 * num_parameters(hardware.architecture) // hardware.num_ranks
    kept = cls is DPOConfig and not config.reference.precompute_ref_log_probs
    assert_fits(hardware, settings, max_tokens, besides=reference if kept else 0)


@pytest.mark.parametrize(
    ("hardware", "billions"),
    [
        (ONLINE["ppo/0.5b.yaml"], 0.49),
        (ONLINE["ppo/1.5b.yaml"], 1.54),
        (ONLINE["ppo/7b.yaml"], 7.6),
        (ONLINE["ppo/32b.yaml"], 32.8),
        (OFFLINE["sft/8b.yaml"][1], 8.0),
        (OFFLINE["sft/70b.yaml"][1], 70.6),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(hardware, billions):
    assert num_parameters(hardware.architecture) == pytest.approx(billions * GB, rel=0.01)


def test_a_recipe_that_is_too_large_for_its_gpus_is_noticed():
    hardware = OFFLINE["sft/70b.yaml"][1]
    with pytest.raises(AssertionError, match=r"^\d+ GB"):
        assert_fits(Hardware(hardware.architecture, 1, 8), DeepSpeedConfig(zero_stage=3), 8192)


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
