"""Properties of every objective: lengths are kept, rows fit, and nothing but the key decides what is drawn."""

from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from megatfm.config import load_config
from megatfm.data.loader import DataLoader, DataRank, without_documents
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives import OBJECTIVES, Objective
from megatfm.rng import ChunkKey, chunk_keys
from megatfm.train.build import build_model
from megatfm.verify.shrink import draw_batch, objective_for, shrink
from tests.support.packed_corpora import MemoryCorpus, pack_dataset
from tests.support.text_objectives import OtherDocuments, make_objective, make_text

IGNORE, ROWS = -100, (96, 64)
# Objective and family → the first hex digits of what a pinned text becomes. A change here changes what a resumed run
# sees: it must not happen without a reason that is in the changelog.
PINNED = {
    ("causal", "decoder"): "b28d33bfe37f7ad6", ("causal", "encoder_decoder"): "f74da1b5af0cfbb2",
    ("prefix", "decoder"): "e676f59d2bd078ac", ("prefix", "encoder_decoder"): "548a63a6901afaee",
    ("masked", "encoder"): "620388d271d6d53a", ("next_sentence", "encoder"): "56038d0a0e11ad7b",
    ("sentence_order", "encoder"): "f802c4e39a109d73", ("span_boundary", "encoder"): "80dd60c0d12b8d3a",
    ("permutation", "xlnet"): "3cee926603be1fd6", ("span_corruption", "encoder_decoder"): "6ffdd1a814c933d9",
    ("span_corruption", "decoder"): "33e6d02009b18d84", ("ul2", "encoder_decoder"): "938f05fc650184cd",
    ("ul2", "decoder"): "d39146e24923a1e1", ("replaced_token", "electra"): "ebd899cbb0d073bd",
}  # fmt: skip
EACH_OBJECTIVE = pytest.mark.parametrize(("name", "family"), PINNED, ids=[" ".join(case) for case in PINNED])


class TextCorpus(MemoryCorpus):
    """A corpus for `PackedDataset`, of texts in this vocabulary."""

    def make_documents(self, lengths: list[int]) -> list[np.ndarray]:
        return [make_text(n, seed) for seed, n in enumerate(lengths)]


def hash_fields(fields: dict[str, np.ndarray]) -> bytes:
    hashed = blake3()
    for name, values in sorted(fields.items()):
        hashed.update(name.encode() + values.astype("<i8").tobytes())
    return hashed.digest()


def build_objective(name: str, family: str) -> Objective:
    return make_objective(name, family=family, rows=ROWS if family == "encoder_decoder" else ROWS[:1])


def test_every_text_objective_is_pinned() -> None:
    shipped = {name for name in OBJECTIVES.names() if OBJECTIVES.get(name).__module__.startswith("megatfm.")}
    of_text = {name for name in shipped if not getattr(OBJECTIVES.get(name), "needs_files", False)}
    assert {name for name, _ in PINNED} == of_text


@EACH_OBJECTIVE
def test_examples_of_each_objective_are_pinned(name: str, family: str) -> None:
    objective = build_objective(name, family)
    other_documents, hashed = OtherDocuments([make_text(70, 1), make_text(20, 2)]), blake3()
    for n in (2, 3, 17, 40, min(objective.max_tokens or 60, 60)):
        chunk = DocumentChunk(make_text(n), other_documents)
        for sample in range(8):
            hashed.update(hash_fields(objective.build_example(chunk, ChunkKey(12, 1, sample, sample % 3))))
    assert hashed.hexdigest()[:16] == PINNED[name, family]


@EACH_OBJECTIVE
def test_examples_depend_on_the_key_alone(name: str, family: str) -> None:
    keys = [ChunkKey(5, epoch, sample, chunk) for epoch in range(2) for sample in range(6) for chunk in range(2)]
    other_documents = OtherDocuments([make_text(50, 1), make_text(9, 2)])
    first, second = (build_objective(name, family) for _ in range(2))
    tokens = make_text(40).astype(np.int64)  # of the type that sequences have, so that nothing copies it by chance
    tokens.flags.writeable = False
    chunk = DocumentChunk(tokens, other_documents)
    forwards = [hash_fields(first.build_example(chunk, key)) for key in keys]
    backwards = [hash_fields(second.build_example(chunk, key)) for key in reversed(keys)]
    assert forwards == backwards[::-1]
    if name != "causal":
        examples = set(forwards)
        assert len(examples) > len(keys) / 3, "samples and chunks differ, and but for planned cuts epochs"
        other_seed = {hash_fields(first.build_example(chunk, key._replace(seed=6))) for key in keys}
        assert len(examples & other_seed) < len(keys) / 2


