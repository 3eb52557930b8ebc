"""`rlhf serve-tinker`: serve the Tinker API."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.rollout import SYNC, EngineConfig
from rlhf_cli.config.tinker import TinkerModelConfig, TinkerServerConfig


class ServeTinkerConfig(CommandConfig):
    """Serve the Tinker API on this machine: clients train LoRA adapters of a model and sample from them over HTTP.

    Programs written for Tinker, such as the recipes of tinker-cookbook, run against it with TINKER_BASE_URL and
    TINKER_API_KEY. Several clients can train at once; their operations run one after another.
    """

    example = "--pretrain Qwen/Qwen2.5-0.5B-Instruct --output runs/tinker"
    unsupported = SYNC | {"engine.vllm_num_engines", "model.tokenizer_chat_template"}

    model: ModelSource
    adapters: TinkerModelConfig = TinkerModelConfig()
    engine: EngineConfig = EngineConfig()
    server: TinkerServerConfig = TinkerServerConfig()
