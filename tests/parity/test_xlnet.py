"""XLNet against transformers, from the same perturbed weights: predictions in a given order, losses, every gradient."""

import pytest
import torch
from torch import Tensor
from transformers.models.xlnet import modeling_xlnet

from megatfm.config import ModelConfig
from megatfm.models import build
from megatfm.ops.attention import reference as rows
from tests.support.hf_encoders import draw_tokens
from tests.support.reference_gradients import LargestErrors, Pair, assert_documented, build_pair, dtype_fixture, perturb

VOCABULARY, LENGTHS, IGNORE = 47, (13, 9, 11), -100
CONFIG = ModelConfig(
    family="xlnet", vocab_size=VOCABULARY, d_model=24, n_layers=3, attention={"name": "two_stream", "n_heads": 4},
    ffn={"d_ff": 40, "activation": "gelu", "bias": True},
    norm={"name": "layer_norm", "eps": 1e-7, "placement": "post"}, position={"name": "transformer_xl"},
    lm_head={"bias": True},
)  # fmt: skip


dtype = dtype_fixture(modeling_xlnet)


@pytest.fixture(params=["at once", "in pieces"])
def of_scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces: of 4 queries, as those of long rows."""
    if request.param == "in pieces":
        monkeypatch.setattr(rows, "MAX_SCORES", len(LENGTHS) * 4 * max(LENGTHS) * 4)


def batch_of(lengths: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Return a batch like our objective's: a third of the tokens are targets, each document in its own random order."""
    rows, longest = len(lengths), max(lengths)
    inside = torch.arange(longest) < torch.tensor(lengths)[:, None]
    tokens = draw_tokens(VOCABULARY, rows, longest, seed=seed)
    chosen = (draw_tokens(3, rows, longest, seed=seed + 1) == 0) & inside
    chosen[:, 2:4] = True
    assert len(set(chosen.sum(1).tolist())) > 1 or rows == 1, "rows with different numbers of targets"
    ranks = draw_tokens(10**9, rows, longest, seed=seed + 2).masked_fill(~chosen, -1).argsort(1).argsort(1)
    ranks = (ranks - (~chosen).sum(1, keepdim=True) + 1).where(chosen, 0)
    return {
        "tokens": tokens, "documents": inside.long() - 1, "segments": draw_tokens(3, rows, longest, seed=seed + 3),
        "order": ranks, "targets": tokens.where(chosen, IGNORE),
    }  # fmt: skip


