"""Exact counts of the encoders' presets, and their parameters' names and shapes, which checkpoints depend on.

After a change that is meant: `python tests/unit/models/test_encoder_presets.py` writes the golden files anew.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from megatfm.config import Config, load_config
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import build_objective
from tests.support.golden_curves import SPECIAL, VOCABULARY, join_equal_blocks, make_batch
from tests.support.reference_gradients import get_table_row

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "models"
# All parameters; of BERT's tables and blocks with a pooler (what transformers calls its bare model); without any head.
COUNTS = {
    "bert-base": (110_106_428, 109_482_240, 108_891_648),
    "bert-base-cased": (108_932_934, 108_310_272, 107_719_680),
    "bert-large": (336_226_108, 335_141_888, 334_092_288),
    "roberta-base": (124_697_433, None, 124_055_040),
    "roberta-large": (355_412_057, None, 354_310_144),
    "bigbird-base": (127_520_694, None, 126_878_208),
    "bigbird-large": (359_176_374, None, 358_074_368),
    "longformer-base": (148_711_257, None, 148_068_864),
    "spanbert-base": (110_310_280, 108_310_272, 107_719_680),
    "spanbert-large": (337_008_776, 333_579_264, 332_529_664),
    "albert-base": (11_813_810, 11_683_584, 11_092_992),
    "deberta-base": (139_244_121, None, 138_601_728),
    "modernbert-base": (149_655_232, None, 149_014_272),
    "modernbert-large": (395_881_664, None, 394_781_696),
    "xlnet-base": (116_750_336, None, 116_718_336),
    "vit-ti16": (5_717_416, None, 5_524_416),
    "vit-s16": (22_050_664, None, 21_665_664),
    "vit-s32": (22_878_952, None, 22_493_952),
    "vit-b16": (86_567_656, None, 85_798_656),
    "vit-b32": (88_224_232, None, 87_455_232),
    "vit-l16": (304_326_632, None, 303_301_632),
    "vit-l32": (306_535_400, None, 305_510_400),
    "vit-h14": (632_045_800, None, 630_764_800),
}
ELECTRA = {
    "electra-small": (14_196_731, 13_549_057, 4_620_026),
    "electra-base": (119_389_499, 109_483_009, 33_740_602),
    "electra-large": (354_659_387, 335_142_913, 51_295_290),
    "deberta-v3-base": (228_066_661, 184_422_913, 142_024_548),
}
DEBERTA_V3 = 183_831_552
"""Its discriminator without the verdict: transformers' bare model."""
PRESETS = [*COUNTS, *ELECTRA]


@cache
def loaded(preset: str) -> tuple[Config, nn.Module]:
    """On the meta device: 355 million parameters in no memory."""
    config = load_config(preset)
    with torch.device("meta"):
        return config, build(config.model)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("preset", COUNTS)
def test_counts_of_encoders(preset: str) -> None:
    _, model = loaded(preset)
    full, with_pooler, bare = COUNTS[preset]
    assert count(model) == full
    assert count(model.encoder) == bare
    if with_pooler:
        d = model.config.d_model
        assert with_pooler == bare + d * d + d
        if "sentence" in model.config.extra_heads:
            assert count(model.sentence.pooler) == d * d + d


def test_without_the_sentence_head_it_is_the_masked_language_model() -> None:
    config = load_config("bert-base", ["model.extra_heads={}"])
    with torch.device("meta"):
        assert count(build(config.model)) == 109_514_298


@pytest.mark.parametrize("preset", ELECTRA)
def test_counts_of_both_halves(preset: str) -> None:
    _, model = loaded(preset)
    full, discriminator, generator = ELECTRA[preset]
    shared = model.generator.encoder.embedding
    assert count(model) == full
    assert count(model.discriminator) == discriminator
    assert count(model.generator) == generator
    positions = count(shared.positions) if shared.positions is not None else 0
    assert full == discriminator + generator - count(shared.tokens) - positions
    if preset == "deberta-v3-base":
        assert count(model.discriminator.encoder) == DEBERTA_V3


