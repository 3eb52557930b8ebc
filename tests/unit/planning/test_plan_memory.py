"""Bytes of a plan, compared with manual calculations for published models."""

import json
from dataclasses import asdict, replace

import pytest
from plans import LARGE, SMALL, engine_of, plan_of
from tiny_causal_models import tiny_config
from transformers import AutoConfig

from rlhf_cli.planning.architectures import config_of, find_shape, published
from rlhf_cli.planning.memory import GIB, added, total
from rlhf_cli.planning.plain_shapes import plain_shape
from rlhf_cli.planning.shapes import shape_of
from rlhf_cli.planning.shared_memory import shared_memory

PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
}
"""Published numbers of parameters (the sizes of the safetensors files on the Hub)."""
N = PARAMETERS[LARGE]


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_the_parameters_of_their_weights(name):
    assert find_shape(name).parameters == PARAMETERS[name]


def test_stored_shapes_are_those_of_the_configurations():
    for row in {id(row): row for row in published().values()}.values():
        computed = asdict(shape_of(config_of(row)))
        assert row["shape"] | {"linears": tuple(map(tuple, row["shape"]["linears"]))} == computed, row["names"]


def test_plain_decoders_have_the_stored_shapes():
    rows = {id(row): row for row in published().values()}.values()
    shapes = [(plain_shape(row["config"]), find_shape(row["names"][0])) for row in rows]
    assert [found for found, stored in shapes if found not in (None, stored)] == []
    assert sum(found is not None for found, _ in shapes) == 23  # not the two mixtures of experts


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_plain_decoder_has_the_shape_of_its_model_on_the_meta_device(kind, is_tied, tmp_path):
    config = AutoConfig.for_model(
        kind,
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 300, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": is_tied},
    )
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert plain_shape(values) == shape_of(AutoConfig.from_pretrained(tmp_path))
    for unusual in ({"attention_bias": True}, {"auto_map": {"AutoModel": "x.Y"}}, {"vocab_size": None}):
        assert plain_shape(values | unusual) is None


def test_kv_cache_of_a_token_is_keys_and_values_of_all_layers():
    assert find_shape(LARGE).cache_values == 28 * 2 * 4 * 128
    engine = engine_of(plan_of("generate"))
    assert engine.token_bytes == 57_344
    assert engine.cache_tokens == pytest.approx((0.9 * 79.1 * GIB - 2 * N - engine._rest) / 57_344, abs=1)


def test_layers_with_larger_heads_cache_more_and_attend_to_more():
    """Two layers with 2 x 8 key values and two with 1 x 16, 4 query heads each."""
    shape = shape_of(tiny_config("gemma4_text"))
    layers = [2 * 8, 1 * 16, 2 * 8, 1 * 16]
    assert (shape.attention_layers, shape.cache_values) == (4, 2 * sum(layers))
    assert shape.query_width == 4 * (8 + 16) / 2


def test_experts_are_counted_in_memory_but_not_in_operations():
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    # Per layer 8 of 128 experts with three matrices of 2,048 x 768, attention, router and norms; and the head.
    layer = 8 * 3 * 2048 * 768 + 2048 * 128 * (32 + 32 + 4 + 4) + 2048 * 128 + 2 * 2048 + 2 * 128
    assert shape.active == 48 * layer + 2048 * 151_936 + 2048


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        (0, 2, 2, 12),  # at stage 0 gradients are summed in bf16
        (1, 2, 4, 12 / 8),
        (2, 2, 4 / 8, 12 / 8),
        (3, 2 / 8, 4 / 8, 12 / 8),
    ],
)
def test_states_are_partitioned_by_stage(stage, weights, gradients, optimizer):
    role = plan_of("sft", num_gpus=8, zero_stage=stage).work.roles["model"]
    found = (role.weights, role.gradients, role.optimizer_states)
    assert found == pytest.approx((weights * N, gradients * N, optimizer * N))


@pytest.mark.parametrize(
    ("settings", "optimizer", "copies"),
    [
        ({}, 8, 0),  # weights are their own master weights, and gradients are summed where the optimizer reads them
        ({"optim": "muon"}, 8, 4),
        ({"zero_stage": 1}, 8, 0),
        ({"param_dtype": "bf16"}, 12, 6),
    ],
)
def test_float32_weights_on_a_cpu_have_no_copies(settings, optimizer, copies):
    role = plan_of("sft", **{"param_dtype": "fp32"} | settings).work.roles["model"]
    role = replace(role, has_gpus=False)
    assert role.optimizer_states == optimizer * N
    assert role.buffers == copies * N + 20_000_000 * role.value_bytes


def test_offloaded_states_are_in_host_memory():
    plan = plan_of("sft", adam_offload="true")
    assert (plan.work.roles["model"].gradients, plan.work.roles["model"].optimizer_states) == (0, 0)
    assert plan.host["offloaded states"] == 16 * N
    both = plan_of("sft", zero_stage=3, adam_offload="true", param_offload="true")
    assert both.work.roles["model"].weights == 0
    assert both.host["offloaded states"] == 18 * N


def test_offloaded_activations_are_in_host_memory():
    """8 ranks with the inputs of 28 layers for 8,192 tokens, 3,584 values each in bf16."""
    given = {"num_gpus": 8, "train_max_tokens_per_gpu": 8192, "gradient_checkpointing": "true"}
    assert "offloaded activations" not in plan_of("sft", **given).host
    host = plan_of("sft", activation_offload="true", **given).host
    assert host["offloaded activations"] == 8 * 8192 * 28 * 3584 * 2


