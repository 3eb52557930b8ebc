"""Models of `rlhf eval` that share engines, the reasons for the others, and what engines load."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_cli.backends.cluster.ray_cluster import Cluster
from rlhf_cli.backends.weight_sync.adapter_push import read_adapter
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.models.adapters import PREFIX
from rlhf_cli.options import build_config
from rlhf_cli.runs.inference.model_groups import ARCHITECTURES, describe_groups, grouped_models, manifest_of, why_whole
from rlhf_cli.runs.inference.run import model_under_test

ONE = Cluster(["a"], [2], 2.0, has_gpus=False, is_local=True)


@pytest.fixture
def place(tiny_model_dir, tmp_path):
    """Return a folder with a prompt and adapters of the tiny model and of a copy."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "copy")
    adapter(tmp_path / "one", tiny_model_dir)
    adapter(tmp_path / "two", tiny_model_dir, r=12)
    adapter(tmp_path / "dora", tiny_model_dir, use_dora=True)
    adapter(tmp_path / "other", tmp_path / "copy")
    return tmp_path


def adapter(folder, base, **lora):
    from transformers import AutoTokenizer

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | lora
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).save_pretrained(folder)
    model_dir = base if (Path(base) / "tokenizer_config.json").is_file() else folder.parent / "one"
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)


def model_of(place, name, **changes):
    flags = {"pretrain": str(name if Path(name).is_absolute() else place / name)}
    flags |= {"prompt_data": str(place / "prompts.jsonl"), "label_key": "answer", "reward_funcs": "exact"}
    flags |= {"max_len": "32", "max_new_tokens": "4", "param_dtype": "fp32", "rollout_backend": "transformers"}
    return replace(model_under_test(build_config(EvalConfig, flags | changes)), backend="vllm")


def folders(groups):
    return [[Path(one.config.model.pretrain).name for one in group.models] for group in groups]


def test_neighbours_of_one_base_share_engines_and_their_order_stays(place, tiny_model_dir):
    base = Path(tiny_model_dir)
    names = ("one", base, "two", "other", "one", "dora", "two", "copy")
    models = [model_of(place, name) if name != "copy" else model_of(place, "other") for name in names]
    groups = grouped_models(models, cluster=ONE)
    assert [group.base is not None for group in groups] == [True, False, False, False, False, False]
    assert folders(groups)[0] == ["one", base.name, "two"]
    assert [number for group in groups for number in group.numbers] == list(range(8))
    assert groups[0].max_lora_rank == 16
    said = describe_groups(groups, cluster=ONE)
    assert f"engines load {base.resolve()} once for" in said
    assert "dora is merged (vLLM does not support DoRA)" in said
    assert "one is merged (no neighbor has the same base)" in said


def test_a_base_without_an_adapter_beside_it_is_loaded_as_it_is(place, tiny_model_dir):
    groups = grouped_models([model_of(place, tiny_model_dir), model_of(place, tiny_model_dir)], cluster=ONE)
    assert [group.base for group in groups] == [None, None]
    assert describe_groups(groups, cluster=ONE) == ""


def test_every_reason_to_write_an_adapter_whole_is_named(place, tiny_model_dir):
    adapter(place / "head", tiny_model_dir, modules_to_save=["lm_head", "embed_tokens"])
    adapter(place / "high", tiny_model_dir, rank_pattern={"q_proj": 600})
    gpus = replace(ONE, has_gpus=True)
    one = model_of(place, "one")
    assert why_whole(one, cluster=ONE) is None
    for model, cluster, reason in (
        (replace(one, backend="transformers"), ONE, "only vLLM applies adapters"),
        (one, gpus, "16-bit weights"),
        (one, replace(ONE, node_gpus=[2, 2]), "other machines"),
        (model_of(place, "one", stop="7"), ONE, "--stop"),
        (model_of(place, "dora"), ONE, "DoRA"),
        (model_of(place, "head"), ONE, "modules_to_save"),
        (model_of(place, "high"), ONE, "ranks up to 512"),
    ):
        said = why_whole(model, cluster=cluster)
        assert said is not None
        assert reason in said
    assert why_whole(model_of(place, "one", param_dtype="bf16"), cluster=gpus) is None
    (place / "one" / "generation_config.json").write_text('{"eos_token_id": 77}')
    assert "end tokens differ" in str(why_whole(one, cluster=ONE))
    one.model.architecture.architectures = ["MixtralForCausalLM"]
    assert "are loaded in full" in str(why_whole(one, cluster=ONE))


def test_engines_get_the_adapter_with_its_own_settings_and_the_base_without_any(place, tiny_model_dir):
    manifest = manifest_of(model_of(place, "two"), version=3)
    tensors, _ = read_adapter(manifest)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), place / "two")
    wanted = {name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if ".lora_" in name}
    assert tensors.keys() == wanted.keys()
    assert all(name.startswith(PREFIX) and torch.equal(tensors[name], wanted[name]) for name in tensors)
    assert manifest["config"]["r"] == 12  # type: ignore[index]
    assert read_adapter(manifest_of(model_of(place, tiny_model_dir), version=4)) == ({}, 0)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_adds_adapters_to_the_models_named_here():
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    folder = Path(str(spec.origin)).parent / "model_executor" / "models"
    for name in ARCHITECTURES:
        source = (folder / f"{name.removesuffix('ForCausalLM').lower()}.py").read_text()
        bases = source.split(f"class {name}(")[1].split(":")[0]
        assert "SupportsLoRA" in bases or "LlamaForCausalLM" in bases
