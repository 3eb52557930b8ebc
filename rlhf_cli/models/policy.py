"""Models as trainers use them: a flat pack in, one value per trained token out.

The Hugging Face model is the attribute `model`, so state dict keys are `model.` plus the Hugging Face name. Losses and
generation are in other modules.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.table import packed_length
from rlhf_cli.models.compat import attention_name
from rlhf_cli.models.embedding_noise import EmbeddingNoise
from rlhf_cli.models.last_mlp import LastMLP
from rlhf_cli.models.logit_chunks import HeadWeights, LogitTransform
from rlhf_cli.models.logprobs import Second, token_logprobs
from rlhf_cli.models.mixers.operations import RUNS, bind_mixers
from rlhf_cli.models.mixers.runs import MixerRuns
from rlhf_cli.models.packs import PackLike
from rlhf_cli.models.requirements import check_packed_length
from rlhf_cli.models.routers import RouterRecorder, router_recorder, token_weights
from rlhf_cli.models.routing_replay import ROUTED_EXPERTS, ExpertChoice, ReplayedExperts
from rlhf_cli.models.sequence_parallel.parts import Part, host_runs, part_of
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks
from rlhf_cli.models.shape_bucketing import rounded
from rlhf_cli.models.vision.tower import tower_of

_MASKED_HERE = frozenset({"gpt_oss"})
"""Model types that take one mask per layer type, and build it without positions."""

_ResultT = TypeVar("_ResultT")


class Decoder:
    """Runs a model's decoder on packs. Not a module, so state dict names do not change.

    With `replays_routing`, routers choose the experts that packs name.
    """

    def __init__(self, model: PreTrainedModel, *, replays_routing: bool = False) -> None:
        self._decoder = model.get_decoder()
        self._embed = model.get_input_embeddings()
        self._tower = tower_of(model)
        self._last_mlp = LastMLP(self._decoder)
        self._has_mixers = bind_mixers(self._decoder)
        self._text = model.config.get_text_config()
        self._longest = packed_length(model.config)
        if self._longest is not None:
            _drop_temperatures(self._decoder)
        self.routers = router_recorder(model.config)
        self._replays_routing = replays_routing
        if replays_routing:
            ExpertChoice(self._decoder)

    def __call__(self, part: Part, *, real: PackLike, noise: EmbeddingNoise | None = None) -> torch.Tensor:
        """Return hidden states [k, D] of the part's targets, after the final norm and before any head.

        `real` is the pack before filler was added. `noise` is added to the embeddings.
        """
        pack = part.pack
        if self._longest is not None and real.position_ids_T.numel():
            check_packed_length(self._text, int(real.position_ids_T.max()) + 1)
        records_routers = self.routers is not None and self.routers.is_on
        with self._spared(part):
            output = self._decoder(
                **self._inputs(part, noise),
                # A KV cache would keep the keys and values of all layers.
                use_cache=False,
                **part.runs.as_arguments(),
                **self._masks(pack),
                # transformers passes unknown arguments through all layers to the attention function.
                **({"shards": part.shards} if part.shards else {}),
                **({RUNS: MixerRuns(host_runs(pack), pack.input_ids_T.device)} if self._has_mixers else {}),
                **self._experts(part),
                **({"output_router_logits": True} if records_routers else {}),
            )
        if self.routers is not None and records_routers:
            self.routers.add(output.router_logits, token_weights(real, num_tokens=pack.input_ids_T.numel()))
        # Select rows before the head: prompts and filler would otherwise cost a vocabulary-sized product each.
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD.index_select(0, part.rows_k)

    def _inputs(self, part: Part, noise: EmbeddingNoise | None) -> dict[str, object]:
        """Return tokens and positions, or embeddings and positions for a vision-language model."""
        pack = part.pack
        noise_TD = None if noise is None else noise.of(pack, dimension=self._embed.embedding_dim)
        if self._tower is not None:
            assert part.shards is None, "ranks do not share sequences of vision-language models"
            return self._tower.decoder_inputs(pack, noise_TD)
        if pack.pictures is not None:
            raise UsageError("a text model cannot read images: use a vision-language model")
        token_ids_1t, position_ids_1t = pack.input_ids_T[part.tokens][None], pack.position_ids_T[part.tokens][None]
        if noise_TD is None:
            return {"input_ids": token_ids_1t, "position_ids": position_ids_1t}
        embedded_1tD = self._embed(token_ids_1t)
        noised_1tD = embedded_1tD + noise_TD[part.tokens].to(embedded_1tD.dtype)
        return {"inputs_embeds": noised_1tD, "position_ids": position_ids_1t}

    def _experts(self, part: Part) -> dict[str, object]:
        """Return the experts to replay in the layers."""
        experts_TLk = part.pack.routed_experts
        if experts_TLk is None:
            return {}
        assert self._replays_routing, "the pack names experts, but the model does not replay them"
        return {ROUTED_EXPERTS: ReplayedExperts(experts_TLk[part.tokens], part.read_r)}

    def _masks(self, pack: PackLike) -> dict[str, object]:
        """Return pack masks for decoders that would build masks without sequence boundaries."""
        if self._text.model_type not in _MASKED_HERE or attention_name(self._decoder.config) != "eager":
            return {}
        return {"attention_mask": _packed_masks(pack, self._text, self._decoder.dtype)}

    def _spared(self, part: Part) -> AbstractContextManager[None]:
        """Return a context that skips work on tokens that are not read.

        It skips nothing in two cases:
        - With gradient checkpointing, the backward pass recomputes layers after the context has ended.
        - If the last layer's router is recorded, it must see all tokens.
        """
        computes_again = self._decoder.training and getattr(self._decoder, "is_gradient_checkpointing", False)
        records_routers = self.routers is not None and self.routers.is_on
        return nullcontext() if computes_again or records_routers else self._last_mlp.only(part.read_r)


def _drop_temperatures(decoder: nn.Module) -> None:
    """Switch off Llama 4's attention temperature, which is 1 within `packed_length` tokens.

    transformers computes it from places in the pack instead of positions.
    """
    for part in decoder.modules():
        if hasattr(part, "attn_temperature_tuning"):
            part.attn_temperature_tuning = False


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return the head output transform for this configuration."""
    text = config.get_text_config()
    # Granite divides logits by logits_scaling, Cohere multiplies them by logit_scale.
    divisor = getattr(text, "logits_scaling", None)
    scale = getattr(text, "logit_scale", None)
    return LogitTransform(
        scale=(1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor)),
        # RecurrentGemma has a name of its own.
        softcap=getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None),
    )


