"""Each causal model type of transformers is packed exactly or rejected before its weights are read."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_causal_models import distance_in_packs, sequences, tiny_config, tiny_text_only_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.table import WITHOUT_BOUNDS, packed_length
from rlhf_cli.models.mixers.layers import fix_model
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.requirements import NOT_PACKED, PACKED_TYPES, check_row_positions, check_trainable
from rlhf_cli.models.supported import TESTED, models_table, supported_types
from rlhf_cli.models.vision.families.table import FAMILIES, TEXT_ONLY

ROUNDING = 1e-5  # for log-probs in float32
OTHERS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - PACKED_TYPES - FAMILIES.keys())


@pytest.mark.parametrize("kind", sorted(PACKED_TYPES))
def test_a_pack_in_training_has_the_logprobs_of_each_sequence_in_transformers(kind, tmp_path):
    assert distance_in_packs(tiny_config(kind), tmp_path) < ROUNDING


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXT_ONLY.items() for text in texts])
def test_packs_of_text_for_a_vision_language_model_have_its_logprobs_in_transformers(kind, text, tmp_path):
    assert distance_in_packs(tiny_text_only_config(kind, text), tmp_path) < ROUNDING


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "mixtral"])
def test_kernels_with_masks_keep_sequences_apart_too(kind, kernel, tmp_path):
    assert distance_in_packs(tiny_config(kind), tmp_path, kernel) < ROUNDING


@pytest.mark.parametrize("kind", sorted(WITHOUT_BOUNDS))
def test_a_kernel_whose_masks_have_no_bounds_is_refused(kind, tmp_path):
    with pytest.raises(UsageError, match=r"'sdpa' cannot be used here: .* or use auto"):
        distance_in_packs(tiny_config(kind), tmp_path, "sdpa")


def test_sequences_beyond_a_chunk_are_refused():
    architecture = tiny_config("llama4_text")
    check_row_positions(architecture, 140, dataset="rows")
    message = "llama4_text supports sequences of up to 140 tokens, .*: set --max_len 140"
    with pytest.raises(UsageError, match=message):
        check_row_positions(architecture, 141, dataset="rows")
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="varlen")
    fix_model(model)
    policy = PolicyModel(model.eval())
    policy(pack(sequences((140, 140))))
    with pytest.raises(UsageError, match=message):
        policy(pack(sequences((20, 141))))


def test_a_chunk_ends_before_the_temperature_changes():
    assert packed_length(AutoConfig.for_model("llama4_text")) == 8191
    assert packed_length(AutoConfig.for_model("llama4_text", attn_temperature_tuning=False)) == 8192
    assert packed_length(AutoConfig.for_model("llama4_text", no_rope_layers=[0] * 48)) is None
    assert packed_length(AutoConfig.for_model("llama")) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_type_is_refused_in_one_sentence(kind):
    assert kind in CONFIG_MAPPING_NAMES
    architecture = SimpleNamespace(model_type=kind, get_text_config=lambda: SimpleNamespace(model_type=kind))
    reason = NOT_PACKED.get(kind, "not tested to keep sequences separate")
    with pytest.raises(UsageError, match=f"models of type {kind} cannot be trained on packs: {reason}; docs"):
        check_trainable(architecture, trust_remote_code=False)


def test_reasons_are_given_for_types_of_transformers():
    assert NOT_PACKED.keys() <= {*OTHERS} | CONFIG_MAPPING_NAMES.keys()
    assert PACKED_TYPES.isdisjoint(NOT_PACKED)


def test_adapters_leave_stacks_of_matrices_out_as_the_table_says():
    for one in (one for one in supported_types() if one.images == "no"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(one.kind))
        convolutions = {part.weight for part in model.modules() if isinstance(part, torch.nn.Conv1d)}
        stacks = [name for name, weight in model.named_parameters() if weight.ndim == 3 and weight not in convolutions]
        language = [name for name in stacks if "vision" not in name]
        assert bool(language) == any(word in one.adapted() for word in ("experts", "gates")), (one.kind, language)


def test_the_tests_that_the_table_names_make_these_models():
    root = Path(__file__).parents[3]
    for file, kinds in itertools.chain(*TESTED.values()):
        text = (root / file).read_text()
        for kind in kinds:
            classes = CONFIG_MAPPING_NAMES[kind].removesuffix("Config")
            assert f'"{kind}"' in text or f"{classes}Config" in text, f"{file} does not make models of type {kind}"


def test_the_page_has_the_table_of_types_that_train():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    table = models_table()
    assert f"\n\n{table}\n" in page, "run `rlhf doctor --models` and copy its output to docs/models.md"
    kinds = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert set(re.findall(r"`([\w-]+)`", "".join(kinds))) == PACKED_TYPES | FAMILIES.keys() | TEXT_ONLY.keys()
