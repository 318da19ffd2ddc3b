"""Loading of configs: overrides, paths, defaults, TOML again, and keys of earlier versions."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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
    key_migrations,
    list_presets,
    load_config,
    to_toml,
)
from megatfm.config.key_migrations import find_renamed_keys, migrate, migrate_prep
from megatfm.config.load import load_section
from megatfm.config.prep import PrepConfig
from megatfm.config.sources import merge_files, read_files
from megatfm.errors import UsageError

Load = Callable[..., Config]


def kind_of(preset: str) -> type[Config] | type[PrepConfig]:
    return PrepConfig if preset.endswith("-data") else Config


@cache
def schema_of_configs(kind: type[Config] | type[PrepConfig]) -> dict[str, Any]:
    return kind.model_json_schema()


@cache
def schema_of_files(kind: type[Config] | type[PrepConfig]) -> dict[str, Any]:
    return make_schema(kind)


def test_an_override_is_toml_or_a_plain_string(load: Load) -> None:
    config = load(
        "train.steps=20", "train.steps = 30", "optimizer.lr=3e-4", "optimizer.betas=[0.8, 0.9]", "data.shuffle=false",
        'lr_schedule.name="linear"', "objective.name=masked", 'log.sinks=["wandb"]', "parallel.dp_shard=-1",
        "log.profile=10:13",
    )  # fmt: skip
    assert (config.train.steps, config.optimizer.lr, config.optimizer.betas) == (30, 3e-4, (0.8, 0.9))
    assert (config.data.shuffle, config.lr_schedule.name, config.objective.name) == (False, "linear", "masked")
    assert (config.log.sinks, config.parallel.dp_shard, config.log.profile) == (["wandb"], -1, "10:13")


@pytest.mark.parametrize("name", ["2026-11-21", "run-1", "1e3x", "true-north", "nan0", "07"])
def test_a_string_of_any_form_needs_no_quotes(load: Load, name: str) -> None:
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


def test_a_folder_may_be_named_like_a_variable(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's config, whose paths are absolute, names files in it that don't exist yet."""
    (folder := tmp_path / "$project").mkdir()
    monkeypatch.chdir(folder)
    config = load("data.cache_dir=cache")
    (stored := folder / "mine.toml").write_text(to_toml(config))
    assert load_config(stored) == config
    for path in (folder / "$NAME" / "cache", folder / "cache-$NAME"):
        with pytest.raises(UsageError, match=r"a config knows no variables of the environment"):
            load_config(stored, [f"data.cache_dir={path}"])


