"""Settings from flags, YAML and defaults, and error messages for mistakes."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator
from settings_files import from_yaml

from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import config_class, flags_of
from rlhf_cli.options import build_config, to_yaml, typer_command
from rlhf_cli.settings_file import read_yaml


class Paint(SettingsGroup):
    """Paint"""

    colour: str
    """Name of the colour."""
    finish: Literal["matt", "satin", "gloss"] = "matt"
    """How it shines."""
    coats: int = Field(2, gt=0)
    """Layers."""
    level: Literal[0, 1, 2] = 1
    """Grade."""


class Tools(SettingsGroup):
    """Tools"""

    brushes: list[str] = []
    """Brushes to use."""
    weights: list[float] = [1.0]
    """Weight of each."""
    pair: tuple[float, float] = (0.9, 0.95)
    """Two numbers."""
    share: float | None = Field(0.5, ge=0, le=1)
    """A share."""
    cover_floor: bool = False
    """Protect the floor."""
    clean_up: bool = True
    """Wash everything."""
    primer: bool | None = None
    """Paint a first coat of primer."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> "Tools":
        if self.brushes and len(self.brushes) != len(self.weights):
            raise ValueError(f"weights has {len(self.weights)} values for {len(self.brushes)} brushes")
        return self


class JobConfig(CommandConfig):
    paint: Paint
    tools: Tools = Tools(share=0.25, cover_floor=True)


def parse(*args: str) -> JobConfig:
    """Return the parsed config of a command line."""
    seen: list[JobConfig] = []

    def job(config: JobConfig) -> None:
        """Paint a room."""
        seen.append(config)

    typer_command("job", config_class(job), job, text=job.__doc__).main(list(args), standalone_mode=False)
    return seen[0]


def complaint(*args: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*args)
    message = str(caught.value)
    assert "\n" not in message
    assert "Value error" not in message
    return message


def write(folder: Path, text: str) -> str:
    (folder / "job.yaml").write_text(text)
    return str(folder / "job.yaml")


def test_defaults_of_the_command_win_over_those_of_the_group():
    config = parse("--colour", "red")
    assert (config.paint.coats, config.tools.share, config.tools.cover_floor) == (2, 0.25, True)


def test_a_given_value_keeps_the_other_defaults_of_the_command():
    assert parse("--colour", "red", "--pair", "0", "1").tools == Tools(pair=(0, 1), share=0.25, cover_floor=True)


def test_flag_beats_yaml_beats_default(tmp_path):
    file = write(tmp_path, "colour: red\ncoats: 7\nshare: 1e-1\n")
    config = parse("--config", file, "--coats", "3")
    assert (config.paint.colour, config.paint.coats, config.tools.share) == ("red", 3, 0.1)


def test_hyphens_are_underscores_in_flags_but_not_in_values():
    config = parse("--colour", "blue-green", "--no-cover-floor", "--no_clean_up")
    assert (config.paint.colour, config.tools.cover_floor, config.tools.clean_up) == ("blue-green", False, False)


def test_a_switch_may_be_turned_on_and_off(tmp_path):
    file = write(tmp_path, "colour: red\nclean_up: false\ncover_floor: true\n")
    tools = parse("--config", file, "--clean_up", "--no_cover_floor").tools
    assert (tools.clean_up, tools.cover_floor) == (True, False)


def test_a_switch_without_a_fixed_default_takes_auto(tmp_path):
    file = write(tmp_path, "colour: red\nprimer: true\n")
    assert parse("--config", file).tools.primer is True
    for words in (["--primer", "auto"], ["--primer=auto"]):
        assert parse("--config", file, *words).tools.primer is None
        assert parse("--colour", "red", *words).tools.primer is None
    assert parse("--config", write(tmp_path, "colour: red\nprimer: auto\n")).tools.primer is None
    assert parse("--colour", "red", "--primer", "false").tools.primer is False


def test_lists_are_comma_separated_and_tuples_take_their_values():
    tools = parse("--colour=red", "--brushes", "round, flat", "--weights", "1,0.5", "--pair", "-10", "1e3").tools
    assert (tools.brushes, tools.weights, tools.pair) == (["round", "flat"], [1.0, 0.5], (-10.0, 1000.0))


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a(x=1,y=2),b", ["a(x=1,y=2)", "b"]),
        ("a, b(x=1, y=2) ,c()", ["a", "b(x=1, y=2)", "c()"]),
        ("a(,b", ["a(", "b"]),
        ("a),b)", ["a)", "b)"]),
        ("a,,b,", ["a", "b"]),
        ("a, ,b", ["a", "", "b"]),  # for the setting to refuse
    ],
)
def test_a_comma_in_parentheses_belongs_to_its_item(text, items):
    weights = ",".join("1" for _ in items)
    assert parse("--colour=red", "--brushes", text, "--weights", weights).tools.brushes == items


