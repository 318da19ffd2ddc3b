"""What `megatfm describe` counts. Names and shapes of the presets are held in tests/unit/models."""

import argparse
from pathlib import Path

import pytest
import torch

from megatfm.config import Config, load, load_config, preset_names
from megatfm.config.prep import PrepConfig
from megatfm.describe import add_arguments, describe, main
from megatfm.engines.optimizers import TorchOptimizer
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.train.optimizers import optimizer_groups

VOCABULARY = ["model.vocab_size=4096"]  # what the quickstart's tokenizer has


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_counts_are_exact(preset: str, parameters: int) -> None:
    found = describe(load_config(preset))
    assert found.parameters == parameters
    assert found.embedding + found.non_embedding == parameters
    header = Path("megatfm/presets", f"{preset}.toml")
    assert f"{parameters:,}" in (Path(__file__).resolve().parents[2] / header).read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads(preset: str) -> None:
    kind = PrepConfig if preset.endswith("-data") else Config
    assert load(kind, preset)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_flops_of_a_small_model_by_hand(tied: str) -> None:
    """6 FLOPs for each weight of each matrix product, and 12·h for each pair of tokens in a layer."""
    found = describe(load_config("quickstart", [*VOCABULARY, f"model.tie_embeddings={tied}"]))
    model, s = found.config.model, found.config.data.sequence_length
    d, ff, v, layers = model.d_model, model.d_ff, 4096, model.n_layers
    matrices = layers * (4 * d * d + 3 * d * ff) + v * d
    norms = (2 * layers + 1) * d
    assert found.multiplied == matrices + norms
    assert found.flops_full == 6 * (matrices + norms) + 12 * layers * d * s
    assert found.flops_full - found.flops_causal == 6 * layers * d * s
    assert found.tokens == found.tokens_per_step * found.config.train.steps


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("adamw", "8: two moments"),
        ("muon", "8: momentum and a whole copy, or two moments"),
        ("soap", "30.6: two moments, covariances, bases and a whole copy"),
        ("adafactor", "4.22: rows, columns and a whole copy"),
        ("lamb", "12: two moments and a whole copy"),
        ("lion", "4: a momentum"),
        ("schedule_free_adamw", "8: second moment and z"),
    ],
)
def test_state_bytes_are_those_of_the_real_optimizers(name: str, about: str) -> None:
    """Counted on the optimizer itself, after a step that moves every weight of a small model."""
    optimizer = f'optimizer={{name="{name}", lr=1e-3}}'
    constant = ['schedule={name="constant"}'] if name == "schedule_free_adamw" else []
    small = ["model.vocab_size=64", "model.d_model=32", "model.d_ff=80"]
    config = load_config("quickstart", [optimizer, *constant, *small])
    found = describe(config)
    n_bytes = 0
    for group in optimizer_groups(config.optimizer, build(config.model)):
        tensors = {n: torch.ones(found.shapes[n]) for n in group.names}
        made = TorchOptimizer(group, tensors)
        made.step({n: torch.ones_like(tensor) for n, tensor in tensors.items()}, 1e-3)
        n_bytes += sum(v.nbytes for state in made.state().values() for v in state.values() if v.dim())
        n_bytes += sum(t.nbytes for t in tensors.values()) * (group.needs == "whole_tensor")
    assert found.optimizer_bytes * found.parameters == pytest.approx(n_bytes, rel=1e-12)
    assert f"{found.optimizer_bytes:.3g}" == about.partition(":")[0]
    assert found.state_bytes == 8 + found.optimizer_bytes


def test_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """405 billion parameters in no memory: they are on the meta device."""
    seen: list[torch.nn.Module] = []
    monkeypatch.setattr("megatfm.models.build", lambda config: seen.append(build(config)) or seen[-1])
    describe(load_config("llama3-405b"))
    assert all(parameter.is_meta for parameter in seen[0].parameters())


def test_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert main(parser.parse_args(["llama3-8b", "train.steps=2000"])) == 0
    printed = capsys.readouterr().out
    for text in (
        "32 heads of 128, 8 of keys and values",
        "8,030,261,248",
        "theta 500,000",
        "8,388,608,000 in 2,000 steps",
    ):
        assert text in printed


def test_an_unknown_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.vocab_size is not set, and there is no tokenizer at"):
        describe(load_config("quickstart", [f"data.tokenizer={tmp_path}/tokenizer.model"]))
