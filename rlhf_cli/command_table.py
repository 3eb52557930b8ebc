"""The commands of `rlhf`, one row each, from which every list of commands is derived. Imports no other module."""

from typing import NamedTuple

OFFLINE, ONLINE, USE, HELP = "Train offline", "Train online", "Use models", "Help"


class Command(NamedTuple):
    """A command, known without importing it: `function` of rlhf_cli.commands.`module` takes its config.

    `estimator` is the advantage estimator of the command's defaults; empty if the command computes no advantages.
    Example: `COMMANDS["rloo"]` is listed under "Train online", trains on episodes too and can sample ahead of training,
    because it has an estimator.
    """

    module: str
    panel: str
    summary: str
    estimator: str = ""

    @property
    def function(self) -> str:
        """The name of the command's function, which is the name of its module."""
        return self.module


COMMANDS = {
    "sft": Command("sft", OFFLINE, "Fine-tune on examples: prompts with responses, conversations, or plain text."),
    "rm": Command("rm", OFFLINE, "Train a reward model on pairs of a chosen and a rejected response."),
    "prm": Command("prm", OFFLINE, "Train a process reward model on solutions whose steps are labelled."),
    "dpo": Command("dpo", OFFLINE, "Train a policy on pairs: DPO, IPO, SimPO, ORPO and other losses."),
    "kto": Command("kto", OFFLINE, "Train a policy on single responses labelled desirable or undesirable."),
    "distill": Command("distill", OFFLINE, "Train a student to give tokens the probabilities of a teacher."),
    "ppo": Command("ppo", ONLINE, "Train a policy and a critic on sampled and scored responses (PPO with GAE).", "ppo"),
    "reinforce++": Command(
        "reinforce", ONLINE, "Without a critic: rewards whitened over the whole batch.", "reinforce++"
    ),
    "grpo": Command(
        "grpo", ONLINE, "Without a critic: responses compared within their group; DAPO, GSPO as presets.", "grpo"
    ),
    "rloo": Command("rloo", ONLINE, "Without a critic: each response against the others to its prompt.", "rloo"),
    "remax": Command("remax", ONLINE, "Without a critic: each response against the greedy one to its prompt.", "remax"),
    "gkd": Command("gkd", ONLINE, "Train a student on a teacher's distributions over its own responses."),
    "generate": Command("generate", USE, "Sample responses to prompts, score them and select some to train on."),
    "eval": Command("eval", USE, "Answer prompts with a model and count what a verifier finds right."),
    "chat": Command("chat", USE, "Talk to one or several models in the terminal."),
    "serve-rm": Command("serve_rm", USE, "Serve a reward model or verifiers over HTTP, for --remote_rm_url."),
    "merge": Command("merge", USE, "Fold an adapter into its model, or turn a checkpoint into a Hugging Face folder."),
    "scratch": Command("scratch", USE, "Make a small untrained model and tokenizer, to try things offline."),
    "data": Command("data", HELP, "Show how rows will be read: trained tokens, lengths, what is cut or dropped."),
    "doctor": Command("doctor", HELP, "Check the installation and this machine, with a cure for each problem."),
    "quickstart": Command(
        "quickstart", HELP, "Train a tiny model to add numbers in minutes, by sft and ppo, on this machine."
    ),
}

TRAINING = tuple(name for name, command in COMMANDS.items() if command.panel in (OFFLINE, ONLINE))
"""Commands that train a model."""
ONLINE_TRAINING = tuple(name for name, command in COMMANDS.items() if command.panel == ONLINE)
"""Commands that train on responses that they sample."""
POLICY_GRADIENT = tuple(name for name, command in COMMANDS.items() if command.estimator)
"""Commands that train on advantages: on episodes too, and optionally on responses sampled ahead."""
