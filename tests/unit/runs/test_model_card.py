"""Model cards: front matter of the Hub, changed settings, metrics, and nothing private."""

import shlex
from pathlib import Path

import pytest
import yaml

from rlhf_cli import cli
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.options import typer_command
from rlhf_cli.runs.model_card import write_model_card
from rlhf_cli.runs.recorded_runs import RecordedRun


def config_of(command: str, line: str) -> CommandConfig:
    read: list[CommandConfig] = []
    typer_command(command, cli.COMMANDS[command].config_class, read.append).main(
        shlex.split(line), standalone_mode=False
    )
    return read[0]


def card(command: str, line: str, folder: Path, **files: str) -> tuple[dict[str, object], str]:
    """Return the front matter and the text of the card."""
    model = folder / "gsm8k" / "model"
    model.mkdir(parents=True)
    for name, text in files.items():
        (model / f"{name}.json").write_text(text)
    metrics = {"reward": 0.75, "eval/accuracy": 0.5}
    run = RecordedRun(folder, command, "", "running", 80, 100, "iteration", metrics, [], None, 0.0, "", "")
    write_model_card(model, config_of(command, line), run)
    _, front, text = (model / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_card_names_base_model_data_settings_and_metrics(tmp_path):
    front, text = card(
        "grpo",
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data openai/gsm8k:main@train,/home/me/data/own.jsonl "
        "--reward_funcs gsm8k --output runs/gsm8k --eps_clip 0.3",
        tmp_path,
    )
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf-cli", "grpo"],
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "datasets": ["openai/gsm8k"],
    }
    assert "# gsm8k\n" in text
    assert "Trained with `rlhf grpo` (rlhf-cli " in text
    assert "): iteration 80 of 100.\n" in text
    assert "- Data: openai/gsm8k, own.jsonl\n" in text
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert {"reward_funcs": ["gsm8k"], "eps_clip": 0.3, "use_kl_loss": True}.items() <= settings.items()
    assert not {"pretrain", "prompt_data", "output", "seed"} & settings.keys()
    assert "| reward | 0.7500 |" in text


@pytest.mark.parametrize("private", ["/home/me", "10.0.0.7", "runs/", "secret"])
def test_paths_and_addresses_stay_private(private, tmp_path):
    _, text = card(
        "ppo",
        "--pretrain /home/me/models/base --prompt_data /home/me/p.jsonl --remote_rm_url http://10.0.0.7:5000/secret "
        "--tokenizer_chat_template /home/me/chat.jinja --output runs/x --wandb_project secret --use_wandb",
        tmp_path,
    )
    assert private not in text
    assert "- Base model: base\n" in text
    assert "tokenizer_chat_template: chat.jinja" in text


def test_commands_with_passwords_stay_private(tmp_path):
    words = "--pretrain m --prompt_data p --output o --agent_command 'env KEY=hush python agent.py'"
    _, text = card("grpo", words, tmp_path)
    assert "hush" not in text
    assert "agent_command" not in text


def test_a_reward_model_and_an_adapter_are_what_they_are(tmp_path):
    front, _ = card("rm", "--pretrain m --dataset d --output o --lora_rank 8", tmp_path, adapter_config="{}")
    assert (front["library_name"], front["pipeline_tag"]) == ("peft", "text-classification")
    assert "base_model" not in front
