"""Commands in other frameworks and the `rlhf` equivalents."""

from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.errors import listed

COMMANDS = {
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_kd": "distill",
    "train_prm": "prm",
    "train_ppo": "ppo",
    "train_ppo_ray": listed(POLICY_GRADIENT, "or"),
    "lora_combiner": "merge",
    "batch_inference": "generate",
    "serve_rm": "serve-rm",
    "reward": "rm",
    "vllm-serve": "generate, which starts its own engines",
    "env": "doctor",
    "interactive_chat": "chat",
}
