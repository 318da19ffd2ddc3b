"""Which parameters decay, which are for Muon and SOAP, at what rate each moves; the table, and a plugin."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from megatfm.config import AdamWConfig, ModelConfig, MuonConfig, OptimizerConfig, OptimizerSection, load_config
from megatfm.describe import describe
from megatfm.engines.optimizers import TorchOptimizer
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.norm import NORMS
from megatfm.models import build
from megatfm.optim.lr_schedules import compute_schedule_factor
from megatfm.optim.parameters import OPTIMIZERS, ParameterInfo, build_optimizer_groups, describe_parameters
from tests.support.models import FAMILY_MODELS, PATTERN_MODELS

SMALL = {"vocab_size": 96, "d_model": 32, "n_layers": 3, "attention.n_heads": 4, "ffn.d_ff": 64}
ADAMW = AdamWConfig(lr=1e-3)


def model(**parts: Any) -> nn.Module:
    with torch.device("meta"):
        return build(ModelConfig.from_dotted({**SMALL, **parts}))


def table(config: OptimizerSection = ADAMW, **parts: Any) -> dict[str, ParameterInfo]:
    return describe_parameters(model(**parts), config)


BERT = {
    "family": "encoder", "position.name": "learned", "position.max_positions": 16, "embedding.n_segments": 2,
    "embedding.norm": True, "norm.name": "layer_norm", "attention.bias": True, "ffn.bias": True,
    "lm_head.name": "transform", "lm_head.bias": True, "extra_heads.sentence.classes": 2,
}  # fmt: skip


def test_norms_and_biases_of_bert_have_no_weight_decay() -> None:
    for name, info in table(**BERT).items():
        is_vector = name.endswith(".bias") or "norm" in name
        assert info.decays != is_vector, name
        is_table = name.startswith("encoder.embedding")
        assert info.role == ("vector" if is_vector else "embedding" if is_table else "matrix"), name


def test_embeddings_have_weight_decay_only_if_configured() -> None:
    """Tables of tokens, positions, segments and distances; the projection of a factorised embedding is a matrix."""
    config = AdamWConfig(lr=1e-3, decay_embeddings=False)
    bert, shaw = (
        table(config, **BERT, **{"embedding.dim": 16}),
        table(config, **{"position.name": "shaw", "embedding.tied": False}),
    )
    assert {name for name, info in (bert | shaw).items() if info.role == "embedding"} == {
        "encoder.embedding.tokens.weight",
        "encoder.embedding.positions.weight",
        "encoder.embedding.segments.weight",
        "decoder.embedding.tokens.weight",
        *(f"decoder.layers.{i}.attn.core.{key}" for i in range(3) for key in ("keys", "values")),
    }
    assert not any(info.decays for info in (bert | shaw).values() if info.role == "embedding")
    assert bert["encoder.embedding.projection.weight"].decays
    assert shaw["head.weight"].decays


def test_parameters_of_one_value_per_head_are_vectors() -> None:
    """T5's biases are [buckets, heads]; a gain for each head or expert, and their biases, may come stacked as well."""
    t5 = table(family="encoder_decoder", **{"position.name": "t5"})
    assert t5["encoder.position.weight"].shape == (32, 4)
    assert not t5["encoder.position.weight"].decays

    class Stacked(NORMS.get("rms_norm")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(8, 1e-5)
            self.weight = nn.Parameter(torch.ones(4, 8))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.up_bias = nn.Parameter(torch.ones(4, 8, 8)), nn.Parameter(torch.ones(4, 8))
            self.slopes, self.roles = nn.Parameter(torch.ones(4, 1, 1)), {"slopes": "vector"}

    layer = nn.ModuleDict({"norm": Stacked(), "experts": Experts()})
    parameters = describe_parameters(nn.ModuleDict({"layers": nn.ModuleDict({"0": layer})}), ADAMW)
    assert {name: info.decays for name, info in parameters.items()} == {
        "layers.0.norm.weight": False,
        "layers.0.experts.weight": True,
        "layers.0.experts.up_bias": False,
        "layers.0.experts.slopes": False,
    }
    assert not any(info.is_block_matrix for info in parameters.values())


def test_muon_optimizes_the_matrices_of_blocks_only() -> None:
    groups = build_optimizer_groups(MuonConfig(lr=1e-3), model(**BERT, **{"position.offset": 0}))
    moved = {name for group in groups if group.granularity == "whole_tensor" for name in group.names}
    parts = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "ffn.w_gate", "ffn.w_up", "ffn.w_down")
    assert moved == {f"encoder.layers.{i}.{part}.weight" for i in range(3) for part in parts}
    shaw = build_optimizer_groups(MuonConfig(lr=1e-3), model(**{"position.name": "shaw"}))
    assert not any(name.endswith(("keys", "values")) for name in shaw[0].names), "rows of a table"


