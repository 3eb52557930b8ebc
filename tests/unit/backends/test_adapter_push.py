"""Adapters that are sent separately from their base model: the transfer, the folder for vLLM, and errors."""

import importlib.util
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapted_models import settings
from peft import PeftModel
from safetensors.torch import load_file
from test_online_trained_roles import role_settings, train
from tiny_training import make_sequences
from transformers import AutoModelForCausalLM

from rlhf_cli.backends.roles.ranks import ActorRank
from rlhf_cli.backends.roles.settings import EngineLink
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.vllm_arguments import engine_arguments
from rlhf_cli.backends.weight_sync.adapter_push import (
    VLLM_RANKS,
    ObjectTransport,
    check_adapter_push,
    read_adapter,
    vllm_config,
    vllm_rank,
    written_adapter,
)
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.backends.weight_sync.vllm_trainer import Rendezvous
from rlhf_cli.config.model import LoraConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.adapters import plan_adapter
from rlhf_cli.models.policy import PolicyModel

LINK = EngineLink("shm", lambda call, given: None, 1, 1, Rendezvous("localhost", 1), adapter_alone=True)


def sent(tensors):
    """Return the manifest of an update as another process receives it."""
    report = WeightSender(ObjectTransport({})).send(tensors.items(), 3)
    return pickle.loads(pickle.dumps(report.manifest)), report


def test_tensors_of_any_type_arrive_bit_for_bit_and_no_longer_share_memory():
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7), "c": torch.tensor(2.0)}
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    report = WeightSender(ObjectTransport({})).send(tensors.items(), 3)
    for tensor in tensors.values():
        tensor.zero_()  # the next optimizer step must not affect an engine
    assert report.manifest is not None
    found, checksum = read_adapter(report.manifest)
    assert checksum == report.checksum
    assert all(found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_push_that_was_altered_is_refused():
    manifest, _ = sent({"a": torch.ones(4), "b": torch.ones(4)})
    manifest["tensors"][1]["bytes"][2] += 1
    with pytest.raises(RunError, match=r"weight push 3: checksum .* of the received weights differs"):
        read_adapter(manifest)
    del manifest["tensors"][1]
    with pytest.raises(RunError, match="1 tensors arrived, 2 were sent"):
        read_adapter(manifest)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_push_is_the_adapter_that_is_saved_and_peft_reads_the_folder_of_an_engine(tiny_model_dir, tmp_path, stage):
    actor = ActorRank(role_settings(tiny_model_dir, stage, lora_rank=4, use_rslora=True))
    actor.connect_engines(LINK)
    train(actor)
    report = actor.push_weights(2)
    manifest = pickle.loads(pickle.dumps(report.manifest))
    tensors, _ = read_adapter(manifest)
    actor.save_model(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)
    assert report.num_bytes == sum(tensor.nbytes for tensor in saved.values())

    with written_adapter(tensors, manifest["config"]) as folder:
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="varlen")
        engine = PeftModel.from_pretrained(base, folder).eval().base_model.model
        assert json.loads((Path(folder) / "adapter_config.json").read_text())["use_rslora"]
    assert not Path(folder).exists()
    batch = pack(make_sequences(5))
    with torch.no_grad():
        expected = PolicyModel(engine)(batch)[0]
    [trained] = actor.logprobs([make_sequences(5)])
    torch.testing.assert_close(torch.from_numpy(trained), expected, atol=1e-5, rtol=1e-5)


def planned(folder, **lora):
    return plan_adapter(settings(folder), LoraConfig(**{"lora_rank": 4} | lora), seed=1)


def test_what_vllm_cannot_take_is_refused_with_the_reason(tiny_model_dir):
    usual = {"backend": "vllm", "sync_backend": "auto"}
    check_adapter_push(planned(tiny_model_dir), **usual)
    for plan, changes, message in (
        (None, {}, "requires a LoRA adapter: set --lora_rank"),
        (
            planned(tiny_model_dir),
            {"backend": "transformers"},
            "requires vLLM; --rollout_backend transformers supports only",
        ),
        (planned(tiny_model_dir), {"sync_backend": "nccl"}, "remove --vllm_sync_backend nccl"),
        (planned(tiny_model_dir, use_dora=True), {}, "vLLM does not support DoRA"),
        (planned(tiny_model_dir, load_in_4bit=True), {}, "in 16 bits while the actor uses 4 bits"),
        (planned(tiny_model_dir, lora_rank=600), {}, "ranks up to 512, not 600"),
    ):
        with pytest.raises(UsageError, match=rf"--lora_push adapter.*{message}"):
            check_adapter_push(plan, **usual | changes)


def test_an_engine_reserves_memory_for_the_highest_rank(tiny_model_dir):
    plan = planned(tiny_model_dir, lora_rank=9)
    assert vllm_rank(vllm_config(plan.config)) == 16
    patterns = replace(plan, config=type(plan.config)(r=4, rank_pattern={"q_proj": 40}))
    assert vllm_rank(vllm_config(plan.config), vllm_config(patterns.config)) == 64
    usual = EngineSettings(max_model_len=64)
    arguments = engine_arguments("m", replace(usual, max_lora_rank=16), on_cpu=True)
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 16)
    assert "enable_lora" not in engine_arguments("m", usual, on_cpu=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_ranks_are_those_of_the_installed_vllm():
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    source = (Path(str(spec.origin)).parent / "config" / "lora.py").read_text()
    found = re.search(r"MaxLoRARanks = Literal\[(.*)\]", source)
    assert found is not None
    assert tuple(map(int, found[1].split(","))) == VLLM_RANKS
