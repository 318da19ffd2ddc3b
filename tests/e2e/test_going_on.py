"""Going on from a model or a run, also with other layouts and with the engine of a plugin."""

import json
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatfm
from megatfm import checkpoint
from megatfm.commands.from_model import continue_from_config
from megatfm.config import Config, load_config
from megatfm.convert.convert import convert
from megatfm.errors import EXIT_OK, EXIT_REQUEUE, UsageError
from megatfm.inference.evaluate import evaluate_run
from tests.support import forked_commands
from tests.support.forked_commands import run_command
from tests.support.training_runs import (
    assert_bitwise_equal,
    assert_nearly_equal,
    final_state,
    losses,
    run_training,
    train_until,
    train_with_plugins,
    training_curve,
)
from tests.support.workers import Workers

STILL = (
    "optimizer.lr=1e-12", "train.steps=1", "lr_schedule.warmup_steps=0", "evaluate.every=0", "log.sinks=[]",
)  # fmt: skip


@pytest.fixture
def foreign(corpus: Path, tmp_path: Path) -> Path:
    """A small Llama as transformers saves it, with the corpus's tokenizer."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path / "foreign"
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(corpus / "tokenizer.model", folder)
    return folder


def same_weights(run: Path, expected: torch.nn.Module) -> None:
    for name, parameter in megatfm.load(run).named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=0, atol=1e-9)


def test_a_run_starts_from_a_hugging_face_folder(workers, corpus, foreign, tmp_path, monkeypatch):
    """Its architecture, tokenizer and weights; started again, it finds what it made of the folder."""
    words = [f"run_dir={tmp_path / 'run'}", f"data.train={corpus}/train", "train.global_batch=2", *STILL]
    config, output = continue_from_config(foreign, None, words)
    assert "LlamaForCausalLM" in output[0]
    assert workers.run(run_training, 1, config) == [EXIT_OK]
    same_weights(tmp_path / "run", megatfm.load(foreign))
    other = [f"run_dir={tmp_path / 'other'}", *words[1:]]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    with monkeypatch.context() as patch:
        for name, value in ranks.items():
            patch.setenv(name, value)
        assert continue_from_config(foreign, None, words) == (config, [])
        with pytest.raises(UsageError, match="which one process must convert first: run `megatfm convert"):
            continue_from_config(foreign, None, other)
    monkeypatch.setenv("SLURM_NTASKS", "2")  # as in the shell of `sbatch` or `salloc`, which is one process
    assert "LlamaForCausalLM" in continue_from_config(foreign, None, other)[1][0]


def test_settings_of_a_foreign_model_survive_training_and_export(workers, corpus, foreign, tmp_path):
    """Ids and how to generate, after training on and after a resume."""
    about = {key: json.loads((foreign / f"{key}.json").read_text()) for key in ("config", "generation_config")}
    about["config"] |= {"bos_token_id": 5, "eos_token_id": [7, 9], "pad_token_id": None}
    about["generation_config"] |= {"eos_token_id": [7, 9], "top_k": 3}
    for key, values in about.items():
        (foreign / f"{key}.json").write_text(json.dumps(values))
    words = [f"run_dir={tmp_path / 'run'}", f"data.train={corpus}/train", "train.global_batch=2", *STILL]
    for more in ([], ["train.steps=2", "resume.allow=schedule"]):
        config, _ = continue_from_config(foreign, None, [*words, *more])
        assert workers.run(run_training, 1, config) == [EXIT_OK]
    assert checkpoint.find_latest(tmp_path / "run/checkpoints").name == "step-00000002"
    convert(tmp_path / "run", tmp_path / "back", "hf")
    back = {key: json.loads((tmp_path / "back" / f"{key}.json").read_text()) for key in about}
    assert back["generation_config"] == about["generation_config"]
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [back["config"][key] for key in ids] == [5, [7, 9], None]


def test_a_user_config_starts_from_it_on_several_processes(foreign, config_file, tmp_path):
    run = tmp_path / "run"
    words = ["launch", config_file, "--from", foreign, "--nproc", 2, f"run_dir={run}"]
    forked_commands.run_megatfm(*words, "optimizer.matrix_lr=1e-12", *STILL, output=tmp_path / "said")
    config = load_config(run)
    assert (config.model.d_model, config.optimizer.name) == (24, "muon")
    same_weights(run, megatfm.load(foreign))


def test_a_converted_folder_as_a_config_starts_from_its_weights(workers, corpus, foreign, tmp_path):
    """A resume once started from random weights, without a word."""
    convert(foreign, tmp_path / "imported", "megatfm")
    words = [f"run_dir={tmp_path / 'run'}", f"data.train={corpus}/train", "train.global_batch=2", *STILL]
    assert workers.run(run_training, 1, load_config(tmp_path / "imported", words)) == [EXIT_OK]
    same_weights(tmp_path / "run", megatfm.load(foreign))
    with pytest.raises(UsageError, match=r"no config: go on from it with `megatfm train --from .*foreign"):
        load_config(foreign)


def test_a_refused_config_leaves_no_folder(foreign, corpus, config_file, tmp_path):
    run = tmp_path / "runs" / "refused"
    words = [f"run_dir={run}", f"data.train={corpus}/train"]
    with pytest.raises(UsageError, match="steps"):
        continue_from_config(foreign, None, [*words, "train.steps=-1"])
    assert not run.exists()
    run.mkdir(parents=True)
    (run / "mine").touch()
    with pytest.raises(UsageError, match="tokenizer"):
        continue_from_config(foreign, str(config_file), [*words, f"data.tokenizer={corpus}/none.model"])
    assert [path.name for path in run.iterdir()] == ["mine"]


@pytest.mark.parametrize("launched", [False, True])
def test_a_run_that_its_ranks_refuse_leaves_nothing(foreign, corpus, config_file, tmp_path, launched):
    """Neither what the ranks wrote nor the model that was converted for them, nor the config that they were given."""
    words = [str(config_file), "--from", str(foreign), f"run_dir={tmp_path}/runs/a", "train.freeze=nothing"]
    files = sorted(tmp_path.iterdir())
    words = ["launch", *words, "--nproc", "3", "train.global_batch=12"] if launched else ["train", *words]
    output = forked_commands.run_megatfm(*words, output=tmp_path.with_suffix(".said"), code=2)
    assert "train.freeze: 'nothing' matches no weight" in output
    assert sorted(tmp_path.iterdir()) == files


def test_a_run_starts_from_a_run(workers, make_config, corpus, tmp_path):
    """The recipe is the other run's; settings about that run alone are not copied."""
    workers.run(run_training, 1, make_config("train.steps=2", "train.seed=5", run="first"))
    config, _ = continue_from_config(
        tmp_path / "first/checkpoints/step-00000002", None, [f"data.train={corpus}/train", "name=x"]
    )
    assert (config.name, config.train.init_from) == ("x", f"{tmp_path}/first/checkpoints/step-00000002")
    config, _ = continue_from_config(tmp_path / "first", None, [f"data.train={corpus}/validation", "train.steps=3"])
    assert (config.name, config.run_dir, config.data.validation) == ("from-first", None, {})
    assert (config.optimizer.name, config.train.seed, config.train.steps) == ("muon", 5, 3)
    words = [
        "optimizer.matrix_lr=1e-12", f"run_dir={tmp_path / 'second'}", f"data.train={corpus}/train", *STILL,
    ]  # fmt: skip
    assert workers.run(run_training, 1, continue_from_config(tmp_path / "first", None, words)[0]) == [EXIT_OK]
    same_weights(tmp_path / "second", megatfm.load(tmp_path / "first"))
    with pytest.raises(UsageError, match=r"give data\.train=CORPUS/train"):
        continue_from_config(tmp_path / "first", None, ["train.steps=1"])


