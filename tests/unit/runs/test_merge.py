"""`rlhf merge`: full models from adapters and checkpoints, with the outputs and weights of training."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from adapted_models import foreign_adapter
from safetensors.torch import load_file, save_file
from trained_folders import Trained, outputs
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.commands.merge import MergeGroup
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.merging import FoldedAdapter, verify_shards, write_shards
from rlhf_cli.models.weight_files import SafetensorsFiles, open_weights, plan_shards
from rlhf_cli.runs.merge import run_merge

pytestmark = pytest.mark.usefixtures("group_of_one")


def merge(model, output, **settings):
    said = run_merge(MergeGroup(model=str(model), output=str(output), **settings))
    assert sorted(path.name for path in output.parent.glob(f"*{output.name}*")) == [output.name]
    return said


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    source = open_weights(folder)
    return {name: source.read(name) for name in source.names()}


def assert_same_files(one: Path, other: Path) -> None:
    first, second = weights_in(one), weights_in(other)
    assert first.keys() == second.keys()
    assert all(first[name].dtype == second[name].dtype for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)


# Checkpoints


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_becomes_the_folder_that_the_run_would_have_saved(tiny_model_dir, tmp_path, stage, dtype):
    run = Trained(tmp_path, tiny_model_dir, stage=stage, dtype=dtype)
    said = merge(run.checkpoint, tmp_path / "out")
    assert_same_files(tmp_path / "out", run.folder)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (run.folder / name).read_text(), name
    assert "reloaded and run on 8 tokens, 1 file" in said
    assert not torch.equal(weights_in(tmp_path / "out")["model.norm.weight"], torch.ones(32))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_a_mixture_of_experts_has_every_expert_by_its_name(tiny_moe_dir, tmp_path, stage):
    run = Trained(tmp_path, tiny_moe_dir, stage=stage)
    said = merge(run.checkpoint, tmp_path / "out")
    assert_same_files(tmp_path / "out", run.folder)
    before, after = weights_in(Path(tiny_moe_dir)), weights_in(tmp_path / "out")
    assert after.keys() == before.keys()
    experts = [name for name in after if ".mlp.experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert any(not after[name].equal(before[name]) for name in experts)
    assert "reloaded and run on 8 tokens" in said


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_a_model_whose_head_is_its_own(tiny_llama_dir, tmp_path, stage):
    run = Trained(tmp_path, tiny_llama_dir, stage=stage)
    merge(run.checkpoint, tmp_path / "out")
    assert "lm_head.weight" in weights_in(tmp_path / "out")
    assert_same_files(tmp_path / "out", run.folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_of_a_checkpoint_with_several_models_is_given_by_name(tiny_model_dir, tmp_path, stage):
    run = Trained(tmp_path, tiny_model_dir, stage=stage, value=True, name="critic")
    shutil.copytree(run.checkpoint / "critic", run.checkpoint / "actor")
    with pytest.raises(UsageError, match=r"contains multiple models: pass .*/actor or .*/critic"):
        merge(run.checkpoint, tmp_path / "out")
    merge(run.checkpoint / "critic", tmp_path / "out")
    assert_same_files(tmp_path / "out", run.folder)
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert critic.score.weight.shape == (1, 32)


def test_a_checkpoint_in_another_type(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, dtype="fp32")
    merge(run.checkpoint, tmp_path / "out", param_dtype="bf16")
    found, expected = weights_in(tmp_path / "out"), weights_in(run.folder)
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_damaged_checkpoint_is_refused(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir)
    (next(run.checkpoint.rglob("*model_states.pt"))).write_bytes(b"x")
    with pytest.raises(UsageError, match="is damaged"):
        merge(run.checkpoint, tmp_path / "out")


# Adapters


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_merged_gives_the_outputs_of_the_adapter(fixture, request, tmp_path, stage):
    base = request.getfixturevalue(fixture)
    run = Trained(tmp_path, base, stage=stage, lora_rank=4)
    merge(tmp_path / "run", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base)
    if stage < 3:  # partitioned weights are empty outside their engine
        torch.testing.assert_close(outputs(merged), run.outputs(), atol=1e-4, rtol=1e-4)
    with_adapter = AutoModelForCausalLM.from_pretrained(base)
    with_adapter.load_adapter(str(run.folder))
    torch.testing.assert_close(outputs(merged), outputs(with_adapter), atol=1e-4, rtol=1e-4)
    assert (outputs(merged) - outputs(plain)).abs().max() > 0.1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    assert merged.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_an_adapter_is_merged_as_its_folder_is(tiny_model_dir, tmp_path, stage, use_dora):
    run = Trained(tmp_path, tiny_model_dir, stage=stage, lora_rank=4, use_dora=use_dora)
    merge(run.checkpoint, tmp_path / "of_checkpoint")
    merge(run.folder, tmp_path / "of_folder")
    assert_same_files(tmp_path / "of_checkpoint", tmp_path / "of_folder")


def test_only_layers_with_an_adapter_change(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4)
    merge(run.folder, tmp_path / "out")
    base, merged = weights_in(Path(tiny_model_dir)), weights_in(tmp_path / "out")
    assert base.keys() == merged.keys()
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name for name in base if "_proj.weight" in name}


def test_a_merged_weight_by_hand(tmp_path):
    """Rank 1, alpha 3: W + 3 B A, computed in float32 and rounded once."""
    from peft import LoraConfig

    save_file({"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()}, tmp_path / "base.safetensors")
    factors = {"lora_A": torch.tensor([[0.5, -1.0]]), "lora_B": torch.tensor([[1.0], [1 / 512]])}
    named = {f"base_model.model.a.{name}.weight": tensor for name, tensor in factors.items()}
    save_file(named, tmp_path / "adapter.safetensors")
    base, adapter = (SafetensorsFiles([tmp_path / f"{name}.safetensors"]) for name in ("base", "adapter"))
    folded = FoldedAdapter(base, adapter, LoraConfig(r=1, lora_alpha=3))
    expected = torch.tensor([[1 + 1.5, 2 - 3.0], [3 + 1.5 / 512, 4 - 3 / 512]])
    assert torch.equal(folded.read("a.weight"), expected)
    write_shards(folded, tmp_path, dtype=None, max_bytes=1000)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a.weight"], expected.bfloat16())


def test_an_adapter_in_bf16_merges_to_about_its_outputs(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, dtype="bf16", lora_rank=4)
    merge(run.folder, tmp_path / "out", param_dtype="bf16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert merged.dtype == torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    apart = (outputs(merged) - run.outputs()).abs().mean()
    assert apart < 0.1 * (outputs(plain) - run.outputs()).abs().mean()


def test_a_head_is_merged_with_its_adapter(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4, value=True)
    merge(run.folder, tmp_path / "out")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), run.outputs(), atol=1e-5, rtol=1e-4)
    assert merged.config.reward_mean == 0.25
    assert "lm_head.weight" not in weights_in(tmp_path / "out")
    merge(run.checkpoint, tmp_path / "of_checkpoint")
    assert_same_files(tmp_path / "of_checkpoint", tmp_path / "out")


PATTERNS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 32}}
WHOLE = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, **PATTERNS},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "v_proj"], "use_dora": True, "use_rslora": True, **PATTERNS},
        {"target_modules": ["q_proj"], "modules_to_save": WHOLE},
        {"target_modules": ["q_proj"], "modules_to_save": WHOLE, "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["rslora", "dora", "dora+rslora", "whole", "tied", "head"],
)
@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir"])
def test_an_adapter_of_peft_alone_is_merged_as_peft_merges_it(fixture, request, tmp_path, config):
    foreign = foreign_adapter(request.getfixturevalue(fixture), tmp_path / "adapter", r=4, lora_alpha=8, **config)
    merge(tmp_path / "adapter", tmp_path / "out")
    theirs = foreign.merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged.state_dict(), theirs.state_dict(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(outputs(merged), outputs(theirs), atol=1e-5, rtol=1e-5)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == merged.config.tie_word_embeddings


def test_an_embedding_that_leaves_a_shared_head_behind_is_refused(tiny_model_dir, tmp_path):
    foreign_adapter(tiny_model_dir, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with pytest.raises(UsageError, match="trains the embedding of a model whose head has the same weight"):
        merge(tmp_path / "adapter", tmp_path / "out")


def test_the_head_of_a_foreign_reward_model_is_merged(tiny_llama_dir, tmp_path):
    kind, config = AutoModelForSequenceClassification, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    foreign = foreign_adapter(
        tiny_llama_dir, tmp_path / "adapter", auto_class=kind, options={"num_labels": 1}, **config
    )
    merge(tmp_path / "adapter", tmp_path / "out")
    merged = kind.from_pretrained(tmp_path / "out")
    assert type(merged).__name__ == "LlamaForSequenceClassification"
    torch.testing.assert_close(outputs(merged), outputs(foreign.base_model.model), atol=1e-4, rtol=1e-4)


def test_an_adapter_on_a_quantised_model_is_merged_into_its_original(tiny_llama_dir, tmp_path):
    base = shutil.copytree(tiny_llama_dir, tmp_path / "bnb-4bit")
    foreign = foreign_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(UsageError, match="is quantized"):
        merge(tmp_path / "adapter", tmp_path / "out")
    merge(tmp_path / "adapter", tmp_path / "out", base=tiny_llama_dir)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), outputs(foreign.base_model.model), atol=1e-5, rtol=1e-5)


def test_what_is_not_lora_is_refused(tiny_llama_dir, tmp_path):
    from peft import IA3Config, LoraConfig, get_peft_model

    for number, (config, message) in enumerate(
        (
            (LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True), "uses LoRA biases"),
            (LoraConfig(r=2, target_modules=["embed_tokens"]), "weights other than LoRA factors"),
            (
                LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
                "modified its base model at initialization",
            ),
            (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "only LoRA is supported"),
        )
    ):
        folder = tmp_path / str(number)
        get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config).save_pretrained(folder)
        with pytest.raises(UsageError, match=message):
            merge(folder, tmp_path / "out")


# Refusals


def test_an_adapter_for_another_base_is_refused(tiny_model_dir, tiny_llama_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4)
    with pytest.raises(UsageError, match=r"was trained on a different base: .* have fingerprint"):
        merge(run.folder, tmp_path / "out", base=tiny_llama_dir)
    (run.folder / "adapter_base.json").unlink()  # as written by PEFT
    weights = load_file(run.folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    save_file(weights | {name: weights[name][:-1].clone()}, run.folder / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"up_proj\.weight has shape \(48, 32\), but the adapter expects \(47, 32\)"):
        merge(run.folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_base_that_has_moved_is_given(tiny_model_dir, tmp_path):
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    run = Trained(tmp_path, base, lora_rank=4)
    moved = shutil.move(base, tmp_path / "moved")
    with pytest.raises(UsageError, match="its base model cannot be found"):
        merge(run.folder, tmp_path / "out")
    merge(run.folder, tmp_path / "out", base=str(moved))


def test_an_output_that_exists_is_left_alone(tiny_model_dir, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"--output .* already exists"):
        run_merge(MergeGroup(model=tiny_model_dir, output=str(tmp_path / "out")))


def test_what_can_be_merged_is_said_where_it_is_something_else(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir)
    cases = {
        tiny_model_dir: "is already a full model",
        tmp_path / "run": r"has no adapter; to convert a checkpoint to a model, pass .*step_000002",
        run.checkpoint.parent: "neither an adapter .* nor a checkpoint",
        tmp_path / "gone": "there is no such folder",
    }
    for path, message in cases.items():
        with pytest.raises(UsageError, match=message):
            merge(path, tmp_path / "out")
    with pytest.raises(UsageError, match=r"--base: .* is a full model"):
        merge(run.checkpoint, tmp_path / "out", base=tiny_model_dir)


def test_a_merge_that_fails_leaves_nothing(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4)
    file = run.folder / "adapter_model.safetensors"
    save_file({name: tensor / 0 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(RunError, match="output is not finite"):
        merge(run.folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


# Shards


class CountedTensors:
    """Ten tensors of 4,000 bytes, created when read; records how many were alive at once."""

    def __init__(self) -> None:
        self._read: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def names(self):
        return [f"layer.{number}" for number in range(10)]

    def shape(self, name):
        return (10, 100)

    def dtype(self, name):
        return torch.float32

    def read(self, name):
        tensor = torch.full(self.shape(name), float(name.split(".")[1]))
        self._read.append(weakref.ref(tensor))
        self.most = max(self.most, sum(reference() is not None for reference in self._read))
        return tensor


def test_no_more_than_a_shard_is_in_memory(tmp_path):
    source = CountedTensors()
    assert write_shards(source, tmp_path, dtype=None, max_bytes=12_000) == 4
    assert source.most == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 40_000}
    assert [len(set(load_file(file))) for file in sorted(tmp_path.glob("*.safetensors"))] == [3, 3, 3, 1]
    found = weights_in(tmp_path)
    assert {name: float(tensor.mean()) for name, tensor in found.items()} == {f"layer.{n}": n for n in range(10)}


@pytest.mark.parametrize(("dtype", "sizes"), [(None, [3, 3, 3, 1]), (torch.bfloat16, [6, 4])])
def test_shards_are_full_in_the_type_that_is_written(dtype, sizes):
    source = CountedTensors()
    shards = plan_shards(source, source.names(), dtype=dtype, max_bytes=12_000)
    assert [len(shard) for shard in shards] == sizes


def test_a_tensor_larger_than_a_shard_has_one_of_its_own():
    source = CountedTensors()
    assert [len(shard) for shard in plan_shards(source, source.names(), dtype=None, max_bytes=10)] == [1] * 10


def test_what_was_written_otherwise_is_found(tmp_path):
    source = CountedTensors()
    write_shards(source, tmp_path, dtype=None, max_bytes=10**6)
    verify_shards(source, tmp_path, dtype=None)
    with pytest.raises(RunError, match="10 written tensors differ from the source"):
        verify_shards(source, tmp_path, dtype=torch.bfloat16)


def test_a_model_in_several_files_is_loaded(tiny_llama_dir, tmp_path):
    run = Trained(tmp_path, tiny_llama_dir, lora_rank=4)
    said = merge(run.folder, tmp_path / "cut", max_shard_size=2e-5)
    merge(run.folder, tmp_path / "whole")
    assert_same_files(tmp_path / "cut", tmp_path / "whole")
    files = list((tmp_path / "cut").glob("*.safetensors"))
    assert said.endswith(f"reloaded, {len(files)} files of weights")  # too large for a forward pass
    assert max(file.stat().st_size for file in files) < 45_000  # the embedding is 38,400 bytes
    AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
