"""A judge model that a command starts: checks before anything is loaded, its engines, and how it is asked."""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_cli.backends.cluster.placement import JUDGE, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Reservation, ray_cluster
from rlhf_cli.backends.roles.start import EnginePlan, Processes, Started
from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.config.scoring import JUDGE_MAX_LEN, RewardConfig
from rlhf_cli.data.formats.conversations import MARK, Conversation, Message
from rlhf_cli.data.pictures.placing import placed_pictures
from rlhf_cli.data.rollouts import GenerationRequest, sampling_params
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.plain_text import PlainText
from rlhf_cli.errors import UsageError
from rlhf_cli.models.classifiers import refuse_classifier
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.models.positions import known_positions
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.models.vision.families.table import find_family
from rlhf_cli.models.vision.family import VisionFamily
from rlhf_cli.models.vision.pictures import PlacedPicture
from rlhf_cli.rewards.judge.cache import CompletionCache
from rlhf_cli.rewards.judge.engines import ChatEngines, ChatModel, JudgeEngines
from rlhf_cli.rewards.judge.judge import Judge
from rlhf_cli.rewards.judge.wire import Question
from rlhf_cli.rewards.records import BadResult, ScoreRequest
from rlhf_cli.runs.pictured_roles import check_engine_pictures

_WRITES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Class name suffixes of models that write text."""


@dataclass(frozen=True)
class JudgeModel:
    """A judge model before its weights are loaded.

    - `max_len`: maximum tokens of question and answer.
    - `family`: how the model reads images; None if it reads only text.
    """

    reward: RewardConfig
    source: ModelSource
    found: FoundModel
    tokenizer: PreTrainedTokenizerBase
    backend: str
    max_len: int
    template: ChatTemplate
    family: VisionFamily | None

    @property
    def permits_only_verdicts(self) -> bool:
        """Whether the engine permits no other text than a valid verdict, which only vLLM can."""
        return self.backend == "vllm" and "response_format" not in self.reward.judge_arguments

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Raise UsageError if the model cannot read questions about these made-up responses to a prompt."""
        ask = self._asked().encode
        for question in Judge(self.reward).trial(requests).questions:
            try:
                ask(question)
            except BadResult as error:
                raise UsageError(f"--judge {self.source.pretrain} {error}") from error

    def plan(self, processes: Processes, engine: EngineConfig, *, max_images: int = 0) -> EnginePlan:
        """Return the plan of the judge's engines. Most settings of rollout engines do not apply to them."""
        settings = EngineSettings(
            max_model_len=self.max_len,
            role=JUDGE,
            dtype=self.source.param_dtype,
            tensor_parallel_size=self.reward.judge_tensor_parallel_size,
            enforce_eager=engine.enforce_eager,
            enable_sleep=processes.judge_takes_turns,
            trust_remote_code=self.source.trust_remote_code,
            max_images_per_prompt=None if self.family is None else max_images,
            structured_outputs=self.permits_only_verdicts,
        )
        share = engine.vllm_gpu_memory_utilization
        return EnginePlan(self.backend, self.found.path, settings, share, keeps_weights=True)

    @property
    def described(self) -> str:
        """Model and engine for the log."""
        return f"{self.source.pretrain} ({self.backend}, {self.max_len:,} tokens for question and answer)"

    def asked_by(self, engines: ChatEngines, *, waits: bool) -> JudgeEngines:
        """Return the judge on its engines. `waits`: as in `JudgeEngines`."""
        path = self.reward.judge_cache
        cache = None if path is None else CompletionCache(path)
        return JudgeEngines(engines, self._asked(), waits=waits, retries=self.reward.reward_retries, cache=cache)

    def _asked(self) -> ChatModel:
        given = self.reward.judge_arguments
        sampling = self.reward.judge_sampling.model_copy(update={"max_new_tokens": self.max_len})
        limit = given.get("max_tokens")
        architecture, template = self.found.architecture, self.tokenizer.get_chat_template()
        plain = PlainText(self.tokenizer, template, vocab_size=architecture.get_text_config().vocab_size)
        return ChatModel(
            self.source.pretrain,
            {"model": self.found.fingerprint(), "arguments": given, "only verdicts": self.permits_only_verdicts},
            partial(self._encoded, plain, limit if isinstance(limit, int) else self.max_len),
            partial(text_of, self.tokenizer, skip_special_tokens=True),
            # The end of a turn, and what a grammar permits after the verdict.
            sampling_params(sampling, end_ids=(*self.template.end_ids, int(self.tokenizer.eos_token_id))),
        )

    def _encoded(self, plain: PlainText, limit: int, question: Question) -> GenerationRequest:
        """Return the request for a question. Raises BadResult, with the end of a sentence about the judge."""
        pictures = question.pictures
        if pictures and self.family is None:
            raise BadResult("reads only text, but the prompt has images: use a judge that reads images")
        # Control tokens of the model in a response would end the question and begin another turn.
        content = MARK * len(pictures) + plain.guarded(question.text.replace(MARK, ""))
        ids = plain.ids(self.template.prompt(Conversation((Message("user", content, pictures=pictures),))))
        placed: tuple[PlacedPicture, ...] = ()
        if self.family is not None:
            ids, placed = placed_pictures(ids, pictures, self.family)
        left = self.max_len - len(ids)
        if left < 1:
            known, what = known_positions(self.found.architecture), f"cannot read a question of {len(ids):,} tokens"
            if known is not None and known[0] == self.max_len:
                raise BadResult(f"{what}, because it has {self.max_len:,} positions")
            raise BadResult(f"{what}: raise --judge_max_len {self.max_len}")
        return GenerationRequest(
            ids,
            zlib.crc32(question.text.encode(errors="replace")) >> 1,
            pictures=placed,
            max_new_tokens=min(left, limit),
            json_schema=json.dumps(question.schema) if self.permits_only_verdicts else None,
        )