@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_s_paths_are_relative_to_here(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_section(kind_of(preset), preset)
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


@pytest.mark.parametrize("overrides", [
    (),
    ("optimizer.name=muon", "optimizer.lr=0.1", "run_dir=somewhere", 'resume.allow=["seed"]'),
    ("model.attention.n_kv_heads=1", "log.profile=1:2", "data.validation={}", "name=1984-01-01"),
])  # fmt: skip
def test_the_resolved_config_gives_itself_again(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = load(*overrides)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    monkeypatch.chdir(run)
    reloaded = load_config(run)
    assert reloaded == config
    assert to_toml(reloaded) == to_toml(config)
    assert type(reloaded.optimizer) is type(config.optimizer)
    spelled = tomllib.loads(to_toml(config))
    assert spelled["checkpoint"] == config.checkpoint.model_dump(), "defaults are spelled out"
    assert spelled["checkpoint"]["every"] == 500


@pytest.fixture(params=["lock", "environment.json"])
def run(request: pytest.FixtureRequest, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has been moved since it stored its config, and one copied without its lock."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "moved"
    folder.mkdir()
    (folder / request.param).touch()
    (folder / "config.toml").write_text(to_toml(load(f"run_dir={tmp_path / 'runs/a'}")), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("overrides", "expected"), [
    ((), "moved"),
    (("train.steps=20",), "moved"),
    (("name=a",), "moved"),
    (("name=b",), None),
    (("name=b", "run_dir=c"), "c"),
    (("run_dir=c",), "c"),
])  # fmt: skip
def test_a_run_is_where_its_folder_is_and_a_new_name_is_a_new_run(
    run: Path, tmp_path: Path, overrides: tuple[str, ...], expected: str | None
) -> None:
    for config in (load_config(run, overrides), load_config(run / "config.toml", overrides)):
        assert config.run_dir == (expected and str(tmp_path / expected))
    assert load_config("moved", overrides).run_dir == (expected and str(tmp_path / expected))


def test_a_config_that_extends_a_run_s_is_another_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text('extends = "moved/config.toml"\nname = "b"\n')
    assert load_config("b.toml").run_dir is None


def test_a_config_can_not_be_changed(load: Load) -> None:
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "b"


@pytest.mark.parametrize("kind", [Config, PrepConfig])
def test_the_schema_is_one_and_every_key_says_what_it_means(kind: type[Config] | type[PrepConfig]) -> None:
    schema = schema_of_configs(kind)
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
    of_files = jsonschema.Draft202012Validator(schema_of_files(kind))
    of_configs = jsonschema.Draft202012Validator(schema_of_configs(kind))
    for preset in [name for name in list_presets() if kind_of(name) is kind]:
        values = tomllib.loads(find_config(preset)[0].read_text(encoding="utf-8"))
        of_files.validate(values)
        if "extends" in values:
            of_configs.validate(merge_files(kind, read_files(kind, preset)))


@pytest.mark.parametrize("preset", ["quickstart", "quickstart-data"])
def test_only_a_file_that_extends_another_may_leave_out_what_is_required(preset: str) -> None:
    schema = schema_of_files(kind_of(preset))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    values = tomllib.loads(find_config(preset)[0].read_text(encoding="utf-8"))
    extending = values | {"extends": "gpt2"}
    for key in schema_of_configs(kind_of(preset))["required"]:
        assert not validator.is_valid({name: value for name, value in values.items() if name != key})
        assert validator.is_valid({name: value for name, value in extending.items() if name != key})
        if isinstance(values[key], dict) and key != "read":
            assert not validator.is_valid(values | {key: {}})
            assert validator.is_valid(extending | {key: {}})
    for known in (values, extending):
        assert not validator.is_valid(known | {"nmae": 1})
    assert not validator.is_valid(values | {"extends": ["gpt2"]})


def test_the_schema_refuses_what_loading_refuses() -> None:
    validator = jsonschema.Draft202012Validator(schema_of_configs(Config))
    values = tomllib.loads(find_config("quickstart")[0].read_text(encoding="utf-8"))
    for section, key, value in [("train", "steps", 0), ("train", "precision", "fp6"), ("optimizer", "lr", 0)]:
        assert not validator.is_valid(values | {section: values[section] | {key: value}}), key


def test_a_config_needs_no_torch_and_no_validator_of_other_configs() -> None:
    code = (
        "import sys, megatfm, megatfm.config.prep, megatfm.cli; megatfm.load_config('quickstart'), megatfm.Config; "
        "print('torch' in sys.modules, 'numpy' in sys.modules, megatfm.config.prep.PrepConfig.__pydantic_complete__)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout.split() == ["False", "False", "False"]


# ----------------------------------------------------------------------------------- keys of earlier versions


RENAMED = (
    ("schedule", "lr_schedule"),
    ("parallel.schedule", "parallel.pp_schedule"),
    ("optimizer[soap].every", "optimizer.precondition_frequency"),
    ("model.block", "model.layer_type"),
    ("model.attention[latent].kv_rank", "model.attention.kv_lora_rank"),
    ("train.cuda_graphs", "engine.graphs.enabled"),
    ("data.mixture.*.weight", "data.mixture.*.share"),
    ("data.warmup.steps", "data.warmup.n_steps"),
)


def test_keys_are_renamed_at_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_migrations, "BLOCK_KINDS", ("model.block.*", "model.layer_type.*"))
    stored: dict[str, Any] = {
        "schedule": {"name": "cosine"},
        "parallel": {"schedule": "1f1b", "tp": 2},
        "optimizer": {"name": "soap", "every": 7},
        "model": {
            "attention": {"name": "latent", "kv_rank": 4},
            "block": {"wide": {"attention": {"name": "latent", "kv_rank": 8}}, "other": {"attention": {"kv_rank": 3}}},
        },
        "train": {"cuda_graphs": True, "steps": 5},
        "data": {"mixture": {"a": {"weight": 1.0}, "b": {"weight": 2.0}}, "warmup": [{"steps": 3}, {"steps": 4}]},
    }  # fmt: skip
    before = repr(stored)
    expected = {
        "lr_schedule": {"name": "cosine"},
        "parallel": {"pp_schedule": "1f1b", "tp": 2},
        "optimizer": {"name": "soap", "precondition_frequency": 7},
        "model": {
            "attention": {"name": "latent", "kv_lora_rank": 4},
            "layer_type": {
                "wide": {"attention": {"name": "latent", "kv_lora_rank": 8}},
                "other": {"attention": {"kv_rank": 3}},
            },
        },
        "train": {"steps": 5},
        "engine": {"graphs": {"enabled": True}},
        "data": {"mixture": {"a": {"share": 1.0}, "b": {"share": 2.0}}, "warmup": [{"n_steps": 3}, {"n_steps": 4}]},
    }  # fmt: skip
    assert migrate(stored, RENAMED, (), ()) == expected
    assert repr(stored) == before
    assert migrate(expected, RENAMED, (), ()) == expected
    other = {"optimizer": {"name": "adamw", "every": 7}}
    assert migrate(other, RENAMED, (), ()) == other


def test_keys_of_kinds_of_blocks_may_be_dotted() -> None:
    """`with_changes` takes them so from Python, and configs store them so."""
    kinds = {"wide": {"attention.n_heads": 8, "ffn": {"name": "moe"}, "ffn.capacity": 2.0}}
    layer_type = {"wide": {"attention": {"n_heads": 8}, "ffn": {"name": "moe", "capacity_factor": 2.0}}}
    for key in ("block", "layer_type"):
        assert migrate({"model": {key: kinds}}) == {"model": {"layer_type": layer_type}}


def test_values_and_what_was_computed_before_a_key_came() -> None:
    values = (("parallel.cp_method", "heads", "ulysses"), ("model.ffn.kind", 1, "one"))
    before = (("optimizer[muon].dtype", "bf16"),)
    stored = {"parallel": {"context": "heads"}, "model": {"ffn": {"kind": 1}, "block": {"a": {"ffn": {"kind": 1}}}}}
    for name, more in (("muon", {"dtype": "bf16"}), ("adamw", {})):
        migrated = migrate(
            {**stored, "optimizer": {"name": name}}, (("parallel.context", "parallel.cp_method"),), values, before,
        )  # fmt: skip
        assert migrated["parallel"] == {"cp_method": "ulysses"}
        assert migrated["model"] == {"ffn": {"kind": "one"}, "block": {"a": {"ffn": {"kind": "one"}}}}
        assert migrated["optimizer"] == {"name": name, **more}
    assert migrate({"optimizer": {"name": "muon", "dtype": "fp32"}}, (), (), before)["optimizer"]["dtype"] == "fp32"


@pytest.mark.parametrize("odd", [None, 3, [], {"optimizer": 3}, {"data": {"warmup": [1]}}])
def test_migration_leaves_values_that_are_no_config(odd: Any) -> None:
    assert migrate(odd, RENAMED, (), ()) == odd


def test_no_old_name_is_a_key_of_today() -> None:
    """Else a config that this version stores would be translated, too."""
    for kind, renamed in ((Config, key_migrations.RENAMED_KEYS), (PrepConfig, key_migrations.RENAMED_PREP_KEYS)):
        schema = schema_of_configs(kind)
        for old, new in renamed:
            assert not has_key(schema, old), f"{old} → {new}"
    schema = schema_of_configs(Config)
    assert has_key(schema, "optimizer.max_grad_norm")
    assert has_key(schema, "optimizer[soap].precondition_frequency")
    assert not has_key(schema, "optimizer[adamw].precondition_frequency")
    assert has_key(schema, "data.mixture.*.weight")


def has_key(schema: dict[str, Any], path: str) -> bool:
    """Whether a JSON schema of configs knows a key."""

    def options(node: Any) -> list[dict[str, Any]]:
        if "$ref" in node:
            return options(schema["$defs"][node["$ref"].rpartition("/")[2]])
        nodes = [node]
        for key in ("anyOf", "oneOf", "allOf"):
            nodes += [option for item in node.get(key, ()) for option in options(item)]
        return nodes + (options(node["items"]) if "items" in node else [])

    nodes = options(schema)
    for part in path.split("."):
        key, _, variant = part.partition("[")
        parts = [{**node.get("properties", {}), "*": node.get("additionalProperties")} for node in nodes]
        actual = [known.get(key) for known in parts]
        nodes = [option for item in actual if isinstance(item, dict) for option in options(item)]
        if variant:
            names = [node.get("properties", {}).get("name", {}) for node in nodes]
            nodes = [n for n, name in zip(nodes, names, strict=True) if name.get("const") == variant.rstrip("]")]
    return bool(nodes)


def test_stored_keys_are_translated_and_a_user_s_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_migrations, "RENAMED_KEYS", (("optimizer.max_norm", "optimizer.max_grad_norm"),))
    text = to_toml(load_config("quickstart")).replace("\nmax_grad_norm = ", "\nmax_norm = ")
    (tmp_path / "checkpoints").mkdir()
    for path in (tmp_path / "config.toml", tmp_path / "mine.toml"):
        path.write_text(text)
    assert load_config(tmp_path).optimizer == load_config("quickstart").optimizer
    expected = r"mine\.toml: .*: optimizer\.max_norm is optimizer\.max_grad_norm now: write"
    with pytest.raises(UsageError, match=expected):
        load_config(tmp_path / "mine.toml")
    with pytest.raises(UsageError, match=r"optimizer\.max_norm is optimizer\.max_grad_norm now"):
        load_config("quickstart", ["optimizer.max_norm=2"])
    assert find_renamed_keys({"optimizer": {"max_grad_norm": 1}}) == []


def test_prep_json_is_translated_by_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = (("steps[near].words", "steps.shingle"), ("split.by", "split.key"))
    monkeypatch.setattr(key_migrations, "RENAMED_PREP_KEYS", renamed)
    steps = [{"name": "near", "words": 5}, {"name": "c4", "words": 1}]
    stored = {"version": 3, "split": {"by": "source"}, "steps": steps}
    assert migrate_prep(stored) == {
        "version": 3, "split": {"key": "source"}, "steps": [{"name": "near", "shingle": 5}, {"name": "c4", "words": 1}],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["latent", "mla"])
def test_a_stored_width_of_latent_attention_is_that_without_position(name: str) -> None:
    """Both names of the attention, as earlier versions stored them; other attentions keep `head_dim`."""
    migrated = migrate({"model": {"attention": {"name": name, "head_dim": 24}}})
    assert migrated == {"model": {"attention": {"name": "mla", "qk_nope_head_dim": 24}}}
    stored = {"model": {"attention": {"name": "gqa", "head_dim": 24}}}
    assert migrate(stored) == stored
