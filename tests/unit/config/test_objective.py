"""Sections that are chosen by name, and one for the names of plugins."""

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from megatfm.config import (
    CausalObjective,
    Config,
    MaskedObjective,
    PluginObjective,
    SpanCorruptionObjective,
    to_toml,
)
from megatfm.errors import UsageError

Load = Callable[..., Config]


def test_the_name_chooses_the_section(load: Load) -> None:
    assert load().objective == CausalObjective()
    assert load("objective.mtp_loss_weight=0.5").objective == CausalObjective(mtp_loss_weight=0.5)
    actual = load("objective.name=span_corruption", "objective.noise_density=0.3").objective
    assert actual == SpanCorruptionObjective(noise_density=0.3)
    again = Config.model_validate(load("objective.name=masked").model_dump())
    assert type(again.objective) is MaskedObjective


def test_a_plugins_section_has_keys_of_its_own(load: Load) -> None:
    config = load("objective.name=mine", "objective.depth=3")
    assert isinstance(config.objective, PluginObjective)
    assert config.objective.model_extra == {"depth": 3}
    assert "depth = 3" in to_toml(config)
    with pytest.raises(ValidationError, match="frozen"):
        config.objective.name = "other"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("objective.mask_rate=2",), "objective.mask_rate: unknown key; known here: name, mtp_loss_weight"),
        (
            ("objective.name=masked", "objective.mask_rate=2"),
            "objective.mask_rate = 2: input should be less than 1; the default",
        ),
        (
            ("objective.name=masked", "objective.rates=2"),
            "objective.rates: unknown key; known here: name, mask_rate, mask_replace_prob",
        ),
        (
            ("objective.name=masked", "objective.random_replace_prob=0.3"),
            "objective: mask_replace_prob = 0.8 and random_replace_prob = 0.3 are more than 1 together: "
            "choose for example",
        ),
        (
            (
                "objective.name=ul2",
                "objective.r_denoiser_weight=0",
                "objective.x_denoiser_weight=0",
                "objective.s_denoiser_weight=0",
            ),
            "objective: r_denoiser_weight, x_denoiser_weight and s_denoiser_weight are all 0: give at least "
            "one a weight",
        ),
        (("objective=3",), "objective = 3: this is a section; for example objective = {"),
        (
            ("objective.name=7",),
            "objective.name = 7: input should be a valid string",
        ),
    ],
)
def test_a_mistake_names_key_and_way_out(load: Load, overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(*overrides)
    assert line in str(caught.value)
