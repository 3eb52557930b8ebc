"""Parts of a run's identity, which must match to resume a checkpoint.

Each setting and hash is a separate entry, because the error message shows the entry's name.
"""

import json
from collections.abc import Sequence, Set

from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.plugins import without_folder
from rlhf_cli.models.adapters import VARIANTS, AdapterPlan
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.identity import configuration_fingerprint, template_fingerprint, tokenizer_fingerprint
from rlhf_cli.runs.trained_model import ModelPlan

_OF_AN_ADAPTER = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "lora_vision_tower",
    "load_in_4bit",
    *VARIANTS,
)
_NOT_OF_THE_OBJECTIVE = {"preset", "share_prompts"}
"""Settings without effect on the objective: a preset only sets defaults, and shared prompts only save time."""
NOT_OF_THE_STEPS = {"max_norm", "max_skipped_steps"}
"""Settings of the optimizer that a resumed run may change."""


def model_identity(role: str, model: FoundModel | None, plan: AdapterPlan | None = None) -> dict[str, object]:
    """Return hashes of a role's initial model; None values if the run has no such role.

    Args:
        role: name of the role.
        model: the model, or the adapter's base model.
        plan: the adapter, if any.
    """
    weights = configuration = None
    if model is not None:
        # An adapter run starts from the adapter's weights, if any.
        weights = plan.start_fingerprint() if plan else model.fingerprint()
        configuration = configuration_fingerprint(model.path)
    return {f"weights of the {role}": weights, f"configuration of the {role}": configuration}


def teachers_identity(config: CommandConfig, teachers: Sequence[ModelPlan]) -> dict[str, object]:
    """Return hashes of the weights of teachers by source, and of teachers' own tokenizers; None values without.

    Args:
        teachers: distinct teachers in order, the common one first.
    """
    by_source, own = config.setting("teacher_by_source"), config.setting("teacher_tokenizer") == "own"
    weights = {teacher.source.pretrain: teacher.found for teacher in teachers}
    found = json.loads(by_source) if by_source is not None else {}
    return {
        "weights of the teachers by source": {source: weights[name].fingerprint() for source, name in found.items()}
        or None,
        "tokenizers of the teachers": [list(tokenizer_identity(one.tokenizer).values()) for one in teachers]
        if own
        else None,
    }


def adapter_identity(plan: AdapterPlan | None, *, suffix: str = "") -> dict[str, object]:
    """Return the adapter settings by name with `suffix`; None values without an adapter."""
    # Include names without a value, so that adding an adapter on resume is an error.
    settings = dict.fromkeys(_OF_AN_ADAPTER) | (plan.identity() if plan else {})
    return {f"{name}{suffix}": value for name, value in settings.items()}


def tokenizer_identity(tokenizer: object) -> dict[str, object]:
    """Return hashes of tokenizer and chat template."""
    return {"tokenizer": tokenizer_fingerprint(tokenizer), "chat template": template_fingerprint(tokenizer)}


def objective_identity(group: SettingsGroup, *, besides: frozenset[str] = frozenset()) -> dict[str, object]:
    """Return a group's settings that affect the objective, as JSON values, except `besides`."""
    settings = group.model_dump(mode="json", exclude=_NOT_OF_THE_OBJECTIVE | besides)
    return {name: without_folder(value) for name, value in settings.items()}


def supported_identity(config: CommandConfig, group: str, *, besides: Set[str] = frozenset()) -> dict[str, object]:
    """Return a group's supported settings that affect the objective, as JSON values, except `besides`."""
    return objective_identity(getattr(config, group), besides=config.unsupported_in(group) | besides)
