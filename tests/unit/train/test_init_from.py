"""Inheritance of a run: weights of another run, a task's config, states of generators."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.config import ParallelConfig, load_config
from megatfm.config.model_parts import LoRAConfig
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.train.corpora import open_corpora, open_tokenizer
from megatfm.train.finetuning import resolve_task
from megatfm.train.init_from import LoadReport, check_adapter_scale, load_weights, match_weights
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.workers import Workers

BODY = {"decoder.embedding.tokens.weight": (40, 8), "decoder.layers.0.attn.wq.weight": (8, 8)}
STORED = {**BODY, "head.weight": (40, 8), "head.bias": (40,)}
SOURCE = Path("runs/before")


def test_all_are_taken_over_where_all_fit() -> None:
    takeover = match_weights(STORED, STORED, [], SOURCE)
    assert takeover.loaded == STORED
    assert not takeover.missing
    assert str(takeover) == "the weights of runs/before"


def test_the_table_lists_loaded_drawn_and_unused_weights() -> None:
    expected = {**BODY, "topic.weight": (5, 8)}
    takeover = match_weights(expected, STORED, ["decoder.*"], SOURCE)
    assert takeover.loaded == BODY
    assert str(takeover) == "2 of the 3 weights of runs/before"
    assert takeover.format_table() == [
        "weights of runs/before",
        "  loaded       2 tensors, 384 parameters",
        "  initialized  1 tensors, 40 parameters: topic.weight [5, 8]",
        "  not used     2 tensors, 360 parameters: head.weight [40, 8], head.bias [40]",
    ]


def test_another_family_is_distinguished_from_other_sizes() -> None:
    expected = {name.replace("decoder.", "encoder."): shape for name, shape in BODY.items()}
    with pytest.raises(UsageError, match=r"of another model\.family \(decoder, head; here encoder\): choose that"):
        match_weights(expected, STORED, [], SOURCE)
    wider = {name: (*shape[:-1], 16) for name, shape in STORED.items()}
    with pytest.raises(UsageError, match=r"use the weights of a model of the same sizes, or choose its sizes$"):
        match_weights(wider, STORED, [], SOURCE)


@pytest.mark.parametrize(("expected", "only", "message"), [
    ({**BODY, "topic.weight": (5, 8)}, [],
     r"""no topic\.weight: name the .* 'train\.init_include=\["decoder\.\*"\]'$"""),
    ({**BODY, "head.weight": (50, 8)}, [], r"head\.weight is \[40, 8\] there and \[50, 8\] here"),
    ({**BODY, "topic.weight": (5, 8)}, ["topic.*"], r"it has no topic\.weight"),
    (BODY, ["decoder.layer.*"], r"'decoder\.layer\.\*' matches none .*such as 'decoder\.\*'"),
    ({"other.weight": (3,)}, [], r"it has no other\.weight: these are the weights of another"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_named_with_a_way_out(expected: dict, only: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        match_weights(expected, STORED, only, SOURCE)


@pytest.mark.parametrize(("stored", "alpha", "loaded", "is_refused"), [
    ({"lora": {"rank": 2, "alpha": 8.0}}, 8, "decoder.attn.wq.lora.a.weight", False),
    ({"lora": {"rank": 2, "alpha": 8.0}}, 4, "decoder.attn.wq.lora.a.weight", True),
    ({"lora": {"rank": 2, "alpha": 8.0}}, 4, "decoder.ffn.experts.w_up_lora_b", True),
    ({"lora": {"rank": 2, "alpha": 8.0}}, 4, "decoder.attn.wq.weight", False),
    ({"lora": None}, 4, "decoder.attn.wq.lora.a.weight", False),
])  # fmt: skip
def test_adapters_keep_their_scale(stored: dict, alpha: float, loaded: str, is_refused: bool, tmp_path: Path) -> None:
    """A and B with another alpha are another model, of which nothing but the loss would speak."""
    source = checkpoint.save(tmp_path, 1, {"model.w": torch.ones(1)}, {"config": {"model": stored}})
    report = LoadReport(source, {loaded: (2, 2)}, {}, {})
    refusal = pytest.raises(UsageError, match=r"alpha = 8, and with 4 .*: set model\.lora\.alpha=8, or merge them")
    with refusal if is_refused else nullcontext():
        check_adapter_scale(report, LoRAConfig(rank=2, alpha=alpha))


def check_rank_0_decides(folder: Path) -> float:
    """The other run saves between two ranks' looks."""
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), ADAMW)
    for step in (1, 2):
        for tensor in engine.local.values():
            tensor.fill_(float(step))
        checkpoint.save(folder, step, engine.state_dict(), {})
    local = folder / f"step-0000000{2 - dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "find_checkpoint", lambda _: local)
        loaded = load_weights(engine, folder)
    assert loaded.source.name == "step-00000002"
    return float(torch.cat([tensor.flatten() for tensor in engine.local.values()]).mean())


