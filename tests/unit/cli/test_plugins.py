"""User code named by settings: how it is located, and which code is rejected before a run starts."""

import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from settings_files import from_yaml

from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.plugins import (
    Plugin,
    contents_of_plugins,
    load_target,
    require_plugins,
    targets_of,
    without_folder,
)
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config, to_yaml


class Group(SettingsGroup):
    """Things"""

    thing: Annotated[str | None, Plugin(("one", "two"), ("first", "second"), records=("Row",))] = None
    """One or two."""
    things: Annotated[list[str], Plugin(("one", "two"), ("first",))] = []
    """Several."""


class Config(CommandConfig):
    group: Group = Group()


def config_of(**values: Any) -> Config:
    return build_config(Config, values)


def test_a_name_of_the_table_is_no_code() -> None:
    config = config_of(thing="two", things="one,two")
    assert list(targets_of(config)) == []
    require_plugins(config)


def test_a_file_is_found_again_from_any_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "own.py").write_text("import beside\ndef f(a, b): return beside.SUM(a, b)\n")
    (tmp_path / "beside.py").write_text("def SUM(a, b): return a + b\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(thing="own.py:f", things=["own.py:f"])
    assert config.group.thing == f"{tmp_path}/own.py:f"
    monkeypatch.chdir("/")
    assert load_target(str(config.group.thing))(1, 2) == 3
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert from_yaml(Config, file) == config


def test_a_module_is_imported() -> None:
    require_plugins(config_of(thing="operator:add"))
    assert load_target("operator:add")(1, 2) == 3


def test_two_names_of_one_file_share_its_module(tmp_path) -> None:
    (tmp_path / "own.py").write_text("STATE = []\ndef f(a): STATE.append(a)\ndef g(a): return STATE\n")
    load_target(f"{tmp_path}/own.py:f")(5)
    assert load_target(f"{tmp_path}/own.py:g")(0) == [5]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("three", "--thing three: must be one or two, or code as file.py:NAME or module:NAME"),
        ("own.py", "--thing own.py: must be one or two, or code as file.py:NAME"),
        ("own.py:", "must be one or two, or code as"),
        ("a b:c", "must be one or two, or code as"),
    ],
)
def test_what_is_neither_a_name_nor_code_is_refused(value, reason) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        config_of(thing=value)


@pytest.mark.parametrize(
    ("code", "name", "reason"),
    [
        (None, "f", "there is no file {path}"),
        ("x = (", "f", "line 1 of {path} is not valid Python"),
        ("import no_such_thing_here", "f", "the import of {path} raises ModuleNotFoundError: No module named"),
        ("def g(a, b): pass", "f", "{path} has no f; it has g"),
        (
            "def forward(a, b): pass\ndef g(a): pass",
            "forwards",
            "{path} has no forwards (did you mean forward?); it has fo",
        ),
        ("f = 3", "f", "f is 3, which cannot be called"),
        ("def f(a): pass", "f", "f has to take 2 arguments: first, second"),
        ("def f(a, b, *, c): pass", "f", "f has to take 2 arguments: first, second"),
    ],
)
def test_code_that_cannot_be_used_is_refused_in_one_sentence(code, name, reason, tmp_path) -> None:
    path = tmp_path / "own.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(UsageError) as refusal:
        require_plugins(config_of(thing=f"{path}:{name}"))
    assert str(refusal.value).startswith(f"--thing {path}:{name}: {reason.format(path=path)}")
    assert "\n" not in str(refusal.value)


def test_an_object_of_a_named_type_needs_no_parameters(tmp_path) -> None:
    (tmp_path / "own.py").write_text("class Row: pass\nrow = Row()\n")
    require_plugins(config_of(thing=f"{tmp_path}/own.py:row"))


def test_the_contents_of_a_file_count_and_its_folder_does_not(tmp_path) -> None:
    hashes = []
    for folder, code in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        path = tmp_path / folder / "own.py"
        path.parent.mkdir()
        path.write_text(code)
        config = config_of(thing=f"{path}:x")
        assert without_folder(config.group.thing) == "own.py:x"
        hashes.append(contents_of_plugins(config)["thing"])
    assert hashes[0] == hashes[1] != hashes[2]
    assert without_folder(str(Path("/x/y"))) == "/x/y"
