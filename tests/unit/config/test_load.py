"""What a config becomes: overrides, paths, defaults, and TOML again."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from megatfm.commands.config import make_schema
from megatfm.config import (
    AdamWConfig,
    Config,
    MuonConfig,
    PluginOptimizer,
    PluginSchedule,
    find_config,
    list_presets,
    load_config,
    to_toml,
)
from megatfm.config.load import load as load_kind
from megatfm.config.prep import PrepConfig
from megatfm.config.sources import merge_files, read_files

Load = Callable[..., Config]


def kind_of(preset: str) -> type[Config] | type[PrepConfig]:
    return PrepConfig if preset.endswith("-data") else Config


def test_an_override_is_toml_or_a_plain_string(load: Load) -> None:
    config = load(
        "train.steps=20",
        "train.steps = 30",
        "optimizer.lr=3e-4",
        "optimizer.betas=[0.8, 0.9]",
        "data.shuffle=false",
        'lr_schedule.name="linear"',
        "objective.name=masked",
        'log.sinks=["wandb"]',
        "parallel.dp_shard=-1",
        "log.profile=10:13",
    )
    assert (config.train.steps, config.optimizer.lr, config.optimizer.betas) == (30, 3e-4, (0.8, 0.9))
    assert (config.data.shuffle, config.lr_schedule.name, config.objective.name) == (
        False,
        "linear",
        "masked",
    )
    assert (config.log.sinks, config.parallel.dp_shard, config.log.profile) == (["wandb"], -1, "10:13")


@pytest.mark.parametrize("name", ["2026-11-21", "run-1", "1e3x", "true-north", "nan0", "07"])
def test_a_string_needs_no_quotes_whatever_it_looks_like(load: Load, name: str) -> None:
    assert load(f"name={name}").name == name


def test_an_equals_sign_belongs_to_the_value(load: Load) -> None:
    assert load("run_dir=/runs/lr=3").run_dir == "/runs/lr=3"


def test_a_path_is_relative_to_the_file_that_says_it(load: Load, file: Path) -> None:
    data = load().data
    assert data.train == str(file.parent / "corpus/train")
    assert data.tokenizer == str(file.parent.parent / "tokenizer.model")
    assert data.validation["code"] == str(file.parent / "corpus/validation")
    assert data.validation["web"] == "s3://bucket/validation"


def test_a_path_from_the_command_line_is_relative_to_the_current_directory(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load("data.train=x", 'data.validation.code="y"', "data.tokenizer=hf://z/t", "run_dir=2026-11-21")
    assert config.data.train == str(tmp_path / "x")
    assert config.data.validation["code"] == str(tmp_path / "y")
    assert config.data.tokenizer == "hf://z/t"
    assert config.run_dir == str(tmp_path / "2026-11-21")
    assert load('data.validation={ code = "y" }').data.validation == {"code": str(tmp_path / "y")}
    assert load("data.train=~/x").data.train == str(Path.home() / "x")


@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_s_paths_are_relative_to_the_current_directory(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_kind(kind_of(preset), preset)
    path = config.out if isinstance(config, PrepConfig) else config.data.train
    assert Path(path).is_relative_to(tmp_path)


def test_a_plugin_s_optimizer_and_schedule_keep_their_own_keys(load: Load) -> None:
    optimizer, schedule = 'optimizer={name="mine", lr=1e-3, wobble=2}', 'lr_schedule={name="saw", teeth=3}'
    config = load('plugins=["my_package"]', optimizer, schedule)
    assert isinstance(config.optimizer, PluginOptimizer)
    assert isinstance(config.lr_schedule, PluginSchedule)
    assert config.optimizer.model_extra == {"wobble": 2}
    assert (config.optimizer.max_grad_norm, config.lr_schedule.model_extra) == (1.0, {"teeth": 3})
    assert tomllib.loads(to_toml(config))["optimizer"]["wobble"] == 2


def test_optimizers_have_their_own_fields(load: Load) -> None:
    assert type(load().optimizer) is AdamWConfig
    muon = load("optimizer.name=muon", "optimizer.matrix_lr=0.5").optimizer
    assert isinstance(muon, MuonConfig)
    assert (muon.matrix_lr, muon.lr) == (0.5, 1e-3)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.name=muon", "optimizer.lr=0.1", "run_dir=somewhere", 'resume.allow=["seed"]'),
        ("model.attention.n_kv_heads=1", "log.profile=1:2", "data.validation={}", "name=1984-01-01"),
    ],
)
def test_the_resolved_config_gives_itself_again(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = load(*overrides)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    monkeypatch.chdir(run)
    again = load_config(run)
    assert again == config
    assert to_toml(again) == to_toml(config)
    assert type(again.optimizer) is type(config.optimizer)
    spelled = tomllib.loads(to_toml(config))
    assert spelled["checkpoint"] == config.checkpoint.model_dump(), "defaults are spelled out"
    assert spelled["checkpoint"]["every"] == 500


def test_a_config_can_not_be_changed(load: Load) -> None:
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "b"  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Config, PrepConfig])
def test_the_schema_is_one_and_every_key_says_what_it_means(kind: type[Config] | type[PrepConfig]) -> None:
    schema = kind.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    objects = [schema, *(part for part in schema["$defs"].values() if part["type"] == "object")]
    for part in objects:
        # Only what belongs to a plugin may have keys that are not known here.
        assert part["additionalProperties"] is part["title"].startswith("Plugin")
        for key, field in part["properties"].items():
            # A section is described by its class, the names of optimizers by themselves.
            assert "description" in field or "const" in field or "$ref" in str(field), key


@pytest.mark.parametrize("kind", [Config, PrepConfig])
def test_the_schema_takes_the_presets(kind: type[Config] | type[PrepConfig]) -> None:
    of_files = jsonschema.Draft202012Validator(make_schema(kind))
    of_configs = jsonschema.Draft202012Validator(kind.model_json_schema())
    for preset in [name for name in list_presets() if kind_of(name) is kind]:
        values = tomllib.loads(find_config(preset)[0].read_text(encoding="utf-8"))
        of_files.validate(values)
        if "extends" in values:
            of_configs.validate(merge_files(kind, read_files(kind, preset)))


@pytest.mark.parametrize("preset", ["quickstart", "quickstart-data"])
def test_only_a_file_that_extends_another_may_leave_out_what_is_required(preset: str) -> None:
    schema = make_schema(kind_of(preset))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    values = tomllib.loads(find_config(preset)[0].read_text(encoding="utf-8"))
    extending = values | {"extends": "gpt2"}
    for key in kind_of(preset).model_json_schema()["required"]:
        assert not validator.is_valid({name: value for name, value in values.items() if name != key})
        assert validator.is_valid({name: value for name, value in extending.items() if name != key})
        if isinstance(values[key], dict) and key != "read":
            assert not validator.is_valid(values | {key: {}})
            assert validator.is_valid(extending | {key: {}})
    for known in (values, extending):
        assert not validator.is_valid(known | {"nmae": 1})
    assert not validator.is_valid(values | {"extends": ["gpt2"]})


def test_the_schema_refuses_what_loading_refuses() -> None:
    validator = jsonschema.Draft202012Validator(Config.model_json_schema())
    values = tomllib.loads(find_config("quickstart")[0].read_text(encoding="utf-8"))
    for section, key, value in [
        ("train", "steps", 0),
        ("train", "precision", "fp6"),
        ("optimizer", "lr", 0),
    ]:
        assert not validator.is_valid(values | {section: values[section] | {key: value}}), key


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; from megatfm.config import load_config; import megatfm.config.prep, megatfm.cli; "
        "load_config('quickstart'); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]
