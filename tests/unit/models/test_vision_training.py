"""Vision-language models after steps of the real engine: trained and saved weights, and loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text_only import save_tiny_gemma3
from tiny_training import (
    CLOSE,
    Items,
    Layout,
    farthest,
    load_policy,
    make_engine,
    make_sequences,
    train,
    train_plainly,
    weights_of,
)
from tiny_vision import TINY_FAMILIES, save_tiny_vision
from trained_folders import Trained
from transformers import AutoConfig, AutoImageProcessor, AutoModelForSequenceClassification, AutoProcessor
from transformers.quantizers.quantizers_utils import should_convert_module
from vision_sequences import plain_logprobs, tiny_family, vision_sequences

from rlhf_cli.commands.merge import MergeGroup
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import load_with_adapter, plan_adapter
from rlhf_cli.models.loading import in_run_type, load_causal_lm
from rlhf_cli.models.policy import PolicyModel, hidden_matrices
from rlhf_cli.models.vision.freezing import check_trained_parts, tower_parameters
from rlhf_cli.models.weight_files import open_weights
from rlhf_cli.runs.merge import run_merge

pytestmark = pytest.mark.usefixtures("group_of_one")
STEPS = [[0, 1, 2], [1, 3], [4]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {kind: save_tiny_vision(kind, root / kind) for kind in TINY_FAMILIES}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    source = open_weights(folder)
    return {name: source.read(name) for name in source.names()}


@pytest.mark.parametrize(("kind", "stage"), [("qwen2_5_vl", 2), ("qwen3_vl", 3), ("idefics3", 0), ("llava", 3)])
def test_three_steps_equal_plain_pytorch(folders: dict[str, Path], kind: str, stage: int) -> None:
    items = Items(vision_sequences(folders[kind]))
    plain = PolicyModel(load_causal_lm(ModelConfig(pretrain=str(folders[kind]), param_dtype="fp32")))
    expected = train_plainly(plain, items, STEPS)
    hf_model, module = load_policy(str(folders[kind]), stage)
    engine = make_engine(module, stage)
    found = train(engine, items, STEPS, Layout())
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    reached = {name for name, parameter in plain.model.named_parameters() if parameter.grad is not None}
    weights = {name: weight for name, weight in weights_of(engine, hf_model).items() if name in reached}
    assert (
        farthest(weights, {name: p.detach() for name, p in plain.model.named_parameters() if name in reached}) < CLOSE
    )


@pytest.mark.parametrize("kind", TINY_FAMILIES)
@pytest.mark.parametrize("frozen", ["freeze_vision_tower", "freeze_projector"])
def test_frozen_parts_stay_and_the_others_move(
    folders: dict[str, Path], tmp_path: Path, kind: str, frozen: str
) -> None:
    run = Trained(tmp_path, folders[kind], sequences=vision_sequences(folders[kind]), **{frozen: True})
    tower, projectors = tower_parameters(run.hf_model)
    stays, moves = (tower, projectors) if frozen == "freeze_vision_tower" else (projectors, tower)
    before, after = weights_in(folders[kind]), weights_in(run.folder)
    own = {parameter: name for name, parameter in run.hf_model.named_parameters()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(parameter.requires_grad for parameter in stays)
    names = {own[parameter].split(".", 1)[1] for parameter in stays}  # files may omit the first part of a name
    assert not [name for name in changed if any(name.endswith(one) for one in names)]
    moved = {own[parameter].split(".", 1)[1] for parameter in moves}
    assert any(name.endswith(one) for name in changed for one in moved)
    assert any("layers" in name and "vis" not in name for name in changed)


def test_frozen_parts_have_no_optimizer_state(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["idefics3"]
    whole = Trained(tmp_path / "whole", folder, sequences=vision_sequences(folder))
    part = Trained(tmp_path / "part", folder, sequences=vision_sequences(folder), freeze_vision_tower=True)
    sizes = [sum(file.stat().st_size for file in run.checkpoint.rglob("*")) for run in (whole, part)]
    tower = sum(parameter.numel() for parameter in tower_parameters(part.hf_model)[0])
    assert sizes[0] - sizes[1] > 0.9 * 3 * 4 * tower  # weight and two moments in float32


@pytest.mark.parametrize(
    ("kind", "stage", "value"),
    [("qwen2_5_vl", 2, False), ("qwen3_vl", 3, False), ("idefics3", 0, False), ("llava", 0, True)],
)
def test_a_checkpoint_with_frozen_parts_is_merged_into_the_model_that_the_run_saves(
    folders: dict[str, Path], tmp_path: Path, kind: str, stage: int, value: bool
) -> None:
    frozen = {"freeze_vision_tower": True, "freeze_projector": kind != "idefics3"}
    run = Trained(
        tmp_path,
        folders[kind],
        stage=stage,
        dtype="bf16",
        value=value,
        sequences=vision_sequences(folders[kind]),
        **frozen,
    )
    run_merge(MergeGroup(model=str(run.checkpoint), output=str(tmp_path / "out")))
    saved, merged = weights_in(run.folder), weights_in(tmp_path / "out")
    assert saved.keys() == merged.keys()
    assert not [name for name in saved if not torch.equal(saved[name], merged[name])]


@pytest.mark.parametrize(("stage", "value", "copies"), [(2, False, 4), (3, False, 3), (0, True, 3)])
def test_a_model_that_reads_only_text_is_trained_except_for_its_other_parts(
    tmp_path: Path, stage: int, value: bool, copies: int
) -> None:
    folder = save_tiny_gemma3(tmp_path / "source")
    run = Trained(tmp_path, folder, stage=stage, value=value)
    others = {name for name, parameter in run.hf_model.named_parameters() if not parameter.requires_grad}
    assert others == {
        name
        for name, _ in run.hf_model.named_parameters()
        if name.startswith(("model.vision_tower.", "model.multi_modal_projector."))
    }
    run_merge(MergeGroup(model=str(run.checkpoint), output=str(tmp_path / "out")))
    before, saved, merged = weights_in(folder), weights_in(run.folder), weights_in(tmp_path / "out")
    assert saved.keys() == merged.keys() == before.keys() | ({"score.weight"} if value else set())
    assert all(torch.equal(saved[name], merged[name]) for name in saved)
    changed = {name for name in before if not torch.equal(before[name], saved[name])}
    assert changed == {name for name in before if "language_model" in name}
    trained = sum(saved[name].numel() for name in saved if name in changed or name == "score.weight")
    size = sum(file.stat().st_size for file in run.checkpoint.rglob("*.pt"))
    assert 0.95 < size / (copies * 4 * trained) < 1.1  # two moments and one or two copies of the weights in float32
    for written in (run.folder, tmp_path / "out"):
        assert AutoImageProcessor.from_pretrained(written).size == AutoImageProcessor.from_pretrained(folder).size
    if value:
        loaded = AutoModelForSequenceClassification.from_pretrained(run.folder, num_labels=1)
        assert torch.equal(loaded.score.weight, saved["score.weight"])


def test_an_adapter_of_a_model_that_reads_only_text_is_on_its_language_model(tmp_path: Path) -> None:
    folder = save_tiny_gemma3(tmp_path / "source")
    run = Trained(tmp_path, folder, lora_rank=4)
    run_merge(MergeGroup(model=str(run.folder), output=str(tmp_path / "out")))
    before, after = weights_in(folder), weights_in(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "language_model" in name and "proj" in name}
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    with torch.no_grad():
        found = PolicyModel(run.hf_model.eval())(pack(make_sequences(3)))[0]
        plain = PolicyModel(load_causal_lm(ModelConfig(pretrain=str(tmp_path / "out"), param_dtype="fp32"))).eval()
        torch.testing.assert_close(found, plain(pack(make_sequences(3)))[0], atol=1e-5, rtol=0)


def test_frozen_parts_of_a_model_that_has_moved_or_changed(folders: dict[str, Path], tmp_path: Path) -> None:
    origin = save_tiny_vision("llava", tmp_path / "origin")
    run = Trained(tmp_path, origin, sequences=vision_sequences(origin), freeze_vision_tower=True)
    origin.rename(tmp_path / "moved")

    def merged(name: str, base: Path | None) -> dict[str, torch.Tensor]:
        run_merge(MergeGroup(model=str(run.checkpoint), output=str(tmp_path / name), base=base and str(base)))
        return weights_in(tmp_path / name)

    with pytest.raises(UsageError, match="cannot find the model with the frozen parts"):
        merged("gone", None)
    with pytest.raises(
        UsageError, match=r"the frozen parts come from a different model: the weights at .*another have"
    ):
        merged("other", save_tiny_vision("llava", tmp_path / "another", seed=1))
    saved, found = weights_in(run.folder), merged("out", tmp_path / "moved")
    assert not [name for name in saved if not torch.equal(saved[name], found[name])]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("qwen2_5_vl", 2), ("qwen3_vl", 0), ("qwen3_5", 3), ("qwen3_5_moe", 0), ("idefics3", 3), ("llava", 0)],
)
def test_a_trained_model_is_a_folder_like_the_one_it_began_with(
    folders: dict[str, Path], tmp_path: Path, kind: str, stage: int
) -> None:
    folder, sequences = folders[kind], vision_sequences(folders[kind])
    run = Trained(tmp_path, folder, stage=stage, sequences=sequences)
    run_merge(MergeGroup(model=str(run.checkpoint), output=str(tmp_path / "out")))
    for written in (run.folder, tmp_path / "out"):
        before, after = weights_in(folder), weights_in(written)
        assert {name: weight.shape for name, weight in after.items()} == {n: w.shape for n, w in before.items()}
        assert not all(torch.equal(before[name], after[name]) for name in before)
        assert (
            AutoImageProcessor.from_pretrained(written).to_dict()
            == AutoImageProcessor.from_pretrained(folder).to_dict()
        )
        assert tiny_family(written).run(56, 84) == tiny_family(folder).run(56, 84)
        if "qwen" not in kind:  # its processor needs torchvision for videos
            assert AutoProcessor.from_pretrained(written).to_dict() == AutoProcessor.from_pretrained(folder).to_dict()
    saved, merged = weights_in(run.folder), weights_in(tmp_path / "out")
    assert all(torch.equal(saved[name], merged[name]) for name in saved)
    if stage == 0:
        with torch.no_grad():
            found = PolicyModel(run.hf_model.eval())(pack(sequences))[0]
        torch.testing.assert_close(found, plain_logprobs(run.folder, sequences)[0].detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("with_tower", [False, True])
def test_an_adapter_is_on_the_language_part_unless_the_tower_is_asked_for_and_can_be_merged(
    folders: dict[str, Path], tmp_path: Path, kind: str, with_tower: bool
) -> None:
    folder, sequences = folders[kind], vision_sequences(folders[kind])
    run = Trained(tmp_path, folder, sequences=sequences, lora_rank=4, lora_vision_tower=with_tower)
    tower, projectors = tower_parameters(run.hf_model)
    assert any(parameter.requires_grad for parameter in tower + projectors) == with_tower
    run_merge(MergeGroup(model=str(run.folder), output=str(tmp_path / "out")))
    before, after = weights_in(folder), weights_in(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vis" in name for name in changed) == with_tower
    with torch.no_grad():
        found = PolicyModel(run.hf_model.eval())(pack(sequences))[0]
    torch.testing.assert_close(found, plain_logprobs(tmp_path / "out", sequences)[0].detach(), atol=1e-5, rtol=0)


def test_named_target_modules_are_looked_for_in_the_language_part(folders: dict[str, Path]) -> None:
    def adapted(**given: Any) -> set[str]:
        model = ModelConfig(pretrain=str(folders["llava"]), param_dtype="fp32")
        plan = plan_adapter(model, LoraConfig(lora_rank=2, **given), seed=0)
        hf_model = load_with_adapter(load_causal_lm, model, plan)
        return {name.split(".lora_")[0] for name, p in hf_model.named_parameters() if p.requires_grad}

    layers = [f"model.language_model.layers.{number}.self_attn.q_proj" for number in (0, 1)]
    assert adapted(target_modules=["q_proj"]) == set(layers)
    assert adapted(target_modules=["q_proj"], exclude_modules=["layers.0.self_attn.q_proj"]) == set(layers[1:])
    with pytest.raises(UsageError, match="no linear layer fc1; --lora_vision_tower also searches the vision encoder"):
        adapted(target_modules=["fc1"])
    assert all("vision_tower" in name for name in adapted(target_modules=["fc1"], lora_vision_tower=True))


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_muon_takes_the_matrices_of_tower_and_decoder_but_no_embedding(folders: dict[str, Path], kind: str) -> None:
    model = load_causal_lm(ModelConfig(pretrain=str(folders[kind]), param_dtype="fp32"))
    matrices = set(hidden_matrices(model))
    names = {name for name, parameter in model.named_parameters() if parameter in matrices}
    assert any("vis" in name for name in names)
    assert any("layers" in name and "vis" not in name for name in names)
    assert not any("embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_weights_in_4_bits_are_the_language_part_alone(folders: dict[str, Path], kind: str) -> None:
    model = load_causal_lm(ModelConfig(pretrain=str(folders[kind]), param_dtype="fp32"))
    left = in_run_type(model.config)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    quantised = {name for name in linear if should_convert_module(name, left)}
    of_decoder = set(model.get_decoder().modules())
    decoder = {name for name, module in model.named_modules() if module in of_decoder}
    assert quantised == linear & decoder
    if "qwen3_5" not in kind:  # its layers are of several kinds
        assert len(quantised) == 7 * model.config.get_text_config().num_hidden_layers


def test_parts_that_a_model_has_not_are_refused(folders: dict[str, Path], tiny_model_dir: str) -> None:
    text, vision = (AutoConfig.from_pretrained(path) for path in (tiny_model_dir, folders["llava"]))
    frozen = ModelConfig(pretrain="model", freeze_projector=True)
    with pytest.raises(UsageError, match="freeze_projector: models of type qwen2 have no trainable vision encoder"):
        check_trained_parts(frozen, LoraConfig(), text, is_adapted=False)
    with pytest.raises(UsageError, match="lora_vision_tower: models of type qwen2 have no trainable vision encoder"):
        check_trained_parts(
            ModelConfig(pretrain="model"), LoraConfig(lora_rank=2, lora_vision_tower=True), text, is_adapted=True
        )
    with pytest.raises(UsageError, match="freeze_projector: with an adapter, all model weights are frozen"):
        check_trained_parts(frozen, LoraConfig(lora_rank=2), vision, is_adapted=True)
    check_trained_parts(frozen, LoraConfig(), vision, is_adapted=False)


def test_a_text_model_refuses_packs_with_pictures(folders: dict[str, Path], tiny_model_dir: str) -> None:
    policy = PolicyModel(load_causal_lm(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32")))
    with pytest.raises(UsageError, match="a text model cannot read images"):
        policy(pack(vision_sequences(folders["llava"], [[(56, 56)]])))
