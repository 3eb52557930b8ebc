"""Commands with images in rows: items have them, rlhf data shows them, and text models reject them."""

import io
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from picture_rows import write_rows
from rich.console import Console
from tiny_vision import save_larger_vision, save_tiny_vision
from transformers import AutoTokenizer

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.kto import KTOConfig
from rlhf_cli.commands.prm import PRMConfig
from rlhf_cli.commands.rm import RMConfig
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.options import build_config
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.data_view import show
from rlhf_cli.runs.offline.distill import distill_task
from rlhf_cli.runs.offline.dpo import dpo_task
from rlhf_cli.runs.offline.kto import kto_task
from rlhf_cli.runs.offline.prm import prm_task
from rlhf_cli.runs.offline.rm import rm_task
from rlhf_cli.runs.offline.sft import sft_task

LLAVA_TEMPLATE = Path(__file__).parents[3] / "examples/templates/llava_1_5.jinja"
ASKED = {"prompt": "<image>How many?", "images": ["a.png"]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [ASKED | {"response": "two"}, {"prompt": "2+2?", "response": "4"}],
    "dpo": [ASKED | {"chosen": "two", "rejected": "ten"}, {"prompt": "2+2?", "chosen": "4", "rejected": "5"}],
    "kto": [
        ASKED | {"response": "two", "label": True},
        ASKED | {"images": ["other.png"], "response": "ten", "label": False},
    ],
}
ROWS["rm"], ROWS["distill"] = ROWS["dpo"], ROWS["sft"]
ROWS["prm"] = [
    ASKED | {"completions": ["I see two.", "So two."], "labels": [True, False]},
    {"prompt": "2+2?", "completions": ["It is 4."], "labels": [True]},
]
TASKS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTConfig, sft_task),
    "dpo": (DPOConfig, dpo_task),
    "kto": (KTOConfig, kto_task),
    "rm": (RMConfig, rm_task),
    "prm": (PRMConfig, prm_task),
    "distill": (DistillConfig, distill_task),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idefics3")
    save_tiny_vision("idefics3", folder / "model")
    save_larger_vision(folder / "model", folder / "teacher")
    for name, rows in ROWS.items():
        write_rows(folder, *rows).rename(folder / f"{name}.jsonl")
    (folder / "other.png").write_bytes((folder / "b.jpg").read_bytes())
    return folder


def task_of(command: str, folder: Path, **settings: Any) -> Any:
    config_class, make_task = TASKS[command]
    given = {
        "pretrain": str(folder / "model"),
        "dataset": str(folder / f"{command}.jsonl"),
        "output": str(folder / "run"),
        "param_dtype": "fp32",
        **({"teacher_pretrain": str(folder / "teacher")} if command == "distill" else {}),
        **settings,
    }
    return make_task(build_config(config_class, given))


def test_a_folder_of_pictures_that_is_not_there_is_refused_before_any_row_is_read(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"image_dir 'nowhere': there is no such folder"):
        task_of("sft", folder, image_dir="nowhere")