def test_the_command_takes_a_model_with_and_without_a_config(foreign, corpus, config_file, tmp_path, monkeypatch):
    configs = []
    monkeypatch.setattr("megatfm.train.run.train", lambda config, *_: configs.append(config) or 0)
    monkeypatch.setattr("megatfm.cli.signal.pthread_sigmask", lambda *args: None)
    run, text = f"run_dir={tmp_path / 'run'}", f"data.train={corpus}/train"
    for words in (["--from", str(foreign), run, text], [str(config_file), run, "--from", str(foreign)]):
        assert run_command("train", *words) == 0
    assert [config.name for config in configs] == ["from-foreign", "small"]
    (weights,) = {config.train.init_from for config in configs}
    assert [str(path) for path in (tmp_path / "run").glob("from-*")] == [weights]
    recipe = tomllib.loads(config_file.read_text())
    del recipe["model"]  # the folder brings it
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    assert run_command("train", str(tmp_path / "recipe.toml"), run, "--from", str(foreign)) == 0
    assert configs[-1].model == configs[0].model
    other = tmp_path / "other"
    shutil.copytree(foreign, other)
    run_command("train", "--from", str(other), run, text)
    assert configs[-1].train.init_from != weights, "a folder of an earlier --from was taken for another's"
    assert run_command("train") == 2


