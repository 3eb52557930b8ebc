"""Save models and tokenizers as folders that transformers loads. See `loading` for the reverse."""

import copy
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.models.classifiers import set_padding
from rlhf_cli.models.folders import whole_folder
from rlhf_cli.models.mixers.remainders import remainders, save_remainders, with_remainders
from rlhf_cli.models.unused_weights import ORIGIN, copy_unused_weights, describe_unused_weights
from rlhf_cli.models.vision.families.table import is_multimodal
from rlhf_cli.models.weight_files import folder_of

logger = logging.getLogger(__name__)

# Ignored by greedy search.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Ignored by single-beam search.
_OF_BEAMS = ("early_stopping", "length_penalty")
# Ignored without return_dict_in_generate.
_OF_OUTPUT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Token IDs that every model keeps."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files from which transformers builds a vision-language model's processor, other than tokenizer files."""


def save_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Atomically write model, tokenizer, chat template and generation settings to `path`.

    `state_dict` (Hugging Face names) replaces the model weights if they are partitioned. An existing folder at `path`
    remains until the new one is complete and synced to disk.
    """
    with whole_folder(path) as written:
        # Before save_pretrained: it changes the padding token in the model configuration.
        tokenizer = set_padding(model, tokenizer)
        _make_generation_valid(model, tokenizer)
        if remainders(model):
            state_dict = dict(with_remainders(model, (state_dict or model.state_dict()).items()))
        model.save_pretrained(written, state_dict=_without_tied_copies(model, state_dict))
        copy_unused_weights(model, written)
        tokenizer.save_pretrained(written)
        _save_processor(model, written)


def save_all_but_weights(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder without weights: configuration, tokenizer, chat template and generation settings."""
    tokenizer = set_padding(model, tokenizer)
    config_to_save(model).save_pretrained(folder)
    save_remainders(model, folder)
    describe_unused_weights(model, folder)
    save_tokenizer(model, tokenizer, folder)


def config_to_save(model: PreTrainedModel) -> PretrainedConfig:
    """Copy the model configuration the way `save_pretrained` writes it, without in-memory quantization."""
    config = copy.deepcopy(model.config)
    # save_pretrained sets both when it writes; the in-memory configuration may lack them.
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def save_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer, chat template, generation settings and image processor files."""
    _make_generation_valid(model, tokenizer)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _save_processor(model, folder)


def _save_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the image processor files from the model that training started from."""
    if is_multimodal(model.config):
        copy_processor_files(folder_of(getattr(model, ORIGIN)), folder)


def copy_processor_files(source: Path, folder: Path) -> None:
    """Copy the processor files that exist in the source."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _without_tied_copies(
    model: PreTrainedModel, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """Drop tied copies: transformers recognizes tied weights by shared memory, which gathered weights do not have."""
    if state_dict is None:
        return None
    tied = model.all_tied_weights_keys  # name of the copy -> name of the weight
    return {name: tensor for name, tensor in state_dict.items() if tied.get(name) not in state_dict}


def end_at(model: object, end_ids: Sequence[int]) -> None:
    """Add end tokens to the saved generation settings. Models that return scores have none."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    if generation is not None and end_ids:
        ends = _ends(generation)
        generation.eos_token_id = [*ends, *(end for end in end_ids if end not in ends)]


def _ends(generation: GenerationConfig) -> list[int]:
    """Return the end tokens as a list."""
    ends = generation.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _make_generation_valid(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set end and padding tokens from the tokenizer, and remove contradictory generation settings."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    if generation is None:
        return
    ends = _ends(generation)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends = [tokenizer.eos_token_id, *ends]
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    # Some published configurations contain -1.
    if generation.pad_token_id is None or generation.pad_token_id < 0:
        generation.pad_token_id = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
    if not _is_valid(generation):
        model.generation_config = _settled(generation)


def _settled(generation: GenerationConfig) -> GenerationConfig:
    """Drop settings that `generate` ignores.

    transformers refuses to save them, which would lose the model at the end of a run.
    """
    if generation.do_sample is False:
        _unset(generation, _SAMPLING)
    elif any(getattr(generation, name) is not None for name in _SAMPLING):
        # Published models often set a temperature but not do_sample.
        generation.do_sample = True
    if generation.num_beams in (None, 1):
        _unset(generation, _OF_BEAMS)
    if not generation.return_dict_in_generate:
        _unset(generation, _OF_OUTPUT)
    logger.warning("generation_config.json is inconsistent: settings without effect are not saved")
    tokens = {name: getattr(generation, name) for name in _TOKENS}
    return generation if _is_valid(generation) else GenerationConfig(**tokens)


def _unset(generation: GenerationConfig, names: tuple[str, ...]) -> None:
    for name in names:
        setattr(generation, name, None)


def _is_valid(generation: GenerationConfig) -> bool:
    try:
        generation.validate(strict=True)
    except ValueError:
        return False
    return True
