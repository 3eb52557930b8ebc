"""Workload of `generate` and `eval`."""

from rlhf_cli.backends.cluster.placement import plan_layout
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.memory import WEIGHT_BYTES, RoleMemory
from rlhf_cli.planning.workload import CPU_PLACES, Shapes, Tokens, Workload, engine_of, mean_lengths


def inference_work(config: InferenceConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    """Plan `generate` and `eval`: engines with fixed weights, and at most a reward model."""
    size, reward = config.engine.vllm_tensor_parallel_size or 1, config.reward.reward_pretrain
    ranks = (config.reward_ranks.reward_num_gpus_per_node or 1) if reward else 0
    together = bool(config.placement.colocate_all_models) if reward else False
    num_engines = config.engine.vllm_num_engines or max(1, (hardware.total_gpus - ranks) // size)
    layout = LayoutSettings(
        shapes={"reward": (1, ranks)} if reward else {}, together=together, num_engines=num_engines, engine_size=size
    )
    names = getattr(config.model, "names", [config.model.pretrain])
    shape = max((shapes(name) for name in names), key=lambda one: one.parameters)
    sampling = config.sampling
    requests = sampling.rollout_batch_size * sampling.n_samples_per_prompt
    prompt, response = mean_lengths(config.prompts.max_len, sampling.max_new_tokens, plan)
    roles: dict[str, RoleMemory] = {}
    if reward:
        value_bytes = WEIGHT_BYTES[config.model.param_dtype]
        roles["reward"] = RoleMemory(
            shape=shapes(reward).with_score_head(),
            num_ranks=ranks,
            weight_bytes=value_bytes,
            value_bytes=value_bytes,
            has_gpus=not hardware.is_cpu,
        )
    return Workload(
        config=config,
        hardware=hardware,
        roles=roles,
        layout=plan_layout(layout, node_gpus=[CPU_PLACES] if hardware.is_cpu else hardware.node_gpus),
        tokens=Tokens(
            forward=dict.fromkeys(roles, requests * (prompt + response)),
            length=prompt + response,
            requests=requests,
            prompt=prompt,
            response=response,
            prefilled=sampling.rollout_batch_size * prompt,
        ),
        longest=config.prompts.max_len,
        engine=engine_of(config, shape, hardware, shared=together),
        steps=None if plan.num_rows is None else -(-plan.num_rows // sampling.rollout_batch_size),
    )
