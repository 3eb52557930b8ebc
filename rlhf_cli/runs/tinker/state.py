"""Records of a Tinker server: the served model, sessions, models in training and what sampling sessions sample from."""

import time
from dataclasses import dataclass, field
from typing import Any

from rlhf_cli.backends.training.adapter_trainer import Adapter
from rlhf_cli.runs.tinker.checkpoints import CheckpointPath
from rlhf_cli.runs.tinker.futures import Turns

_SILENT_SECONDS = 120.0
"""A session without a heartbeat for this long has ended. Clients send one every 10 seconds."""


@dataclass(frozen=True)
class ServedModel:
    """The base model as clients see it, and the limits.

    - `name`: its name for clients. `tokenizer_id`: folder or Hub name of its tokenizer.
    - `max_len`: tokens of a sequence, or of a prompt with its response.
    - `max_models`: models in training. `max_snapshots`: unnamed sampler checkpoints of each.
    - `max_rank`: highest rank of an adapter, None without a limit.
    """

    name: str
    tokenizer_id: str
    tokenizer: Any
    vocab_size: int
    max_len: int
    max_models: int
    max_snapshots: int
    max_rank: int | None
    lora_alpha: int
    seed: int


@dataclass
class Session:
    """A client's session. `heard` is the time of its last request, of `time.monotonic`."""

    heard: float = field(default_factory=time.monotonic)
    is_finished: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the client has finished the session or has been silent for long."""
        return self.is_finished or time.monotonic() - self.heard > _SILENT_SECONDS


@dataclass
class TrainedModel:
    """A model in training. `inflight` is the checkpoint of its sampling sessions of the kind `inflight`."""

    adapter: Adapter
    user_metadata: dict[str, object] | None
    turns: Turns = field(default_factory=Turns)
    inflight: CheckpointPath | None = None
    used: float = field(default_factory=time.time)


@dataclass(frozen=True)
class SampledFrom:
    """Weights of a sampling session: a checkpoint, the latest inflight one of a model, or the base model."""

    path: CheckpointPath | None = None
    inflight_of: str | None = None
