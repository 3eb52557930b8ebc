"""Models with a score head, for types for which transformers has no such class."""

import functools
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from rlhf_cli.models.classifiers import CLASSIFIER
from rlhf_cli.models.vision.families.table import is_text_only, takes_pictures


def sequence_classifier_class(architecture: PretrainedConfig) -> Any:
    """Return the class that loads a model with a linear `score` head, including any vision encoder.

    Classes made here have the suffix of transformers classifiers, so a saved configuration identifies the model type.
    Weights have language model checkpoint names, plus `score.weight`.
    """
    kind = type(architecture)
    has_classifier = kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if takes_pictures(architecture) or (is_text_only(architecture) and not has_classifier):
        return _with_score_head(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])
    # Custom model code brings its own classifier, or none.
    if has_classifier or kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForSequenceClassification
    return _with_score_head(MODEL_FOR_CAUSAL_LM_MAPPING[kind])


@functools.cache
def _with_score_head(base: Any) -> Any:
    def __init__(self: Any, config: PretrainedConfig) -> None:
        base.__init__(self, config)
        del self.lm_head
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)

    name = base.__name__.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM") + CLASSIFIER
    members = {
        "__init__": __init__,
        # transformers converts weight names only for classes in its own modules.
        "__module__": base.__module__,
        "__doc__": "A model with a scalar head.",
        "_tied_weights_keys": {},
        "can_generate": classmethod(lambda cls: False),
        "get_output_embeddings": lambda self: None,
        "from_config": classmethod(lambda cls, config, **options: cls._from_config(config)),
    }
    # Conversions may be registered by class name, which the new class does not inherit.
    if (renamed := get_checkpoint_conversion_mapping(base.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (base,), members)
