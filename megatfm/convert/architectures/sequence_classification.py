"""Fine-tuned encoders with a head of classes: transformers' …ForSequenceClassification.

Written for models that `megatfm finetune` trained. A folder of such a class is opened as the bare model, since another
task has a head of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatfm.config import ModelConfig, TextClassifierHeadConfig
from megatfm.convert.architecture import ARCHITECTURES, HEAD_PREFIXES, Rules, register_architecture
from megatfm.convert.architectures import bert as bert  # which registers the classes that these differ from
from megatfm.convert.architectures import sparse_encoders as sparse_encoders
from megatfm.convert.hf_config import Json, Key, used
from megatfm.convert.weight_mapping import WeightMapping, rename_linear
from megatfm.errors import UsageError

LABELS: dict[str, Key] = {
    "id2label": used({"0": "LABEL_0", "1": "LABEL_1"}, dict),
    "classifier_dropout": used(None, float, int, None),
}


def register_classifier(name: str, base: str, pooler: str, classifier: str) -> None:
    """Register a class: that of `base`, with tensors `pooler` and `classifier` in place of its head."""
    architecture = ARCHITECTURES.get(base)

    def read(hf_config: Json) -> ModelConfig:
        classes, dropout = len(hf_config["id2label"]), hf_config["classifier_dropout"]
        config = architecture.config_from_hf(
            {key: value for key, value in hf_config.items() if key not in LABELS}
        )
        head = {"name": "text_classifier", "classes": classes, "pooler": "tanh", "bias": True}
        head |= {"dropout": config.dropout if dropout is None else float(dropout)}
        return config.with_changes(
            {"lm_head": {"name": "none", "bias": False}, "extra_heads": {"sentence": head}}
        )

    def write(config: ModelConfig) -> Json:
        head = config.extra_heads.get("sentence")
        if not isinstance(head, TextClassifierHeadConfig):
            raise UsageError(f"a {name} has a head of classes: model.extra_heads.sentence is no such head")
        labels = [f"LABEL_{number}" for number in range(head.classes)]
        return {**architecture.config_to_hf(config), **label_keys(labels), "classifier_dropout": head.dropout}

    register_architecture(
        name,
        replace(
            architecture,
            keys={**architecture.keys, **LABELS},
            config_from_hf=read,
            config_to_hf=write,
            weight_mappings=_with_classifier(architecture.weight_mappings, pooler, classifier),
            ignored_tensors=tuple(p for p in architecture.ignored_tensors if "pooler" not in p),
        ),
    )


def _with_classifier(rules: Rules, pooler: str, classifier: str) -> Rules:
    head: Sequence[WeightMapping] = [
        *rename_linear("sentence.pooler", pooler, bias=True),
        *rename_linear("sentence.classifier", classifier, bias=True),
    ]
    return lambda config: [
        *(
            replace(rule, tied_names=())
            for rule in rules(config)
            if not rule.megatfm[0].startswith(HEAD_PREFIXES)
        ),
        *head,
    ]


def label_keys(labels: Sequence[str]) -> Json:
    """The keys of config.json that name the classes."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


register_classifier("BertForSequenceClassification", "BertForMaskedLM", "bert.pooler.dense", "classifier")
register_classifier(
    "RobertaForSequenceClassification", "RobertaForMaskedLM", "classifier.dense", "classifier.out_proj"
)
register_classifier("AlbertForSequenceClassification", "AlbertForMaskedLM", "albert.pooler", "classifier")
register_classifier(
    "LongformerForSequenceClassification", "LongformerForMaskedLM", "classifier.dense", "classifier.out_proj"
)
