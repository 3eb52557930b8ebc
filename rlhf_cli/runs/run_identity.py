"""Parts of a run's identity, which must be equal for a checkpoint to be continued.

Each setting and each hash has an entry of its own, whose name is read in the refusal.
"""

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.plugins import without_folder
from rlhf_cli.models.adapters import VARIANTS, AdapterPlan
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.identity import configuration_fingerprint, template_fingerprint, tokenizer_fingerprint

OF_AN_ADAPTER = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "lora_vision_tower",
    "load_in_4bit",
    *VARIANTS,
)
NOT_OF_THE_OBJECTIVE = {"preset", "share_prompts"}
"""A preset only gives defaults, and shared prompts only save time."""


def model_identity(role: str, model: FoundModel | None, plan: AdapterPlan | None = None) -> dict[str, object]:
    """Return hashes of the model that a role starts from; None if the run has no such role.

    Args:
        model: the model, or the model under the adapter.
    """
    weights = configuration = None
    if model is not None:
        weights = plan.start_fingerprint() if plan else model.fingerprint()
        configuration = configuration_fingerprint(model.path)
    return {f"weights of the {role}": weights, f"configuration of the {role}": configuration}


def adapter_identity(plan: AdapterPlan | None, *, suffix: str = "") -> dict[str, object]:
    """Return the settings of an adapter, None if there is no adapter, with the suffix behind their names."""
    settings = dict.fromkeys(OF_AN_ADAPTER) | (plan.identity() if plan else {})
    return {f"{name}{suffix}": value for name, value in settings.items()}


def tokenizer_identity(tokenizer: object) -> dict[str, object]:
    """Return hashes of the tokenizer and of its chat template."""
    return {"tokenizer": tokenizer_fingerprint(tokenizer), "chat template": template_fingerprint(tokenizer)}


def objective_identity(group: SettingsGroup, *, besides: frozenset[str] = frozenset()) -> dict[str, object]:
    """Return the settings of a group that belong to the objective, as JSON, except `besides`."""
    settings = group.model_dump(mode="json", exclude=NOT_OF_THE_OBJECTIVE | besides)
    return {name: without_folder(value) for name, value in settings.items()}
