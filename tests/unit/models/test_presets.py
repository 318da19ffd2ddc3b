"""Exact counts of the presets, and their parameters' names and shapes, which checkpoints depend on.

After a change that is meant: `python -m tests.unit.models.test_presets` writes the golden files anew.
"""

import re
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import nn

from megatfm.config import Config, load_config
from megatfm.config.sources import ALIASES
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import build_objective
from tests.support.golden_curves import SPECIAL, VOCABULARY, make_batch
from tests.support.reference_gradients import get_table_row

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "models"
DECODERS = {
    "gpt1": 116_534_784, "gpt2-124m": 124_439_808, "gpt2-355m": 354_823_168, "gpt2-774m": 774_030_080,
    "gpt2-xl": 1_557_611_200, "gpt3-small": 125_226_240, "gpt3-medium": 355_871_744, "gpt3-large": 760_300_032,
    "gpt3-xl": 1_315_723_264, "gpt3-2.7b": 2_651_553_280, "gpt3-6.7b": 6_658_404_352, "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "mistral-7b": 7_241_732_096, "mistral-7b-v0.1": 7_241_732_096,
    "mla-1b": 1_725_427_200, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "olmoe-1b-7b": 6_919_161_856, "qwen3-30b-a3b": 30_532_122_624, "gpt-oss-20b": 20_914_757_184,
    "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168,
    "deepseek-v2-lite": 15_706_484_224, "switch-base-8": 619_339_008, "switch-base-128": 7_415_217_408,
    "deepseek-v3": 671_026_404_352, "prefix-lm-base": 109_628_544, "quickstart": 2_643_360, "t5-small": 60_506_624,
    "t5-base": 222_903_552, "t5-large": 737_668_096, "t5-3b": 2_851_598_336, "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152, "t5-v1.1-base": 247_577_856, "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184, "t5-v1.1-xxl": 11_135_332_352, "t-dmca": 32_528_896, "t-dmca-moe": 567_562_240,
    "transformer-base": 63_045_632, "transformer-big": 214_171_648,
}  # fmt: skip
"""Those of papers and released models, but for mla-1b, prefix-lm-base and the quickstart, which are our own."""
ENCODERS = {
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
"""All parameters; of BERT's tables and blocks with a pooler (what transformers calls its bare model); without heads."""
ELECTRA = {
    "electra-small": (14_196_731, 13_549_057, 4_620_026),
    "electra-base": (119_389_499, 109_483_009, 33_740_602),
    "electra-large": (354_659_387, 335_142_913, 51_295_290),
    "deberta-v3-base": (228_066_661, 184_422_913, 142_024_548),
}
"""All parameters; the discriminator's; the generator's."""
DEBERTA_V3 = 183_831_552
"""Its discriminator without the verdict: transformers' bare model."""
IMAGES = {
    "swin-t": 28_288_354, "swin-s": 49_606_258, "swin-b": 87_768_224, "swin-l": 196_532_476,
    "swinv2-t": 28_347_154, "swinv2-s": 49_728_418, "swinv2-b": 87_918_816, "simmim-swin-b": 89_874_104,
    "mvitv2-t": 24_173_320, "mvitv2-s": 34_870_216, "mvitv2-b": 51_472_744, "mvitv2-l": 217_992_952,
    "clip-b32": 151_277_313, "clip-b16": 149_620_737, "clip-l14": 427_616_513, "siglip-b16": 203_155_970,
}  # fmt: skip
"""Parameters with 1,000 classes, counted by transformers (MViTv2: timm), and those of the released pairs of towers."""
COUNTS = DECODERS | {name: counts[0] for name, counts in (ENCODERS | ELECTRA).items()} | IMAGES
OF_RELEASED_MODELS = [name for name in COUNTS if name != "quickstart"]
ACTIVE = {
    "mixtral-8x7b": 12_879_925_248, "mixtral-8x22b": 39_161_468_928, "olmoe-1b-7b": 1_282_017_280,
    "qwen3-30b-a3b": 3_353_032_704, "gpt-oss-20b": 4_187_440_704, "deepseek-v2-lite": 2_661_150_208,
    "deepseek-v3": 37_552_282_624, "switch-base-8": 222_977_280, "switch-base-128": 224_083_200,
    "t-dmca-moe": 34_885_632,
}  # fmt: skip
"""Parameters that a token meets."""
BLOCK = re.compile(r"(?P<before>.*\blayers\.)(?P<number>\d+)(?P<after>\..*)")


def join_equal_blocks(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """`encoder.layers.0…11.attn.wq.weight [768, 768]`, in the model's order.

    Neighbouring blocks are joined if they have the same names and shapes in the same order.
    """
    lines: list[str] = []
    for before, entries in groupby(shapes.items(), _get_stack):
        if before is None:
            lines += [f"{name} {list(shape)}" for name, shape in entries]
            continue
        runs: list[tuple[list[str], list[str]]] = []
        for number, block in groupby(entries, lambda entry: BLOCK.sub(r"\g<number>", entry[0])):
            content = [BLOCK.sub(r"\g<after>", name) + f" {list(shape)}" for name, shape in block]
            if runs and runs[-1][1] == content:
                runs[-1][0].append(number)
            else:
                runs.append(([number], content))
        for numbers, content in runs:
            where = numbers[0] if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}"
            assert [int(n) for n in numbers] == list(range(int(numbers[0]), int(numbers[-1]) + 1))
            lines += [f"{before}{where}{line}" for line in content]
    return lines


def _get_stack(entry: tuple[str, tuple[int, ...]]) -> str | None:
    match = BLOCK.fullmatch(entry[0])
    return match["before"] if match else None


@cache
def loaded(preset: str) -> tuple[Config, nn.Module]:
    """On the meta device: 405 billion parameters in no memory."""
    config = load_config(preset, ["model.vocab_size=4096"] if preset == "quickstart" else [])
    with torch.device("meta"):
        return config, build(config.model)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def header(preset: str) -> str:
    text = (ROOT / "megatfm" / "presets" / f"{preset}.toml").read_text(encoding="utf-8")
    return re.split(r"\n(?:name|extends)", text)[0]


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_their_parameter_counts(preset: str) -> None:
    assert count(loaded(preset)[1]) == COUNTS[preset]


@pytest.mark.parametrize("preset", ENCODERS)
def test_counts_of_encoders(preset: str) -> None:
    _, model = loaded(preset)
    _, with_pooler, bare = ENCODERS[preset]
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
    assert count(model.discriminator) == discriminator
    assert count(model.generator) == generator
    positions = count(shared.positions) if shared.positions is not None else 0
    assert full == discriminator + generator - count(shared.tokens) - positions
    if preset == "deberta-v3-base":
        assert count(model.discriminator.encoder) == DEBERTA_V3


@pytest.mark.parametrize("preset", ACTIVE)
def test_parameters_that_a_token_meets(preset: str) -> None:
    config, model = loaded(preset)
    unchosen = 0
    stacks = 2 if config.model.family == "encoder_decoder" else 1
    for depth in range(config.model.n_layers):
        ffn, d = config.model.layer_config(depth).ffn, config.model.d_model
        if ffn.name == "moe":
            expert_size = (2 if ffn.activation == "relu" else 3) * ffn.d_ff * d + ffn.bias * (2 * ffn.d_ff + d)
            unchosen += stacks * (ffn.n_experts - ffn.top_k) * expert_size
    assert count(model) - unchosen == ACTIVE[preset]
    assert f"{ACTIVE[preset]:,} for each token" in header(preset)
    assert re.search(rf"{ACTIVE[preset]:,}( and [\d,]+)? parameters a token", get_table_row(preset)[1])


@pytest.mark.parametrize("preset", OF_RELEASED_MODELS)
def test_the_header_states_count_and_command(preset: str) -> None:
    assert f"megatfm describe {preset} " in header(preset)
    assert f"# {COUNTS[preset]:,} parameters" in header(preset)
    if preset in ENCODERS | ELECTRA:
        known = {*(ENCODERS | ELECTRA)[preset], DEBERTA_V3}
        assert {int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3}){2}", header(preset))} <= known


