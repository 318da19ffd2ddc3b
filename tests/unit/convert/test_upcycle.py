"""A dense model becomes a mixture that computes the same, and learns from there."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megatfm
from megatfm.checkpoint import find_checkpoint, read_state
from megatfm.config import Config
from megatfm.convert.convert import convert
from megatfm.convert.starting_config import make_starting_config
from megatfm.convert.upcycle import Upcycling, upcycle
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.moe.experts import Experts
from megatfm.train.init_from import match_weights
from tests.support.hf_folders import DECODER_TOKENS, build_hf_gpt2, build_hf_llama, run_convert
from tests.support.small_runs import SMALL_DECODER, random_model, tokenizer_model, write_trained_run

__all__ = ["tokenizer_model"]  # a fixture

RECOMPILED = {"compile": True, "recompute": "50 %"}


@pytest.fixture(params=[build_hf_gpt2, build_hf_llama], ids=["biases", "gated"])
def dense(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "dense", "megatfm")
    return tmp_path / "dense"


def logits_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model.double()(DECODER_TOKENS).logits
    logits.sin().sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if ".ffn." not in name}


@pytest.mark.parametrize("options", [
    {"experts": 4}, {"experts": 3, "top_k": 1, "every": 2}, {"experts": 3, "top_k": 2, "granularity": 4},
])  # fmt: skip
def test_the_first_step_is_the_dense_model_s(dense: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    upcycle(dense, tmp_path / "moe", Upcycling(**options))
    expected, actual = (logits_and_gradients(megatfm.load(path)) for path in (dense, tmp_path / "moe"))
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-10)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-9, atol=1e-9)
    result = megatfm.load(tmp_path / "moe")
    mixtures = [module for module in result.modules() if isinstance(module, Experts)]
    assert len(mixtures) == 2 // options.get("every", 1)
    granularity = options.get("granularity", 1)
    assert {m.n_experts for m in mixtures} == {options["experts"] * granularity}
    assert {m.top_k for m in mixtures} == {options.get("top_k", 2) * granularity}


def test_noise_makes_copies_differ(dense: Path, tmp_path: Path) -> None:
    words = ("--to", "moe", "--experts", "4", "--noise", "0.1", "--seed", "3")
    assert run_convert(str(dense), str(tmp_path / "moe"), *words) == 0
    plain, noisy = megatfm.load(dense), megatfm.load(tmp_path / "moe")
    down = noisy.get_parameter("decoder.layers.0.ffn.experts.w_down")
    exact = plain.get_parameter("decoder.layers.0.ffn.w_down.weight")
    relative = (down - exact).std() / exact.std()
    assert 0.08 < relative.item() < 0.12
    assert not torch.equal(down[0], down[1])


def test_a_mixture_goes_into_no_dense_model_and_the_other_way_round(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", Upcycling(4))
    with pytest.raises(UsageError, match="it has experts already: upcycle a dense model"):
        upcycle(tmp_path / "moe", tmp_path / "again", Upcycling(4))
    with pytest.raises(UsageError, match=r"--granularity 7 does not divide model\.ffn\.d_ff = \d+: choose"):
        upcycle(dense, tmp_path / "again", Upcycling(4, granularity=7))
    with pytest.raises(UsageError, match="no mixture can be made of it: ffn: top_k = 5 is more than n_experts = 4"):
        upcycle(dense, tmp_path / "again", Upcycling(4, top_k=5))
    for noise in (math.nan, math.inf, -1.0):
        with pytest.raises(UsageError, match="--noise is a number from 0"):
            upcycle(dense, tmp_path / "again", Upcycling(4, noise=noise))
    assert not (tmp_path / "again").exists()
    models = map(megatfm.load, (dense, tmp_path / "moe"))
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in models]
    with pytest.raises(UsageError, match="weights of a mixture of experts, but the model is dense"):
        match_weights(shapes[0], shapes[1], (), tmp_path / "moe")
    with pytest.raises(UsageError, match=r"`megatfm convert .*dense NEW --to moe --experts N` makes a mixture"):
        match_weights(shapes[1], shapes[0], (), dense)


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(MegatfmError, match=r"a would be \[2\], but \[3\] in the mixture's model: report it"):
        list(Upcycling(2).tensors({"a": torch.zeros(2)}, {"a": (3,)}))


def test_a_network_of_a_plugin_is_refused() -> None:
    plugged = SMALL_DECODER.model_copy(update={"ffn": SMALL_DECODER.ffn.model_copy(update={"name": "plugged"})})
    with pytest.raises(UsageError, match=r"model\.ffn\.name = 'plugged': only dense networks can become experts"):
        Upcycling(2).model(plugged)


def test_a_config_that_goes_with_no_experts_is_a_usage_error(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = read_state(find_checkpoint(dense))
    values = {**state, "config": {**state["config"], "train": {**state["config"]["train"], **RECOMPILED}}}
    monkeypatch.setattr("megatfm.checkpoint.read_state", lambda _: values)
    with pytest.raises(UsageError, match=r"its config doesn't go with a mixture of experts: train\.recompute = '50 %'"):
        upcycle(dense, tmp_path / "moe", Upcycling(4))
    assert not (tmp_path / "moe").exists()


def test_a_model_that_would_lose_tensors_is_refused(tmp_path: Path, tokenizer_model: bytes) -> None:
    adapted = SMALL_DECODER.with_changes({"lora": {"rank": 2}})
    run = write_trained_run(tmp_path / "adapted", tokenizer_model, random_model(adapted, torch.float32))
    with pytest.raises(UsageError, match=r"adapted: its model has adapters .* merge them first, megatfm convert"):
        upcycle(run, tmp_path / "moe", Upcycling(3))
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(SMALL_DECODER, torch.float32))
    state = read_state(find_checkpoint(run))
    for model, message in (
        ({"n_layers": SMALL_DECODER.n_layers + 1},
         r"is not in the checkpoint, but in the model that its config describes"),
        ({"n_layers": 0}, "this version of megatfm can't read its config"),
    ):  # fmt: skip
        other = {**state, "config": {**state["config"], "model": {**state["config"]["model"], **model}}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatfm.checkpoint.read_state", lambda _, other=other: other)
            with pytest.raises(MegatfmError, match=message):
                upcycle(run, tmp_path / "moe", Upcycling(3))
    assert not (tmp_path / "moe").exists()


def test_a_length_that_can_t_be_is_a_usage_error(dense: Path, tmp_path: Path) -> None:
    model = Config.model_validate(read_state(find_checkpoint(dense))["config"]).model
    message = r"the converted model has no valid config.*: data\.sequence_length: Input should be greater"
    with pytest.raises(UsageError, match=message):
        make_starting_config(tmp_path, model, None, -1)


def test_layer_types_with_different_networks(tmp_path: Path, tokenizer_model: bytes) -> None:
    """Each kind's width is divided; `narrow` has the model's, and `plain` another activation."""
    config = SMALL_DECODER.with_changes(
        {"n_layers": 3, "layer_types": ["narrow", "wide", "plain"],
         "layer_type": {"narrow": {}, "wide": {"ffn": {"d_ff": 96, "dropout": 0.2}},
                        "plain": {"ffn": {"d_ff": 60, "activation": "relu"}}}},
    )  # fmt: skip
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(config, torch.float32))
    output = upcycle(run, tmp_path / "moe", Upcycling(3, granularity=2))
    assert output[1:] == ["ffn.dropout = 0.2 is left out: experts have none"]
    result = megatfm.load(tmp_path / "moe")
    widths = [result.config.layer_config(depth).ffn.d_ff for depth in range(3)]
    assert widths == [24, 48, 30]
    expected = megatfm.load(run).double()(DECODER_TOKENS).logits
    torch.testing.assert_close(result.double()(DECODER_TOKENS).logits, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(UsageError, match="--every 2: the model's blocks differ already, so all get experts"):
        upcycle(run, tmp_path / "again", Upcycling(3, every=2))
    reason = r"--granularity 8 does not divide model\.layer_type\.plain\.ffn\.d_ff = 60: choose 6"
    with pytest.raises(UsageError, match=reason):
        upcycle(run, tmp_path / "again", Upcycling(3, granularity=8))
