"""Changing a preset from the command line: what is set, taken out, and follows another name."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import Config, load_config, to_toml
from megatfm.config.load import load_section
from megatfm.config.prep import PrepConfig
from megatfm.config.sources import find_config
from megatfm.errors import UsageError
from tests.support.forked_commands import run_command


def quickstart(*overrides: str) -> Config:
    return load_config("quickstart", overrides)


def test_a_key_is_taken_out_and_its_default_holds() -> None:
    assert load_config("gpt2-124m").model.position.max_positions == 1024
    assert quickstart("evaluate.every=").evaluate.every == Config.model_fields["evaluate"].default.every
    assert quickstart("~evaluate.every", "~checkpoint").checkpoint == Config.model_fields["checkpoint"].default
    assert quickstart("evaluate.every=", "evaluate.every=3").evaluate.every == 3, "in their order"
    assert quickstart("~log.wandb_project") == quickstart(), "what is not there is out already"
    with pytest.raises(UsageError, match=r"train\.steps: is required"):
        quickstart("train.steps=")
    with pytest.raises(UsageError, match=r"override '~': expected key=value"):
        quickstart("~")


@pytest.mark.parametrize(("changes", "message"), [
    ({"optimizer.matrix_lrr": 1}, r"^optimizer\.matrix_lrr: unknown key \(did you mean .*matrix_lr"),
    ({"train.steps": "many"}, r"^train\.steps = 'many': input should be a valid integer"),
    ({"train.steps": 3}, r"^lr_schedule\.warmup_steps = .* is longer than the run"),
])  # fmt: skip
def test_changes_from_python_are_refused_as_on_the_command_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quickstart().with_changes(changes)


@pytest.mark.parametrize("override", ["run_dir=null", "log.profile=None", "data.validation.a=NULL", "data.corpus=null"])
def test_null_is_no_word(override: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^override '{override}': configs have no null: {override.split('=')[0]}= rem"
    ):
        quickstart(override)
    assert quickstart('run_dir="null"').run_folder.name == "null"


def test_another_name_takes_out_what_only_the_old_one_has() -> None:
    """The quickstart's Muon has a rate for matrices; AdamW has none."""
    assert quickstart().optimizer.name == "muon"
    adamw = quickstart("optimizer.name=adamw")
    assert (adamw.optimizer.name, adamw.optimizer.lr) == ("adamw", quickstart().optimizer.lr)
    assert quickstart("optimizer.name=muon") == quickstart()
    assert quickstart("lr_schedule.name=constant").lr_schedule.name == "constant"
    optimizer = load_config("gpt2-124m", ["optimizer.name=muon", "optimizer.matrix_lr=0.5"]).optimizer
    assert (optimizer.name, optimizer.matrix_lr) == ("muon", 0.5)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"optimizer\.matrix_lr: unknown key"):
        quickstart("optimizer.name=adamw", "optimizer.matrix_lr=0.5")


@pytest.mark.parametrize(("preset", "overrides", "section", "left"), [
    ("olmoe-1b-7b", ["model.ffn.router.name=gshard", "model.ffn.top_k=2"], "ffn.router",
     {"name": "gshard", "aux_loss_coef": 0.01, "z_loss_coef": 0.001}),
    ("gpt-oss-20b", ["model.position.scaling.name=linear"], "position.scaling", {"name": "linear", "factor": 32.0}),
    ("gpt-oss-20b", ["model.position.scaling.name=yarn"], "position.scaling",
     {"name": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False}),
])  # fmt: skip
def test_another_name_deep_in_a_config(preset: str, overrides: list[str], section: str, left: dict[str, Any]) -> None:
    """The variant that the file names has the options, also where a section is one of several inside another's."""
    model: Any = load_config(preset, overrides).model
    by_python: Any = load_config(preset).model.with_changes(
        {word.partition("=")[0].removeprefix("model."): _value(word) for word in overrides}
    )
    for part in section.split("."):
        model, by_python = getattr(model, part), getattr(by_python, part)
    assert {key: getattr(model, key) for key in left} == left
    assert by_python == model, "Python and the command line agree"


