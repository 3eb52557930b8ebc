"""Vision-language models with a head that gives a number instead of words, for which transformers has no class."""

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
    """Return the class of a family's models with a linear head `score` in place of the language-model head.

    Its name ends as those of transformers' classifiers, so a saved configuration shows what the model is. The weights
    have the names of the language model's checkpoint, and `score.weight`.
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
        "__module__": base.__module__,  # transformers renames the weights of its own models alone
        "__doc__": "A vision-language model with a scalar head.",
        "_tied_weights_keys": {},
        "can_generate": classmethod(lambda cls: False),
        "get_output_embeddings": lambda self: None,
        "from_config": classmethod(lambda cls, config, **options: cls._from_config(config)),
    }
    if (renamed := get_checkpoint_conversion_mapping(base.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (base,), members)
