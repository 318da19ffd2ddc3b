"""`extends`: a file holds what differs from a preset or another file."""

import copy
import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import Config, load_config, to_toml
from megatfm.config.load import load_section
from megatfm.config.marked_strings import FromFile
from megatfm.config.prep import PrepConfig
from megatfm.config.sources import find_config, list_presets, read_files
from megatfm.errors import UsageError
from tests.support.forked_commands import run_command


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def differences(first: Any, second: Any, path: str = "") -> dict[str, Any]:
    """The keys at which two dumps differ, with the values of the second."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        pairs = [differences(first[key], second[key], f"{path}.{key}") for key in first]
        return {key: value for pair in pairs for key, value in pair.items()}
    return {} if first == second else {path[1:]: second}


def test_keys_that_a_file_leaves_out_are_the_preset_s(tmp_path: Path) -> None:
    text = 'extends = "gpt2"\nname = "mine"\n[model.attention]\ndropout = 0.5\n[optimizer]\nbetas = [0.5, 0.6]\n'
    path = write(tmp_path / "mine.toml", text)
    changed = differences(load_config("gpt2").model_dump(mode="json"), load_config(path).model_dump(mode="json"))
    assert changed == {"name": "mine", "model.attention.dropout": 0.5, "optimizer.betas": [0.5, 0.6]}


def test_lists_and_tables_of_free_names_replace_the_base_s(file: Path, tmp_path: Path) -> None:
    text = f'extends = "{file.name}"\nplugins = ["json", "csv"]\n[log]\nsinks = ["wandb"]\n'
    base = write(file.parent / "base.toml", text)
    text = f'extends = "{base}"\nplugins = []\n[data]\nvalidation = {{ mine = "s3://b/v" }}\n'
    config = load_config(write(tmp_path / "mine.toml", text))
    assert (config.plugins, config.log.sinks) == ([], ["wandb"])
    assert config.data.validation == {"mine": "s3://b/v"}


ADAMW = 'name = "adamw"\nlr = 7e-3\neps = 1e-7\nweight_decay = 0.3\n'
PLUGIN = 'name = "theirs"\nlr = 7e-3\nwobble = 2\n'


@pytest.mark.parametrize(("base", "changes", "expected"), [
    # What both variants know stays, what only the old one knows goes.
    (ADAMW, 'name = "adafactor"\n', {"name": "adafactor", "lr": 7e-3, "weight_decay": 0.3}),
    # To a plugin's variant and from one.
    (PLUGIN, 'name = "adamw"\n', {"name": "adamw", "lr": 7e-3}),
    (PLUGIN, 'name = "ours"\nwidth = 3\n', {"name": "ours", "lr": 7e-3, "width": 3}),
    # The default's name counts as well, and the same name changes nothing.
    ("name = 'muon'\nlr = 7e-3\nmatrix_lr = 0.5\n", 'name = "muon"\nlr = 8e-3\n',
     {"name": "muon", "lr": 8e-3, "matrix_lr": 0.5}),
])  # fmt: skip
def test_another_name_leaves_the_keys_of_the_old_variant_behind(
    tmp_path: Path, base: str, changes: str, expected: dict[str, Any]
) -> None:
    before, _, after = find_config("quickstart")[0].read_text().partition("[optimizer]")
    after = after.partition("[lr_schedule]")[2]
    plugins = 'plugins = ["json"]\n'  # else an unknown name is refused
    load_config(write(tmp_path / "base.toml", f"{plugins}{before}[optimizer]\n{base}[lr_schedule]{after}"))
    path = write(tmp_path / "mine.toml", f'extends = "base.toml"\n[optimizer]\n{changes}')
    assert load_config(path).optimizer.model_dump(exclude_unset=True) == expected


def test_a_section_below_one_that_gets_another_name_goes_with_it(tmp_path: Path) -> None:
    text = 'extends = "quickstart-moe"\n[model.ffn]\nname = "dense"\n[model.position]\nname = "alibi"\n'
    dumped = load_config(write(tmp_path / "mine.toml", text)).model.model_dump()
    assert dumped["ffn"]["name"] == "dense"
    assert "router" not in dumped["ffn"]
    assert dumped["ffn"]["d_ff"] == load_config("quickstart-moe").model.ffn.d_ff
    assert dumped["position"].keys() == {"name"}


def test_each_file_s_paths_are_relative_to_it(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (local := tmp_path / "here").mkdir()
    monkeypatch.chdir(local)
    path = write(tmp_path / "mine" / "mine.toml", 'extends = "../configs/small.toml"\n[data]\ntokenizer = "t.model"\n')
    config = load_config(path, ["run_dir=r"])
    assert config.data.train == str(file.parent / "corpus/train")
    assert config.data.tokenizer == str(path.parent / "t.model")
    assert config.data.validation == load_config(file).data.validation
    assert config.run_dir == str(local / "r")
    of_preset = load_config(write(path, 'extends = "gpt2"\n[data]\nvalidation = { a = "v" }\n')).data
    assert (of_preset.train, of_preset.validation) == (str(local / "corpora/web/train"), {"a": str(path.parent / "v")})


def test_a_base_s_string_outlives_pickle_and_copy() -> None:
    text = FromFile("corpus", Path("/a"))
    for copied in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert (copied, copied.folder) == ("corpus", Path("/a"))


def test_a_head_of_the_base_keeps_its_other_keys(tmp_path: Path) -> None:
    """Heads that the file does not name are gone; under another `name`, keys that the head lacks are."""
    classifier = "[model.extra_heads.classifier]\nn_classes = 2\n"
    heads = load_config(write(tmp_path / "a.toml", f'extends = "swin-t"\n{classifier}')).model.extra_heads
    assert heads["classifier"].model_dump() == {
        **load_config("swin-t").model.extra_heads["classifier"].model_dump(), "n_classes": 2,
    }  # fmt: skip
    base = write(tmp_path / "two.toml", f'extends = "swin-t"\n{classifier}[model.extra_heads.pixels]\nstride = 32\n')
    other = write(tmp_path / "b.toml", f'extends = "{base}"\n[model.extra_heads.pixels]\nstride = 32\n')
    assert list(load_config(other).model.extra_heads) == ["pixels"]
    renamed = '[model.extra_heads.classifier]\nname = "pixels"\nstride = 32\n'
    head = load_config(write(tmp_path / "c.toml", f'extends = "swin-t"\n{renamed}')).model.extra_heads["classifier"]
    assert (head.name, head.stride) == ("pixels", 32)


def test_a_source_of_a_mixture_keeps_its_other_keys(file: Path, tmp_path: Path) -> None:
    base = write(tmp_path / "base.toml", f'extends = "{file}"\nwithout = ["data.train"]\n[data.mixture]\n'
                 'web = { path = "web", weight = 3.0 }\ncode = { path = "code", weight = 1.0 }\n')  # fmt: skip
    path = write(tmp_path / "mine.toml", f'extends = "{base}"\n[data.mixture]\nweb = {{ weight = 2.0 }}\n')
    (source,) = load_config(path).data.mixture.values()
    assert (source.path, source.weight) == (str(tmp_path / "web"), 2.0)


def test_a_file_takes_keys_of_its_base_out(file: Path, tmp_path: Path) -> None:
    """A key whose default is none, a section, a name of a free table; at any depth of bases, and set again above."""
    text = (
        f'extends = "{file.name}"\n[data]\ncache_dir = "cache"\nvalidation = {{ a = "a", b = "b" }}\n'
        "[evaluate]\nevery = 7\nmax_rows = 5\n[model.mup]\nbase_width = 64\n"
    )
    base = write(file.parent / "base.toml", text)
    text = f'extends = "{base}"\nwithout = ["data.cache_dir", "data.validation.a", "evaluate", "model.mup"]\n'
    middle = write(tmp_path / "middle.toml", text)
    path = write(tmp_path / "mine.toml", f'extends = "{middle}"\n[evaluate]\nmax_rows = 3\n')
    assert (load_config(base).data.cache_dir or "").endswith("cache")
    assert load_config(base).model.mup is not None
    config = load_config(path)
    assert (config.data.cache_dir, config.model.mup) == (None, None)
    assert list(config.data.validation) == ["b"]
    assert (config.evaluate.every, config.evaluate.max_rows) == (0, 3)
    assert "without" not in to_toml(config)


@pytest.mark.parametrize(("text", "message"), [
    ('extends = "gpt2"\nwithout = ["model.n_layer"]',
     r"mine\.toml: without = \['model\.n_layer'\]: .*does not set this \(did you mean 'model\.n_layers'\?\)"),
    ('extends = "gpt2"\nwithout = ["name.x"]', r"\['name\.x'\]: .*does not set this"),
    ('extends = "gpt2"\nwithout = "model"', r"without = 'model': give a list of keys"),
    ('extends = "gpt2"\nwithout = [3]', r"without = \[3\]: give a list of keys"),
    ('without = ["model"]', r"takes keys out of a base: give it by `extends`"),
    ('extends = "gpt2"\nwithout = ["model"]\ndata.tokenizer = "t.model"', r"model: is required"),
])  # fmt: skip
def test_a_key_that_can_not_be_taken_out_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(write(tmp_path / "mine.toml", text))


def test_a_file_extends_one_that_extends_one(file: Path, tmp_path: Path) -> None:
    write(file.parent / "b.toml", 'extends = "small.toml"\nname = "b"\n[train]\nsteps = 20\nglobal_batch = 8\n')
    path = write(tmp_path / "c.toml", 'extends = "configs/b.toml"\n[train]\nsteps = 30\n')
    config = load_config(path, ["train.micro_batch=1"])
    assert config.name == "b"
    assert (config.train.steps, config.train.global_batch, config.train.micro_batch) == (30, 8, 1)


def test_overrides_come_last_and_take_away_what_a_base_says(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", 'extends = "gpt2"\n[optimizer]\nlr = 1e-5\n')
    config = load_config(path, ["optimizer.lr=2e-5", "~optimizer.eps", "model.dropout="])
    assert (config.optimizer.lr, config.model.dropout) == (2e-5, 0.0)


def test_a_run_can_be_a_base_and_extends_is_never_stored(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    (run / "checkpoints").mkdir(parents=True)
    path = write(tmp_path / "mine.toml", 'extends = "quickstart"\nname = "mine"\n')
    stored = to_toml(load_config(path))
    assert "extends" not in tomllib.loads(stored)
    write(run / "config.toml", stored.replace("min_lr_factor", "final_ratio"))  # of an earlier version
    write(path, 'extends = "runs/a"\n[train]\nsteps = 721\n')
    config = load_config(path)
    assert differences(load_config(run).model_dump(mode="json"), config.model_dump(mode="json")) == {"train.steps": 721}


def test_a_preset_s_vocabulary_goes_with_its_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", 'extends = "gpt2"\n')
    assert load_config(path).model.vocab_size == 50257
    assert load_config(path, ["data.corpus=c"]).model.vocab_size is None
    write(path, 'extends = "gpt2"\n[data]\ntokenizer = "t"\n')
    assert load_config(path).model.vocab_size is None
    write(tmp_path / "wrong.toml", 'extends = "mine.toml"\nmodel = 3\n')
    with pytest.raises(UsageError, match="model = 3: this is a section"):
        load_config(tmp_path / "wrong.toml")
    write(tmp_path / "next.toml", 'extends = "mine.toml"\n[train]\nsteps = 3000\n')
    assert load_config(tmp_path / "next.toml").model.vocab_size is None
    write(path, 'extends = "gpt2"\n[model]\nvocab_size = 300\n[data]\ntokenizer = "t"\n')
    assert load_config(path, ["data.corpus=c"]).model.vocab_size == 300


def test_preparation_extends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'extends = "quickstart-data"\nout = "made"\n[tokenizer]\nvocab_size = 300\n'
    path = write(tmp_path / "a" / "mine.toml", text)
    config = load_section(PrepConfig, path)
    assert (config.out, config.read.builtin) == (str(path.parent / "made"), "python-stdlib")
    assert config.tokenizer.vocab_size == 300


@pytest.mark.parametrize(("extends", "message"), [
    ('"quickstrt"',
     r"mine\.toml: extends = 'quickstrt': no preset .*no file {at}/quickstrt \(did you mean 'quickstart'"),
    ('"no/b.toml"', r"mine\.toml: extends = 'no/b\.toml': .*there is no file {at}/no/b\.toml"),
    ('"folder"', r"mine\.toml: extends = 'folder': {at}/folder: is a folder without config\.toml"),
    ('["gpt2", "bert-base"]',
     r"mine\.toml: extends = \['gpt2', 'bert-base'\]: give one config, .*\"quickstart\"$"),
    ('"~nobody-at-all/b.toml"', r"mine\.toml: extends = '~nobody-at-all/b\.toml': "),
    (f'"{"x" * 300}"', r"mine\.toml: extends = 'x+': .*too long"),
    ('""', r"mine\.toml: extends = '': give one config"),
    ('"broken.toml"', r"^{at}/broken\.toml: not valid TOML"),
    ('"mine.toml"',
     r"mine\.toml: extends = 'mine\.toml': a cycle, {at}/mine\.toml extends {at}/mine\.toml: take"),
    ('"a.toml"', r"^{at}/b\.toml: extends = './a\.toml': a cycle, {at}/a\.toml extends {at}/b\.toml extends "
     r"{at}/a\.toml: take"),
    ('"wrong.toml"', r"^{at}/mine\.toml \(extends {at}/wrong\.toml\): train\.steps = 0: "),
    ('"quickstart-data"', r"presets/quickstart-data\.toml: is a config of `megatfm prep`"),
])  # fmt: skip
def test_a_base_that_can_not_be_names_the_files(tmp_path: Path, extends: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "broken.toml", "a = = 1\n")
    write(tmp_path / "a.toml", 'extends = "b.toml"\n')
    write(tmp_path / "b.toml", 'extends = "./a.toml"\n')
    write(tmp_path / "wrong.toml", 'extends = "quickstart"\n[train]\nsteps = 0\n')
    path = write(tmp_path / "mine.toml", f'extends = {extends}\nname = "mine"\n')
    with pytest.raises(UsageError, match=message.replace("{at}", str(tmp_path))):
        load_config(path)


def test_a_folder_named_as_a_preset_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    path = write(tmp_path / "mine.toml", 'extends = "quickstart"\n')
    assert load_config(path) == load_config("quickstart")


def test_extends_is_no_override() -> None:
    reason = "'extends=gpt2': `extends` stands in a config file; here, give gpt2 as CONFIG"
    with pytest.raises(UsageError, match=reason):
        load_config("quickstart", ["extends=gpt2"])


def test_config_show_names_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.toml", 'extends = "quickstart"\nname = "mine"\n')
    assert run_command("config", "show", str(path), "train.steps=50") == 0
    first, displayed = capsys.readouterr().out.split("\n", 1)
    assert first == f"# {path}, which extends preset quickstart; then train.steps=50"
    assert displayed == to_toml(load_config(path, ["train.steps=50"]))


def test_a_preset_takes_at_most_three_files_to_read() -> None:
    """A size, its family, and the model that the family changes: roberta-large, roberta-base, bert-base."""
    for name in list_presets():
        values = tomllib.loads(find_config(name)[0].read_text(encoding="utf-8"))
        assert len(read_files(Config, name)) <= 3, name
        assert "name" in values or "out" in values, f"{name}: a preset says its own name, or where its corpus goes"


@pytest.mark.parametrize(("name", "beside"), [
    ("config.toml", "environment.json"), ("config.toml", "../launch.json"), ("from.toml", "launch.json"),
    ("finetune.toml", "checkpoints"), ("finetune.toml", "task"),
])  # fmt: skip
def test_old_keys_are_renamed_in_configs_that_a_command_stored(tmp_path: Path, name: str, beside: str) -> None:
    """A file of that name is the user's own if no file of a run is beside it: an error names the new key."""
    path = write(tmp_path / "run" / name, 'extends = "quickstart"\n[optimizer]\nclip = 0.25\n')
    with pytest.raises(UsageError, match=r"optimizer\.clip is optimizer\.max_grad_norm now"):
        load_config(path)
    (path.parent / beside).touch()
    assert load_config(path).optimizer.max_grad_norm == 0.25