def test_lists_and_tuples_are_lists_in_yaml(tmp_path):
    file = write(tmp_path, "colour: red\nbrushes: [round, flat]\nweights: [1, 0.5]\npair: [-10, 1000]\n")
    assert (
        from_yaml(JobConfig, Path(file)).tools
        == parse("--colour=red", "--brushes=round,flat", "--weights=1,0.5", "--pair", "-10", "1000").tools
    )


def test_a_list_may_be_written_with_commas_in_yaml_too(tmp_path):
    config = from_yaml(JobConfig, Path(write(tmp_path, "colour: red\nbrushes: round\n")))
    assert config.tools.brushes == ["round"]


def test_null_clears_an_optional_setting(tmp_path):
    assert parse("--colour", "red", "--share", "null").tools.share is None
    assert parse("--config", write(tmp_path, "colour: red\nshare: null\n")).tools.share is None


def test_choices_of_numbers_are_read_from_text(tmp_path):
    assert parse("--colour", "red", "--level", "2").paint.level == 2
    assert parse("--config", write(tmp_path, "colour: red\nlevel: 2\n")).paint.level == 2


def test_missing_settings_are_named_together():
    assert complaint("--coats", "1") == "missing --colour"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--coats", "0"], "--coats 0: must be an integer > 0"),
        (["--coats", "2.5"], "--coats 2.5: must be an integer > 0"),
        (["--coats", "many"], "--coats many: must be an integer > 0"),
        (["--share", "2"], "--share 2: must be a number from 0 to 1"),
        (["--share", "nan"], "--share nan: must be a number from 0 to 1"),
        (["--pair", "1", "inf"], "--pair 1 inf: must be 2 numbers"),
        (["--finish", "shiny"], "--finish shiny: must be matt, satin or gloss"),
        (["--level", "3"], "--level 3: must be 0, 1 or 2"),
        (["--pair", "1", "x"], "--pair 1 x: must be 2 numbers"),
        (["--weights", "1,x"], "--weights 1,x: must be numbers separated by commas"),
        (["--brushes", "a,b"], "weights has 1 values for 2 brushes"),
        (["--coat", "3"], "unknown flag --coat (did you mean --coats?)"),
        (["--no-clean-upp"], "unknown flag --no-clean-upp (did you mean --no_clean_up?)"),
        (["--zzz=1"], "unknown flag --zzz"),
        (["--coats", "--finish", "matt"], "--coats requires an integer > 0, but --finish follows"),
        (["--pair", "1", "--coats", "3"], "--pair requires 2 numbers, but --coats follows"),
        (["--coats", "1", "--coats", "2"], "--coats is given more than once"),
        (["--clean_up", "--no_clean_up"], "--clean_up is given more than once"),
        (["extra"], "unexpected 'extra': pass settings as --NAME VALUE"),
    ],
)
def test_a_wrong_flag_is_named_with_what_would_be_right(args, message):
    assert complaint("--colour", "red", *args) == message