@pytest.mark.parametrize("preset", PRESETS)
def test_the_header_states_the_count(preset: str) -> None:
    header = (ROOT / "megatfm" / "presets" / f"{preset}.toml").read_text(encoding="utf-8").partition("\nname")[0]
    stated = re.findall(r"\d+(?:,\d{3}){2}", header)
    counts = [f"{number:,}" for number in (COUNTS | ELECTRA)[preset] if number]
    assert counts[0] in stated
    assert set(stated) <= {*counts, f"{DEBERTA_V3:,}"}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_zoo_s_row_is_the_preset(preset: str) -> None:
    config, _ = loaded(preset)
    cells = get_table_row(preset)
    place = re.findall(r"`([^`]+)`", cells[0]).index(preset)
    assert cells[4].split("; ")[place] == f"{(COUNTS | ELECTRA)[preset][0]:,}"
    assert f"`{config.objective.name}`" in cells[2]
    text = (ROOT / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    assert all(f"{number:,}" in text for number in ELECTRA.get(preset, ()))


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_shapes_are_golden(preset: str) -> None:
    """A change here breaks checkpoints: if it is meant, say so in CHANGELOG.md and write the files anew."""
    assert lines(preset) == (GOLDEN / f"{preset}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("preset", PRESETS)
def test_batches_divide_over_the_processes_of_the_header(preset: str) -> None:
    config, _ = loaded(preset)
    header = (ROOT / "megatfm" / "presets" / f"{preset}.toml").read_text(encoding="utf-8")
    nodes = int(header.partition("--nodes ")[2].split()[0])
    assert config.train.global_batch % (nodes * 8 * config.train.micro_batch) == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_says_how_it_starts(preset: str) -> None:
    _, model = loaded(preset)
    named = {id(p) for _, p in model.named_parameters()}
    initial = {id(getattr(module, key)) for module in model.modules() for key in getattr(module, "initial", {})}
    assert initial == named


def lines(preset: str) -> list[str]:
    return join_equal_blocks({name: tuple(p.shape) for name, p in loaded(preset)[1].named_parameters()})


if __name__ == "__main__":
    for name in PRESETS:
        (GOLDEN / f"{name}.txt").write_text("\n".join(lines(name)) + "\n", encoding="utf-8")


SMALL = {
    "model.vocab_size": VOCABULARY, "model.d_model": 32, "model.n_layers": 2, "model.attention.n_heads": 2,
    "model.ffn.d_ff": 48, "model.init.std": 0.2, "data.sequence_length": 32, "train.global_batch": 8,
    "train.micro_batch": 8,
}  # fmt: skip
LEARNED = {"model.position.max_positions": 32}
GENERATOR = {"model.generator.d_model": 16, "model.generator.n_heads": 2, "model.generator.d_ff": 24}
TRAINED = {
    "bert-base": LEARNED,
    "roberta-base": LEARNED,
    "spanbert-base": LEARNED,
    "albert-base": LEARNED | {"model.embedding.dim": 12},
    "deberta-base": {"model.position.max_distance": 9},
    "deberta-v3-base": GENERATOR
    | {"model.position.max_distance": 9, "model.position.buckets": 4, "model.generator.n_layers": 1},
    "electra-small": LEARNED | GENERATOR | {"model.embedding.dim": 12},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("preset", TRAINED)
def test_one_step_has_all_gradients_and_lowers_the_loss(preset: str, dtype: torch.dtype) -> None:
    config = load_config(preset, [f"{key}={value}" for key, value in (SMALL | TRAINED[preset]).items()])
    model, objective = build(config.model), build_objective(config.objective, config.model, SPECIAL, (32,))
    initialise(model, seed=0)
    model.to(dtype)
    fields = make_batch(config, objective, 1)
    terms, counts = objective(model, fields), objective.target_counts(fields)
    assert terms.keys() == counts.keys() == objective.loss_weights.keys()
    assert all(count > 0 for count in counts.values())
    sum(objective.loss_weights[name] * term / counts[name] for name, term in terms.items()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    before = {name: float(term.detach()) for name, term in terms.items()}
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    after = {name: float(term.detach()) for name, term in objective(model, fields).items()}
    total = [sum(objective.loss_weights[n] * s / float(counts[n]) for n, s in sums.items()) for sums in (before, after)]
    assert total[1] < total[0], "a step down the gradient goes down"