def convert_batch(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch as transformers reads it: masks written out pair by pair, and targets by number."""
    order, targets = batch["order"].tolist(), batch["targets"]
    rows, n = targets.shape
    most = int((targets != IGNORE).sum(1).max())
    hidden, mapping = torch.zeros(rows, n, n, dtype=dtype), torch.zeros(rows, most, n, dtype=dtype)
    labels = torch.full((rows, most), IGNORE)
    for b in range(rows):
        for i in range(n):
            for j in range(n):
                inputs = order[b][i] == order[b][j] == 0
                hidden[b, i, j] = not (order[b][j] < order[b][i] or inputs)
        for number, place in enumerate(torch.nonzero(targets[b] != IGNORE)[:, 0].tolist()):
            mapping[b, number, place] = 1
            labels[b, number] = targets[b, place]
    return {
        "input_ids": batch["tokens"], "attention_mask": (batch["documents"] + 1).to(dtype),
        "token_type_ids": batch["segments"], "perm_mask": hidden, "target_mapping": mapping, "labels": labels,
    }  # fmt: skip


def predictions(pair: Pair, batch: dict[str, Tensor], expected: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at the targets, row by row, in their order in the text."""
    inputs = {name: values for name, values in batch.items() if name != "targets"}
    return pair.model(**inputs).logits[batch["targets"] != IGNORE], expected[labels != IGNORE]


@pytest.mark.usefixtures("of_scores")
def test_predictions_in_a_given_order(dtype: torch.dtype) -> None:
    pair, figures, batch = build_pair(CONFIG, dtype), LargestErrors(), batch_of(LENGTHS)
    assert type(pair.reference).__name__ == "XLNetLMHeadModel"
    inputs = convert_batch(batch, dtype)
    output = pair.reference(**inputs)
    figures.compare_logits(*predictions(pair, batch, output.logits, inputs["labels"]), dtype)
    loss = pair.model(**batch).losses["permutation"] / (batch["targets"] != IGNORE).sum()
    figures.compare_losses(loss, output.loss, pair, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 20
    assert_documented("xlnet-base", dtype, figures)


@pytest.mark.usefixtures("of_scores")
def test_without_an_order_all_tokens_see_one_another(dtype: torch.dtype) -> None:
    pair, figures, batch = build_pair(CONFIG, dtype, seed=1), LargestErrors(), batch_of(LENGTHS, 5)
    inputs = {k: v for k, v in convert_batch(batch, dtype).items() if k in ("input_ids", "attention_mask")}
    inside = batch["documents"] == 0
    for segments in (None, batch["segments"]):
        reference = pair.reference(**inputs, token_type_ids=segments).logits
        logits = pair.model(batch["tokens"], documents=batch["documents"], segments=segments).logits
        figures.compare_logits(logits[inside], reference[inside], dtype)
    assert figures.logits > 0


def test_packed_documents_are_each_document_alone(dtype: torch.dtype) -> None:
    pair, figures, lengths = build_pair(CONFIG, dtype, seed=2), LargestErrors(), (5, 4, 7)
    parts = [batch_of((n,), 10 * n) for n in lengths]
    for number, part in enumerate(parts):
        part["documents"] += number
    padding = {"tokens": 3, "documents": -1, "segments": 0, "order": 0, "targets": IGNORE}
    row = {k: torch.cat([*(p[k] for p in parts), torch.full((1, 2), v)], 1) for k, v in padding.items()}
    logits = pair.model(**{k: v for k, v in row.items() if k != "targets"}).logits
    start, loss = 0, torch.zeros((), dtype=dtype)
    for part, length in zip(parts, lengths, strict=True):
        part["documents"] = torch.zeros_like(part["documents"])
        inputs = convert_batch(part, dtype)
        output = pair.reference(**inputs)
        expected = part["targets"] != IGNORE
        figures.compare_logits(logits[:, start : start + length][expected], output.logits[0], dtype)
        loss = loss + output.loss * expected.sum()
        start += length
    figures.compare_logits(pair.model(**row).losses["permutation"], loss, dtype)
    assert logits.isfinite().all()


def test_a_prediction_depends_on_what_comes_before_it() -> None:
    """A prediction depends on nothing that comes later in the order."""
    model, batch = build(CONFIG).double().eval(), batch_of((13,), 3)
    perturb(model)
    actual: list[Tensor] = []
    table = model.encoder.embedding.tokens
    table.register_forward_hook(lambda _, __, output: actual.append(output.detach().requires_grad_()) or actual[-1])
    inputs = {k: v for k, v in batch.items() if k != "targets"}
    logits, (order,) = model(**inputs).logits, batch["order"]
    targets = torch.nonzero(order)[:, 0].tolist()
    assert len(targets) > 3
    for i in targets:
        (gradient,) = torch.autograd.grad(logits[0, i].square().sum(), actual[0], retain_graph=True)
        assert ((gradient[0] != 0).any(-1) == (order < order[i])).all()


def test_dropout_is_keyed_and_the_streams_drop_apart() -> None:
    dropped = {"dropout": 0.3, "attention.dropout": 0.2, "ffn.dropout": 0.2, "drop_path": 0.2}
    model, batch = build(CONFIG.with_changes(dropped)).double().train(), batch_of(LENGTHS)
    perturb(model)
    keys = torch.tensor([3, 5, 7])

    def run(rows: slice, inputs: Tensor) -> Tensor:
        return model(**{k: v[rows] for k, v in batch.items()}, keys=inputs[rows]).losses["permutation"]

    full = run(slice(None), keys)
    parts = [run(slice(i, i + 1), keys) for i in range(3)]
    torch.testing.assert_close(full, torch.stack(parts).sum(), rtol=1e-12, atol=0)
    assert run(slice(None), keys + 1) != full
    masks = []
    for layer in model.encoder.layers.values():
        layer.attn_residual.branch.register_forward_hook(lambda _, inputs, output: masks.append(output == 0))
    everywhere = {k: v for k, v in batch.items() if k != "targets"}
    model(**everywhere, keys=keys)
    content, query = torch.cat(masks[0:4:2]), torch.cat(masks[1:4:2])  # of the last layer there is no content
    sees = ~query.all(-1)  # queries of what is no target only fill rows up: they see no key, and get 0
    content, query = content[sees], query[sees]
    assert content.double().mean() == pytest.approx(0.3, abs=0.05)
    assert (content == query).double().mean() == pytest.approx(0.3**2 + 0.7**2, abs=0.06)


def test_rows_without_targets_train() -> None:
    model, batch = build(CONFIG).double(), batch_of(LENGTHS)
    perturb(model)
    batch["targets"] = torch.full_like(batch["targets"], IGNORE)
    loss = model(**batch | {"order": torch.zeros_like(batch["order"])}).losses["permutation"]
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
