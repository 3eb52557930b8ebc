"""The model types that train, as a table: for `rlhf doctor --models` and the documentation."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from transformers import AutoConfig, PretrainedConfig

from rlhf_cli.models.mixers.layers import ATTENTION, KERNELS, MIXERS, OWN_STATES, WITHOUT_INITIAL_STATE, kind_of
from rlhf_cli.models.requirements import PACKED_TYPES
from rlhf_cli.models.vision.families.table import FAMILIES

HEADER = ("types", "layers", "images", "experts", "shared prompts", "transformers engine", "on a CPU", "GPU kernels")


@dataclass(frozen=True)
class SupportedType:
    """A model type whose sequences in a pack are independent, exactly.

    - `kind`: `model_type` in the configuration.
    - `layers`: attention, and names in `MIXERS`, that its models may have.
    - `has_experts`: whether its MLP is, or may be, a mixture of experts.
    - `reads_images`: whether it is a vision-language model.
    """

    kind: str
    layers: tuple[str, ...]
    has_experts: bool
    reads_images: bool

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table after the type."""
        mixers = {*self.layers} - {ATTENTION}
        extras = sorted({KERNELS[mixer][1] for mixer in mixers & KERNELS.keys()})
        decodes = self.kind not in OWN_STATES
        return (
            ", ".join(self.layers),
            _yes(self.reads_images),
            _yes(self.has_experts),
            _yes(not mixers & WITHOUT_INITIAL_STATE),
            _yes(decodes),
            "transformers" if mixers and decodes else "vLLM",
            ", ".join(f"`rlhf-cli[{extra}]`" for extra in extras),
        )


def models_table() -> str:
    """Return a Markdown table of the supported types, those with equal cells in one row."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for one in supported_types():
        kinds.setdefault(one.cells(), []).append(f"`{one.kind}`")
    rows = [HEADER, ("---",) * len(HEADER), *((", ".join(named), *cells) for cells, named in sorted(kinds.items()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def supported_types() -> Iterator[SupportedType]:
    """Yield all supported types in alphabetical order."""
    for kind in sorted(PACKED_TYPES | FAMILIES.keys()):
        architecture = AutoConfig.for_model(kind)
        text = architecture.get_text_config()
        has_experts = any("experts" in name for name in text.to_dict())
        yield SupportedType(kind, _layers_of(text), has_experts, reads_images=kind in FAMILIES)


def _layers_of(text: PretrainedConfig) -> tuple[str, ...]:
    """Return the layers that mix tokens in the module of a text model, whatever a configuration selects."""
    name = type(text).__module__.replace(".configuration_", ".modeling_")
    import_module(name)
    classes = [cls for _, cls in inspect.getmembers(sys.modules[name], inspect.isclass) if cls.__module__ == name]
    kinds = {kind_of(cls) for cls in classes if hasattr(cls, "forward")}
    return tuple(kind for kind in (ATTENTION, *sorted(MIXERS)) if kind in kinds)
