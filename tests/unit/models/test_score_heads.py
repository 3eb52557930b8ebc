"""Score heads on types for which transformers has no sequence classifier."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_mixers_in_packs import KINDS, SHARED
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
)

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import at_targets, only_end, pack
from rlhf_cli.models.classifiers import is_classifier
from rlhf_cli.models.loading import load_reward_model, load_value_backbone
from rlhf_cli.models.mixers.layers import fix_model
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.saving import save_hf
from rlhf_cli.models.score_heads import sequence_classifier_class


@torch.no_grad()
def scores(model: ValueModel) -> torch.Tensor:
    """Return the scores at the ends of sequences."""
    return model(at_targets(pack([only_end(sequence) for sequence in SHARED])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_model_scores_and_is_loaded_again(
    kind: str, tiny_hybrid_dir: Callable[[str], str], tmp_path: Path
) -> None:
    folder = tiny_hybrid_dir(kind)
    model = load_value_backbone(ModelConfig(pretrain=folder, param_dtype="fp32"))
    torch.nn.init.normal_(model.score.weight)
    found = scores(ValueModel(model))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    fix_model(plain)
    for score, sequence in zip(found, SHARED, strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(sequence.token_ids).long()[None]
            last = plain.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        torch.testing.assert_close(score, model.score.weight[0] @ last, atol=1e-4, rtol=1e-4)
    save_hf(model, AutoTokenizer.from_pretrained(folder), tmp_path)
    assert is_classifier(AutoConfig.from_pretrained(tmp_path))
    language = {name for name in load_file(Path(folder) / "model.safetensors") if "lm_head" not in name}
    assert set(load_file(tmp_path / "model.safetensors")) == language | {"score.weight"}
    again = ValueModel(load_reward_model(ModelConfig(pretrain=str(tmp_path), param_dtype="fp32")))
    saved = again.model.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(scores(again), found, atol=1e-5, rtol=1e-5)


def test_classes_of_transformers_are_preferred() -> None:
    assert sequence_classifier_class(Qwen2Config()) is AutoModelForSequenceClassification
