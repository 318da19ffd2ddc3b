"""ELECTRA's two halves, which transformers keeps as two models: folders discriminator/ and generator/ of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.config.model_parts import GeneratorConfig, HeadConfig
from megatfm.convert.config_keys import Json
from megatfm.convert.folder import HfFolder, is_hf_folder
from megatfm.convert.registry import Architecture, architecture_for, differences
from megatfm.convert.table import Rule
from megatfm.errors import MegatfmError, UsageError
from megatfm.models.electra import generator_config

CLASSES = {"discriminator": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"}
DEBERTA = {"discriminator": "DebertaV2Model", "generator": "DebertaV2ForMaskedLM"}
"""Of DeBERTa v3: transformers has no class with the verdict, so that the discriminator is stored without it."""
SHARED = ("encoder.embedding.tokens.weight", "encoder.embedding.positions.weight")
"""Tables of the discriminator that are the generator's as well."""


@dataclass(frozen=True)
class Part:
    """One model of transformers that a model of ours is stored as; folder: where in the target, "" for itself."""

    folder: str
    name: str
    architecture: Architecture
    theirs: Json
    rules: Sequence[Rule]


def parts_of(config: ModelConfig, before: object = None) -> list[Part]:
    """Two for ELECTRA, one for all others. Raises UsageError where transformers can't store the model.

    before: the name of what the model was converted from, which is chosen again if it still fits.
    """
    if config.family != "electra":
        try:
            name, architecture, theirs = architecture_for(config, [str(before)] if before else None)
        except UsageError:
            name, architecture, theirs = architecture_for(config)
        return [Part("", name, architecture, theirs, architecture.rules(config))]
    classes = DEBERTA if config.position.name == "disentangled_buckets" else CLASSES
    halves = _halves(config)
    if classes is DEBERTA:
        bare = {"family": "encoder", "head": HeadConfig(name="none")}
        halves["discriminator"] = halves["discriminator"].model_copy(update=bare)
    return [_half(half, alone, classes[half]) for half, alone in halves.items()]


def is_pair(path: str | Path) -> bool:
    """Whether a folder holds both halves."""
    return all(is_hf_folder(Path(path) / half) for half in CLASSES)


def open_folder(path: str | Path) -> "HfFolder | HfPair":
    """A folder in the Hugging Face format. Raises as they do."""
    return HfPair(path) if is_pair(path) else HfFolder(path)


class HfPair:
    """Both halves as one model of ours; to be used as HfFolder is."""

    def __init__(self, path: str | Path) -> None:
        """Raises UsageError where the halves don't belong together."""
        self.path = Path(path)
        self.halves = {half: HfFolder(self.path / half) for half in CLASSES}
        opened = self.halves["discriminator"]
        self.notes: list[str] = []
        self.name, self.json = " and ".join(CLASSES.values()), opened.json
        for half, name in CLASSES.items():
            if self.halves[half].name == DEBERTA[half]:
                raise UsageError(
                    f"{self.path / half}: a {DEBERTA[half]}, which is stored without what makes it a {half}: open it "
                    "alone"
                )
            if self.halves[half].name != name:
                raise UsageError(f"{self.path / half}: a {self.halves[half].name}, but a {half} is a {name}")
        self.architecture, self.config = opened.architecture, self._config()
        parts = [_half(half, alone, CLASSES[half]) for half, alone in _halves(self.config).items()]
        self.rules = [
            rule
            for part in parts
            for rule in part.rules
            if part.folder == "discriminator" or not _shared(rule)
        ]
        self._check_shared()

    def ours(self, rule: Rule) -> Mapping[str, Tensor]:
        """The tensors of a rule under our names."""
        half = rule.ours[0].partition(".")[0]
        alone = replace(rule, ours=tuple(name.removeprefix(f"{half}.") for name in rule.ours))
        return {f"{half}.{name}": tensor for name, tensor in self.halves[half].ours(alone).items()}

    def _config(self) -> ModelConfig:
        whole, smaller = (self.halves[half].config for half in CLASSES)
        generator = GeneratorConfig(
            d_model=smaller.d_model,
            n_heads=smaller.attention.n_heads,
            d_ff=smaller.ffn.d_ff,
            n_layers=None if smaller.n_layers == whole.n_layers else smaller.n_layers,
        )
        config = whole.model_copy(update={"family": "electra", "generator": generator})
        if lost := differences(smaller, generator_config(config)):
            raise UsageError(
                f"{self.path}: the generator has {', '.join(lost)}, the discriminator another: they are no pair"
            )
        return config

    def _check_shared(self) -> None:
        whole, smaller = (self.halves[half] for half in CLASSES)
        for rule in whole.rules:
            if rule.ours[0] in SHARED and not torch.equal(
                whole.get(rule.theirs[0]), smaller.get(rule.theirs[0])
            ):
                raise MegatfmError(
                    f"{self.path}: {rule.theirs[0]} of the two halves differ, but ELECTRA shares them: they are no pair"
                )


def _halves(config: ModelConfig) -> dict[str, ModelConfig]:
    alone = {"family": "discriminator", "generator": None}
    return {"discriminator": config.model_copy(update=alone), "generator": generator_config(config)}


def _half(half: str, config: ModelConfig, kind: str) -> Part:
    name, architecture, theirs = architecture_for(config, among=[kind])
    rules = [
        replace(rule, ours=tuple(_name(half, name) for name in rule.ours))
        for rule in architecture.rules(config)
    ]
    return Part(half, name, architecture, theirs, rules)


def _name(half: str, name: str) -> str:
    """Of a half's parameter in the whole; what is shared has its name from the discriminator."""
    return f"{'discriminator' if name in SHARED else half}.{name}"


def _shared(rule: Rule) -> bool:
    return rule.ours[0].partition(".")[2] in SHARED
