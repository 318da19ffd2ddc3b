"""ELECTRA's generator and discriminator, which transformers stores as two models, in folders generator/ and
discriminator/."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.config.heads import HeadConfig
from megatfm.config.model_parts import GeneratorConfig
from megatfm.convert.architecture import Architecture, find_architecture, find_config_differences
from megatfm.convert.hf_checkpoint import HfFolder, is_hf_folder
from megatfm.convert.hf_config import Json
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError
from megatfm.models.electra import make_generator_config

ELECTRA_CLASSES = {"discriminator": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"}
DEBERTA_CLASSES = {"discriminator": "DebertaV2Model", "generator": "DebertaV2ForMaskedLM"}
"""Classes of DeBERTa v3. transformers has no class with the discriminator's head, which is left out."""
SHARED_EMBEDDINGS = ("encoder.embedding.tokens.weight", "encoder.embedding.positions.weight")
"""Embeddings that generator and discriminator share."""


@dataclass(frozen=True)
class ExportedModel:
    """A model of transformers as which a megatfm model, or half of an ELECTRA pair, is stored.

    folder: within the target; "": the target itself. name: of the class.
    """

    folder: str
    name: str
    architecture: Architecture
    hf_config: Json
    mappings: Sequence[WeightMapping]


def choose_exported_models(config: ModelConfig, previous_name: object = None) -> list[ExportedModel]:
    """Return the models of transformers that store a megatfm model: two for ELECTRA, one for others.

    previous_name: class that the model was converted from, which is chosen again if it still fits. Raises UsageError if
    transformers can't store the model.
    """
    if config.family != "electra":
        try:
            among = [str(previous_name)] if previous_name else None
            name, architecture, hf_config = find_architecture(config, among)
        except UsageError:
            name, architecture, hf_config = find_architecture(config)
        return [ExportedModel("", name, architecture, hf_config, architecture.map_weights(config))]
    classes = DEBERTA_CLASSES if config.position.name == "deberta_v2" else ELECTRA_CLASSES
    halves = _split_config(config)
    if classes is DEBERTA_CLASSES:
        headless = {"family": "encoder", "lm_head": HeadConfig(name="none")}
        halves["discriminator"] = halves["discriminator"].model_copy(update=headless)
    return [_export(half, half_config, classes[half]) for half, half_config in halves.items()]


def is_electra_folder(path: str | Path) -> bool:
    """Return whether a folder holds both halves of an ELECTRA pair."""
    return all(is_hf_folder(Path(path) / half) for half in ELECTRA_CLASSES)


def open_folder(path: str | Path) -> "HfFolder | ElectraFolder":
    """Open a folder in the Hugging Face format. Raises UsageError, MegatfmError."""
    return ElectraFolder(path) if is_electra_folder(path) else HfFolder(path)


class ElectraFolder:
    """An ELECTRA generator and discriminator in two folders, opened as one model, with the interface of HfFolder."""

    def __init__(self, path: str | Path) -> None:
        """Open a pair. Raises UsageError or MegatfmError if the halves don't belong together."""
        self.path = Path(path)
        self.models = {half: HfFolder(self.path / half) for half in ELECTRA_CLASSES}
        discriminator = self.models["discriminator"]
        self.notes: list[str] = []
        self.name, self.json = " and ".join(ELECTRA_CLASSES.values()), discriminator.json
        for half, name in ELECTRA_CLASSES.items():
            if self.models[half].name == DEBERTA_CLASSES[half]:
                raise UsageError(
                    f"{self.path / half}: a {DEBERTA_CLASSES[half]}, which is stored without what makes it a {half}: "
                    "open it alone"
                )
            if self.models[half].name != name:
                raise UsageError(f"{self.path / half}: a {self.models[half].name}, but a {half} is a {name}")
        self.architecture, self.max_length = discriminator.architecture, discriminator.max_length
        self.config = self._make_config()
        exported_halves = [
            _export(half, half_config, ELECTRA_CLASSES[half])
            for half, half_config in _split_config(self.config).items()
        ]
        self.mappings = [
            mapping
            for exported in exported_halves
            for mapping in exported.mappings
            if exported.folder == "discriminator" or mapping.megatfm[0].partition(".")[2] not in SHARED_EMBEDDINGS
        ]
        self._check_shared()

    def megatfm_tensors(self, mapping: WeightMapping) -> Mapping[str, Tensor]:
        """Read the tensors of a mapping under megatfm's names."""
        half = mapping.megatfm[0].partition(".")[0]
        half_mapping = replace(mapping, megatfm=tuple(name.removeprefix(f"{half}.") for name in mapping.megatfm))
        return {f"{half}.{name}": tensor for name, tensor in self.models[half].megatfm_tensors(half_mapping).items()}

    def _make_config(self) -> ModelConfig:
        discriminator, generator = (self.models[half].config for half in ELECTRA_CLASSES)
        section = GeneratorConfig(
            d_model=generator.d_model,
            n_heads=generator.attention.n_heads,
            d_ff=generator.ffn.d_ff,
            n_layers=None if generator.n_layers == discriminator.n_layers else generator.n_layers,
        )
        config = discriminator.model_copy(update={"family": "electra", "generator": section})
        if differences := find_config_differences(generator, make_generator_config(config)):
            raise UsageError(
                f"{self.path}: the generator has {', '.join(differences)}, the discriminator another: they are no pair"
            )
        return config

    def _check_shared(self) -> None:
        discriminator, generator = (self.models[half] for half in ELECTRA_CLASSES)
        for mapping in discriminator.mappings:
            if mapping.megatfm[0] in SHARED_EMBEDDINGS and not torch.equal(
                discriminator.read_tensor(mapping.hf[0]), generator.read_tensor(mapping.hf[0])
            ):
                raise MegatfmError(
                    f"{self.path}: {mapping.hf[0]} of the two halves differ, but ELECTRA shares them: they are no pair"
                )


def _split_config(config: ModelConfig) -> dict[str, ModelConfig]:
    changes = {"family": "discriminator", "generator": None}
    return {"discriminator": config.model_copy(update=changes), "generator": make_generator_config(config)}


def _export(half: str, config: ModelConfig, class_name: str) -> ExportedModel:
    name, architecture, hf_config = find_architecture(config, among=[class_name])
    mappings = [
        replace(
            mapping,
            megatfm=tuple(f"{'discriminator' if key in SHARED_EMBEDDINGS else half}.{key}" for key in mapping.megatfm),
        )
        for mapping in architecture.map_weights(config)
    ]
    return ExportedModel(half, name, architecture, hf_config, mappings)
