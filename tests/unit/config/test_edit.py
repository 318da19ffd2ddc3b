"""Changing a preset from the command line: what is set, taken out, and follows another name."""

import shlex
import subprocess
from pathlib import Path

import pytest

from megatfm import cli
from megatfm.config import Config, load_config
from megatfm.config.load import find_config
from megatfm.errors import UsageError


def quickstart(*overrides: str) -> Config:
    return load_config("quickstart", overrides)


def test_a_key_is_taken_out_and_its_default_holds() -> None:
    assert load_config("gpt2-124m").model.position.max_positions == 1024
    assert quickstart("evaluate.every=").evaluate.every == Config.model_fields["evaluate"].default.every
    assert (
        quickstart("~evaluate.every", "~checkpoint").checkpoint == Config.model_fields["checkpoint"].default
    )
    assert quickstart("evaluate.every=", "evaluate.every=3").evaluate.every == 3, "in their order"
    assert quickstart("~log.wandb_project") == quickstart(), "what is not there is out already"
    with pytest.raises(UsageError, match=r"train\.steps: is required"):
        quickstart("train.steps=")
    with pytest.raises(UsageError, match=r"override '~': expected key=value"):
        quickstart("~")


def test_another_name_takes_out_what_only_the_old_one_has() -> None:
    """The quickstart's muon has a rate for matrices, which AdamW has not."""
    assert quickstart().optimizer.name == "muon"
    adamw = quickstart("optimizer.name=adamw")
    assert (adamw.optimizer.name, adamw.optimizer.lr) == ("adamw", quickstart().optimizer.lr)
    assert quickstart("optimizer.name=muon") == quickstart()
    assert quickstart("schedule.name=constant").schedule.name == "constant"
    both = load_config("gpt2-124m", ["optimizer.name=muon", "optimizer.matrix_lr=0.5"]).optimizer
    assert (both.name, both.matrix_lr) == ("muon", 0.5)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"optimizer\.matrix_lr: unknown key"):
        quickstart("optimizer.name=adamw", "optimizer.matrix_lr=0.5")


def test_one_corpus_is_three_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = quickstart("data.corpus=my corpora/mine").data
    made = f"{tmp_path}/my corpora/mine"
    assert (data.train, data.tokenizer) == (f"{made}/train", made)
    assert data.validation == {"validation": f"{made}/validation"}
    assert quickstart("data.corpus=s3://b/c/").data.train == "s3://b/c/train", "S3 keeps double slashes"
    assert quickstart("data.corpus=/").data.validation == {"validation": "/validation"}
    assert quickstart("data.corpus=a", "data.tokenizer=b").data.tokenizer == f"{tmp_path}/b"


def test_a_list_of_words_needs_no_quotes() -> None:
    for given in (
        "log.sinks=wandb,tensorboard",
        "log.sinks=[wandb, tensorboard]",
        'log.sinks=["wandb","tensorboard"]',
    ):
        assert quickstart(given).log.sinks == ["wandb", "tensorboard"]
    assert quickstart("log.sinks=wandb").log.sinks == ["wandb"]
    assert quickstart("log.sinks=[]").log.sinks == []
    assert quickstart("resume.allow=data,seed").resume.allow == ["data", "seed"]


def test_what_a_shell_makes_of_what_is_pasted_is_still_right() -> None:
    for pasted in (
        "resume.allow=data,model",
        'resume.allow=["data","model"]',
        "'data.corpus=my corpora/mine'",
    ):
        (word,) = shlex.split(pasted)
        said = subprocess.run(
            ["bash", "-c", f"printf %s {pasted}"], capture_output=True, text=True, check=True
        )
        assert said.stdout == word
        assert quickstart(word) != quickstart()


def test_dashes_before_a_key_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--train.steps", "5"], ["--train.steps=5"]):
        with pytest.raises(SystemExit):
            cli.main(["config", "show", "quickstart", *words])
        assert capsys.readouterr().err.endswith(": settings have no dashes: train.steps=5\n")


@pytest.mark.parametrize(
    ("preset", "width", "scale"),
    [
        ("t5-base", 768, 768**-0.5),
        ("t5-base", 64, 0.125),
        ("prefix-lm-base", 256, 0.0625),
        ("t5-v1.1-base", 64, 1.0),
    ],
)
def test_the_head_s_factor_follows_the_width(preset: str, width: int, scale: float) -> None:
    words = [f"model.d_model={width}", "model.attention.n_heads=4"]
    assert load_config(preset, words).model.head.scale == pytest.approx(scale, rel=1e-12)
    assert load_config(preset, [*words, "model.head.scale=0.5"]).model.head.scale == 0.5


def test_the_embeddings_factor_follows_the_width() -> None:
    words = ["model.d_model=64", "model.attention.n_heads=4"]
    assert load_config("transformer-base", words).model.embedding.scale == 8.0


def test_another_tokenizer_brings_its_size(tmp_path: Path) -> None:
    assert load_config("gpt2-124m").model.vocab_size == 50257
    for words in (["data.tokenizer=t"], ["data.corpus=c"]):
        assert load_config("gpt2-124m", words).model.vocab_size is None
        assert load_config("gpt2-124m", [*words, "model.vocab_size=300"]).model.vocab_size == 300
    own = tmp_path / "own.toml"
    own.write_text(find_config("gpt2-124m")[0].read_text())
    assert load_config(own, ["data.tokenizer=t"]).model.vocab_size == 50257
