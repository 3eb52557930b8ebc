"""Engine arguments of vLLM: defaults, user settings, and validation."""

import importlib.util
import re
import sys

import pytest

from rlhf_cli import cli
from rlhf_cli.backends.rollout.backend_choice import described
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.vllm_arguments import argument_names, check_vllm_args, check_with, engine_arguments
from rlhf_cli.backends.rollout.vllm_start import _cpu_cache, kv_blocks
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.config.vllm_args import DECIDED, HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.flags import flags_of

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
OPEN = {"max_num_seqs", "max_num_batched_tokens", "disable_log_stats"}
"""Default arguments that a user may override."""


def test_whatever_the_program_sets_is_refused_from_a_user_but_for_the_limits_of_a_step():
    for on_cpu in (True, False):
        settings = EngineSettings(
            max_model_len=9, max_images_per_prompt=2, min_pixels=1, max_pixels=2, record_routed_experts=True
        )
        ours = engine_arguments("m", settings, on_cpu=on_cpu).keys()
        assert ours - OPEN <= DECIDED.keys()
    assert not DECIDED.keys() & OPEN


def test_limits_of_a_step_are_fixed_on_a_cpu_and_vllm_s_own_on_a_gpu():
    settings = EngineSettings(max_model_len=9000)
    on_cpu = engine_arguments("m", settings, on_cpu=True)
    assert (on_cpu["max_num_seqs"], on_cpu["max_num_batched_tokens"]) == (256, 9000)
    assert not {"max_num_seqs", "max_num_batched_tokens"} & engine_arguments("m", settings, on_cpu=False).keys()


def test_drafts_from_the_text_are_scheduled_one_step_at_a_time():
    def scheduler(on_cpu: bool = False, **given: object) -> tuple[str, bool]:
        arguments = engine_arguments("m", EngineSettings(max_model_len=9, vllm_args=given), on_cpu=on_cpu)
        return arguments["scheduler_cls"].rpartition(".")[2], arguments["async_scheduling"]

    assert scheduler() == ("AsyncStoppingScheduler", True)
    assert scheduler(speculative_config={"method": "ngram_gpu"}) == ("AsyncStoppingScheduler", True)
    assert scheduler(speculative_config={"method": "ngram"}) == ("StoppingScheduler", False)
    assert scheduler(on_cpu=True) == ("StoppingScheduler", False)


@needs_vllm
def test_speculative_decoding_is_refused_with_min_p_and_on_a_cpu():
    config = EngineConfig(vllm_args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}})
    with pytest.raises(UsageError, match=r"speculative_config: vLLM does not support it with --min_p 0.1"):
        check_vllm_args(config, backend="vllm", on_cpu=False, min_p=0.1)
    with pytest.raises(UsageError, match="vLLM on a CPU returns wrong log-probs"):
        check_vllm_args(config, backend="vllm", on_cpu=True)


@needs_vllm
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, None),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}, None),
        ({"kv_cache_dtype": "fp9"}, "--kv-cache-dtype: invalid choice: 'fp9'"),
    ],
)
def test_quantization_and_speculation_are_checked_by_vllm_s_parser(given, complaint):
    if complaint is None:
        check_vllm_args(EngineConfig(vllm_args=given), backend="vllm", on_cpu=False)
        return
    with pytest.raises(UsageError, match=complaint):
        check_vllm_args(EngineConfig(vllm_args=given), backend="vllm", on_cpu=False)


