"""What must be equal to resume a checkpoint: weights, tokenizer, template, objective and data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHAT_TEMPLATE, make_tiny_tokenizer
from online_settings import resolve
from reward_models import save_reward_model
from safetensors.torch import load_file, save_file

from rlhf_cli import cli
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.training.checkpoint import CheckpointStore, check_same_run
from rlhf_cli.config.base import default_settings
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.errors import UsageError
from rlhf_cli.models.identity import configuration_fingerprint, tokenizer_fingerprint
from rlhf_cli.models.weight_files import NUM_PIECES, PIECE_BYTES, WHOLE_BYTES, fingerprint, fingerprint_of
from rlhf_cli.options import build_config
from rlhf_cli.runs.offline.distill import distill_task
from rlhf_cli.runs.offline.dpo import dpo_task
from rlhf_cli.runs.offline.kto import kto_task
from rlhf_cli.runs.offline.rm import rm_task
from rlhf_cli.runs.offline.run import checked_identity
from rlhf_cli.runs.offline.sft import sft_task
from rlhf_cli.runs.online.identity import online_identity, settings_identity
from rlhf_cli.runs.online.models import find_models
from rlhf_cli.runs.reward_file import REWARD_FILE, reward_file_hash, reward_file_notice

TASKS: dict[str, Callable[[Any], Any]] = {
    "sft": sft_task,
    "dpo": dpo_task,
    "kto": kto_task,
    "rm": rm_task,
    "distill": distill_task,
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(4)],
    "dpo": [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "x", "margin": 0.5} for n in range(4)],
    "kto": [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": n % 2 == 0} for n in range(4)],
}
ROWS["rm"], ROWS["distill"] = ROWS["dpo"], ROWS["sft"]
MODEL = "model.safetensors"
OF_EVERY_ONLINE_COMMAND = """
    actor_learning_rate adam_betas adam_eps aux_loss_coef ema_beta enable_ema environment judge template
    judge_args judge_max_len judge_method judge_model judge_rubric_key judge_score_range judge_weight judges l2
    lr_scheduler lr_warmup_ratio max_new_tokens max_staleness max_turns min_lr_ratio min_p n_samples_per_prompt
    normalize_reward optim remote_rm_weight reward servers reward_by_source reward_func reward_func_args
    reward_func_weight reward_funcs reward_key reward_model_weight reward_weights rollout_batch_size rollout_seed
    seed stop temperature top_k top_p train_batch_size warmup_steps
"""
OF_A_POLICY_GRADIENT = """
    cispo_eps_high clip_cov_range clip_cov_ratio correct_nll_coef distill_coef dppo_delta_low_high dual_clip
    entropy_delta entropy_loss_coef entropy_max entropy_target eps_clip eps_clip_low_high gmpo_log_clip
    init_kl_coef kl_cov_coef kl_cov_ratio kl_estimator kl_horizon kl_target loss_agg mask_truncated
    observation_nll_coef off_policy_mask_threshold overlong_buffer_len overlong_penalty_factor policy_loss
    prompt_sampling ref_mixup_alpha ref_sync_steps reward_clip_range rollout_correction rollout_correction_cap
    rollout_correction_range rollout_routing_replay sapo_tau stop_properly_penalty_coef teacher_tokenizer
    top_entropy_quantile unbiased_kl use_kl_loss vespo_k vespo_lambda
