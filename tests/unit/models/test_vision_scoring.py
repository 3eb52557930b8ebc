"""Scores of vision-language models with our value head, in packs, and from saved folders."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_vision import TINY_FAMILIES, save_tiny_vision
from transformers import AutoConfig, AutoTokenizer
from vision_sequences import plain_scores, vision_sequences

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import TokenSequence, at_targets, only_end, pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.classifiers import is_classifier
from rlhf_cli.models.loading import load_causal_lm, load_reward_model, load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.saving import save_hf


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scoring")
    return {kind: save_tiny_vision(kind, root / kind) for kind in TINY_FAMILIES}


def settings(folder: Path) -> ModelConfig:
    return ModelConfig(pretrain=str(folder), param_dtype="fp32")


def scores(model: ValueModel, sequences: list[TokenSequence]) -> torch.Tensor:
    """Return the scores at the ends of the sequences."""
    with torch.no_grad():
        return model(at_targets(pack([only_end(sequence) for sequence in sequences])))


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_scores_of_packs_are_the_heads_products_with_the_plain_models_last_states(
    folders: dict[str, Path], kind: str
) -> None:
    sequences = vision_sequences(folders[kind])
    model = ValueModel(load_value_backbone(settings(folders[kind])))
    expected = plain_scores(folders[kind], sequences, model.model.score.weight.detach())
    torch.testing.assert_close(scores(model, sequences), expected, atol=1e-5, rtol=0)
    assert expected.std() > 1e-3


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_a_saved_reward_model_scores_the_same_and_is_no_language_model(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    model = load_value_backbone(settings(folders[kind]))
    torch.nn.init.normal_(model.score.weight)
    save_hf(model, AutoTokenizer.from_pretrained(folders[kind]), tmp_path / "judge")
    assert is_classifier(AutoConfig.from_pretrained(tmp_path / "judge"))
    language = {name for name in load_file(folders[kind] / "model.safetensors") if "lm_head" not in name}
    assert set(load_file(tmp_path / "judge" / "model.safetensors")) == language | {"score.weight"}
    sequences = vision_sequences(folders[kind])
    loaded = ValueModel(load_reward_model(settings(tmp_path / "judge")))
    torch.testing.assert_close(scores(loaded, sequences), scores(ValueModel(model), sequences), atol=0, rtol=0)
    with pytest.raises(UsageError, match="which returns scores: use a language model"):
        load_causal_lm(settings(tmp_path / "judge"))


def test_a_language_model_is_no_reward_model(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="score"):
        load_reward_model(settings(folders["idefics3"]))