def test_every_setting_that_is_named_instead_exists():
    commands = (cli.COMMANDS["grpo"], cli.COMMANDS["generate"])
    flags = {flag for entry in commands for flag in flags_of(entry.config_class)}
    named = {name.removeprefix("no_") for text in DECIDED.values() for name in re.findall(r"--(\w+)", text)}
    assert named <= flags


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"max_model_len": 5}', "this program sets max_model_len: use --max_len"),
        ('{"max_num_seqs": 5, "dtype": "half"}', "this program sets dtype: use --param_dtype"),
        ('{"data_parallel_size": 2}', "Ray places the engines; use --vllm_num_engines"),
        ("[1]", "must be a JSON object"),
    ],
)
def test_what_the_program_decides_is_refused_with_the_setting_to_use(text, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        EngineConfig(vllm_args=text)


def test_arguments_need_the_engine_of_vllm():
    given = EngineConfig(vllm_args='{"max_num_seqs": 7}')
    with pytest.raises(UsageError, match="--vllm_args requires vLLM, not --rollout_backend transformers"):
        check_vllm_args(given, backend="transformers", on_cpu=False)
    check_vllm_args(EngineConfig(), backend="transformers", on_cpu=False)


def test_the_start_of_a_run_names_what_was_added():
    assert described(EngineConfig(vllm_num_engines=2), "vllm") == "2 x vllm"
    assert described(EngineConfig(vllm_args='{"a": 7}'), "vllm") == '1 x vllm with {"a": 7}'


@needs_vllm
def test_a_name_that_vllm_does_not_have_is_refused_with_a_near_one_without_loading_vllm():
    loaded = "vllm" in sys.modules
    with pytest.raises(UsageError, match=r"no engine argument max_num_seq \(did you mean max_num_seqs\?\)"):
        check_vllm_args(EngineConfig(vllm_args='{"max_num_seq": 7}'), backend="vllm", on_cpu=False)
    assert ("vllm" in sys.modules) == loaded


@needs_vllm
def test_all_that_the_program_decides_are_arguments_of_the_installed_vllm():
    assert DECIDED.keys() | OPEN <= argument_names()


@needs_vllm
def test_the_bounds_of_temperature_are_those_at_which_vllm_refuses_or_alters_it():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    assert SamplingParams(temperature=HIGHEST_TEMPERATURE).temperature == HIGHEST_TEMPERATURE
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=HIGHEST_TEMPERATURE + 0.01)
    assert SamplingParams(temperature=LOWEST_TEMPERATURE).temperature == LOWEST_TEMPERATURE
    # vLLM raises it without a warning.
    assert SamplingParams(temperature=LOWEST_TEMPERATURE / 2).temperature == LOWEST_TEMPERATURE


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("ppo --pretrain x --output y --prompt_data z --reward_funcs math", "--temperature"),
        ("grpo --pretrain x --output y --prompt_data z --reward_funcs math --eval_dataset z", "--eval_temperature"),
        ("generate --pretrain x --output y --prompt_data z", "--temperature"),
        ("eval --pretrain x --output y --prompt_data z --reward_funcs math", "--temperature"),
    ],
)
def test_a_temperature_that_engines_refuse_or_alter_is_refused_before_anything_starts(words, flag, capsys):
    for value, reason in (("2.5", "2"), ("0.001", "0.01")):
        assert cli.main([*words.split(), flag, value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert flag.removeprefix("--") in line
        assert reason in line


def checked_by(program):
    check_with([sys.executable, "-c", f"import sys; {program}"])


def test_the_last_line_of_the_checking_process_is_the_complaint():
    checked_by("print('noise', file=sys.stderr)")
    with pytest.raises(UsageError, match=r"^second$"):
        checked_by("print('first\\nsecond', file=sys.stderr); sys.exit(2)")
    with pytest.raises(RunError, match=r"vLLM could not be loaded to check --vllm_args \(no lib\)"):
        checked_by("sys.exit('no lib')")
    with pytest.raises(RunError, match="status 3"):
        checked_by("sys.exit(3)")


def test_the_cache_of_a_cpu_is_as_large_as_all_sequences_can_fill(tiny_model_dir):
    """Two layers, two heads of size 8, 4-byte keys and values: 256 bytes per token, 128 tokens per block."""
    settings = EngineSettings(max_model_len=200, dtype="fp32")
    assert kv_blocks(tiny_model_dir, settings, num_sequences=10) == {"num_gpu_blocks_override": 21}
    assert _cpu_cache(tiny_model_dir, settings, {"max_num_seqs": 10}) == {"num_gpu_blocks_override": 21}
    small_blocks = {"max_num_seqs": 10, "block_size": 64}  # from a user's --vllm_args
    assert _cpu_cache(tiny_model_dir, settings, small_blocks) == {"num_gpu_blocks_override": 41}
    most = 2**30 // (256 * 128)  # the limit of 1 GiB; one block stays empty
    assert kv_blocks(tiny_model_dir, settings, num_sequences=(most - 1) // 2) != {}
    assert kv_blocks(tiny_model_dir, settings, num_sequences=most // 2 + 1) == {}


def test_the_cache_of_recurrent_states_is_sized_by_vllm(tiny_hybrid_dir):
    settings = EngineSettings(max_model_len=200, dtype="fp32")
    assert kv_blocks(tiny_hybrid_dir("granitemoehybrid"), settings, num_sequences=10) == {}