"""
SETTINGS_OF_IDENTITY = {
    "ppo": (
        f"{OF_A_POLICY_GRADIENT} "
        "bootstrap_truncated critic_learning_rate dynamic_filtering dynamic_filtering_reward_range gamma "
        "lambd lambd_alpha critic_lambd prm_weight value_clip"
    ),
    "grpo": (
        f"{OF_A_POLICY_GRADIENT} "
        "advantage advantage_std aggregate dynamic_filtering dynamic_filtering_reward_range gigpo_gamma gigpo_weight "
        "prm_weight"
    ),
    "remax": OF_A_POLICY_GRADIENT,
    "gkd": "",
}
"""Names of settings in checkpoints; commands add their own to those of all online commands."""


def change_weights(folder: Path, name: str | None = None) -> None:
    """Change one number in one weight without changing names and sizes."""
    weights = load_file(folder / MODEL)
    name = name or sorted(weights)[0]
    flat = weights[name].flatten()
    flat[flat.numel() // 2] += 0.5
    weights[name] = flat.reshape(weights[name].shape)
    save_file(weights, folder / MODEL, metadata={"format": "pt"})


class Offline:
    """Runs of an offline command on rows in a folder, and the identity in their checkpoints."""

    def __init__(self, folder: Path, command: str, model: str) -> None:
        self.command, self.data = command, folder / "rows.jsonl"
        self.model = Path(shutil.copytree(model, folder / "model"))
        self.rows = [dict(row) for row in ROWS[command]]
        self._store = CheckpointStore(folder / "checkpoints", max_num=1)

    def begin(self, **given: Any) -> None:
        with self._store.writing(1, {"identity": self._identity(None, given)}, needed_bytes=0):
            pass

    def resume(self, **given: Any) -> None:
        self._identity(self._store.latest(), given)

    def refusal(self, **given: Any) -> str:
        with pytest.raises(UsageError) as caught:
            self.resume(**given)
        _, _, said = str(caught.value).partition(" belongs to another run: ")
        return said.removesuffix("; use another --output, or --overwrite to start again")

    def _identity(self, resume: Any, given: dict[str, Any]) -> dict[str, Any]:
        self.data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        least = {"pretrain": str(self.model), "dataset": str(self.data), "output": "x", "param_dtype": "fp32"}
        if self.command == "distill":
            least["teacher_pretrain"] = given.get("pretrain", str(self.model))
        config: Any = build_config(cli.COMMANDS[self.command].config_class, least | given)
        return checked_identity(config, TASKS[self.command](config), resume)


@pytest.fixture(params=TASKS)
def run(request, tmp_path, tiny_model_dir):
    return Offline(tmp_path, request.param, tiny_model_dir)


def test_the_same_model_is_continued_from_another_folder(run, tmp_path):
    run.begin()
    run.resume()
    moved = run.model.rename(tmp_path / "moved")
    run.resume(pretrain=str(moved))


def test_other_weights_behind_the_same_name_are_refused(run):
    run.begin()
    change_weights(run.model)
    second = {
        "dpo": ["weights of the reference"],
        "kto": ["weights of the reference"],
        "distill": ["weights of the teacher"],
    }
    refused = ["weights of the model", *second.get(run.command, [])]
    assert run.refusal() == "; ".join(f"it differs in {what}" for what in refused)


def test_one_changed_row_is_refused_and_an_equal_file_of_another_name_is_not(run, tmp_path):
    run.begin()
    run.data = tmp_path / "other.jsonl"
    run.resume()
    run.rows.reverse()
    assert run.refusal() == "it differs in contents of the training rows"
    run.rows.reverse()
    answer = next(key for key in ("response", "chosen", "completion") if key in run.rows[2])
    run.rows[2][answer] = "7"
    assert run.refusal() == "it differs in contents of the training rows"


def test_another_chat_template_is_refused(run):
    run.begin()
    assert "it differs in chat template" in run.refusal(tokenizer_chat_template=CHAT_TEMPLATE.replace("_start", "_end"))


def test_what_may_change_in_a_run_is_no_difference(run):
    run.begin()
    run.resume(
        save_steps="7",
        logging_steps="5",
        micro_train_batch_size="1",
        adam_offload="true",
        gradient_checkpointing="1",
        zero_stage="3",
    )


def test_another_label_or_margin_is_another_row(tmp_path, tiny_model_dir):
    for command, column, value in (("kto", "label", False), ("rm", "margin", 0.25)):
        run = Offline(tmp_path / command, command, tiny_model_dir)
        run.begin()
        run.rows[0][column] = value
        assert run.refusal() == "it differs in contents of the training rows"


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("dpo", {"beta": "0.5"}, "its beta is 0.1, not 0.5"),
        ("dpo", {"loss": "ipo"}, "its loss is ['sigmoid'], not ['ipo']"),
        ("dpo", {"ref_sync_steps": "5"}, "its ref_sync_steps is 0, not 5"),
        (
            "distill",
            {"beta": "0.5", "teacher_top_k": "9"},
            "its beta is 0.0, not 0.5; its teacher_top_k is None, not 9",
        ),
        ("kto", {"desirable_loss_weight": "2"}, "its desirable_loss_weight is 1.0, not 2.0"),
        ("rm", {"margin_loss": "true"}, "its margin_loss is False, not True"),
        ("sft", {"learning_rate": "1e-3"}, "its learning_rate is 5e-06, not 0.001"),
    ],
)
def test_another_setting_of_the_objective_is_refused_by_its_name(command, given, said, tmp_path, tiny_model_dir):
    run = Offline(tmp_path, command, tiny_model_dir)
    run.begin()
    assert run.refusal(**given) == said


def test_the_weight_of_the_router_loss_is_a_setting_of_the_objective(tmp_path, tiny_moe_dir, tiny_model_dir):
    run = Offline(tmp_path / "mixture", "sft", tiny_moe_dir)
    run.begin(aux_loss_coef="0.01")
    run.resume(aux_loss_coef="0.01")
    assert run.refusal() == "its aux_loss_coef is 0.01, not 0.0"
    with pytest.raises(UsageError, match="models of type qwen2 have no router"):
        Offline(tmp_path / "dense", "sft", tiny_model_dir).begin(aux_loss_coef="0.01")


def test_a_reference_is_known_by_its_weights_and_not_by_its_name(tmp_path, tiny_model_dir):
    run = Offline(tmp_path, "dpo", tiny_model_dir)
    other = Path(shutil.copytree(tiny_model_dir, tmp_path / "reference"))
    run.begin()
    run.resume(ref_pretrain=str(other), precompute_ref_log_probs="true")
    change_weights(other)
    assert run.refusal(ref_pretrain=str(other)) == "it differs in weights of the reference"


def test_an_adapter_is_part_of_the_weights_that_a_run_starts_from(tmp_path, tiny_model_dir):
    run = Offline(tmp_path, "sft", tiny_model_dir)
    run.begin(lora_rank="4")
    run.resume(lora_rank="4")
    assert run.refusal(lora_rank="4", lora_alpha="8") == "its lora_alpha is 16, not 8"
    assert run.refusal().startswith("its lora_rank is 4, not None; ")


def saved_adapter(base: str, folder: Path) -> Path:
    from rlhf_cli.config.model import LoraConfig, ModelConfig
    from rlhf_cli.models.adapters import load_with_adapter, plan_adapter, save_adapter
    from rlhf_cli.models.loading import load_causal_lm

    config = ModelConfig(pretrain=base, param_dtype="fp32")
    model = load_with_adapter(load_causal_lm, config, plan_adapter(config, LoraConfig(lora_rank=2), seed=1))
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(model, make_tiny_tokenizer(), folder, state_dict=trained)
    return folder


def test_another_adapter_on_the_same_base_is_refused(tmp_path, tiny_model_dir):
    adapter = saved_adapter(tiny_model_dir, tmp_path / "adapter")
    run = Offline(tmp_path, "sft", tiny_model_dir)
    run.begin(pretrain=str(adapter))
    moved = adapter.rename(tmp_path / "moved")
    run.resume(pretrain=str(moved))
    file = moved / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: weight + 0.25 for name, weight in weights.items()}, file)
    assert run.refusal(pretrain=str(moved)) == "it differs in weights of the model"


class Online:
    """Runs of an online command, and the identity in their checkpoints."""

    def __init__(self, folder: Path, model: str) -> None:
        names = ("policy", "critic", "reward", "teacher")
        self.paths = dict.fromkeys(names, Path())
        self.paths["policy"] = Path(shutil.copytree(model, folder / "policy"))
        self.paths["teacher"] = Path(shutil.copytree(model, folder / "teacher"))
        for name in ("critic", "reward"):
            self.paths[name] = save_reward_model(folder / name)
        self._data = folder / "prompts.jsonl"
        self._data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(4)))
        self._store = CheckpointStore(folder / "checkpoints", max_num=1)

    def begin(self, **given: Any) -> None:
        with self._store.writing(len(self._store.steps()) + 1, {"identity": self._identity(given)}, needed_bytes=0):
            pass

    def resume(self, **given: Any) -> None:
        checkpoint = self._store.latest()
        assert checkpoint is not None
        check_same_run(checkpoint, self._identity(given), default_settings(self._config(given)))

    def forget(self, *entries: str) -> None:
        """Remove entries from the checkpoint, as in checkpoints of older versions."""
        identity = {name: value for name, value in self._identity({}).items() if name not in entries}
        with self._store.writing(2, {"identity": identity}, needed_bytes=0):
            pass

    def _config(self, given: dict[str, Any]) -> Any:
        models = {f"{name}_pretrain".removeprefix("policy_"): str(path) for name, path in self.paths.items()}
        lengths = {"max_len": "64", "max_new_tokens": "8"}
        return resolve("ppo", **models | {"prompt_data": str(self._data), **lengths, **given})

    def _identity(self, given: dict[str, Any]) -> dict[str, Any]:
        config, row = self._config(given), ESTIMATORS["ppo"]
        found = find_models(config, row)
        data = load_prompts(config.prompts, found.policy.tokenizer, max_new_tokens=8, seed=0)
        return online_identity(config, found, data, estimator=row, iterations=1)


@pytest.fixture
def ppo(tmp_path, tiny_model_dir):
    run = Online(tmp_path, tiny_model_dir)
    run.begin()
    return run


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("policy", "the policy"),
        ("critic", "the critic"),
        ("reward", "the reward model"),
        ("teacher", "the teacher"),
    ],
)
def test_the_role_whose_weights_are_others_is_named(ppo, role, said):
    change_weights(ppo.paths[role])
    with pytest.raises(UsageError, match=f"belongs to another run: it differs in weights of {said}; use another"):
        ppo.resume()


def test_a_checkpoint_of_an_older_version_goes_on_with_the_defaults_of_younger_settings(ppo):
    ppo.forget("adam_eps", "adam_betas", "distill_coef", "use_dora", "use_dora of the critic")
    ppo.resume()
    with pytest.raises(UsageError, match="it does not record adam_eps; use another"):
        ppo.resume(adam_eps="1e-6")
    ppo.forget("weights of the teachers by source")
    ppo.resume()
    ppo.forget("weights of the teacher")
    with pytest.raises(UsageError, match="it does not record weights of the teacher; use another"):
        ppo.resume()


def test_a_teachers_own_tokenizer_is_part_of_a_run(tmp_path, tiny_model_dir):
    run = Offline(tmp_path, "distill", tiny_model_dir)
    run.begin(teacher_tokenizer="own")
    run.resume(teacher_tokenizer="own")
    refused = run.refusal()
    assert "its teacher_tokenizer is 'own', not None" in refused
    assert "tokenizers of the teachers" in refused


def test_teachers_by_source_may_move_and_others_are_refused(ppo, tmp_path):
    folder = ppo.paths["teacher"]
    ppo.begin(teacher_by_source=json.dumps({"code": str(folder)}))
    moved = shutil.copytree(folder, tmp_path / "moved_code")
    ppo.resume(teacher_by_source=json.dumps({"code": str(moved)}))
    change_weights(moved)
    for by_source in ({"code": str(moved)}, {"math": str(folder)}, {}):
        with pytest.raises(UsageError, match="it differs in weights of the teachers by source"):
            ppo.resume(teacher_by_source=json.dumps(by_source))


def test_online_models_may_move_and_settings_of_speed_may_change(ppo, tmp_path):
    ppo.paths = {role: path.rename(tmp_path / f"moved_{role}") for role, path in ppo.paths.items()}
    ppo.resume(max_epochs="3", micro_train_batch_size="2", save_steps="4", reward_timeout="9")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"eps_clip": "0.3"}, "its eps_clip is 0.2, not 0.3"),
        ({"temperature": "0.5"}, "its temperature is 1.0, not 0.5"),
        ({"distill_coef": "0.5"}, "its distill_coef is 1.0, not 0.5"),
        ({"teacher_tokenizer": "own"}, "its teacher_tokenizer is None, not 'own'"),
        ({"teacher_pretrain": None}, "it differs in weights of the teacher"),
        ({"reward_funcs": "gsm8k"}, r"its reward_funcs is \['exact'\], not \['gsm8k'\]"),
        ({"tokenizer_chat_template": "{{ messages[0].content }}"}, "it differs in chat template"),
    ],
)
def test_another_objective_online_is_refused_by_the_name_of_its_setting(ppo, given, said):
    with pytest.raises(UsageError, match=said):
        ppo.resume(**given)


def test_a_large_weight_is_read_in_pieces_from_its_first_to_its_last_byte(tmp_path):
    numbers = torch.arange(WHOLE_BYTES, dtype=torch.float32)
    marks = set()
    for changed in (None, 0, numbers.numel() - 1, PIECE_BYTES):
        folder = tmp_path / str(changed)
        folder.mkdir()
        other = numbers.clone()
        if changed is not None:
            other[changed] = -1
        save_file({"weight": other}, folder / MODEL)
        marks.add(fingerprint(folder))
    assert len(marks) == 3  # a number between two samples is not noticed
    assert NUM_PIECES * PIECE_BYTES < WHOLE_BYTES


def test_a_weight_of_another_type_or_name_has_another_fingerprint():
    class Memory:
        def __init__(self, **tensors: torch.Tensor) -> None:
            self.tensors = tensors

        def names(self) -> list[str]:
            return list(self.tensors)

        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(self.tensors[name].shape)

        def dtype(self, name: str) -> torch.dtype:
            return self.tensors[name].dtype

        def read(self, name: str) -> torch.Tensor:
            return self.tensors[name]

    zeros = torch.zeros(4, 2)
    different = [Memory(a=zeros), Memory(b=zeros), Memory(a=zeros.bfloat16()), Memory(a=zeros.T), Memory(a=zeros[0, 0])]
    assert len({fingerprint_of(source) for source in different}) == len(different)
    assert fingerprint_of(Memory(a=zeros, b=zeros + 1)) == fingerprint_of(Memory(b=zeros + 1, a=zeros))


def test_a_call_does_not_make_another_tokenizer_and_a_new_token_does():
    tokenizer = make_tiny_tokenizer()
    mark = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == mark
    tokenizer.add_tokens(["<|extra|>"])
    assert tokenizer_fingerprint(tokenizer) != mark


def test_a_configuration_is_another_one_where_the_same_weights_compute_other_things(tmp_path, tiny_model_dir):
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    mark = configuration_fingerprint(str(folder))
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"transformers_version": "9.9"}))
    assert configuration_fingerprint(str(folder)) == mark
    (folder / "config.json").write_text(json.dumps(written | {"rms_norm_eps": 0.5}))
    assert configuration_fingerprint(str(folder)) != mark


def test_a_reward_file_that_was_mended_since_the_checkpoint_is_named_and_does_not_end_the_run(tmp_path):
    file, store = tmp_path / "mine.py", CheckpointStore(tmp_path / "checkpoints", max_num=1)
    file.write_text("def reward_func(queries, prompts, labels): return [0.0] * len(queries)")
    for named in (str(file), f"{file}:reward_func"):
        reward = RewardConfig(reward_func=named)
        with store.writing(7, {"identity": {}, REWARD_FILE: reward_file_hash(reward)}, needed_bytes=0):
            pass
        assert reward_file_notice(store.latest(), reward) == []
        assert reward_file_notice(None, reward) == []
        written = file.read_text()
        file.write_text(written.replace("0.0", "1.0"))
        (line,) = reward_file_notice(store.latest(), reward)
        assert line.startswith(f"the reward file {named} has changed since the checkpoint of iteration 7")
        file.write_text(written)


def test_a_run_without_a_reward_file_has_no_notice_about_one(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", max_num=1)
    reward = RewardConfig(reward_funcs=["math"])
    with store.writing(7, {"identity": {}, REWARD_FILE: reward_file_hash(reward)}, needed_bytes=0):
        pass
    assert reward_file_notice(store.latest(), reward) == []


@pytest.mark.parametrize("command", SETTINGS_OF_IDENTITY)
def test_a_checkpoint_records_the_same_settings_as_before(command):
    given = {"teacher_pretrain": "x"} if command == "gkd" else {}
    recorded = set(" ".join(settings_identity(resolve(command, **given))).split())
    listed = set(f"{OF_EVERY_ONLINE_COMMAND} {SETTINGS_OF_IDENTITY[command]}".split())
    new = "add each to a list above if it affects results, else exclude it in runs/online/identity.py"
    assert not recorded - listed, new
    assert not listed - recorded, "no longer recorded: old checkpoints could be resumed with other values"