def test_llava_learns_to_stop_by_the_template_of_the_examples(tmp_path: Path) -> None:
    model = save_tiny_vision("llava", tmp_path / "model")
    bare = tmp_path / "bare.jinja"
    bare.write_text(
        "{% for m in messages %}{{ m.role.upper() }}: {% for part in m.content %}"
        "{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %} {% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    write_rows(tmp_path, *ROWS["sft"]).rename(tmp_path / "sft.jsonl")
    with pytest.raises(UsageError, match=r"no end of turn .* examples/templates/llava_1_5\.jinja is one for LLaVA"):
        task_of("sft", tmp_path, tokenizer_chat_template=str(bare))
    found = task_of("sft", tmp_path, tokenizer_chat_template=str(LLAVA_TEMPLATE)).items.data.data.items
    tokenizer = AutoTokenizer.from_pretrained(model)
    image = "<image>" * 16
    expected = [(f"USER: {image}\nHow many? ASSISTANT:", " two<|im_end|>"), ("USER: 2+2? ASSISTANT:", " 4<|im_end|>")]
    for sequence, (asked, learned) in zip(found, expected, strict=True):
        assert tokenizer.decode(sequence.token_ids[~sequence.loss_mask]) == asked
        assert tokenizer.decode(sequence.token_ids[sequence.loss_mask]) == learned


@pytest.mark.parametrize(("command", "num_pictures"), [(name, 2 if name == "kto" else 1) for name in TASKS])
def test_packs_of_the_command_have_the_pictures_of_their_rows(command: str, num_pictures: int, folder: Path) -> None:
    items = task_of(command, folder).items.data
    made = items.collate([0, 1])
    pack = made if command == "sft" else made.pack
    assert len(pack.pictures.pictures) == num_pictures
    if command == "kto":  # a question about another image is a different prompt
        assert items.partners.tolist() == [1, 0]


@pytest.mark.parametrize("command", ["dpo", "prm"])
def test_data_shows_the_size_and_the_tokens_of_a_picture(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"for": command, "dataset": str(folder / f"{command}.jsonl"), "pretrain": str(folder / "model")}
    previews = inspect_data(build_config(DataCommandConfig, given))
    show(previews, Console(), command=command)
    shown = " ".join(capsys.readouterr().out.split())
    assert "[picture 1: 56 x 28 pixels, 7 tokens]How many?" in shown
    assert "<image>" not in shown
    assert "▀" not in shown


def test_data_draws_the_pictures_of_a_text_below_it_on_a_terminal(folder: Path) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    given = {"for": "kto", "dataset": str(folder / "kto.jsonl"), "pretrain": str(folder / "model")}
    show(inspect_data(build_config(DataCommandConfig, given)), terminal, command="kto", environment={})
    assert isinstance(terminal.file, io.StringIO)
    lines = [line for line in terminal.file.getvalue().splitlines() if "▀" in line]
    assert [line.count("▀") for line in lines] == [48] * 12 + [36] * 18  # 56 x 28 and 56 x 56 pixels


def test_settings_of_pictures_are_refused_where_nothing_reads_them(
    folder: Path, tmp_path: Path, tiny_model_dir: Any
) -> None:
    plain = tmp_path / "sft.jsonl"
    plain.write_text(json.dumps(ROWS["sft"][1]) + "\n")
    with pytest.raises(UsageError, match=r"max_pixels requires a vision-language model, .* is a text model"):
        task_of("sft", folder, pretrain=str(tiny_model_dir), dataset=str(plain), max_pixels=1000)
    assert len(task_of("sft", folder, pretrain=str(tiny_model_dir), dataset=str(plain)).items.data.lengths) == 1


def test_a_step_is_read_at_the_same_token_with_a_picture_before_it(folder: Path) -> None:
    pictured, plain = task_of("prm", folder).items.data.data.items
    for item, num_steps in ((pictured, 2), (plain, 1)):
        assert len(item.ends) == num_steps
        assert item.ends[-1] == item.token_ids.size
    (placed,) = pictured.pictures
    assert placed.start + placed.length <= pictured.start
    decode = load_tokenizer(ModelConfig(pretrain=str(folder / "model"))).decode
    steps = [decode(pictured.token_ids[a:b]) for a, b in pairwise([pictured.start, *pictured.ends])]
    assert steps == ["I see two.\n", "So two.<|im_end|>"]


def test_a_teacher_that_cuts_pictures_in_another_way_than_the_student_is_refused(folder: Path, tmp_path: Path) -> None:
    splits = Path(shutil.copytree(folder / "teacher", tmp_path / "splits"))
    shutil.copy(save_tiny_vision("idefics3", tmp_path / "other", splits=True) / "processor_config.json", splits)
    with pytest.raises(UsageError, match=r"--teacher_pretrain .*splits' splits images differently than the policy"):
        task_of("distill", folder, teacher_pretrain=str(splits))