class TokenHead(nn.Module):
    """Applies functions to hidden states and the LM head weight, which stays in place.

    A separate module, because ZeRO-3 gathers weights per module. The head weight is used outside the head, so it must
    be registered as an external parameter of this module (see `external_parameters` in `LanguageModel`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UsageError(f"{type(model).__name__} has no linear language-model head and cannot be a policy")
        # In a tuple, so that nn.Module does not register the weight under a second state dict name.
        self._head = (head,)
        self._transform = logit_transform(model.config)

    def parameters_used(self) -> list[nn.Parameter]:
        """Return the head parameters that this module uses in forward and backward."""
        return list(self._head[0].parameters(recurse=False))

    def weights(self) -> HeadWeights:
        """Return the head weights as they are: full, or empty if partitioned."""
        return HeadWeights(self._head[0].weight, self._head[0].bias, self._transform)

    def forward(self, hidden_KD: torch.Tensor, function: Callable[[torch.Tensor, HeadWeights], _ResultT]) -> _ResultT:
        return function(hidden_KD, self.weights())


class LanguageModel(nn.Module):
    """A causal language model in training. Its forward pass uses decoder and head separately.

    `sequence_ranks` is the sequence-parallel group, None without sequence parallelism. With `replays_routing`, routers
    choose the experts that packs name.
    """

    def __init__(
        self, model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None, *, replays_routing: bool = False
    ) -> None:
        super().__init__()
        self.sequence_ranks = sequence_ranks
        self.model = model
        self._decoder = Decoder(model, replays_routing=replays_routing)
        self.head = TokenHead(model)

    @property
    def routers(self) -> RouterRecorder | None:
        """Router recorder, if the model has a load-balancing loss."""
        return self._decoder.routers

    def external_parameters(self) -> list[tuple[nn.Module, nn.Parameter]]:
        """Return (module, parameter) pairs for `deepspeed.zero.register_external_parameter`."""
        return [(self.head, parameter) for parameter in self.head.parameters_used()]


class PolicyModel(LanguageModel):
    """A language model that returns log-probs for the trained tokens in a pack."""

    def forward(
        self,
        pack: PackLike,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_log_squares: bool = False,
        noise: EmbeddingNoise | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return target log-probs, float32 [K], and if requested entropies [K], or `log sum_v p_v^2` [K].

        `noise` is added to the embeddings.

        Only hidden states that predict a target are projected, plus a few with filler. Without targets the results are
        empty, and backward gives every parameter a zero gradient.
        """
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)
        second: Second | None = "entropy" if with_entropy else "log_squares" if with_log_squares else None

        def compute(hidden_KD: torch.Tensor, head: HeadWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
            targets_K = part.pack.targets_K[part.targets]
            return token_logprobs(
                hidden_KD,
                head.weight_VD,
                targets_K,
                bias_V=head.bias_V,
                temperature=temperature,
                second=second,
                transform=head.transform,
            )

        logprobs, others = self.head(self._decoder(part, real=pack, noise=noise), compute)
        num_targets = pack.targets_K.numel()
        return part.whole(logprobs)[:num_targets], None if others is None else part.whole(others)[:num_targets]


class ValueModel(nn.Module):
    """A decoder with a scalar head: the value of the state before each trained token in a pack.

    A two-class head (wrong, right) returns the log-odds of right, so that sigmoid equals the softmax probability.

    `sequence_ranks` is the sequence-parallel group, None without sequence parallelism.
    """

    def __init__(self, model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> None:
        super().__init__()
        self.sequence_ranks = sequence_ranks
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise UsageError(f"{type(model).__name__} has no linear `score` head and cannot be trained as a critic")
        self.model = model
        self._decoder = Decoder(model)

    @property
    def routers(self) -> RouterRecorder | None:
        """Router recorder, if the model has a load-balancing loss."""
        return self._decoder.routers

    def forward(self, pack: PackLike) -> torch.Tensor:
        """Return values, float32 [K]."""
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)
        # float32 from here on: ranks exchange values, and losses add up many of them.
        scores = self.model.score(self._decoder(part, real=pack)).float()
        values = scores.squeeze(-1) if scores.shape[-1] == 1 else scores[:, 1] - scores[:, 0]
        return part.whole(values)[: pack.targets_K.numel()]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return trainable matrices and expert stacks of all layers except embeddings, convolutions and heads."""
    # Muon orthogonalizes hidden matrices only; embeddings and heads use AdamW (kellerjordan.github.io/posts/muon).
    outer: set[nn.Parameter] = set()
    for module in model.modules():
        # The kernels of depthwise convolutions are no matrices either, although they are 3-D.
        if isinstance(module, nn.Embedding | nn.Conv1d):
            outer.update(module.parameters())
        if isinstance(module, PreTrainedModel):
            heads = (module.get_output_embeddings(), getattr(module, "score", None))
            outer.update(p for head in heads if head is not None for p in head.parameters())
    # transformers stores the experts of a layer as one 3-D parameter.
    return [p for p in model.parameters() if p.requires_grad and p.ndim in (2, 3) and p not in outer]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split trainable parameters into two optimizer groups: matrices with `weight_decay`, vectors without.

    Vectors are norms and biases.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # ZeRO-3 replaces parameters by empty flat tensors; ds_shape is the original shape.
    matrices = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # An adapter has no vectors, and DeepSpeed does not support empty groups.
    return [group for group in groups if group["params"]]


def _packed_masks(pack: PackLike, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Build additive attention masks [1, 1, T, T] per layer type: 0 or the smallest value.

    Needed if a decoder builds masks without the position IDs from which transformers detects sequences.
    """
    place_T = torch.arange(pack.input_ids_T.numel(), device=pack.input_ids_T.device)
    # Boundaries at the end of each sequence; right=True puts a token at a boundary into the next sequence.
    sequence_T = torch.bucketize(place_T, pack.cu_seqlens[1:], right=True)
    distance_TT = place_T[:, None] - place_T
    seen_TT = (distance_TT >= 0) & (sequence_T[:, None] == sequence_T)
    in_window_TT = seen_TT & (distance_TT < config.sliding_window)
    return {"full_attention": _added(seen_TT, dtype), "sliding_attention": _added(in_window_TT, dtype)}


def _added(seen_TT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    added_TT = torch.zeros(seen_TT.shape, dtype=dtype, device=seen_TT.device)
    # The minimum instead of -inf: transformers uses it too, and a fully masked row does not become NaN.
    return added_TT.masked_fill_(~seen_TT, torch.finfo(dtype).min)[None, None]
