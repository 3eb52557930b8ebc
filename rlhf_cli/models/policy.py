"""Models as the trainers use them: a flat pack goes in, one number per trained token comes out.

State dict: the Hugging Face model is the attribute `model`, so every key is `model.` + the Hugging Face name.
Losses are no business of this module, and neither is generation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.masks import MASKED_HERE, packed_masks
from rlhf_cli.models.last_mlp import LastMLP
from rlhf_cli.models.logit_chunks import HeadWeights, LogitTransform
from rlhf_cli.models.logprobs import token_logprobs
from rlhf_cli.models.packs import PackLike
from rlhf_cli.models.routers import RouterRecorder, router_recorder, token_weights
from rlhf_cli.models.sequence_parallel.parts import Part, part_of
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks
from rlhf_cli.models.shape_bucketing import rounded
from rlhf_cli.models.vision.tower import tower_of

ResultT = TypeVar("ResultT")


class Decoder:
    """A model's decoder, run on packs: no module, so that names in the state dict stay as they are."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder = model.get_decoder()
        self._tower = tower_of(model)
        self._last_mlp = LastMLP(self._decoder)
        self._text = model.config.get_text_config()
        self.routers = router_recorder(model.config)

    def __call__(self, part: Part, *, real: PackLike) -> torch.Tensor:
        """Return hidden states [k, D] after the last norm, before any head, of the part's targets.

        `real` is the pack before it was rounded up with filler.
        """
        pack = part.pack
        records_routers = self.routers is not None and self.routers.is_on
        with self._spared(part):
            output = self._decoder(
                **self._inputs(part),
                use_cache=False,
                **part.runs.as_arguments(),
                **self._masks(pack),
                **({"shards": part.shards} if part.shards else {}),
                **({"output_router_logits": True} if records_routers else {}),
            )
        if self.routers is not None and records_routers:
            self.routers.add(output.router_logits, token_weights(real, num_tokens=pack.input_ids_T.numel()))
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD.index_select(0, part.rows_k)

    def _inputs(self, part: Part) -> dict[str, object]:
        """Return tokens and positions, or what a vision-language model has in their place."""
        pack = part.pack
        if self._tower is not None:
            assert part.shards is None, "ranks do not share sequences of vision-language models"
            return self._tower.decoder_inputs(pack)
        if pack.pictures is not None:
            raise UsageError("a text model cannot read pictures: give a vision-language model")
        return {
            "input_ids": pack.input_ids_T[part.tokens][None],
            "position_ids": pack.position_ids_T[part.tokens][None],
        }

    def _masks(self, pack: PackLike) -> dict[str, object]:
        """Return the masks of the pack if the decoder would make masks without its bounds."""
        if self._text.model_type not in MASKED_HERE:
            return {}
        return {"attention_mask": packed_masks(pack.cu_seqlens, self._text, self._decoder.dtype)}

    def _spared(self, part: Part) -> AbstractContextManager[None]:
        """Return the context that leaves out work on tokens that are not read.

        It leaves out nothing if layers are computed again in the backward pass, when the context has ended, or if the
        last layer's router is recorded, which has to see all tokens.
        """
        computes_again = self._decoder.training and getattr(self._decoder, "is_gradient_checkpointing", False)
        records_routers = self.routers is not None and self.routers.is_on
        return nullcontext() if computes_again or records_routers else self._last_mlp.only(part.read_r)


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return the transform of the head's output that models of this configuration apply."""
    text = config.get_text_config()
    divisor = getattr(text, "logits_scaling", None)
    scale = getattr(text, "logit_scale", None)
    return LogitTransform(
        scale=(1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor)),
        softcap=getattr(text, "final_logit_softcapping", None),
    )