def test_several_mistakes_are_told_in_one_line():
    assert complaint("--coat", "3", "--finish", "shiny", "--coats", "0") == (
        "unknown flag --coat (did you mean --coats?); missing --colour; "
        "--finish shiny: must be matt, satin or gloss; --coats 0: must be an integer > 0"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red\ncoat: 1\n", "unknown setting coat in {} (did you mean coats?)"),
        ("colour: red\ncoats: 0\n", "coats in {} 0: must be an integer > 0"),
        ("colour: red\ncoats: true\n", "coats in {} true: must be an integer > 0"),
        ("colour: red\nshare: .nan\n", "share in {} nan: must be a number from 0 to 1"),
        ("colour: red\nweights: [.inf]\n", "weights in {} inf: must be numbers separated by commas"),
        ("colour: 12\n", "colour in {} 12: must be text"),
        ("colour: red\nclean_up: maybe\n", "clean_up in {} maybe: must be true or false"),
        ("colour: red\nclean_up: auto\n", "clean_up in {} auto: must be true or false"),
        ("colour: red\nprimer: maybe\n", "primer in {} maybe: must be true, false or auto"),
        ("colour: red\npair: [1]\n", "pair in {} 1: must be 2 numbers"),
        ("colour: red\ncoats: null\n", "coats in {} null: must be an integer > 0"),
        (
            "paint: {{colour: red}}\n",
            "unknown setting paint in {}: settings are flat, move its keys to the top level",
        ),
        ("colour: red\ncolour: blue\n", "--config {}, line 2: colour is given more than once"),
        ("- colour\n", "--config {}: must be lines of `setting: value`, not a list"),
        ("colour: 'red\n", "--config {}, line 2: found unexpected end of stream"),
    ],
)
def test_a_wrong_line_of_yaml_is_named_with_its_file(tmp_path, text, message):
    file = write(tmp_path, text.replace("{{", "{").replace("}}", "}"))
    expected = message.format(file)
    said = complaint("--config", file)
    assert said == expected or said == f"{expected}; missing --colour"


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    assert complaint("--config", str(tmp_path / "none.yaml")).endswith("none.yaml: no such file or directory")
    assert complaint("--config", str(tmp_path)).endswith(f"{tmp_path}: is a directory")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in complaint("--config", str(tmp_path / "binary"))