@EACH_OBJECTIVE
def test_examples_have_the_planned_lengths(name: str, family: str) -> None:
    """Lengths from nothing to all that a row takes, and the smallest and largest numbers of a key."""
    objective, random = build_objective(name, family), np.random.default_rng(0)
    for share in (0, 0.01, 0.99, 1, *random.random(120)):
        seed, sample = (int(random.choice([0, limit, random.integers(limit)])) for limit in (2**63 - 1, 2**40))
        n, partner = round(share * (objective.max_tokens or 200)), int(random.integers(1, 201))
        keys = chunk_keys(seed, np.array([sample]), np.array([1]))
        planned = objective.sequence_lengths(np.array([n]), keys).reshape(-1)
        assert len(planned) == len(objective.field_prefixes)
        assert (planned > 0).all() or (planned == 0).all()
        if objective.max_tokens is not None:
            assert (planned <= ROWS[: len(planned)]).all()
        if not planned.any():
            assert n < 2
            continue
        chunk = DocumentChunk(make_text(n, 3), OtherDocuments([make_text(partner, 4)]))
        fields = objective.build_example(chunk, ChunkKey(seed, 3, sample, 1))
        for field, values in fields.items():
            assert len(values) == planned[0 if field.startswith("encoder_") else -1]
        assert {"tokens", "targets"} <= fields.keys()
        assert objective.padding_values.keys() <= fields.keys()
        assert (fields["targets"] >= IGNORE).all()


@EACH_OBJECTIVE
def test_no_rank_or_resume_changes_a_batch(name: str, family: str) -> None:
    def loader(**options: Any) -> DataLoader:
        packed = pack_dataset(
            TextCorpus([[30, 200, 7], [90, 2, 55], [400]]), build_objective(name, family),
            sequence_length=ROWS[0], target_length=ROWS[1], seed=4, streams=2,
        )  # fmt: skip
        return DataLoader(packed, global_batch=4, **options)

    def joined(step: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        sides = [name.removesuffix("tokens") for name in step[0] if name in ("tokens", "encoder_tokens")]
        # Numbers of documents are left out where every row is one.
        full = [{f"{side}documents": np.zeros_like(batch[f"{side}tokens"]) for side in sides} | batch for batch in step]
        return {name: np.concatenate([batch[name] for batch in full]) for name in full[0]}

    with loader(micro_batch=4) as full, loader(micro_batch=1, position=8) as resumed:
        steps = [joined(next(full)) for _ in range(6)]
        resumed_batches = [joined(next(resumed)) for _ in range(4)]
    with (
        loader(micro_batch=1, data_rank=DataRank(0, 2)) as rank_0,
        loader(micro_batch=2, data_rank=DataRank(1, 2)) as rank_1,
    ):
        shared = [[joined(next(rank_0)), joined(next(rank_1))] for _ in range(6)]
    for number, step in enumerate(steps):
        for field, values in step.items():
            np.testing.assert_array_equal(values, np.concatenate([part[field] for part in shared[number]]))
            if number >= 2:
                np.testing.assert_array_equal(values, resumed_batches[number - 2][field])


PRESETS = [
    "albert-base", "bert-base", "bigbird-base", "deberta-v3-base", "deepseek-v2-lite", "electra-base",
    "longformer-base", "mvitv2-b", "prefix-lm-base", "quickstart-vision", "siglip-b16", "simmim-swin-b",
    "spanbert-base", "swin-b", "xlnet-base",
]  # fmt: skip
"""A preset of each objective and family whose rows one document can fill."""


@pytest.mark.parametrize("preset", PRESETS)
def test_losses_do_not_need_ids_of_a_single_document(preset: str) -> None:
    overrides = ["train.micro_batch=2", "train.global_batch=2", "train.precision=fp32"]
    if preset == "siglip-b16":  # its images and captions keep their lengths, which they fill
        config = load_config(preset, [*overrides, "model.n_layers=1", "model.text_tower.n_layers=1"])
    else:
        config, _ = shrink(load_config(preset, overrides))
    rows = draw_batch(config, "one")
    without_ids = without_documents(rows)
    assert "documents" not in without_ids
    model, objective = build_model(config).train(False), objective_for(config)
    losses = []
    for fields in (rows, without_ids):
        batch = {name: torch.from_numpy(values.copy()) for name, values in fields.items()}
        with torch.no_grad():
            losses.append(dict(objective(model, batch)) | objective.target_counts(batch))
    assert losses[0].keys() == losses[1].keys()
    assert all(torch.equal(torch.as_tensor(losses[0][name]), torch.as_tensor(losses[1][name])) for name in losses[0])