class TokenHead(nn.Module):
    """Functions of hidden states and the head's weight, which stays in place.

    A module of its own because ZeRO-3 gathers weights per module: the head's weight is used outside the head, so it has
    to be registered as external parameter of this module (`external_parameters` of `LanguageModel`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UsageError(f"{type(model).__name__} has no linear language-model head: it cannot be a policy")
        # In a tuple, so that the weight does not appear under a second name in the state dict.
        self._head = (head,)
        self._transform = logit_transform(model.config)

    def parameters_used(self) -> list[nn.Parameter]:
        """Return the head's own parameters, in use during forward and backward of this module."""
        return list(self._head[0].parameters(recurse=False))

    def weights(self) -> HeadWeights:
        """Return the head's weights as they are: whole, or empty if they are partitioned."""
        return HeadWeights(self._head[0].weight, self._head[0].bias, self._transform)

    def forward(self, hidden_KD: torch.Tensor, function: Callable[[torch.Tensor, HeadWeights], ResultT]) -> ResultT:
        return function(hidden_KD, self.weights())


class LanguageModel(nn.Module):
    """A causal language model in training, whose forward pass reads its head beside the decoder.

    `sequence_ranks` share the tokens of each pack; None if this rank computes whole packs.
    """

    def __init__(self, model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> None:
        super().__init__()
        self.sequence_ranks = sequence_ranks
        self.model = model
        self._decoder = Decoder(model)
        self.head = TokenHead(model)

    @property
    def routers(self) -> RouterRecorder | None:
        """The recorder of the routers, if the model has any with a load-balancing loss."""
        return self._decoder.routers

    def external_parameters(self) -> list[tuple[nn.Module, nn.Parameter]]:
        """Return the pairs (module, parameter) for `deepspeed.zero.register_external_parameter`."""
        return [(self.head, parameter) for parameter in self.head.parameters_used()]


class PolicyModel(LanguageModel):
    """A language model that gives log-probabilities of the trained tokens of a pack."""

    def forward(
        self, pack: PackLike, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities float32 [K] of the pack's targets, and entropies [K] if asked for.

        Only hidden states that predict a target are projected, and a few more if the pack is rounded up. Without
        targets the results are empty, and a backward pass from them gives every parameter a gradient of zero.
        """
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)

        def compute(hidden_KD: torch.Tensor, head: HeadWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
            targets_K = part.pack.targets_K[part.targets]
            return token_logprobs(
                hidden_KD,
                head.weight_VD,
                targets_K,
                bias_V=head.bias_V,
                temperature=temperature,
                with_entropy=with_entropy,
                transform=head.transform,
            )

        logprobs, entropies = self.head(self._decoder(part, real=pack), compute)
        num_targets = pack.targets_K.numel()
        return part.whole(logprobs)[:num_targets], None if entropies is None else part.whole(entropies)[:num_targets]


class ValueModel(nn.Module):
    """A decoder with a scalar head that gives the value of the state before each trained token of a pack.

    A head with the classes wrong and right gives the log-odds of right, whose sigmoid is the softmax's second number.

    `sequence_ranks` share the tokens of each pack; None if this rank computes whole packs.
    """

    def __init__(self, model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> None:
        super().__init__()
        self.sequence_ranks = sequence_ranks
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise UsageError(f"{type(model).__name__} has no linear `score` head: it cannot be trained as a critic")
        self.model = model
        self._decoder = Decoder(model)

    @property
    def routers(self) -> RouterRecorder | None:
        """The recorder of the routers, if the model has any with a load-balancing loss."""
        return self._decoder.routers

    def forward(self, pack: PackLike) -> torch.Tensor:
        """Return the values float32 [K]."""
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)
        scores = self.model.score(self._decoder(part, real=pack)).float()
        values = scores.squeeze(-1) if scores.shape[-1] == 1 else scores[:, 1] - scores[:, 0]
        return part.whole(values)[: pack.targets_K.numel()]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices, and stacks of matrices (experts), of all layers but embeddings and heads."""
    outer: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outer.update(module.parameters())
        if isinstance(module, PreTrainedModel):
            heads = (module.get_output_embeddings(), getattr(module, "score", None))
            outer.update(p for head in heads if head is not None for p in head.parameters())
    return [p for p in model.parameters() if p.requires_grad and p.ndim in (2, 3) and p not in outer]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the trainable parameters as two optimizer groups: matrices with `weight_decay`, vectors (norms, biases)
    without.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Under ZeRO-3 the parameter itself is flat and empty; its own shape is in ds_shape.
    matrices = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