def files(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        file = folder / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def test_of_several_config_files_the_later_wins(tmp_path):
    files(tmp_path, base="colour: red\ncoats: 7\npair: [0, 0.5]\n", big="coats: 9\nshare: null\n")
    config = parse("--config", f"{tmp_path}/base.yaml, {tmp_path}/big.yaml", "--pair", "0", "1")
    assert (config.paint.colour, config.paint.coats, config.tools.share, config.tools.pair) == ("red", 9, None, (0, 1))


def test_a_file_extends_others_beside_it_and_is_later_than_all_of_them(tmp_path):
    (tmp_path / "sizes").mkdir()
    files(tmp_path, root="colour: red\ncoats: 1\nlevel: 0\n", base="extends: root.yaml\ncoats: 2\nfinish: gloss\n")
    files(tmp_path / "sizes", big="coats: 3\nextends: [../base.yaml, none.yaml]\n", none="finish: satin\n")
    paint = parse("--config", f"{tmp_path}/sizes/big.yaml").paint
    assert paint == Paint(colour="red", finish="satin", coats=3, level=0)
    assert from_yaml(JobConfig, tmp_path / "sizes" / "big.yaml").paint == paint
    over = parse("--config", f"{tmp_path}/sizes/big.yaml,{tmp_path}/base.yaml").paint
    assert (over.finish, over.coats) == ("gloss", 2)


def test_the_outcome_of_several_files_is_one_file(tmp_path):
    files(tmp_path, base="colour: red\ncoats: 7\n", big="extends: base.yaml\ncoats: 9\n")
    config = parse("--config", f"{tmp_path}/big.yaml")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert "extends" not in to_yaml(config)
    assert parse("--config", f"{tmp_path}/config.yaml") == config


def test_a_wrong_setting_is_named_with_the_file_it_is_in(tmp_path):
    files(tmp_path, base="colour: red\ncoats: 0\nfinishh: matt\n", big="extends: base.yaml\nlevel: 4\n")
    base, big = tmp_path / "base.yaml", tmp_path / "big.yaml"
    assert complaint("--config", str(big)) == (
        f"unknown setting finishh in {base} (did you mean finish?); "
        f"coats in {base} 0: must be an integer > 0; level in {big} 4: must be 0, 1 or 2"
    )
    files(tmp_path, base="colour: red\ncoats: 0\n", big="extends: base.yaml\ncoats: -1\n")
    assert complaint("--config", str(big)) == f"coats in {big} -1: must be an integer > 0"


@pytest.mark.parametrize(
    ("extends", "fault"),
    [
        ("none.yaml", "extends {}/none.yaml: no such file or directory"),
        ("big.yaml", "extends {}/big.yaml: a file cannot extend itself"),
        ("round.yaml", "extends {0}/round.yaml extends {0}/big.yaml: a file cannot extend itself"),
        ("[a.yaml, 3]", ": extends a.yaml 3: must be a file, or a list of files"),
        ("''", ": extends '': must be a file, or a list of files"),
        ("broken.yaml", "extends {}/broken.yaml, line 2: coats is given more than once"),
    ],
)
def test_files_that_cannot_be_extended_are_named_with_the_file_that_extends_them(tmp_path, extends, fault):
    files(tmp_path, big=f"extends: {extends}\n", round="extends: ./big.yaml\n", broken="coats: 1\ncoats: 2\n")
    files(tmp_path, a="colour: red\n")
    said = complaint("--config", f"{tmp_path}/big.yaml")
    assert said == f"--config {tmp_path}/big.yaml{' ' * (not fault.startswith(':'))}{fault.format(tmp_path)}"


def test_files_that_extend_each_other_without_bound_are_refused(tmp_path):
    files(tmp_path, **{f"f{n}": f"extends: [f{n + 1}.yaml, f{n + 1}.yaml]\n" for n in range(12)}, f12="coats: 1\n")
    assert complaint("--config", f"{tmp_path}/f0.yaml").endswith(": more than 100 files")


def test_a_missing_name_beside_a_comma_is_refused(tmp_path):
    file = write(tmp_path, "colour: red\n")
    assert complaint("--config", f"{file},") == f"--config {file},: missing file name next to a comma"


def test_an_empty_config_file_changes_nothing(tmp_path):
    assert read_yaml(Path(write(tmp_path, "# nothing\n"))) == {}


def test_yaml_of_a_config_reads_back_to_the_same_config(tmp_path):
    config = build_config(
        JobConfig,
        {"colour": "null\n'ü': {}", "coats": 3, "brushes": ["1", "a b"], "weights": [1e-7, 3], "share": None},
    )
    assert from_yaml(JobConfig, Path(write(tmp_path, to_yaml(config)))) == config


def test_yaml_names_the_groups_in_comments():
    text = to_yaml(build_config(JobConfig, {"colour": "red"}))
    assert text.startswith("# Paint\ncolour: red\n")
    assert "\n# Tools\nbrushes: []\n" in text


def test_a_config_built_in_python_gives_the_messages_of_the_command_line():
    with pytest.raises(UsageError, match=r"^unknown setting --coat \(did you mean coats\?\); --coats 0: must be"):
        build_config(JobConfig, {"colour": "red", "coat": 1, "coats": 0})


def test_a_name_declared_by_two_groups_is_refused():
    class More(SettingsGroup):
        coats: int = 1

    class Twice(CommandConfig):
        paint: Paint
        more: More = More()

    with pytest.raises(TypeError, match="--coats of more is already a flag in paint"):
        flags_of(Twice)


def test_a_group_cannot_take_the_name_of_a_flag_every_command_has():
    class Reserved(SettingsGroup):
        config: str = ""

    class Config(CommandConfig):
        reserved: Reserved = Reserved()

    with pytest.raises(TypeError, match="already a flag in every command"):
        flags_of(Config)


def test_a_launcher_may_add_local_rank():
    assert parse("--local_rank=3", "--colour", "red").paint.colour == "red"


class Gift(SettingsGroup):
    """Gift"""

    to: str
    """Who gets it."""
    from_: Literal["me", "us"] = Field("us", alias="from")
    """Who gives it."""


class GiftConfig(CommandConfig):
    positional = "to"

    gift: Gift


def parse_gift(*args: str) -> GiftConfig:
    seen: list[GiftConfig] = []

    def give(config: GiftConfig) -> None:
        """Give something."""
        seen.append(config)

    typer_command("give", config_class(give), give).main(list(args), standalone_mode=False)
    return seen[0]


def test_a_setting_may_be_called_by_a_word_of_python(tmp_path):
    config = parse_gift("--to", "ada", "--from", "me")
    assert config.gift.from_ == "me"
    file = tmp_path / "gift.yaml"
    file.write_text(to_yaml(config))
    assert read_yaml(file) == {"to": "ada", "from": "me"}
    assert from_yaml(GiftConfig, file) == config
    with pytest.raises(UsageError, match=r"^--from you: must be me or us$"):
        parse_gift("--to", "ada", "--from", "you")


class Gifts(SettingsGroup):
    """Gifts"""

    to: list[str]
    """Who gets one."""
    number: int = 1
    """Gifts for each."""


class GiftsConfig(CommandConfig):
    positional = "to"

    gifts: Gifts


def test_a_list_may_be_given_as_words_without_its_flag():
    seen: list[GiftsConfig] = []
    for words in (["ada", "eve, bob"], ["--number", "2", "ada", "eve, bob"], ["ada", "eve, bob", "--number", "2"]):
        typer_command("give", GiftsConfig, seen.append).main(words, standalone_mode=False)
    assert [(config.gifts.to, config.gifts.number) for config in seen] == [
        (["ada", "eve, bob"], 1),
        (["ada", "eve, bob"], 2),
        (["ada", "eve, bob"], 2),
    ]


def test_one_setting_may_be_given_without_its_flag():
    assert parse_gift("ada", "--from", "me") == parse_gift("--from", "me", "ada") == parse_gift("--to=ada", "--from=me")
    with pytest.raises(UsageError, match=r"^unexpected 'bob': pass settings as --NAME VALUE$"):
        parse_gift("ada", "bob")
    with pytest.raises(UsageError, match=r"^unexpected 'bob'"):
        parse_gift("--to", "ada", "bob")
    with pytest.raises(UsageError, match=r"^missing --to$"):
        parse_gift("--from", "me")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("? [colour, red]\n: 1\n", "line 1: a key must be a single word"),
        ("? {a: b}\n: 1\n", "line 1: a key must be a single word"),
        ("colour: &x [*x]\n", "colour contains itself"),
        ("colour: &x {a: [*x]}\n", "colour contains itself"),
        ("colour: 2026-13-45\n", "line 1: 2026-13-45 is not a valid timestamp"),
        ("coats: " + "9" * 5_000 + "\n", r"line 1: 9{300}\.\.\. \(5,000 characters\) is not a valid int"),
        ("coats: 0x" + "f" * 5_000 + "\n", r"f\.\.\. \(5,002 characters\) is not a valid int"),
        ("a: 1\ncolour: !!timestamp nope\n", "line 2: nope is not a valid timestamp"),
        ("colour: !!bool x\n", "line 1: x is not a valid bool"),
        ("colour: !!int ''\n", "line 1: '' is not a valid int"),
        ("colour: !!float x\n", "line 1: x is not a valid float"),
        ("colour: !!map x\n", "line 1: expected a mapping node"),
        ("colour: " + "[" * 5_000 + "]" * 5_000 + "\n", "nested too deep"),
        ("colour: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("colour: !!int x\n", "x is not a valid int"),
        ("colour: !!binary ä\n", "failed to convert base64|ascii"),
        ("- a\n", "must be lines of `setting: value`"),
        ("a: b: c\n", "mapping values are not allowed here"),
        ("\x00", "special characters are not allowed|not YAML"),
    ],
)
def test_a_hostile_yaml_file_is_refused_in_one_sentence(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=rf"--config {path}.*({said})") as raised:
        read_yaml(Path(path))
    assert "\n" not in str(raised.value)