@contextmanager
def started_judge(judge: JudgeModel, log_dir: Path) -> Iterator[JudgeEngines]:
    """Start a judge without other models, and stop it at the end of the block."""
    with ray_cluster() as cluster, ExitStack() as stack:
        size, count = judge.reward.judge_tensor_parallel_size, judge.reward.judge_num_engines or 1
        layout = plan_layout(LayoutSettings(shapes={}, num_engines=0, judge=(count, size)), node_gpus=cluster.node_gpus)
        reservation = Reservation(layout, cluster)
        stack.callback(reservation.release)
        processes = Processes(cluster, reservation, log_dir)
        plan = judge.plan(processes, EngineConfig(), max_images=PicturesConfig().max_images_per_prompt)
        engines = EngineGroup(
            lambda number: processes.engine(number, plan, {}),
            num_engines=count,
            settings=plan.settings,
            keeps_weights=True,
        )
        stack.callback(engines.shutdown)
        engines.wait_until_built()
        with judge.asked_by(engines, waits=processes.judge_waits) as asked:
            yield asked


def asked_judge(judge: JudgeModel | None, started: Started) -> JudgeEngines | None:
    """Return the judge on the engines that a command has started for it, if any."""
    if judge is None or started.judge is None:
        return None
    return judge.asked_by(started.judge, waits=started.judge_waits)


def find_judge(reward: RewardConfig, model: ModelSource) -> JudgeModel | None:
    """Find the judge model of a command, with dtype and trust of its other models. None without such a judge.

    Raises:
        UsageError: it is no language model, has no chat template, or has too few positions.
    """
    if not reward.starts_judge:
        return None
    name = reward.judge[0]
    source = ModelSource(pretrain=name, param_dtype=model.param_dtype, trust_remote_code=model.trust_remote_code)
    try:
        found, tokenizer = find_model(source), load_tokenizer(source)
        _require_chat_model(found, tokenizer, name)
        backend = rollout_backend(EngineConfig(), found.architecture)
        check_engine_pictures(found.architecture, backend=backend)
        trusted = source.trust_remote_code
        family = find_family(found.path, found.architecture, tokenizer, trust_remote_code=trusted)
    except UsageError as error:
        raise UsageError(f"--judge: {error}") from error
    if backend != "vllm" and reward.judge_tensor_parallel_size > 1:
        raise UsageError(f"--judge_tensor_parallel_size requires vLLM; the {backend} engine uses one device")
    kwargs = reward.judge_arguments.get("chat_template_kwargs", {})
    template = ChatTemplate(tokenizer, kwargs if isinstance(kwargs, dict) else {})
    try:
        template.prompt(Conversation((Message("user", "a"),)))
    except TemplateFault as fault:
        raise UsageError(f"--judge {name}: {fault}") from fault
    return JudgeModel(reward, source, found, tokenizer, backend, _max_len(reward, found), template, family)


def _require_chat_model(found: FoundModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    architecture = found.architecture
    refuse_classifier(architecture, repr(name))
    kinds = architecture.architectures or []
    if architecture.is_encoder_decoder or (kinds and not any(kind.endswith(_WRITES) for kind in kinds)):
        raise UsageError(f"{name!r} is {' '.join(kinds) or architecture.model_type}, which is no chat model")
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{name!r} has no chat template, so it cannot be asked: use an instruction-tuned model, or add "
            "chat_template.jinja to its folder"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(f"{name!r} has no end-of-sequence token (eos_token), so its answers would never end")


def _max_len(reward: RewardConfig, found: FoundModel) -> int:
    known = known_positions(found.architecture)
    given = reward.judge_max_len
    if known is None:
        return given or JUDGE_MAX_LEN
    if given is not None and given > known[0]:
        raise UsageError(f"--judge_max_len {given}: the judge has {known[0]} positions ({known[1]} in config.json)")
    return given or min(JUDGE_MAX_LEN, known[0])
