"""Vision-language models with a score head, for which transformers has no class."""

import functools
from typing import Any

from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from rlhf_cli.models.classifiers import CLASSIFIER


def scoring_class(architecture: PretrainedConfig) -> type[PreTrainedModel]:
    """Return a model class with a linear `score` head instead of the LM head.

    The name has the suffix of transformers classifiers, so a saved configuration identifies the model type. Weights
    have language model checkpoint names, plus `score.weight`.
    """
    return _with_score_head(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(architecture)])


@functools.cache
def _with_score_head(base: Any) -> Any:
    def __init__(self: Any, config: PretrainedConfig) -> None:
        base.__init__(self, config)
        del self.lm_head
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)

    name = base.__name__.removesuffix("ForConditionalGeneration") + CLASSIFIER
    members = {
        "__init__": __init__,
        # transformers converts weight names only for classes in its own modules.
        "__module__": base.__module__,
        "__doc__": "A vision-language model with a scalar head.",
        "_tied_weights_keys": {},
        "can_generate": classmethod(lambda cls: False),
        "get_output_embeddings": lambda self: None,
        "from_config": classmethod(lambda cls, config, **options: cls._from_config(config)),
    }
    # Conversions may be registered by class name, which the new class does not inherit.
    if (renamed := get_checkpoint_conversion_mapping(base.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (base,), members)
