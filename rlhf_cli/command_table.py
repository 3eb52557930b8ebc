"""Table of all `rlhf` commands. Every list of commands is derived from it. Imports no command before it is used."""

from pkgutil import resolve_name
from typing import Any, NamedTuple

OFFLINE, ONLINE, _USE, _HELP = "Train offline", "Train online", "Use models", "Help"


class Command(NamedTuple):
    """Command metadata, available without importing the command.

    - `config`: config class in rlhf_cli.commands, as "module:class". Its docstring is the help text.
    - `function`: function in rlhf_cli.runs that takes the config, as "module:function".
    - `estimator`: default advantage estimator; empty if the command computes no advantages.
    - `task`: function in rlhf_cli.runs that returns the task of an offline command.

    Example: `COMMANDS["rloo"]` is listed under "Train online". Since it has an estimator, it also supports episodes and
    asynchronous sampling.
    """

    config: str
    panel: str
    summary: str
    function: str
    estimator: str = ""
    task: str = ""

    @property
    def config_class(self) -> Any:
        """Import and return the config class."""
        return resolve_name(f"rlhf_cli.commands.{self.config}")

    def run(self, config: Any) -> None:
        """Import and call the command's function."""
        resolve_name(f"rlhf_cli.runs.{self.function}")(config)


_TRAIN_OFFLINE, _TRAIN_ONLINE = "launch:train_offline", "online.run:run_online"