def test_another_tokenizer_than_the_model_s_is_refused(foreign, corpus, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes(megatfm.tokenizers.train_byte_bpe(["some text"] * 9, vocab_size=300))
    words = [f"run_dir={tmp_path / 'run'}", f"data.train={corpus}/train", f"data.tokenizer={other}"]
    with pytest.raises(UsageError, match=r"other\.json: not the tokenizer of .*: prepare the text with that one"):
        continue_from_config(foreign, None, words)


# A branch reads a checkpoint as a resume does, of which tests/e2e/test_training.py has several ranks.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_branch_continues_like_its_run(workers, make_config, tmp_path, ranks):
    """Weights, optimizer and data: the same steps come out, to the bit; and what differs must be allowed."""
    workers.run(run_training, ranks, make_config("checkpoint.keep=9", run="trunk"))
    words = f"train.branch_from={tmp_path / 'trunk'}@4"
    branch = make_config(words, run="branch")
    assert workers.run(run_training, ranks, branch) == [EXIT_OK] * ranks
    first, second = final_state(tmp_path / "trunk"), final_state(tmp_path / "branch")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert training_curve(tmp_path / "branch") == training_curve(tmp_path / "trunk")[4:]
    steps = [path.name for path in sorted((tmp_path / "branch/checkpoints").iterdir())]
    assert steps == ["step-00000008"]
    assert f"from {tmp_path / 'trunk'}@4" in (tmp_path / "branch/logs/rank-0.log").read_text()
    assert checkpoint.read_state(tmp_path / "branch/checkpoints/step-00000008")["data"]["position"] == 64


def test_a_branch_needs_a_checkpoint_and_leave_to_differ(make_config, tmp_path, workers):
    workers.run(run_training, 1, make_config("train.steps=4", run="trunk"))
    for words, message in (
        (["train.branch_from=trunk@3"], r"give RUN@STEP, .*; there are: none"),
        ([f"train.branch_from={tmp_path / 'trunk'}@3"], r"there are: 4"),
        ([f"train.branch_from={tmp_path / 'trunk'}@4", "optimizer.lr=1e-4"], r"resume\.allow=optimizer"),
    ):
        config = make_config("train.steps=8", "resume.allow=schedule", *words, run="branch")
        with pytest.raises(Exception, match=message):
            workers.run(run_training, 1, config)
    with pytest.raises(UsageError, match="give one of the two"):
        make_config("train.branch_from=a@1", "train.init_from=a")


# ------------------------------------------------------------------------------------------ rows that are cut


PATIENCE = 300.0  # on a busy machine; it takes a tenth


def evaluate_in_one_process(run: Path) -> float:
    actual = evaluate_run(run, {}, False)
    assert actual is not None
    return float(actual[0]["sets"]["held-out"]["loss"])


def test_context_ranks_train_like_one_process(
    workers: Workers, make_config: Callable[..., Config], corpus: Path, tmp_path: Path
) -> None:
    """Two ranks train like one process, and stop and resume bit for bit; one process evaluates both."""
    one_set = f"data.validation={{held-out='{corpus}/validation'}}"
    assert workers.run(run_training, 1, make_config(one_set, run="whole"), timeout=PATIENCE) == [EXIT_OK]
    config = make_config("parallel.cp=2", one_set, run="cut")
    assert workers.run(run_training, 2, config, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    plan = (tmp_path / "cut" / "plan.txt").read_text(encoding="utf-8")
    assert "mesh  dp_replicate 1 × dp_shard 1 × cp 2 × tp 1" in plan
    log = (tmp_path / "cut" / "logs" / "rank-1.log").read_text(encoding="utf-8")
    assert log.count("attention Full(causal=True), cp 2: Ulysses, each rank computes some heads of all tokens") == 1
    stopped = make_config("parallel.cp=2", one_set, run="stopped")
    assert workers.run(train_until, 2, stopped, 5, signal.SIGUSR1, timeout=PATIENCE) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 2, stopped, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    assert_bitwise_equal(tmp_path / "cut", tmp_path / "stopped")
    losses = [workers.run(evaluate_in_one_process, 1, tmp_path / run, timeout=PATIENCE)[0] for run in ("whole", "cut")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert_nearly_equal(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.extended  # a checkpoint of two context ranks is read by one above; data ranks move in test_training.py
def test_a_run_moves_to_context_ranks_and_back(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    assert workers.run(run_training, 1, make_config(run="whole"), timeout=PATIENCE) == [EXIT_OK]
    assert workers.run(train_until, 1, make_config(run="moved"), 3, timeout=PATIENCE) == [EXIT_REQUEUE]
    moved = make_config("parallel.cp=2", run="moved")
    assert workers.run(train_until, 2, moved, 3, timeout=PATIENCE) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 1, make_config(run="moved"), timeout=PATIENCE) == [EXIT_OK]
    assert_nearly_equal(tmp_path / "whole", tmp_path / "moved")


# ----------------------------------------------------------------------------------------- engines and keys of plugins


DDP = ["plugins=['plain_ddp']", "parallel.engine=ddp", "parallel.zero=0", "train.steps=8"]
MakeConfig = Callable[..., Config]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / "checkpoints/step-00000008")


def forget_the_end(folder: Path) -> None:
    (folder / "checkpoints/step-00000008").rename(folder / "later")


def test_a_plugin_s_engine_trains_as_native_and_engines_can_change(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    native: list[Any] = ["parallel.zero=0", "train.steps=8"]
    for ranks, name, overrides in ((2, "ddp", DDP), (2, "native", native)):
        assert workers.run(train_with_plugins, ranks, make_config(*overrides, run=name)) == [EXIT_OK] * ranks
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "native"), rel=1e-4)
    full = weights(tmp_path / "ddp")
    forget_the_end(tmp_path / "ddp")
    assert workers.run(train_with_plugins, 2, make_config(*DDP, run="ddp")) == [EXIT_OK] * 2
    resumed = weights(tmp_path / "ddp")
    assert resumed.keys() == full.keys()
    assert all(torch.equal(resumed[name], full[name]) for name in full)
    (tmp_path / "ddp" / "later").rename(tmp_path / "ddp" / "later still")
    forget_the_end(tmp_path / "ddp")
    other = ["parallel.engine=native", "parallel.zero=3", "train.steps=8"]
    assert workers.run(train_with_plugins, 1, make_config(*other, run="ddp")) == [EXIT_OK]
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "native"), rel=1e-4)


SCHEDULE = """
import torch.distributed as dist
from megatfm.optim.lr_schedules import SCHEDULES

@SCHEDULES.register("floor_of_one_rank")
def schedule(config, step, steps):
    return config.floor if dist.get_rank() == 1 else 1.0
"""


def train_with_schedule(config: Config, folder: str) -> int:
    sys.path.insert(0, folder)
    return train_with_plugins(config)


def test_a_plugin_s_key_may_be_read_on_some_ranks_alone(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "floor_plugin.py").write_text(SCHEDULE)
    schedule = "lr_schedule={name='floor_of_one_rank', floor=1.0}"
    config = make_config("plugins=['floor_plugin']", schedule, "parallel.zero=0", "train.steps=1")
    assert workers.run(train_with_schedule, 2, config, str(tmp_path)) == [EXIT_OK] * 2