def _value(word: str) -> str | int:
    text = word.partition("=")[2]
    return int(text) if text.isdigit() else text


def test_a_dotted_change_leaves_its_neighbours() -> None:
    config = quickstart("data.validation={a='/x', b='/y'}")
    assert config.with_changes({"data.validation.c": "/z"}).data.validation == {"a": "/x", "b": "/y", "c": "/z"}
    assert config.with_changes({"data.validation": {"c": "/z"}}).data.validation == {"c": "/z"}, "all of them"
    assert config.with_changes({"data.validation": {}}).data.validation == {}
    gemma = load_config("gemma2-2b").model
    kinds = gemma.with_changes({"layer_type.local.dropout": 0.1, "layer_type.global.dropout": 0.2})
    windows = [kinds.layer_config(depth).attention.pattern for depth in range(2)]
    assert windows == [gemma.layer_config(depth).attention.pattern for depth in range(2)]
    assert [kinds.layer_config(depth).dropout for depth in range(2)] in ([0.1, 0.2], [0.2, 0.1])
    mixed = quickstart("data.train=", "data.mixture={a={path='/x', weight=1}, b={path='/y', weight=2}}")
    heavier = mixed.with_changes({"data.mixture.a.weight": 5}).data.mixture
    assert [(source.path, source.weight) for source in heavier.values()] == [("/x", 5.0), ("/y", 2.0)]
    heads = load_config("bert-base").model.with_changes({"extra_heads.sentence.classes": 3})
    assert heads.with_changes({"extra_heads.sentence.classes": 4}).extra_heads["sentence"].classes == 4  # type: ignore[union-attr]
    scaled = load_config("gpt-oss-20b").model.with_changes({"position.scaling": {"name": "ntk", "factor": 2.0}})
    assert scaled.position.scaling.name == "ntk"  # type: ignore[union-attr]
    assert scaled.with_changes({"position.scaling": None}).position.scaling is None  # type: ignore[union-attr]


def test_a_key_that_is_not_set_is_removed_from_no_new_section() -> None:
    for override in ("model.lora.rank=", "~task.metric", "~model.mup.base_width", "~model.layer_type.a.norm.eps"):
        assert quickstart(override) == quickstart(), override
    with pytest.raises(UsageError, match=r"nothing sets model.d_modl, an unknown key.*: leave it out$"):
        quickstart("~model.d_modl")
    with pytest.raises(UsageError, match=r"unknown key \(did you mean optimizer.lr\?\): leave it out$"):
        quickstart("lr=")


def test_text_that_looks_like_a_number_stays_text() -> None:
    for name in ("2024", "1e5", "1_000", "true", "0x1F"):
        assert quickstart(f"name={name}").name == name
    assert quickstart("log.wandb_project=7").log.wandb_project == "7"
    assert quickstart("data.validation.a=2024").data.validation["a"].endswith("/2024")
    assert quickstart("train.steps=1_000").train.steps == 1000
    assert quickstart("train.compile=true").train.compile is True


def test_text_of_several_lines_stays_whole() -> None:
    """The lines after the first look like further keys of a TOML file."""
    for text in ("7\nname = 1", "'a'\n[model]", '["a"]\nb = 2'):
        assert quickstart(f"log.wandb_project={text}").log.wandb_project == text
    assert quickstart("train.freeze=[\n'a',\n'b']\n").train.freeze == ["a", "b"]
    with pytest.raises(UsageError, match=r"^quickstart: train\.steps = '100\\nseed = 1': input should be"):
        quickstart("train.steps=100\nseed = 1")


def test_brackets_inside_a_word_stay() -> None:
    for override, words in {
        "decoder.layers.[01]": ["decoder.layers.[01]"],
        "[decoder.layers.[01]]": ["decoder.layers.[01]"],
        "[01].a,b.[23]": ["[01].a", "b.[23]"],
        "a.[0,1],b": ["a.[0,1]", "b"],
        "[a, b.[01]]": ["a", "b.[01]"],
        "a[[]b": ["a[[]b"],
        "a]": ["a]"],
    }.items():
        assert quickstart(f"train.freeze={override}").train.freeze == words, override