def rates(**parts: Any) -> dict[str, float]:
    return {name: p.lr_scale for name, p in table(AdamWConfig(lr=1e-3, layer_decay=0.5), **parts).items()}


def test_layer_decay_lowers_the_rate_of_each_lower_block() -> None:
    bert = rates(**BERT)
    for name, scale in bert.items():
        if name.startswith("encoder.layers."):
            assert scale == 0.5 ** (3 - int(name.split(".")[2])), name
        elif name.startswith("encoder.embedding."):
            assert scale == 0.5**4, name
        else:
            assert scale == 1.0, name
    assert set(bert.values()) == {1.0, 0.5, 0.25, 0.125, 0.0625}


def test_layer_decay_counts_each_stack_separately() -> None:
    t5 = rates(family="encoder_decoder", n_encoder_layers=2, **{"position.name": "t5"})
    assert t5["encoder.layers.1.attn.wq.weight"] == t5["decoder.layers.2.attn.wq.weight"] == 0.5
    assert t5["encoder.layers.0.attn.wq.weight"] == t5["decoder.layers.1.cross.wq.weight"] == 0.25
    assert t5["encoder.position.weight"] == t5["encoder.embedding.tokens.weight"] == 0.125
    assert t5["decoder.position.weight"] == 0.0625
    electra = rates(
        family="electra",
        generator={"d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 1},
        **{"position.name": "learned", "position.max_positions": 16},
    )
    assert electra["generator.encoder.layers.0.attn.wq.weight"] == 0.5
    assert electra["discriminator.encoder.layers.0.attn.wq.weight"] == 0.125
    assert electra["discriminator.verdict.weight"] == 1.0


def test_layer_decay_leaves_heads_at_the_full_rate() -> None:
    spans = rates(**BERT, extra_heads={"boundary": {}})
    assert spans["boundary.positions.weight"] == spans["boundary.dense1.weight"] == 1.0
    ahead = rates(n_mtp_heads=1, **{"position.name": "shaw"})
    assert {scale for name, scale in ahead.items() if name.startswith("future.")} == {1.0}


def test_layer_decay_of_patch_merging_is_that_of_the_block_before_it() -> None:
    """SimMIM's released optimizer.py: `get_swin_layer`."""
    config = FAMILY_MODELS["swin"].with_changes(
        {"stages.n_layers": (1, 3, 2), "stages.n_heads": (4, 8, 16), "n_layers": 6}
    )
    with torch.device("meta"):
        parameters = describe_parameters(build(config), AdamWConfig(lr=1e-3, layer_decay=0.5))
    for stage, last in ((0, 0), (1, 3)):
        merging = {p.lr_scale for name, p in parameters.items() if name.startswith(f"encoder.merges.{stage}.")}
        block = {p.lr_scale for name, p in parameters.items() if name.startswith(f"encoder.layers.{last}.")}
        assert merging == block == {0.5 ** (6 - last)}


def test_layer_decay_reaches_all_that_blocks_read() -> None:
    """The vector that starts XLNet's query stream, and Linformer's projection for all layers, as embeddings."""
    xlnet, linformer = (FAMILY_MODELS["xlnet"], ModelConfig.from_dotted(PATTERN_MODELS["linformer, shared by layers"]))
    for config, name in ((xlnet, "encoder.query.weight"), (linformer, "encoder.sketch.weight")):
        with torch.device("meta"):
            parameters = describe_parameters(build(config), AdamWConfig(lr=1e-3, layer_decay=0.5))
        assert parameters[name].lr_scale == parameters["encoder.embedding.tokens.weight"].lr_scale < 0.5


def test_mup_and_layer_decay_multiply() -> None:
    config = AdamWConfig(lr=1e-3, layer_decay=0.5)
    parts = {"attention.bias": True, "mup": {"base_width": 8}, "embedding.tied": False}
    (group,) = build_optimizer_groups(config, model(**parts))
    plain = rates(**parts)
    for name, ratio in group.lr_ratios.items():
        hidden = ".layers." in name and name.endswith(".weight") and "norm" not in name
        assert ratio == plain[name] * (0.25 if hidden else 1.0), name
    assert group.lr_ratios["decoder.layers.1.attn.wq.weight"] == 0.25 * 0.25
    with pytest.raises(MegatfmError, match=r"learning rate factor for 'nothing', but the model has no such parameter"):
        describe_parameters(model(), ADAMW, {"nothing": 0.5})


@pytest.mark.parametrize("name", ["muon", "soap", "adafactor", "lamb"])
def test_mup_is_refused_for_optimizers_of_whole_tensors(name: str) -> None:
    config: Any = TypeAdapter(OptimizerConfig).validate_python({"name": name, "lr": 0.01})
    with pytest.raises(UsageError, match=rf"optimizer\.name = '{name}' sizes its updates by the whole tensor"):
        build_optimizer_groups(config, model(mup={"base_width": 8}))


@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "adafactor", "lamb", "lion", "schedule_free_adamw"])
def test_every_optimizer_uses_roles_and_rates(name: str) -> None:
    """A step with and one without decay, or with a rate of its own, differ only where they should."""

    def moved(weight_decay: float, layer_decay: float) -> dict[str, torch.Tensor]:
        config: Any = TypeAdapter(OptimizerConfig).validate_python(
            {"name": name, "lr": 0.01, "weight_decay": weight_decay, "layer_decay": layer_decay}
        )
        generator = torch.Generator().manual_seed(3)
        net = model(**BERT)
        weights = {n: torch.randn(p.shape, generator=generator) for n, p in net.named_parameters()}
        before = {n: weight.clone() for n, weight in weights.items()}
        for group in build_optimizer_groups(config, net):
            optimizer = TorchOptimizer(group, {n: weights[n] for n in group.names})
            for _ in range(2):  # SOAP only measures at the first
                towards = {n: torch.randn(w.shape, generator=generator) for n, w in weights.items()}
                optimizer.step({n: towards[n] for n in group.names}, 0.01)
        return {n: weight - before[n] for n, weight in weights.items()}

    plain, decayed, layered = moved(0.0, 1.0), moved(1.0, 1.0), moved(0.0, 0.5)
    for parameter, info in table(**BERT).items():
        assert torch.equal(plain[parameter], decayed[parameter]) != info.decays, parameter
    for parameter, scale in rates(**BERT).items():
        ratio = float(layered[parameter].norm() / plain[parameter].norm())
        assert ratio == pytest.approx(scale, rel=0.2), parameter


