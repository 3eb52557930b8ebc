"""Workload of the commands without training: `generate`, `eval`, `chat` and `serve-rm`."""

from rlhf_cli.backends.cluster.default_layout import inference_layout
from rlhf_cli.backends.cluster.placement import ENGINE, Island, Layout, Seat, plan_layout
from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.commands.serve_rm import ServeRMConfig
from rlhf_cli.config.model import ParamDtype
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.serve import TEXTS_TOGETHER
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.images import row_images
from rlhf_cli.planning.memory import WEIGHT_BYTES, RoleMemory
from rlhf_cli.planning.shapes import ModelShape
from rlhf_cli.planning.workload import CPU_PLACES, Shapes, Tokens, Workload, engine_of, judge_of, mean_lengths


def inference_work(config: InferenceConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    """Plan `generate` and `eval`: engines with fixed weights, and at most a reward model.

    Raises:
        UsageError: benchmark tasks are to be run, whose requests are not known.
    """
    if isinstance(config, EvalConfig) and config.benchmark.tasks is not None:
        raise UsageError("rlhf plan cannot forecast --tasks: the package decides how many requests it sends")
    reward = config.reward.reward_pretrain
    node_gpus = [] if hardware.is_cpu else hardware.node_gpus
    settings = inference_layout(config, node_gpus, has_reward_model=reward is not None)
    layout, together = plan_layout(settings, node_gpus=node_gpus or [CPU_PLACES]), bool(settings.together)
    names = getattr(config.model, "names", [config.model.pretrain])
    shape = max((shapes(name) for name in names), key=lambda one: one.parameters)
    sampling = config.sampling
    requests = sampling.rollout_batch_size * sampling.n_samples_per_prompt
    images = row_images(config, plan)
    prompt, response = mean_lengths(config.prompts.max_len, sampling.max_new_tokens, plan, images)
    roles: dict[str, RoleMemory] = {}
    if reward:
        shape_of_reward = images.added_to(shapes(reward).with_score_head(), prompt + response)
        roles["reward"] = _loaded(
            shape_of_reward, config.model.param_dtype, hardware, num_ranks=len(layout.of("reward"))
        )
    return Workload(
        config=config,
        hardware=hardware,
        roles=roles,
        layout=layout,
        tokens=Tokens(
            forward=dict.fromkeys(roles, requests * (prompt + response)),
            length=prompt + response,
            requests=requests,
            prompt=prompt,
            response=response,
            prefilled=sampling.rollout_batch_size * prompt,
        ),
        longest=config.prompts.max_len,
        images=images,
        engine=engine_of(config, shape, hardware, shared=together),
        judge=judge_of(config, shapes, hardware, shared=settings.own_judge is None),
        engines_sleep=settings.judge is not None and settings.own_judge is None,
        steps=None if plan.num_rows is None else -(-plan.num_rows // sampling.rollout_batch_size),
    )


def _loaded(shape: ModelShape, dtype: ParamDtype, hardware: Hardware, *, num_ranks: int = 1) -> RoleMemory:
    """Return a model without training."""
    size = WEIGHT_BYTES[dtype]
    return RoleMemory(
        shape=shape, num_ranks=num_ranks, weight_bytes=size, value_bytes=size, has_gpus=not hardware.is_cpu
    )


def _in_own_process(role: str) -> Layout:
    """Return the layout of a command that loads its models itself, on one GPU."""
    return Layout((Island(0, 1),), (Seat(role, 0, 0, (0,), shared=False),))


def server_work(config: ServeRMConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    """Plan a batch of as many texts as `serve-rm` scores together. Raises UsageError without a reward model."""
    if config.reward.reward_pretrain is None:
        raise UsageError(
            "rlhf serve-rm without a model has no plan, because memory and time of reward functions are unknown: set "
            "--reward_pretrain"
        )
    images = row_images(config, plan)
    length = images.mean_length(plan.row_tokens, config.model.max_len)
    shape = images.added_to(shapes(config.reward.reward_pretrain).with_score_head(), length)
    return Workload(
        config=config,
        hardware=hardware,
        roles={"reward": _loaded(shape, config.model.param_dtype, hardware)},
        layout=_in_own_process("reward"),
        tokens=Tokens(
            forward={"reward": TEXTS_TOGETHER * length}, length=length, requests=TEXTS_TOGETHER, prompt=length
        ),
        longest=config.model.max_tokens_per_gpu,
        images=images,
    )


def chat_work(config: ChatConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    """Plan an answer of `chat` in a conversation of the greatest length.

    All models are loaded, and one after another answers. The largest one determines the rest.

    Raises:
        UsageError: the greatest length is unknown, or has no room for an answer.
    """
    found = {name: shapes(name) for name in config.model.names}
    name = max(found, key=lambda one: found[one].parameters)
    longest, model = _longest(config, plan, name, found[name]), _loaded(found[name], config.model.param_dtype, hardware)
    images = row_images(config, plan)
    prompt, response = mean_lengths(longest, config.sampling.max_new_tokens, plan, images)
    engine = EngineMemory(
        shape=model.shape,
        gpu_bytes=hardware.memory,
        share=1,
        size=1,
        value_bytes=model.value_bytes,
        max_len=longest,
        requests=1,
        other_weights=model.value_bytes * sum(shape.parameters for other, shape in found.items() if other != name),
        activations=model.forward(longest)["activations"],
        is_eager=True,
        is_vllm=False,
        has_gpus=model.has_gpus,
    )
    return Workload(
        config=config,
        hardware=hardware,
        roles={},
        layout=_in_own_process(ENGINE),
        tokens=Tokens(length=prompt + response, requests=1, prompt=prompt, response=response, prefilled=prompt),
        longest=longest,
        engine=engine,
        images=images,
    )


def _longest(config: ChatConfig, plan: PlanConfig, name: str, shape: ModelShape) -> int:
    """Return the tokens of the longest conversation: of the prompt, if it is set, and its answer, or all positions."""
    new = config.sampling.max_new_tokens
    if plan.prompt_tokens is None and shape.positions is None:
        raise UsageError(f"{name} has no limit of positions: set --prompt_tokens, the length of a conversation")
    if shape.positions is not None and new >= shape.positions:
        raise UsageError(
            f"--max_new_tokens {new}: {name} has {shape.positions:,} positions, shared with the conversation: set "
            f"{max(1, shape.positions // 2)}, for example"
        )
    limits = [shape.positions, None if plan.prompt_tokens is None else plan.prompt_tokens + new]
    return min(limit for limit in limits if limit is not None)