def test_one_corpus_is_three_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = quickstart("data.corpus=my corpora/mine").data
    assert quickstart("data.corpus='my corpora/mine'").data == data, "quotes are TOML's"
    assert quickstart("data.corpus=2024").data.tokenizer == f"{tmp_path}/2024"
    result = f"{tmp_path}/my corpora/mine"
    assert (data.train, data.tokenizer) == (f"{result}/train", result)
    assert data.validation == {"validation": f"{result}/validation"}
    assert quickstart("data.corpus=s3://b/c/").data.train == "s3://b/c/train", "S3 keeps double slashes"
    assert quickstart("data.corpus=/").data.validation == {"validation": "/validation"}
    assert quickstart("data.corpus=a", "data.tokenizer=b").data.tokenizer == f"{tmp_path}/b"
    images = load_config("quickstart-vision", ["data.corpus=a"]).data
    assert (images.train, images.tokenizer) == (f"{tmp_path}/a/train", None), "no text is read"
    assert load_config("quickstart-vision", ["data.corpus=a", "data.tokenizer=b"]).data.tokenizer == f"{tmp_path}/b"
    assert load_config("clip-b32", ["data.corpus=a"]).data.tokenizer == f"{tmp_path}/a"
    later = "data.mixture_schedule=[{tokens=9,weights={code=1}}]"
    data = quickstart("data.mixture={code={path='c',weight=1}}", "data.train=", later, "data.corpus=a").data
    assert (data.train, data.mixture, data.mixture_schedule) == (f"{tmp_path}/a/train", {}, [])


def test_a_list_of_words_needs_no_quotes() -> None:
    for inputs in ("wandb,tensorboard", "[wandb, tensorboard]", '["wandb","tensorboard"]'):
        assert quickstart(f"log.sinks={inputs}").log.sinks == ["wandb", "tensorboard"]
    assert quickstart("log.sinks=wandb").log.sinks == ["wandb"]
    assert quickstart("log.sinks=[]").log.sinks == []
    assert quickstart("resume.allow=data,seed").resume.allow == ["data", "seed"]


def test_pasted_overrides_survive_the_shell() -> None:
    for pasted in ("resume.allow=data,model", 'resume.allow=["data","model"]', "'data.corpus=my corpora/mine'"):
        (word,) = shlex.split(pasted)
        process = subprocess.run(["bash", "-c", f"printf %s {pasted}"], capture_output=True, text=True, check=True)
        assert process.stdout == word
        assert quickstart(word) != quickstart()


SHOW = ("config", "show", "quickstart")


@pytest.mark.parametrize(("words", "message"), [
    ((*SHOW, "--train.steps", "5"), ": settings have no dashes: train.steps=5\n"),
    ((*SHOW, "--train.steps=5"), ": settings have no dashes: train.steps=5\n"),
    ((*SHOW, "train.steps=2", "train.steps=3"), "train.steps is given twice, by 'train.steps=2' and 'train.steps=3'"),
    ((*SHOW, "train.steps=2", "~train.steps"), "train.steps is given twice, by 'train.steps=2' and '~train.steps'"),
    (("trian", "quickstart"), "COMMAND = 'trian': there is none (did you mean 'train'?); there are: 'prep'"),
])  # fmt: skip
def test_mistakes_of_a_command_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert run_command(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "width", "scale"),
    [("t5-base", 768, 768**-0.5), ("t5-base", 64, 0.125), ("prefix-lm-base", 256, 0.0625), ("t5-v1.1-base", 64, 1.0)],
)  # fmt: skip
def test_the_head_s_factor_follows_the_width(preset: str, width: int, scale: float) -> None:
    words = [f"model.d_model={width}", "model.attention.n_heads=4"]
    assert load_config(preset, words).model.head_scale == pytest.approx(scale, rel=1e-12)
    assert load_config(preset, [*words, "model.lm_head.scale=0.5"]).model.head_scale == 0.5


