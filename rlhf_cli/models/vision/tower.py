"""Decoder inputs for packs in vision-language models: embeddings with image features, and positions.

Features go to the rows named in the pack, never to all tokens with the placeholder ID, because a model may sample one.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.models.packs import PackLike, host_of
from rlhf_cli.models.vision.families.processing import PictureProcessing
from rlhf_cli.models.vision.families.table import names_of_parts
from rlhf_cli.models.vision.patch_products import use_patch_products
from rlhf_cli.models.vision.pictures import PackPictures, Picture, picture_of_pixels

PROCESSING = "picture_processing"
"""Attribute of a loaded model with its image processing. Not a module, so state dict names do not change."""
_KEPT_BYTES = 1 << 30
"""Cache size for encoder inputs: 220 images of 400,000 pixels in bf16.

This exceeds one rank's images in most iterations, so log-probs and updates decode and resize each image once.
"""


def tower_of(model: PreTrainedModel) -> "VisionTower | None":
    """Return the vision encoder of a loaded model, or None for a text model."""
    processing = getattr(model, PROCESSING, None)
    return None if processing is None else VisionTower(model, processing)


def tower_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the encoder and projector modules; a projector may be part of the encoder."""
    return [model.get_submodule(name) for name in names_of_parts(model.config)]


@dataclass(frozen=True)
class _Features:
    """Concatenated image features.

    `embedded_FD` replaces embeddings, and each `deep_FD` is added to an early layer output (DeepStack, arXiv
    2406.04334).
    """

    embedded_FD: torch.Tensor
    deep_FD: tuple[torch.Tensor, ...] = ()

    def nothing(self) -> torch.Tensor:
        """Return a zero with zero gradients for all parameters that produced the features."""
        # With a dummy image, every rank runs the same backward collectives although no loss uses the features.
        return sum((0.0 * part.float().mean() for part in self.deep_FD), start=0.0 * self.embedded_FD.float().mean())


class VisionTower:
    """A model's vision encoder and embedding, run on packs. Not a module, so state dict names do not change."""

    def __init__(self, model: PreTrainedModel, processing: PictureProcessing) -> None:
        self._body = model.base_model
        self._embed = model.get_input_embeddings()
        self._modules = tower_modules(model)
        # Projectors have no convolutions.
        use_patch_products(self._modules[0])
        self._processing = processing
        self._inputs = RecentInputs(self._inputs_of, _KEPT_BYTES)
        self._blank = picture_of_pixels("blank", processing.blank())

    def _inputs_of(self, picture: Picture) -> dict[str, torch.Tensor]:
        """Return the encoder inputs for an image in the weight dtype, to which encoders convert them anyway."""
        inputs, dtype = self._processing.inputs_of(picture.pixels), self._embed.weight.dtype
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}

    def decoder_inputs(self, pack: PackLike, noise_TD: torch.Tensor | None = None) -> dict[str, object]:
        """Return decoder arguments for the tokens in a pack, except sequence boundaries.

        `noise_TD` is added to the embeddings of text.
        """
        pictures = pack.pictures
        features = self._features(pictures.pictures if pictures else (self._blank,)) if self._runs_for(pack) else None
        embedded_TD = self._embed(pack.input_ids_T)
        if noise_TD is not None:
            embedded_TD = embedded_TD + noise_TD.to(embedded_TD.dtype)
        positions = {"position_ids": self._positions(pack)}
        if features is None:
            return {"inputs_embeds": embedded_TD[None], **positions}
        if pictures is None:
            return {"inputs_embeds": (embedded_TD + features.nothing().to(embedded_TD.dtype))[None], **positions}
        _require_all_features(features, host_of(pack).pictures)
        own_PD = features.embedded_FD.index_select(0, pictures.features_P).to(embedded_TD.dtype)
        # Rows by position, not by token ID: a sampled placeholder must stay an ordinary token.
        embedded_TD = embedded_TD.index_copy(0, pictures.rows_P, own_PD)
        return {"inputs_embeds": embedded_TD[None], **positions, **_deep_inputs(features, pictures, len(embedded_TD))}

    def _runs_for(self, pack: PackLike) -> bool:
        """Return whether to run the encoder.

        It runs for images. Without images it runs on a dummy image if its parameters need a gradient or are
        partitioned, so all ranks join the collectives.
        """
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        # ZeRO-3 sets ds_id on the parameters it partitions.
        return pack.pictures is not None or trains or any(hasattr(parameter, "ds_id") for parameter in parameters)

    def _positions(self, pack: PackLike) -> torch.Tensor:
        """Return positions [1, T], or [4, 1, T] for three-axis models; the first row marks sequence boundaries."""
        plain_T = pack.position_ids_T
        if not self._processing.has_axes:
            return plain_T[None]
        rope_3T = pack.pictures.rope_3T if pack.pictures else None
        return torch.cat([plain_T[None], plain_T.expand(3, -1) if rope_3T is None else rope_3T])[:, None]

    def _features(self, pictures: Sequence[Picture]) -> _Features:
        inputs = self._processing.joined([self._inputs[picture] for picture in pictures])
        device = self._embed.weight.device
        output = self._body.get_image_features(
            **{name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}, return_dict=True
        )
        deep = getattr(output, "deepstack_features", None) or ()
        return _Features(_end_to_end(output.pooler_output), tuple(_end_to_end(part) for part in deep))


def _end_to_end(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [F, D] from one tensor per image, or from one tensor for images with equal feature counts."""
    return features.flatten(0, -2) if isinstance(features, torch.Tensor) else torch.cat(list(features))


def _require_all_features(features: _Features, pictures: PackPictures | None) -> None:
    """Raise AssertionError unless the encoder returned one feature per image placeholder."""
    assert pictures is not None, "a pack has images on both devices"
    expected, actual = int(pictures.features_P.max()) + 1, features.embedded_FD.shape[0]
    assert actual == expected, f"images have {expected} placeholders and {actual} features"


def _deep_inputs(features: _Features, pictures: PackPictures, num_tokens: int) -> dict[str, object]:
    """Return arguments that add features to early decoder layers; empty for most models."""
    if not features.deep_FD:
        return {}
    # The decoder adds them through a boolean mask, in token order.
    order_P = pictures.rows_P.argsort()
    is_feature_T = torch.zeros(num_tokens, dtype=torch.bool, device=order_P.device)
    own = pictures.features_P[order_P]
    return {
        "visual_pos_masks": is_feature_T.index_fill(0, pictures.rows_P, True)[None],
        "deepstack_visual_embeds": [deep_FD.index_select(0, own) for deep_FD in features.deep_FD],
    }


@dataclass
class RecentInputs:
    """LRU cache for encoder inputs, limited in bytes."""

    make: Callable[[Picture], dict[str, torch.Tensor]]
    most_bytes: int
    _kept: OrderedDict[str, dict[str, torch.Tensor]] = field(default_factory=OrderedDict)
    _num_bytes: int = 0

    def __getitem__(self, picture: Picture) -> dict[str, torch.Tensor]:
        """Return the inputs for an image; images with the same digest share an entry."""
        if picture.digest in self._kept:
            self._kept.move_to_end(picture.digest)
            return self._kept[picture.digest]
        made = self.make(picture)
        self._kept[picture.digest] = made
        self._num_bytes += _num_bytes(made)
        # Keep the newest entry even if it exceeds the limit alone: the caller uses it now.
        while self._num_bytes > self.most_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= _num_bytes(dropped)
        return made


def _num_bytes(inputs: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())