@pytest.mark.parametrize("preset", OF_RELEASED_MODELS)
def test_the_zoo_s_row_is_the_preset(preset: str) -> None:
    cells = get_table_row(preset)
    place = re.findall(r"`([^`]+)`", cells[0]).index(preset)
    assert cells[4].split("; ")[place] == f"{COUNTS[preset]:,}"
    assert f"`{loaded(preset)[0].objective.name}`" in cells[2]
    text = (ROOT / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    assert all(f"{number:,}" in text for number in ELECTRA.get(preset, ()))


@pytest.mark.parametrize("preset", OF_RELEASED_MODELS)
def test_batches_divide_over_the_processes_of_the_header(preset: str) -> None:
    config, _ = loaded(preset)
    nodes = int(header(preset).partition("--nodes ")[2].split()[0])
    replicas = nodes * 8 // config.parallel.tp
    assert config.train.global_batch % (replicas * config.train.micro_batch) == 0


@pytest.mark.parametrize("preset", sorted(COUNTS.keys() - IMAGES.keys()))
def test_names_and_shapes_are_golden(preset: str) -> None:
    """A change here breaks checkpoints: if it is meant, say so in CHANGELOG.md and write the files anew."""
    assert lines(preset) == (GOLDEN / f"{preset}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("preset", COUNTS)
def test_every_parameter_says_how_it_starts(preset: str) -> None:
    _, model = loaded(preset)
    named = {id(parameter) for parameter in model.parameters()}
    buffers_of_routers = {id(buffer) for m in model.modules() if hasattr(m, "observed") for buffer in m.buffers()}
    initial = {id(getattr(m, key)) for m in model.modules() for key in getattr(m, "initial", {})}
    assert initial == named | buffers_of_routers


@pytest.mark.parametrize(("alias", "preset"), ALIASES.items())
def test_presets_have_other_names(alias: str, preset: str) -> None:
    assert load_config(alias) == loaded(preset)[0]


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


def lines(preset: str) -> list[str]:
    return join_equal_blocks({name: tuple(p.shape) for name, p in loaded(preset)[1].named_parameters()})


if __name__ == "__main__":
    for name in COUNTS.keys() - IMAGES.keys():
        (GOLDEN / f"{name}.txt").write_text("\n".join(lines(name)) + "\n", encoding="utf-8")