def test_an_adapter_has_the_states_of_its_matrices():
    role = plan_of("sft", lora_rank=16).work.roles["model"]
    hidden, keys, width = 3584, 512, 18_944
    linears = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + width)
    assert role.num_trained == 28 * 16 * linears
    assert role.weights == 2 * N
    assert role.optimizer_states == 12 * role.num_trained
    assert plan_of("sft", lora_rank=16, target_modules="q_proj,v_proj").work.roles["model"].num_trained == 28 * 16 * (
        2 * hidden + hidden + keys
    )
    assert plan_of("sft", lora_rank=16, load_in_4bit="true").work.roles["model"].weights == 0.6 * N


def test_sleeping_roles_leave_their_gpu_to_the_active_one():
    plan = plan_of("ppo", num_gpus=8, pretrain=SMALL)
    (gpu,) = plan.gpus
    assert set(gpu.roles) == {"actor", "critic", "ref", "engine"}
    actor = plan.work.roles["actor"]
    train = actor.training(plan.batching.max_tokens, recomputes=plan.batching.recomputes)
    others = [plan.work.roles[name].asleep() for name in ("critic", "ref")]
    assert gpu.phases["train"] == pytest.approx(added(train, *others, engine_of(plan).asleep()))
    assert all(parts["processes"] == total(parts) for parts in others)
    # Weights of all three on each GPU, and one copy of the optimizer states of actor and critic.
    shapes = [plan.work.roles[name].shape.parameters for name in ("actor", "critic", "ref")]
    expected = sum(2 * 8 * size for size in shapes) + 12 * sum(shapes[:2])
    assert plan.host["sleeping roles (pinned)"] == expected


def test_without_sleep_all_states_and_the_allocators_cache_stay_on_the_gpu():
    asleep, awake = (
        plan_of(
            "grpo",
            num_gpus=8,
            pretrain=SMALL,
            colocate_all_models="true",
            vllm_num_engines=8,
            actor_num_gpus_per_node=8,
            ref_num_gpus_per_node=8,
            vllm_enable_sleep=sleeps,
            deepspeed_enable_sleep=sleeps,
        )
        for sleeps in ("true", "false")
    )
    ref, engine = awake.work.roles["ref"], engine_of(awake)
    # PyTorch's allocator keeps the memory of the reference's forward pass.
    forward = ref.forward(awake.batching.max_tokens)
    kept = total(forward) - total(ref.asleep()) + total(engine.generating()) - total(engine.asleep())
    trained = [total(plan.gpus[0].phases["train"]) for plan in (awake, asleep)]
    used = []
    for plan in (awake, asleep):
        actor = plan.work.roles["actor"]
        active = actor.training(plan.batching.max_tokens, recomputes=plan.batching.recomputes)
        used.append(active["activations"] + active["logits"])
    assert trained[0] - used[0] == pytest.approx(trained[1] - used[1] + kept)
    assert "sleeping roles (pinned)" not in awake.host


def test_a_hosted_teacher_is_on_the_gpu_while_its_student_trains():
    plan = plan_of("gkd", pretrain=SMALL, teacher_pretrain=LARGE)
    train = plan.gpus[0].phases["train"]
    assert train["weights"] == 2 * (N + plan.work.roles["actor"].shape.parameters)


@pytest.mark.parametrize("command", ["gkd", "grpo", "distill"])
def test_several_teachers_rest_in_host_memory_and_take_turns_on_the_gpu(command):
    given: dict[str, object] = {"pretrain": SMALL, "teacher_pretrain": LARGE}
    by_source = {"teacher_by_source": json.dumps({"code": SMALL, "math": LARGE})}
    alone, several = (plan_of(command, **given, **more) for more in ({}, by_source))
    own = several.work.roles["actor" if command != "distill" else "model"].shape.parameters
    assert several.work.roles["teacher 2"].shape.parameters == own
    assert several.work.roles["teacher 2"].offloaded_bytes == 2 * own
    offloaded = several.host["offloaded states"] - alone.host.get("offloaded states", 0.0)
    assert offloaded == pytest.approx(2 * (N + own), rel=0.01)
    of_teachers = sum(several.work.tokens.forward[name] for name in ("teacher", "teacher 2"))
    assert of_teachers == alone.work.tokens.forward["teacher"]


def test_a_reference_of_dpo_takes_memory_unless_it_is_precomputed_or_the_base():
    cases: dict[str, dict[str, object]] = {
        "resident": {},
        "precomputed": {"precompute_ref_log_probs": "true"},
        "adapter": {"lora_rank": 8},
        "offloaded": {"ref_offload": "true"},
    }
    weights = {
        name: plan_of("dpo", num_gpus=8, **given).gpus[0].phases["train"]["weights"] for name, given in cases.items()
    }
    assert weights == {"resident": 4 * N, "precomputed": 2 * N, "adapter": 2 * N, "offloaded": 2 * N}


def test_checkpoints_on_disk_are_those_that_are_kept_and_one_more():
    plan = plan_of("sft", save_steps=10, max_ckpt_num=2)
    assert plan.disk == {"model": 2 * N, "3 checkpoints": 3 * 14 * N}


def test_a_folder_needs_only_its_configuration(tmp_path):
    config_of(published()[SMALL]).save_pretrained(tmp_path)
    assert find_shape(str(tmp_path)) == find_shape(SMALL)


def test_the_object_store_holds_the_tokens_of_an_iteration():
    lengths = {"prompt_tokens": 100, "response_tokens": 300, "rollout_batch_size": 64, "n_samples_per_prompt": 16}
    found = shared_memory(plan_of("grpo", **lengths).work)
    # 1,024 samples of 400 tokens with 17 bytes each.
    assert found["Ray's objects"] == 1024 * 400 * 17
    assert "Ray's objects" not in shared_memory(plan_of("sft", num_gpus=8).work)