def test_an_optimizer_that_omits_a_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = OPTIMIZERS.get("adamw")
    for fault, count in (
        (lambda config, parameters: adamw(config, dict(list(parameters.items())[1:])), 0),
        (lambda config, parameters: adamw(config, parameters) * 2, 2),
    ):
        monkeypatch.setitem(OPTIMIZERS._parts, "adamw", fault)
        with pytest.raises(MegatfmError, match=rf"has decoder\.embedding\.tokens\.weight in {count} groups"):
            build_optimizer_groups(ADAMW, model())
    with pytest.raises(UsageError, match="unknown optimizer 'nothing'; there are: adafactor, adamw, "):
        build_optimizer_groups(ADAMW.model_copy(update={"name": "nothing"}), model())


PAGE = Path(__file__).parents[3] / "docs" / "guide" / "optimizers.md"
OVERRIDES = [
    'plugins=["my_optimizers"]', 'optimizer={name="momentum", lr=0.1, mass=0.5, layer_decay=0.5, weight_decay=0.25}',
    'lr_schedule={name="steps", every=3, factor=0.5, warmup_steps=2}', "model.vocab_size=16", "model.n_layers=1",
]  # fmt: skip


def test_plugins_may_register_optimizers_and_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r'^```python title="my_optimizers.py"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_optimizers.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config("quickstart", OVERRIDES)
    assert describe(config).optimizer_bytes == 4  # imports the plugin
    (group,) = build_optimizer_groups(config.optimizer, build(config.model))
    shapes = {name: p.shape for name, p in build(config.model).named_parameters()}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    optimizer = TorchOptimizer(group, weights)
    for _ in range(2):
        optimizer.step({name: torch.ones(shape) for name, shape in shapes.items()}, 0.1)
    # w = 1, g = 1 twice, with mass 0.5; the matrices' gradient has a quarter of the weight added.
    by_hand = {True: (1 - 0.05 * 1.25, 1.25), False: (1 - 0.05, 1.0)}
    for name, decays in (("wq.weight", True), ("norm.weight", False)):
        block = next(weight for key, weight in weights.items() if ".layers.0." in key and key.endswith(name))
        first, buffer = by_hand[decays]
        second = first - 0.05 * (0.5 * buffer + 1 + 0.25 * decays * first)
        torch.testing.assert_close(block, torch.full_like(block, second))
    assert [compute_schedule_factor(config.lr_schedule, step, 10) for step in range(1, 8)] == [
        0.5, 1, 0.5, 0.5, 0.5, 0.25, 0.25,
    ]  # fmt: skip