def test_all_ranks_take_the_checkpoint_that_rank_0_found(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(check_rank_0_decides, 2, tmp_path) == [2.0, 2.0]


# -------------------------------------------------------------------------------------------- a task's config


TASKS = {
    "span_extraction": {"question": "a b", "context": "c d", "answers": [{"text": "d", "answer_start": 2}]},
    "classification": {"text": "a b", "label": "yes"},
    "multiple_choice": {"text": "a b", "choices": ["c", "d"], "label": 1},
}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]


SMALL = (
    "model.d_model=16", "model.attention.n_heads=2", "model.ffn.d_ff=16", "model.n_layers=1", "data.sequence_length=16",
)  # fmt: skip
POOLERS = {
    ("bert-base", "classification"): ("tanh", True), ("bert-base", "multiple_choice"): ("tanh", True),
    ("bert-base", "span_extraction"): ("none", True), ("albert-base", "classification"): ("tanh", True),
    ("deberta-base", "classification"): ("gelu", True), ("deberta-base", "span_extraction"): ("none", True),
    ("bigbird-base", "classification"): ("activation", True),
    ("modernbert-base", "classification"): ("transform", True),
    ("modernbert-base", "span_extraction"): ("transform", True), ("gpt2-124m", "classification"): ("none", False),
    ("gpt2-124m", "multiple_choice"): ("none", True), ("gpt2-124m", "span_extraction"): ("none", True),
    ("xlnet-base", "classification"): ("tanh", True), ("xlnet-base", "span_extraction"): ("none", True),
}  # fmt: skip
"""Preset and form → pooler, and whether the last layer has a bias, as in transformers' classes."""


def task_words(folder: Path, form: str) -> list[str]:
    """Write a task's file and a tokenizer; the options that name them."""
    (folder / "rows.jsonl").write_text(json.dumps(TASKS[form]) + "\n")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    choices = ["task.choices=['choices']"] * (form == "multiple_choice")
    choices += ["task.labels=['no', 'yes']"] * (form == "classification")
    return [
        f"run_dir={folder}/run", f"task={{form='{form}',train='{folder}/rows.jsonl'}}", *choices,
        f"data.tokenizer={folder}/vocab.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(("preset", "form"), POOLERS)
def test_a_head_has_the_layers_of_transformers_s_class(preset: str, form: str, tmp_path: Path) -> None:
    words = [*task_words(tmp_path, form), "data.sequence_length=16", "model.extra_heads="]
    config, _ = resolve_task(load_config(preset, words))
    (head,) = config.model.extra_heads.values()
    assert (head.pooler, head.bias) == POOLERS[preset, form]


def test_the_pooler_of_next_sentence_prediction_is_kept(tmp_path: Path) -> None:
    """Its tanh, too, in a model whose class in transformers has another pooler."""
    words = [*task_words(tmp_path, "classification"), "data.sequence_length=16", "model.extra_heads.sentence={}"]
    config, _ = resolve_task(load_config("modernbert-base", words))
    (head,) = config.model.extra_heads.values()
    assert (head.name, head.pooler) == ("text_classifier", "tanh")


def test_the_log_says_how_many_steps_the_epochs_are(tmp_path: Path) -> None:
    """Rows are packed: a table of short texts may be a single step."""
    words = task_words(tmp_path, "classification")
    words += ["data.sequence_length=32", "task.epochs=3", "lr_schedule.warmup_steps=0"]
    words += ["train.global_batch=2", "train.micro_batch=2"]
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() * 7)
    config, notes = resolve_task(load_config("bert-base", words))
    n_rows, n_steps = len(open_corpora(*open_tokenizer(config)).train), config.train.steps
    sizes = f"7 examples in {n_rows} rows of 32 tokens, 3 epochs"
    (padding,) = (note for note in open_corpora(*open_tokenizer(config)).warnings if "is padding" in note)
    assert padding.endswith(
        "is padding, which costs time: whole documents don't fill such rows: choose longer rows "
        "(data.sequence_length), which hold several documents"
    )
    assert notes[-1] == f"{sizes}: {n_steps} steps of 2 rows (train.global_batch)"
    assert n_steps == round(3 * n_rows / 2)
    _, notes = resolve_task(load_config("bert-base", [*words, "task.epochs=1", "train.global_batch=4"]))
    assert notes[-1].endswith(" rows of 32 tokens, 1 epoch: 1 step of 4 rows (train.global_batch)")


def test_answers_have_no_auxiliary_loss(tmp_path: Path) -> None:
    words = [*task_words(tmp_path, "span_extraction"), "data.sequence_length=16", "task.lm_weight=0.5"]
    with pytest.raises(UsageError, match=r"task.lm_weight = 0.5: form = 'span_extraction' has no auxiliary"):
        resolve_task(load_config("gpt2-124m", words))


@pytest.mark.parametrize("form", TASKS)
def test_the_head_is_trained_beside_adapters(form: str, tmp_path: Path) -> None:
    words = [*task_words(tmp_path, form), *SMALL, "model.lora={rank=2}"]
    config, _ = resolve_task(load_config("bert-base", words))
    trained = {name for name, p in build(config.model).named_parameters() if p.requires_grad}
    (head,) = config.model.extra_heads
    assert any(name.startswith(f"{head}.") for name in trained)
    assert any(name.endswith(".lora.b.weight") for name in trained)
