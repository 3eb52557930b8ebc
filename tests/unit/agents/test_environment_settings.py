"""The value of --environment determines its kind, its identity and whether it has a reward; so does --agent_command."""

import pytest

from rlhf_cli.commands.generate import GenerateConfig
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.config.episodes import EpisodeConfig, environment_kind
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config

NEEDED = {"pretrain": "model", "prompt_data": "rows.jsonl", "output": "run"}


@pytest.mark.parametrize(
    ("environment", "kind", "identity"),
    [
        ("games/higher.py:Game", "file", "higher.py:Game"),
        ("ws://host:8000", "openenv", "openenv:"),
        ("https://other/ws", "openenv", "openenv:"),
        ("http://host/games/one/", "openenv", "openenv:/games/one"),
        ("mcp:http://host:8000/mcp", "mcp", "mcp:/mcp"),
        ("mcp:python server.py --at http://host", "mcp", "mcp:python server.py --at host"),
        ("mcp:python /home/me/server.py --root data", "mcp", "mcp:python server.py --root data"),
        ("verifiers:sums?taskset.url=http://host", "verifiers", "verifiers:sums?taskset.url=http://host"),
    ],
)
def test_kind_and_identity_follow_from_the_form(environment: str, kind: str, identity: str) -> None:
    assert environment_kind(environment) == kind
    found = EpisodeConfig(environment=environment).identity(max_len=100)
    assert found == {"environment": identity, "max_turns": 8, "max_len": 100}


@pytest.mark.parametrize("url", ["ftp://host", "ws://", "ws:///path"])
def test_a_url_without_a_host_or_of_another_scheme_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="an OpenEnv server has a URL like ws://host:8000"):
        build_config(GRPOConfig, {**NEEDED, "environment": url})


@pytest.mark.parametrize("url", ["mcp:ws://host/mcp", "mcp:http://", "mcp:https:///mcp"])
def test_a_url_of_an_mcp_server_without_a_host_or_of_another_scheme_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="an MCP server has a URL like http://host:8000/mcp"):
        build_config(GRPOConfig, {**NEEDED, "environment": url})


def test_a_server_has_its_own_reward_by_default_and_an_mcp_server_needs_another_one() -> None:
    config = build_config(GRPOConfig, {**NEEDED, "environment": "ws://host:8000"})
    assert [call.name for call in config.reward.rewards] == ["environment"]
    with pytest.raises(UsageError, match="no reward: set --reward_funcs"):
        build_config(GRPOConfig, {**NEEDED, "environment": "mcp:python server.py"})
    with pytest.raises(UsageError, match="an MCP server has tools and no reward; name another reward"):
        build_config(GRPOConfig, {**NEEDED, "environment": "mcp:python server.py", "reward_funcs": "environment,math"})
    config = build_config(GRPOConfig, {**NEEDED, "environment": "mcp:python server.py", "reward_funcs": "math"})
    assert [call.name for call in config.reward.rewards] == ["math"]


def test_an_agent_program_has_its_own_reward_by_default_and_is_known_by_the_names_in_its_command() -> None:
    config = build_config(GRPOConfig, {**NEEDED, "agent_command": "python /home/me/agent.py --fast"})
    assert [call.name for call in config.reward.rewards] == ["environment"]
    found = config.episodes.identity(max_len=100)
    assert found == {"environment": "agent:python agent.py --fast", "max_turns": 8, "max_len": 100}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"turn_schedule": "free"}, "turn_schedule needs --environment"),
        ({"agent_command": "python 'agent.py"}, "agent_command python 'agent.py: No closing quotation"),
        ({"agent_command": " "}, "agent_command is empty"),
    ],
)
def test_settings_that_do_not_go_with_an_agent_program_are_refused(given: dict[str, object], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        build_config(GRPOConfig, {**NEEDED, "reward_funcs": "math", "agent_command": "python agent.py", **given})


def test_an_environment_of_verifiers_has_its_own_prompts_and_requests_turns_at_any_time() -> None:
    name = "verifiers:sums?taskset.num_tasks=3"
    given = {"pretrain": "model", "output": "run", "environment": name}
    config = build_config(GRPOConfig, {**GRPOConfig.implied(given), **given})
    assert (config.prompts.prompt_data, [call.name for call in config.reward.rewards]) == (name, ["environment"])
    with pytest.raises(UsageError, match="requests turns at any time already"):
        build_config(GRPOConfig, {**NEEDED, "environment": name, "turn_schedule": "free"})


def test_rows_to_train_on_are_not_selected_from_the_conversations_of_a_program() -> None:
    given = {"pretrain": "model", "prompt_data": "rows.jsonl", "output": "out", "agent_command": "python agent.py"}
    with pytest.raises(UsageError, match="select best writes rows with the run's prompts"):
        build_config(GenerateConfig, {**given, "select": "best"})
