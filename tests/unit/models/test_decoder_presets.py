"""Exact counts of the decoders' and encoder-decoders' presets, and their parameters' names and shapes.

After a change that is meant: `python tests/unit/models/test_decoder_presets.py` writes the golden files anew.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from megatfm.config import Config, load_config
from megatfm.config.sources import ALIASES
from megatfm.models import build
from tests.support.golden_curves import join_equal_blocks
from tests.support.reference_gradients import get_table_row

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "models"
COUNTS = {
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
OF_RELEASED_MODELS = [name for name in COUNTS if name != "quickstart"]


@cache
def loaded(preset: str) -> tuple[Config, nn.Module]:
    """On the meta device: 405 billion parameters in no memory."""
    config = load_config(preset, ["model.vocab_size=4096"] if preset == "quickstart" else [])
    with torch.device("meta"):
        return config, build(config.model)


def header(preset: str) -> str:
    text = (ROOT / "megatfm" / "presets" / f"{preset}.toml").read_text(encoding="utf-8")
    return text.partition("\nname")[0]


@pytest.mark.parametrize("preset", COUNTS)
def test_decoder_presets_have_their_parameter_counts(preset: str) -> None:
    _, model = loaded(preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[preset]


@pytest.mark.parametrize("preset", OF_RELEASED_MODELS)
def test_the_header_states_count_and_command(preset: str) -> None:
    assert f"megatfm describe {preset} " in header(preset)
    assert f"# {COUNTS[preset]:,} parameters" in header(preset)


@pytest.mark.parametrize("preset", OF_RELEASED_MODELS)
def test_the_zoo_s_row_is_the_preset(preset: str) -> None:
    cells = get_table_row(preset)
    place = re.findall(r"`([^`]+)`", cells[0]).index(preset)
    assert cells[4].split("; ")[place] == f"{COUNTS[preset]:,}"
    assert f"`{loaded(preset)[0].objective.name}`" in cells[2]


@pytest.mark.parametrize("preset", COUNTS)
def test_names_and_shapes_are_golden(preset: str) -> None:
    """A change here breaks checkpoints: if it is meant, say so in CHANGELOG.md and write the files anew."""
    assert lines(preset) == (GOLDEN / f"{preset}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("preset", OF_RELEASED_MODELS)
def test_batches_divide_over_the_processes_of_the_header(preset: str) -> None:
    config, _ = loaded(preset)
    nodes = int(header(preset).partition("--nodes ")[2].split()[0])
    replicas = nodes * 8 // config.parallel.tp
    assert config.train.global_batch % (replicas * config.train.micro_batch) == 0


@pytest.mark.parametrize("preset", COUNTS)
def test_every_parameter_says_how_it_starts(preset: str) -> None:
    _, model = loaded(preset)
    named = {id(parameter) for parameter in model.parameters()}
    initial = {id(getattr(m, key)) for m in model.modules() for key in getattr(m, "initial", {})}
    assert initial == named | {id(buffer) for buffer in stateful(model)}


def stateful(model: nn.Module) -> list[torch.Tensor]:
    """Buffers of routers."""
    return [buffer for m in model.modules() if hasattr(m, "observed") for buffer in m.buffers()]


ACTIVE = {
    "mixtral-8x7b": 12_879_925_248, "mixtral-8x22b": 39_161_468_928, "olmoe-1b-7b": 1_282_017_280,
    "qwen3-30b-a3b": 3_353_032_704, "gpt-oss-20b": 4_187_440_704, "deepseek-v2-lite": 2_661_150_208,
    "deepseek-v3": 37_552_282_624, "switch-base-8": 222_977_280, "switch-base-128": 224_083_200,
    "t-dmca-moe": 34_885_632,
}  # fmt: skip


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
    assert sum(p.numel() for p in model.parameters()) - unchosen == ACTIVE[preset]
    assert f"{ACTIVE[preset]:,} for each token" in header(preset)
    assert re.search(rf"{ACTIVE[preset]:,}( and [\d,]+)? parameters a token", get_table_row(preset)[1])


@pytest.mark.parametrize(("alias", "preset"), ALIASES.items())
def test_presets_have_other_names(alias: str, preset: str) -> None:
    assert load_config(alias) == loaded(preset)[0]


def lines(preset: str) -> list[str]:
    return join_equal_blocks({name: tuple(p.shape) for name, p in loaded(preset)[1].named_parameters()})


if __name__ == "__main__":
    for name in COUNTS:
        (GOLDEN / f"{name}.txt").write_text("\n".join(lines(name)) + "\n", encoding="utf-8")