def test_aliases_that_double_twenty_times_are_refused_before_anything_writes_them_out(tmp_path):
    levels = [f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}, *a{level - 1}]" for level in range(1, 21)]
    path = write(tmp_path, "\n".join(["a0: &a0 red", *levels]) + "\n")
    with pytest.raises(UsageError, match=r": a12 has more than 1,000,000 characters or items") as raised:
        read_yaml(Path(path))
    assert len(str(raised.value)) < 500


def test_values_that_share_an_alias_are_read(tmp_path):
    path = write(tmp_path, "a: &x [red, blue]\nb: [*x, *x]\n")
    assert read_yaml(Path(path)) == {"a": ["red", "blue"], "b": [["red", "blue"], ["red", "blue"]]}


def test_a_message_cuts_a_long_value():
    said = complaint("--coats", "9" * 5_000)
    assert "(5,000 characters)" in said
    assert len(said) < 500


def test_texts_that_are_no_characters_and_homes_of_nobody_are_named():
    assert complaint("--colour", "\udcff") == "--colour: not valid UTF-8"
    assert complaint("--colour", "~nosuchuser/x") == "--colour ~nosuchuser/x: no such user"


class TouchUpConfig(JobConfig):
    unsupported = frozenset({"tools", "paint.coats"})
    tools: Tools = Tools(share=0.75)


def test_settings_that_a_command_does_not_support_have_no_flag_and_keep_its_defaults():
    config = build_config(TouchUpConfig, {"colour": "red"})
    assert config.tools.share == 0.75
    assert config.unsupported_in("tools") == set(Tools.model_fields)
    assert "coats" not in flags_of(TouchUpConfig)
    assert "# Tools" not in to_yaml(config)
    assert "coats" not in to_yaml(config)
    with pytest.raises(UsageError, match="unknown setting --coats; unknown setting --share"):
        build_config(TouchUpConfig, {"colour": "red", "coats": 2, "share": 0.1})
