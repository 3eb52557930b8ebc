"""Plans of `chat` and `serve-rm`, compared with manual calculations."""

import json
from dataclasses import replace

import pytest
from plans import LARGE, SMALL, engine_of, plan_config, plan_of, plans_of
from transformers import AutoConfig

from rlhf_cli import cli
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.architectures import find_shape
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.memory import GIB
from rlhf_cli.planning.plain_shapes import plain_shape
from rlhf_cli.planning.planner import make_plan
from rlhf_cli.planning.shapes import shape_of

N, TABLE = 7_615_616_512, 152_064 * 3584
"""Parameters of the 7B model, and of its embedding or head."""
TOKEN = 2 * (2 * 3584 + (8 * 3584 + 2 * (3584 + 512) + 4 * 18_944) // 2)
"""Bytes of a token's activations in a forward pass: two hidden states, and half of what a layer keeps for training."""


def server_plan(**values):
    return plan_of("serve-rm", pretrain=None, **({"reward_pretrain": LARGE} | values))


def test_a_chat_has_one_conversation_in_all_positions():
    (gpu,) = plan_of("chat").gpus
    memory = gpu.phases["generate"]
    assert memory["weights"] == 2 * N
    assert memory["cache"] == 32_768 * 57_344
    assert memory["activations"] == 32_768 * TOKEN
    assert memory["processes"] == 0.55 * GIB
    assert gpu.count == 1
    short = engine_of(plan_of("chat", prompt_tokens=1000, max_new_tokens=24))
    assert (short.max_len, short.activations) == (1024, 1024 * TOKEN)


def test_an_answer_needs_the_weights_and_the_cache_once_per_token():
    plan = plan_of("chat")
    prompt = (32_768 - 1024) // 2
    read = (2 * (N - TABLE) + (prompt + 256) * 57_344) / (0.8 * 3.35e12)
    # Causal attention meets half of the conversation.
    compute = (2 * (N - TABLE) + 4 * 28 * 3584 * (prompt + 256) / 2) / (0.75 * 989e12)
    assert plan.times["decode"].seconds == pytest.approx(512 * (0.02 + read + compute))
    assert plan.tokens_per_second == pytest.approx(1 / (0.02 + read + compute))
    operations = prompt * (2 * (N - TABLE) + 4 * 28 * 3584 * prompt / 2)
    assert plan.times["prefill"].seconds == pytest.approx(operations / (0.75 * 989e12))
    assert plan.bottleneck == "decode"


def test_all_models_of_a_chat_stay_in_memory():
    (gpu,) = plan_of("chat", pretrain=f"{SMALL},{LARGE}").gpus
    assert gpu.phases["generate"]["weights"] == 2 * (N + 1_543_714_304)
    assert gpu.phases["generate"]["cache"] == 32_768 * 57_344


def test_a_reward_server_has_one_pack_and_scores_256_texts_together():
    plan = server_plan()
    (gpu,) = plan.gpus
    parameters = N - TABLE + 3584
    assert gpu.phases["forward"]["weights"] == 2 * parameters
    assert gpu.phases["forward"]["activations"] == 16_384 * TOKEN
    tokens = 256 * 8192 / 2
    assert plan.work.tokens.forward == {"reward": tokens}
    assert plan.tokens_per_second == pytest.approx(tokens / plan.times["forward"].seconds)
    assert server_plan(row_tokens=512).seconds < plan.seconds / 8


def test_a_model_that_is_too_large_gets_smaller_packs_or_weights():
    plan, changes = plans_of("serve-rm", pretrain=None, reward_pretrain=LARGE, gpu="rtx4090", param_dtype="fp32")
    assert not plan.fits
    assert [one.flags for one in changes] == ["--param_dtype bf16"]
    # 24.0 GB hold 14.1 GB of weights, 0.6 of a process and 8.3 of activations, but not 16.6.
    large = {"max_len": 131_072, "max_tokens_per_gpu": 131_072}
    plan, changes = plans_of("serve-rm", pretrain=None, reward_pretrain=LARGE, gpu="rtx4090", **large)
    assert "--max_tokens_per_gpu 65536 --max_len 65536" in [one.flags for one in changes]
    assert not plan.fits


def test_longer_packs_than_fit_are_halved_without_shorter_texts():
    given = {"reward_pretrain": LARGE, "max_tokens_per_gpu": 131_072}
    _, changes = plans_of("serve-rm", pretrain=None, gpu="rtx4090", **given)
    assert changes[0].flags == "--max_tokens_per_gpu 65536"


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        (["chat", SMALL], "response"),
        (["serve-rm", "--reward_pretrain", SMALL], "batch of 256 texts"),
    ],
)
def test_what_a_server_does_not_have_is_left_out(words, unit, capsys):
    assert cli.main(["plan", *words, "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert f"Time per {unit} (forecast)" in out
    assert f"with {SMALL} (1.5" in out or f"with {SMALL} (1.3" in out
    assert not {"Disk", "/dev/shm", "Run"} & {line.partition(":")[0] for line in out.splitlines()}
    assert cli.main(["plan", *words, "--gpu", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    absent = {"steps", "disk_gib", "shared_memory_gib", "gradient_checkpointing", "train_max_tokens_per_gpu"}
    assert not absent & found.keys()
    assert sum(found["seconds"].values()) > 0


def test_a_chat_on_a_cpu_needs_its_process_and_model():
    config = plan_config("chat", pretrain=SMALL, param_dtype="fp32", prompt_tokens=1000, gpu=None)
    hardware = replace(hardware_of(plan_config("chat").plan), is_cpu=True, memory=24 * GIB, host_memory=24 * GIB)
    plan = make_plan(config, config.plan, hardware, has_critic=False)
    token = 2 * 1536 + (8 * 1536 + 2 * (1536 + 256) + 4 * 8960) / 2
    values = 1_543_714_304 + 2024 * (14_336 + 1.4 * token)
    assert plan.host == {"processes": GIB / 2, "models": pytest.approx(4 * values)}
    assert plan.fits
    small = replace(hardware, host_memory=4 * values)
    assert not make_plan(config, config.plan, small, has_critic=False).fits


@pytest.mark.parametrize(
    ("positions", "given", "message"),
    [
        (2048, {"max_new_tokens": 2048}, "has 2,048 positions, shared with the conversation: set 1024"),
        (None, {}, "has no limit of positions: set --prompt_tokens"),
    ],
)
def test_a_chat_without_room_or_limit_is_refused(positions, given, message):
    config = plan_config("chat", **given)
    with pytest.raises(UsageError, match=message):
        make_plan(
            config,
            config.plan,
            hardware_of(config.plan),
            has_critic=False,
            shapes=lambda name: replace(find_shape(name), positions=positions),
        )


def test_a_server_without_a_model_has_no_plan():
    with pytest.raises(UsageError, match="set --reward_pretrain"):
        server_plan(reward_pretrain=None, reward_funcs="math")


@pytest.mark.parametrize("rope", [{"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_positions_of_an_older_file_are_scaled_as_by_transformers(rope):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = {"model_type": "llama", **sizes, "num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": True}
    values |= {"max_position_embeddings": 512, "rope_scaling": rope}
    plain = plain_shape(values)
    assert plain is not None
    # vLLM multiplies the positions of linear scaling only.
    assert plain.positions == (1024 if "type" in rope else 512)
    assert plain == shape_of(AutoConfig.for_model(**values))
