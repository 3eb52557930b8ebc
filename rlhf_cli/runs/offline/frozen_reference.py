"""Reference model for preference commands: checks, and hooks for the offline loop."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.distributed import gather_rows
from rlhf_cli.backends.training.frozen_reference import Columns, FrozenReference, base_results, kept_columns
from rlhf_cli.config.model import ModelConfig, ReferenceConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import find_model
from rlhf_cli.runs.offline.task import Items, ReferenceHooks
from rlhf_cli.runs.run_identity import model_identity
from rlhf_cli.runs.trained_model import ModelPlan, find_companion, reference_notice
from rlhf_cli.trainers.offline import dpo, kto
from rlhf_cli.trainers.offline.loop import Share
from rlhf_cli.trainers.offline.pairs import Gather
from rlhf_cli.trainers.offline.reference_logprobs import all_results, digest_of_pairs, digest_of_responses

_Forwards = dict[str, Callable[[object, Any], object]]
"""Reference forward functions, keyed by result column."""


def check_reference(reference: ReferenceConfig, model: ModelPlan, *, is_needed: bool) -> None:
    """Raise UsageError if the reference is unsupported, or set but unused."""
    if not is_needed and reference != ReferenceConfig():
        raise UsageError("the loss does not use a reference: remove the reference settings")
    if reference.moves and model.plan is not None:
        raise UsageError("ref_sync_steps requires full fine-tuning: with an adapter, the base model is the reference")
    if reference.ref_offload and _is_base(reference, model):
        raise UsageError("ref_offload requires a separate reference: with an adapter, the base model is the reference")
    if reference.ref_pretrain is not None:
        find_companion("ref_pretrain", _source(reference, model), model)


def _source(reference: ReferenceConfig, model: ModelPlan) -> ModelConfig:
    changes = {"compile_model": False} | ({"pretrain": reference.ref_pretrain} if reference.ref_pretrain else {})
    return model.base.model_copy(update=changes)


def reference_identity(reference: ReferenceConfig, model: ModelPlan, *, is_needed: bool = True) -> dict[str, object]:
    """Return reference facts that must match to resume a checkpoint."""
    if not is_needed:
        return model_identity("reference", None)
    found = model.found if reference.ref_pretrain is None else find_model(_source(reference, model))
    return model_identity("reference", found)


def reference_notices(reference: ReferenceConfig, model: ModelPlan) -> tuple[str, ...]:
    """Return a notice if the reference differs from the initial model without being set."""
    return tuple(reference_notice(model)) if _is_base(reference, model) else ()


def pair_reference(
    settings: ReferenceConfig,
    objective: dpo.DPOObjective,
    items: Items,
    share: Share,
    *,
    model: ModelPlan,
    deepspeed: DeepSpeedConfig,
) -> tuple[Items, ReferenceHooks]:
    """Add precomputed reference log-probs to the pairs, or return hooks that compute them in each step."""
    deepspeed, gather = _of_reference(deepspeed, settings), _gather(deepspeed)
    if not objective.needs_reference:
        return items, _pair_hooks(objective, None, gather)
    if settings.precompute_ref_log_probs:
        # The model is needed only here, so it is freed before training starts.
        precomputed = _Precomputed(_source(settings, model), deepspeed, share, {dpo.REF: objective.forward})

        def digest(pairs: Any) -> str:
            return digest_of_pairs(pairs) + ("" if objective.ld_alpha == 1 else f" ld_alpha {objective.ld_alpha:g}")

        return precomputed.added_to(items, digest), _pair_hooks(objective, None, gather)
    if _is_base(settings, model):
        return items, _pair_hooks(objective, base_results(objective.forward), gather)
    frozen = FrozenReference(_source(settings, model), deepspeed)
    hooks = _pair_hooks(objective, frozen.results(objective.forward), gather)
    return items, _moving(hooks, frozen, settings) if settings.moves else hooks


def _is_base(settings: ReferenceConfig, model: ModelPlan) -> bool:
    """Return whether the reference is the trained model without its adapter."""
    return model.plan is not None and settings.ref_pretrain is None


def _of_reference(deepspeed: DeepSpeedConfig, settings: ReferenceConfig) -> DeepSpeedConfig:
    """Return the reference's DeepSpeed settings."""
    return deepspeed.model_copy(update={"param_offload": deepspeed.param_offload or settings.ref_offload})