def test_the_embeddings_factor_follows_the_width() -> None:
    words = ["model.d_model=64", "model.attention.n_heads=4"]
    assert load_config("transformer-base", words).model.embedding_scale == 8.0


def test_a_word_stays_in_the_config_and_follows_every_width(tmp_path: Path) -> None:
    """Copies, stored configs and kinds of blocks keep the word; the layers and exports have the number."""
    config = load_config("transformer-base", ["model.lm_head.scale=d_model^-1/2"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    narrow = {"model.d_model": 256, "model.attention.n_heads": 4}
    for copy in (
        config.with_changes(narrow),
        config.with_changes({"model.n_layers": 1}).with_changes(narrow),
        load_config(tmp_path, [f"{key}={value}" for key, value in narrow.items()]),
        Config.model_validate(config.model_dump(mode="json")).with_changes(narrow),
    ):
        assert (copy.model.embedding_scale, copy.model.head_scale) == (16.0, 1 / 16)
    numbers = config.model.with_resolved_factors()
    assert (numbers.embedding.scale, numbers.lm_head.scale) == (512**0.5, 512**-0.5)
    with pytest.raises(UsageError, match=r"model\.embedding\.scale = 'd_model': input should be a valid number"):
        load_config("transformer-base", ["model.embedding.scale=d_model"])
    with pytest.raises(UsageError, match=r"model\.embedding\.scale = 0: input should be greater than 0"):
        load_config("transformer-base", ["model.embedding.scale=0"])


def test_another_tokenizer_brings_its_size(tmp_path: Path) -> None:
    assert load_config("gpt2-124m").model.vocab_size == 50257
    for words in (["data.tokenizer=t"], ["data.corpus=c"]):
        assert load_config("gpt2-124m", words).model.vocab_size is None
        assert load_config("gpt2-124m", [*words, "model.vocab_size=300"]).model.vocab_size == 300
    local = tmp_path / "own.toml"
    local.write_text(find_config("gpt2-124m")[0].read_text())
    assert load_config(local, ["data.tokenizer=t"]).model.vocab_size == 50257


def test_a_corpus_stands_in_place_of_a_mixture_and_its_schedule(file: Path) -> None:
    mixture = file.read_text().replace(
        'train = "corpus/train"',
        'mixture = { a = { path = "a", weight = 1 } }\nmixture_schedule = [{ tokens = 9, weights = { a = 2 } }]',
    )
    file.write_text(mixture)
    data = load_config(file, ["data.corpus=/c"]).data
    assert (data.train, data.mixture, data.mixture_schedule) == ("/c/train", {}, [])


@pytest.mark.parametrize(("override", "line"), [
    ("steps=[{name='url_filter', fil='x'}]", "steps[0].fil: unknown key (did you mean 'file'?); known here: name, "),
    ("steps=[{file='x'}]", "steps[0]: a step needs a name: c4, "),
    ("read.builtin=digits", "read.builtin = 'digits' are images: set read.format to 'images'"),
    ("read.labels.by=table", "read.labels.by = 'table' without a table: set both by = 'table' and the table, or nei"),
    ("read.labels.table=x.csv", "read.labels.by = 'cls' with table = '"),
    ("read.labels={by='table', table='x.csv'}", "read.labels are those of images: set read.format = 'images', or"),
    ("read.format=tokens", "read.format = 'tokens': set tokenizer.file to the tokenizer of these ids"),
])  # fmt: skip
def test_a_wrong_value_of_a_preparation(override: str, line: str) -> None:
    with pytest.raises(UsageError, match=f"^quickstart-data: {re.escape(line)}"):
        load_section(PrepConfig, "quickstart-data", [override])


@pytest.mark.parametrize(("override", "reason"), [
    *((override, f"override {override!r}: expected key=value, for example train.steps=100")
      for override in ("train", "=3", ".steps=3", "train..steps=3", "train.=3", " = 3")),
    ("train.steps.x=3", "override 'train.steps.x=3': 'steps' is a value in this config, not a section"),
])  # fmt: skip
def test_an_override_of_no_key(load: Callable[..., Config], override: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(override)
    assert str(caught.value) == reason
