"""State of a Tinker server: sessions, models in training, sampling sessions, and their operations.

All operations on models run one at a time on the trainer's thread, in the order of each client's requests.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from rlhf_cli.algorithms.tinker_losses import tinker_loss
from rlhf_cli.backends.training.adapter_trainer import AdapterShape, AdapterTrainer, AdapterWeights
from rlhf_cli.data.rollouts import GenerationRequest, scattered_seed
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.tinker.checkpoints import SAMPLER, STATES, CheckpointPath, Checkpoints, SavedWeights, write_factors
from rlhf_cli.runs.tinker.datums import check_datum, check_tokens
from rlhf_cli.runs.tinker.futures import Futures, Result
from rlhf_cli.runs.tinker.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    LoraShape,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from rlhf_cli.runs.tinker.sampler import Sampler
from rlhf_cli.runs.tinker.state import SampledFrom, ServedModel, Session, TrainedModel
from rlhf_cli.runs.tinker.wire import ForwardBackwardRequest, SampledTokens, forward_backward_output, sample_response

_Found = TypeVar("_Found")


class Service:
    """Everything behind the HTTP routes. Methods raise UsageError for requests that cannot be served."""

    def __init__(
        self,
        trainer: AdapterTrainer,
        sampler: Sampler,
        checkpoints: Checkpoints,
        *,
        thread: ThreadPoolExecutor,
        served: ServedModel,
    ) -> None:
        """`thread` is the trainer's thread."""
        self.futures, self.checkpoints, self.served = Futures(), checkpoints, served
        self._trainer, self._sampler, self._thread = trainer, sampler, thread
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, TrainedModel] = {}
        self._samplers: dict[str, SampledFrom] = {}
        self._loaded: tuple[SavedWeights, AdapterWeights] | None = None
        self._num_sampled = 0
        self._num_created = 0

    async def _on_trainer(self, work: Callable[[], _Found]) -> _Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def create_session(self) -> str:
        """Start a session and return its ID."""
        session_id = uuid4().hex
        self._sessions[session_id] = Session()
        return session_id

    def session(self, session_id: str) -> Session:
        """Return a session and note that its client is alive."""
        found = self._sessions.get(session_id)
        if found is None or found.is_finished:
            raise UsageError(f"session {session_id} does not exist, or has finished: create a new ServiceClient")
        found.heard = time.monotonic()
        return found

    def finish_session(self, session_id: str) -> None:
        """End a session with its requests. Its models are removed when others need their places."""
        self.session(session_id).is_finished = True
        self.futures.drop(f"{session_id}:")

    def _require_name(self, name: str) -> None:
        if name not in (self.served.name, self.served.tokenizer_id):
            raise UsageError(
                f"base_model {name!r} is not served here: this server has {self.served.name!r} (rlhf serve-tinker "
                "--model_name sets its name)"
            )

    def model(self, model_id: str) -> TrainedModel:
        """Return a model in training."""
        found = self._models.get(model_id)
        if found is None:
            raise UsageError(f"model {model_id} is not in training on this server: it was removed, or never created")
        found.used = time.time()
        return found

    def _make_room(self) -> None:
        """Remove models of sessions that are over, the oldest first, until another one fits."""
        over = [name for name in self._models if self._sessions[name.partition(":")[0]].is_over]
        while len(self._models) >= self.served.max_models and over:
            name = over.pop(0)
            self._models.pop(name)
            self.futures.drop(f"{name}:")

    def _new_model(self, model_id: str, shape: AdapterShape, user_metadata: dict[str, object] | None) -> TrainedModel:
        """Create a model. Runs on the trainer's thread."""
        if len(self._models) >= self.served.max_models:
            raise UsageError(
                f"this server has {len(self._models)} models in training, the limit: finish another session "
                "(ServiceClient.close), or raise --max_models"
            )
        if self.served.max_rank is not None and shape.rank > self.served.max_rank:
            raise UsageError(f"rank {shape.rank} is above {self.served.max_rank} (--max_lora_rank)")
        model = self._models[model_id] = TrainedModel(self._trainer.new_adapter(shape), user_metadata)
        return model

    def _shape(self, lora: LoraShape | None) -> AdapterShape:
        if lora is None:
            raise UsageError("lora_config is missing: this server trains LoRA adapters only")
        self._num_created += 1
        seed = scattered_seed(self.served.seed, self._num_created) if lora.seed is None else lora.seed
        return AdapterShape(
            lora.rank, self.served.lora_alpha, seed, train_attn=lora.train_attn, train_mlp=lora.train_mlp
        )

    def create_model(self, request: CreateModel) -> str:
        """Start to create a model. Returns its ID, which is also the ID of the request."""
        self.session(request.session_id)
        self._require_name(request.base_model)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        shape = self._shape(request.lora_config)

        async def create() -> Result:
            self._make_room()
            await self._on_trainer(lambda: self._new_model(model_id, shape, request.user_metadata))
            return Result({"type": "create_model", "model_id": model_id})

        self.futures.start(model_id, create)
        return model_id

    def _operate(self, model_id: str, seq_id: int | None, work: Callable[[TrainedModel], Result]) -> str:
        """Run work on a model in its turn. Returns the request ID."""
        model = self.model(model_id)
        self.session(model_id.partition(":")[0])
        request_id = f"{model_id}:{uuid4().hex if seq_id is None else seq_id}"

        async def operate() -> Result:
            await model.turns.take(seq_id)
            # Queued before the next request gets its turn, so that the thread keeps the order.
            running = asyncio.ensure_future(self._on_trainer(lambda: work(model)))
            model.turns.leave()
            return await running

        self.futures.start(request_id, operate)
        return request_id

    def forward_backward(self, request: ForwardBackwardRequest) -> str:
        """Queue a forward pass, with a backward pass unless `forward_only`."""

        def run(model: TrainedModel) -> Result:
            loss = tinker_loss(request.loss_fn)
            config = loss.config(request.loss_fn, request.loss_fn_config)
            if not request.data:
                raise UsageError("data is empty")
            for number, datum in enumerate(request.data):
                check_datum(
                    datum, f"data[{number}]", loss, max_len=self.served.max_len, vocab_size=self.served.vocab_size
                )
            logprobs, total = self._trainer.forward_backward(
                model.adapter, request.data, loss, config, backward=not request.forward_only
            )
            return Result(forward_backward_output(logprobs, {"loss:sum": total}))

        return self._operate(request.model_id, request.seq_id or None, run)

    def optim_step(self, request: OptimStep) -> str:
        """Queue an optimizer step."""

        def run(model: TrainedModel) -> Result:
            return Result({"metrics": self._trainer.optim_step(model.adapter, request.adam_params.step)})

        return self._operate(request.model_id, request.seq_id, run)

    def save_weights(self, request: SaveWeights) -> str:
        """Queue a checkpoint with optimizer states."""

        def run(model: TrainedModel) -> Result:
            path = CheckpointPath(request.model_id, STATES, request.path or uuid4().hex)
            optimizer = model.adapter.optimizer.state_dict()
            self._save(model, path, request.user_metadata, optimizer=optimizer, overwrite=request.overwrite)
            return Result({"type": "save_weights", "path": str(path)})

        return self._operate(request.model_id, request.seq_id, run)

    def _save(
        self, model: TrainedModel, path: CheckpointPath, user_metadata: dict[str, object] | None, **others: Any
    ) -> None:
        def write(folder: Path) -> None:
            self._trainer.write(model.adapter, folder, self.served.tokenizer)

        facts = {"user_metadata": user_metadata, "run_metadata": model.user_metadata}
        self.checkpoints.save(path, write, model.adapter.shape, facts=facts, **others)

    def save_for_sampler(self, request: SaveWeightsForSampler) -> str:
        """Queue a checkpoint for sampling: with a name, or for a new sampling session."""

        def run(model: TrainedModel) -> Result:
            if request.path is not None:
                path = CheckpointPath(request.model_id, SAMPLER, request.path)
                self._save(model, path, request.user_metadata)
                return Result({"type": "save_weights_for_sampler", "path": str(path)})
            session_id = f"{request.model_id.partition(':')[0]}:sample:{request.sampling_session_seq_id}"
            path = CheckpointPath.snapshot(request.model_id, request.sampling_session_seq_id)
            shape, factors = model.adapter.shape, self._trainer.factors_of(model.adapter)
            self.checkpoints.save(path, lambda folder: write_factors(factors, folder), shape)
            self.checkpoints.trim(request.model_id, self.served.max_snapshots)
            if request.kind == "inflight":
                model.inflight = path
                self._samplers[session_id] = SampledFrom(inflight_of=request.model_id)
            else:
                self._samplers[session_id] = SampledFrom(path)
            return Result({"type": "save_weights_for_sampler", "sampling_session_id": session_id})

        return self._operate(request.model_id, request.seq_id, run)

    def load_weights(self, request: LoadWeights) -> tuple[str, str]:
        """Queue loading a checkpoint, into a new model or an existing one. Returns the IDs of request and model."""
        path = CheckpointPath.parse(request.path)
        facts = self.checkpoints.facts(path)
        if request.base_model is not None:
            self._require_name(request.base_model)

        def load(model: TrainedModel) -> Result:
            optimizer = self.checkpoints.optimizer(path) if request.optimizer else None
            self._trainer.load(model.adapter, self.checkpoints.factors(path), optimizer)
            return Result({"type": "load_weights", "path": str(path), "model_id": model_id})

        if request.model_id is not None:
            model_id = request.model_id
            return self._operate(model_id, request.seq_id, load), model_id
        assert request.session_id is not None, "the request was validated"
        self.session(request.session_id)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"

        def new_and_load() -> Result:
            model = self._new_model(model_id, facts.shape, request.user_metadata)
            try:
                return load(model)
            except Exception:
                # Nobody learns the ID of a model that failed to load.
                del self._models[model_id]
                raise

        async def create() -> Result:
            self._make_room()
            return await self._on_trainer(new_and_load)

        self.futures.start(model_id, create)
        return model_id, model_id

    def create_sampling_session(self, request: CreateSamplingSession) -> str:
        """Create a sampling session for a checkpoint or the base model. Returns its ID."""
        self.session(request.session_id)
        session_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self._samplers[session_id] = self._weights(request.base_model, request.model_path)
        return session_id

    def _weights(self, base_model: str | None, model_path: str | None) -> SampledFrom:
        if base_model is not None:
            self._require_name(base_model)
        if model_path is None:
            return SampledFrom()
        path = CheckpointPath.parse(model_path)
        self.checkpoints.facts(path)
        return SampledFrom(path)

    def sampled_path(self, session_id: str) -> CheckpointPath | None:
        """Return the checkpoint that a sampling session samples from now, None for the base model."""
        weights = self._samplers.get(session_id)
        if weights is None:
            raise UsageError(f"sampling session {session_id} does not exist on this server: create a new one")
        return weights.path if weights.inflight_of is None else self.model(weights.inflight_of).inflight

    def sample(self, request: Sample) -> tuple[str, list[str]]:
        """Queue sampling. Returns the request ID and an ID for each sequence."""
        session_id = request.sampling_session_id
        if session_id is None:
            path = self._weights(request.base_model, request.model_path).path
        else:
            path = self.sampled_path(session_id)
            self.session(session_id.partition(":")[0])
        weights = None if path is None else self.checkpoints.saved(path)
        name = f"{session_id or 'sample'}:{uuid4().hex if request.seq_id is None else request.seq_id}"
        prompt, limit = request.prompt.token_ids, request.sampling_params.max_tokens
        room = self.served.max_len - len(prompt)
        self._check_prompt(prompt, room, limit, last_n=request.prompt_logprobs_last_n)
        requests = [
            GenerationRequest(prompt, seed, max_new_tokens=limit or room)
            for seed in self._seeds(request.sampling_params.seed, request.num_samples)
        ]

        async def run() -> Result:
            params = request.sampling_params.params(self.served.max_len)
            generations = await self._sampler.sample(weights, requests, params)
            sequences = [SampledTokens(one.token_ids, one.logprobs, one.finish_reason == "stop") for one in generations]
            scores = await self._prompt_logprobs(prompt, weights, request) if request.prompt_logprobs else None
            return Result(sample_response(sequences, scores))

        self.futures.start(name, run)
        return name, [f"{name}:{index}" for index in range(request.num_samples)]

    def _seeds(self, seed: int | None, count: int) -> list[int]:
        """Return a seed for each sample. Requests with the same seed get the same ones."""
        if seed is not None:
            return [scattered_seed(seed, index) for index in range(count)]
        first, self._num_sampled = self._num_sampled, self._num_sampled + count
        return [scattered_seed(self.served.seed, first + index) for index in range(count)]

    def _check_prompt(self, prompt: list[int], room: int, limit: int | None, *, last_n: int | None) -> None:
        if not prompt:
            raise UsageError("prompt has no tokens")
        check_tokens(np.array(prompt), "prompt", self.served.vocab_size)
        if room < (limit or 1):
            raise UsageError(
                f"prompt has {len(prompt)} tokens, which with max_tokens {limit or 1} exceeds {self.served.max_len} "
                "(--max_len)"
            )
        if last_n is not None and last_n >= len(prompt):
            raise UsageError(f"prompt_logprobs_last_n {last_n} must be below the {len(prompt)} tokens of the prompt")

    async def _prompt_logprobs(self, prompt: list[int], weights: SavedWeights | None, request: Sample) -> np.ndarray:
        """Compute the prompt's log-probs with the trainer, NaN where there are none."""
        scores = np.full(len(prompt), np.nan, np.float32)
        if len(prompt) > 1:
            tokens = np.array(prompt, np.int32)
            scores[1:] = await self._on_trainer(lambda: self._trainer.score(self.loaded(weights), tokens))
        if request.prompt_logprobs_last_n is not None:
            scores[: -request.prompt_logprobs_last_n] = np.nan
        return scores

    def loaded(self, saved: SavedWeights | None) -> AdapterWeights:
        """Read saved weights, None for the base model. The last ones are kept, for many prompts in a row."""
        if saved is None:
            return AdapterWeights()
        if self._loaded is None or self._loaded[0] != saved:
            self._loaded = saved, self.checkpoints.weights(saved)
        return self._loaded[1]

    def describe_model(self, model_id: str) -> dict[str, object]:
        """Describe a model in training as `get_info` does."""
        model = self.model(model_id)
        data = {"arch": self._trainer.hf_model.config.model_type, "tokenizer_id": self.served.tokenizer_id}
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {"model_name": self.served.name, **data},
            "model_name": self.served.name,
            "is_lora": True,
            "lora_rank": model.adapter.shape.rank,
        }

    def describe_run(self, model_id: str) -> dict[str, object]:
        """Describe a model in training, or one that has checkpoints, as a training run."""
        saved = self.checkpoints.listed(model_id)
        facts = self.checkpoints.facts(CheckpointPath.parse(str(saved[-1]["tinker_path"]))) if saved else None
        model = self._models.get(model_id)
        if model is None and facts is None:
            raise UsageError(f"training run {model_id} does not exist on this server")
        return {
            "training_run_id": model_id,
            "base_model": self.served.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": model.adapter.shape.rank if model is not None else facts and facts.shape.rank,
            "last_request_time": saved[-1]["time"] if model is None else model.used,
            "last_checkpoint": next((one for one in saved[::-1] if one["checkpoint_type"] == "training"), None),
            "last_sampler_checkpoint": next((one for one in saved[::-1] if one["checkpoint_type"] == "sampler"), None),
            "user_metadata": model.user_metadata if model is not None else facts and facts.run_metadata,
        }