def _gather(settings: DeepSpeedConfig) -> Gather:
    """Return a function that gathers rows from all ranks."""
    return functools.partial(gather_rows, ranks_per_pack=settings.ranks_per_pack)


def _pair_hooks(objective: dpo.DPOObjective, infer: dpo.Infer | None, gather: Gather) -> ReferenceHooks:
    preparation = dpo.PairPreparation(objective, infer, gather)
    return ReferenceHooks(prepare=preparation if preparation.is_needed else None)


def _moving(hooks: ReferenceHooks, frozen: FrozenReference, settings: ReferenceConfig) -> ReferenceHooks:
    """Extend the hooks to update the reference and checkpoint it."""

    def after_step(engine: DeepSpeedEngine, step: int) -> None:
        if step % settings.ref_sync_steps == 0:
            frozen.move(engine.named_weights(engine.module.get_submodule("model")), settings.ref_mixup_alpha)

    return replace(hooks, after_step=after_step, save=frozen.save, load=frozen.load)


def labelled_reference(
    settings: ReferenceConfig,
    objective: kto.KTOObjective,
    items: Items,
    share: Share,
    *,
    model: ModelPlan,
    deepspeed: DeepSpeedConfig,
) -> tuple[Items, ReferenceHooks]:
    """Add precomputed reference log-probs to the responses, or return hooks that compute them in each step."""
    reference, deepspeed = None, _of_reference(deepspeed, settings)
    if settings.precompute_ref_log_probs:
        forwards: _Forwards = {kto.REF: kto.matched_logprobs, kto.MISMATCHED_REF: kto.mismatched_logprobs}
        precomputed = _Precomputed(_source(settings, model), deepspeed, share, forwards)
        items = precomputed.added_to(items, digest_of_responses)
    else:
        # With an adapter no second model is loaded.
        asked = (
            base_results if _is_base(settings, model) else FrozenReference(_source(settings, model), deepspeed).results
        )
        reference = kto.LabelledReference(asked(kto.matched_logprobs), asked(kto.mismatched_logprobs))
    return items, ReferenceHooks(prepare=kto.KTOPreparation(objective, reference, _gather(deepspeed)))


class _Precomputed:
    """Precomputed reference columns for whole datasets. The model is loaded once, and only without cached columns."""

    def __init__(self, source: ModelConfig, deepspeed: DeepSpeedConfig, share: Share, forwards: _Forwards) -> None:
        self._source, self._deepspeed, self._share, self._forwards = source, deepspeed, share, forwards

    @functools.cached_property
    def _model(self) -> FrozenReference:
        return FrozenReference(self._source, self._deepspeed)

    def added_to(self, items: Items, digest: Callable[[Any], str]) -> Items:
        """Return the items with the columns."""
        evaluated = None if items.eval_data is None else self._completed(items.eval_data, digest)
        return Items(self._completed(items.data, digest), evaluated)

    def _completed(self, part: Any, digest: Callable[[object], str]) -> object:
        # The key contains the items and the columns, so that a change of either computes them again.
        key = " ".join([digest(part), *self._forwards])
        return replace(part, columns=part.columns | kept_columns(self._source, key, lambda: self._columns(part)))

    def _columns(self, part: Any) -> Columns:
        return {
            name: all_results(self._model, forward, part, share=self._share, gather=_gather(self._deepspeed))
            for name, forward in self._forwards.items()
        }
