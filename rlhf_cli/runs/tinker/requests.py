"""JSON requests of the Tinker API. An unknown field is an error: a request must not be answered as if it lacked it."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlhf_cli.backends.training.adapter_trainer import AdamStep
from rlhf_cli.data.rollouts import SamplingParams

# Names that start with snapshot- belong to the server.
_NAME = re.compile(r"(?!snapshot-)[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("use letters, digits, '.', '_' and '-' in the name; it starts with neither '.' nor snapshot-")
    return name


Name = Annotated[str, AfterValidator(_checked_name)]
"""Name of a checkpoint, which becomes a folder name."""
_Metadata = dict[str, object] | None


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str | None = None


class CreateSession(_Request):
    tags: list[str] = []
    user_metadata: _Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(_Request):
    session_id: str


class LoraShape(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rank: int = Field(gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class CreateModel(_Request):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: _Metadata = None
    lora_config: LoraShape | None = None
    optimizer_config: Optimizer = Optimizer()


class OfModel(_Request):
    model_id: str
    seq_id: int | None = None


class AdamParams(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)

    @property
    def step(self) -> AdamStep:
        """The same values as a step of the trainer."""
        return AdamStep(**self.model_dump())


class OptimStep(OfModel):
    adam_params: AdamParams


class SaveWeights(OfModel):
    path: Name | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: _Metadata = None


class SaveWeightsForSampler(OfModel):
    path: Name | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: _Metadata = None

    @model_validator(mode="after")
    def _check_target(self) -> "SaveWeightsForSampler":
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("set path or sampling_session_seq_id")
        return self


class LoadWeights(_Request):
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: _Metadata = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _check_target(self) -> "LoadWeights":
        if (self.model_id is None) == (self.session_id is None or self.model_seq_id is None):
            raise ValueError("set model_id, or session_id and model_seq_id")
        return self


class CreateSamplingSession(_Request):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None

    @model_validator(mode="after")
    def _check_model(self) -> "CreateSamplingSession":
        if self.base_model is None and self.model_path is None:
            raise ValueError("set base_model or model_path")
        return self


class TextChunk(BaseModel):
    model_config = ConfigDict(extra="forbid")

    # Images and audio are other types of chunks.
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class Prompt(BaseModel):
    model_config = ConfigDict(extra="forbid")

    chunks: list[TextChunk]

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all chunks."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    # Token ids first: a list of them is no list of strings.
    stop: list[int] | list[str] | str | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)

    def params(self, max_model_len: int) -> SamplingParams:
        """Return the engine's parameters. The limit on tokens is part of each request instead."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        is_greedy = self.temperature == 0
        return SamplingParams(
            max_model_len,
            # A temperature of 0 would divide logits by zero.
            temperature=1.0 if is_greedy else self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            greedy=is_greedy,
            stop=tuple(entry for entry in stop if isinstance(entry, str)),
            end_ids=tuple(entry for entry in stop if isinstance(entry, int)),
            ignores_eos=self.stop is not None,
            continues=True,
        )


class Sample(_Request):
    num_samples: int = Field(1, gt=0)
    prompt: Prompt
    sampling_params: Sampling
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = Field(None, gt=0)
    # Only the values that ask for nothing.
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: Literal[False] = False

    @model_validator(mode="after")
    def _check_model(self) -> "Sample":
        if (self.sampling_session_id, self.base_model, self.model_path) == (None, None, None):
            raise ValueError("set sampling_session_id, base_model or model_path")
        return self


class RetrieveFuture(_Request):
    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(_Request):
    tinker_path: str
