"""Table of all `rlhf` commands. Every list of commands is derived from it. Imports no other module."""

from typing import NamedTuple

OFFLINE, ONLINE, USE, HELP = "Train offline", "Train online", "Use models", "Help"


class Command(NamedTuple):
    """Command metadata, available without importing the command. `function` in rlhf_cli.commands.`module` runs it.

    `estimator` is the default advantage estimator; empty if the command computes no advantages. Example:
    `COMMANDS["rloo"]` is listed under "Train online". Since it has an estimator, it also supports episodes and
    asynchronous sampling.
    """

    module: str
    panel: str
    summary: str
    estimator: str = ""

    @property
    def function(self) -> str:
        """Name of the command's function, equal to the module name."""
        return self.module


COMMANDS = {
    "sft": Command("sft", OFFLINE, "Supervised fine-tuning on prompts with responses, conversations, or plain text."),
    "rm": Command("rm", OFFLINE, "Train a reward model on preference pairs."),
    "prm": Command("prm", OFFLINE, "Train a process reward model on solutions with step labels."),
    "dpo": Command("dpo", OFFLINE, "Preference optimization on pairs: DPO, IPO, SimPO, ORPO and other losses."),
    "kto": Command("kto", OFFLINE, "Preference optimization on responses labelled desirable or undesirable (KTO)."),
    "distill": Command("distill", OFFLINE, "Distill a teacher's token distributions into a student on fixed examples."),
    "ppo": Command("ppo", ONLINE, "Train a policy and a critic (PPO with GAE).", "ppo"),
    "reinforce++": Command(
        "reinforce", ONLINE, "No critic, advantages whitened over the batch (REINFORCE++).", "reinforce++"
    ),
    "grpo": Command("grpo", ONLINE, "No critic, group-relative advantages (GRPO); presets for DAPO and GSPO.", "grpo"),
    "rloo": Command("rloo", ONLINE, "No critic, leave-one-out baseline within the group (RLOO).", "rloo"),
    "remax": Command("remax", ONLINE, "No critic, reward of the greedy response as baseline (ReMax).", "remax"),
    "gkd": Command("gkd", ONLINE, "On-policy distillation: match a teacher on the student's own responses (GKD)."),
    "generate": Command("generate", USE, "Sample responses to prompts, score them and select training data."),
    "eval": Command("eval", USE, "Evaluate models on prompts with labels: accuracy, pass@k, majority votes."),
    "chat": Command("chat", USE, "Chat with one or more models in the terminal."),
    "serve-rm": Command("serve_rm", USE, "Serve a reward model or verifiers over HTTP, for --remote_rm_url."),
    "merge": Command("merge", USE, "Merge an adapter into the base model, or convert a checkpoint to Hugging Face."),
    "scratch": Command("scratch", USE, "Create a small untrained model and tokenizer for offline tests."),
    "data": Command("data", HELP, "Preview how a command reads a dataset: trained tokens, lengths, dropped rows."),
    "doctor": Command("doctor", HELP, "Check the installation and this machine, with a fix for each problem."),
    "quickstart": Command("quickstart", HELP, "Train a tiny model to add numbers with sft and ppo, in a few minutes."),
}

TRAINING = tuple(name for name, command in COMMANDS.items() if command.panel in (OFFLINE, ONLINE))
"""Commands that train a model."""
ONLINE_TRAINING = tuple(name for name, command in COMMANDS.items() if command.panel == ONLINE)
"""Commands that train on sampled responses."""
POLICY_GRADIENT = tuple(name for name, command in COMMANDS.items() if command.estimator)
"""Commands that train on advantages. They also support episodes and asynchronous sampling."""