COMMANDS = {
    "sft": Command(
        "sft:SFTConfig",
        OFFLINE,
        "Supervised fine-tuning on responses, conversations or text.",
        _TRAIN_OFFLINE,
        task="offline.sft:sft_task",
    ),
    "rm": Command(
        "rm:RMConfig", OFFLINE, "Train a reward model on preference pairs.", _TRAIN_OFFLINE, task="offline.rm:rm_task"
    ),
    "prm": Command(
        "prm:PRMConfig",
        OFFLINE,
        "Train a process reward model on solutions with step labels.",
        _TRAIN_OFFLINE,
        task="offline.prm:prm_task",
    ),
    "dpo": Command(
        "dpo:DPOConfig",
        OFFLINE,
        "Train on preference pairs: DPO, IPO, SimPO, ORPO and others.",
        _TRAIN_OFFLINE,
        task="offline.dpo:dpo_task",
    ),
    "kto": Command(
        "kto:KTOConfig",
        OFFLINE,
        "Train on responses labeled desirable or undesirable (KTO).",
        _TRAIN_OFFLINE,
        task="offline.kto:kto_task",
    ),
    "distill": Command(
        "distill:DistillConfig",
        OFFLINE,
        "Match a teacher's token distributions on fixed examples.",
        _TRAIN_OFFLINE,
        task="offline.distill:distill_task",
    ),
    "ppo": Command("ppo:PPOConfig", ONLINE, "Train a policy and a critic (PPO with GAE).", _TRAIN_ONLINE, "ppo"),
    "reinforce++": Command(
        "reinforce:ReinforceConfig",
        ONLINE,
        "No critic, advantages whitened over the batch (REINFORCE++).",
        _TRAIN_ONLINE,
        "reinforce++",
    ),
    "grpo": Command(
        "grpo:GRPOConfig",
        ONLINE,
        "No critic, group-relative advantages: GRPO, DAPO, GSPO.",
        _TRAIN_ONLINE,
        "grpo",
    ),
    "rloo": Command(
        "rloo:RLOOConfig", ONLINE, "No critic, leave-one-out baseline within the group (RLOO).", _TRAIN_ONLINE, "rloo"
    ),
    "remax": Command(
        "remax:ReMaxConfig",
        ONLINE,
        "No critic, reward of the greedy response as baseline (ReMax).",
        _TRAIN_ONLINE,
        "remax",
    ),
    "gkd": Command(
        "gkd:GKDConfig",
        ONLINE,
        "Match a teacher on the student's own responses (GKD).",
        _TRAIN_ONLINE,
    ),
    "generate": Command(
        "generate:GenerateConfig",
        _USE,
        "Sample responses, score them and select training data.",
        "inference.generate:run_generation",
    ),
    "eval": Command(
        "eval:EvalConfig",
        _USE,
        "Evaluate models on labeled prompts: accuracy, pass@k, votes.",
        "inference.evaluate:run_evaluation",
    ),
    "compare": Command(
        "compare:CompareConfig",
        _USE,
        "Compare two models, or find where a metric of a run broke.",
        "inference.compare:run_compare",
    ),
    "chat": Command("chat:ChatConfig", _USE, "Chat with one or more models in the terminal.", "chat.run:run_chat"),
    "serve-rm": Command(
        "serve_rm:ServeRMConfig",
        _USE,
        "Serve a reward model or verifiers over HTTP.",
        "reward_server:run_server",
    ),
    "serve-tinker": Command(
        "serve_tinker:ServeTinkerConfig",
        _USE,
        "Serve the Tinker API: LoRA training and sampling over HTTP.",
        "tinker.run:run_tinker_server",
    ),
    "merge": Command(
        "merge:MergeConfig",
        _USE,
        "Merge an adapter, or convert a checkpoint to Hugging Face.",
        "merge:merge",
    ),
    "scratch": Command(
        "scratch:ScratchConfig",
        _USE,
        "Create a small untrained model and tokenizer for tests.",
        "scratch:scratch",
    ),
    "runs": Command(
        "runs:RunsConfig",
        _HELP,
        "List runs: state, progress, metrics, command that resumes.",
        "run_list:list_runs",
    ),
    "view": Command(
        "view:ViewConfig",
        _HELP,
        "Show runs in the browser: curves, samples and settings.",
        "view:run_view",
    ),
    "why": Command(
        "why:WhyConfig",
        _HELP,
        "Explain how a sampled token entered the loss, with numbers.",
        "why:explain",
    ),
    "replay": Command(
        "replay:ReplayConfig",
        _HELP,
        "Run an iteration again with other settings, and compare.",
        "online.replay:run_replay",
    ),
    "rerun": Command(
        "rerun:RerunConfig",
        _HELP,
        "Run a training run again, and name what differs and why.",
        "rerun:rerun",
    ),
    "plan": Command(
        "plan:PlanCommandConfig",
        _HELP,
        "Plan memory, time and price of a command on any hardware.",
        "plan_proof:run_plan",
    ),
    "data": Command(
        "data:DataCommandConfig",
        _HELP,
        "Preview how a command reads a dataset, or test its rewards.",
        "data:show_data",
    ),
    "migrate": Command(
        "migrate:MigrateConfig",
        _HELP,
        "Translate commands of OpenRLHF, TRL, verl and others.",
        "migrate:run_migrate",
    ),
    "schema": Command(
        "schema:SchemaConfig",
        _HELP,
        "Print the JSON Schema of a command's settings, for editors.",
        "schema:print_schema",
    ),
    "doctor": Command(
        "doctor:DoctorConfig",
        _HELP,
        "Check the installation and this machine, and suggest fixes.",
        "doctor:doctor",
    ),
    "quickstart": Command(
        "quickstart:QuickstartConfig",
        _HELP,
        "Train a tiny model to add numbers, in a few minutes.",
        "quickstart:quickstart",
    ),
}

TRAINING = tuple(name for name, command in COMMANDS.items() if command.panel in (OFFLINE, ONLINE))
"""Commands that train a model."""
ONLINE_TRAINING = tuple(name for name, command in COMMANDS.items() if command.panel == ONLINE)
"""Commands that train on sampled responses."""
FUNCTIONS = {name.replace("+", ""): name for name in (*TRAINING, "generate", "eval")}
"""Commands by the name of their function in Python (api.py)."""
POLICY_GRADIENT = tuple(name for name, command in COMMANDS.items() if command.estimator)
"""Commands that train on advantages. They also support episodes and asynchronous sampling."""
