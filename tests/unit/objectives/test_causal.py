"""Next tokens and prefixes: what is made of a document, where it is cut, what is predicted and how terms count."""

import numpy as np
import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.models import build
from megatfm.objectives import Causal, SpecialTokens
from megatfm.rng import chunk_keys
from tests.support.text_objectives import build_fields, make_model, make_objective, make_text

OBJECTIVE = Causal(SpecialTokens(bos=1, eos=2, pad=0))


@pytest.mark.parametrize("document", [[], [7], [7, 8, 9]])
@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_every_token_is_predicted_once(document: list[int], dtype: type) -> None:
    tokens = np.array(document, dtype)
    built = build_fields(OBJECTIVE, tokens)
    assert built["tokens"].tolist() == [1, *document]
    assert built["targets"].tolist() == [*document, 2]
    repeated = build_fields(OBJECTIVE, tokens, sample=6, epoch=7)
    assert {k: v.tolist() for k, v in repeated.items()} == {k: v.tolist() for k, v in built.items()}


def test_the_term_is_a_sum_over_counted_targets_within_documents() -> None:
    model = build(ModelConfig(vocab_size=11, d_model=8, n_layers=1, attention={"n_heads": 2}, ffn={"d_ff": 8})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    first, second = build_fields(OBJECTIVE, np.array([7, 8])), build_fields(OBJECTIVE, np.array([9]))
    batch = {
        "tokens": torch.tensor([[1, 7, 8, 1, 9, 0]]),
        "targets": torch.tensor([[7, 8, 2, 9, 2, -100]]),
        "documents": torch.tensor([[0, 0, 0, 1, 1, -1]]),
        "positions": torch.tensor([[0, 1, 2, 0, 1, 0]]),
    }
    nats = 0.0
    for document in (first, second):
        logits = model(torch.from_numpy(document["tokens"])[None]).logits[0]
        chosen = torch.from_numpy(document["targets"])
        nats -= float(logits.log_softmax(-1)[torch.arange(len(chosen)), chosen].sum().detach())
    terms = OBJECTIVE(model, batch)
    assert terms.keys() == OBJECTIVE.loss_weights.keys() == OBJECTIVE.target_counts(batch).keys() == {"causal"}
    assert float(terms["causal"].detach()) == pytest.approx(nats, rel=1e-12)
    assert int(OBJECTIVE.target_counts(batch)["causal"]) == 5


def test_tokens_further_ahead_are_counted_in_their_documents() -> None:
    ahead = make_objective("causal", model_config=make_model("decoder", n_mtp_heads=2), mtp_loss_weight=0.3)
    assert dict(ahead.loss_weights) == {"causal": 1.0, "future_1": 0.3, "future_2": 0.3}
    batch = {"targets": torch.tensor([[7, 8, 2, 9, 2, -100]]), "documents": torch.tensor([[0, 0, 0, 1, 1, -1]])}
    counts = {name: int(n) for name, n in ahead.target_counts(batch).items()}
    assert counts == {"causal": 5, "future_1": 3, "future_2": 1}


def test_an_encoder_decoder_models_the_text_alone() -> None:
    result = make_objective("causal", family="encoder_decoder", rows=(64, 32))
    assert (result.max_tokens, result.likelihood_term, dict(result.loss_weights)) == (31, "span", {"span": 1.0})
    fields = {name: field.tolist() for name, field in build_fields(result, np.array([7, 8, 9])).items()}
    assert fields == {"encoder_tokens": [2], "tokens": [0, 7, 8, 9], "targets": [7, 8, 9, 2]}


BOS, EOS, PAD, IGNORE = 1, 2, 0, -100


def test_a_decoder_predicts_everything_after_its_prefix() -> None:
    result, tokens = make_objective("prefix", rows=(64,)), make_text(63)
    assert result.max_tokens == 63
    full = [BOS, *tokens.tolist(), EOS]
    prefixes = []
    for sample in range(6_000):
        fields = build_fields(result, tokens, sample=sample)
        assert fields["tokens"].tolist() == full[:-1]
        n = int(fields["prefix"].sum())
        assert fields["prefix"].tolist() == [1] * n + [0] * (64 - n)
        assert fields["targets"].tolist() == [IGNORE] * (n - 1) + full[n:], "the prefix' last token predicts the next"
        prefixes.append(n)
    counts = np.bincount(prefixes, minlength=65)
    assert counts[0] == 0
    chi2 = float(((counts[1:] - 6_000 / 64) ** 2 / (6_000 / 64)).sum())
    assert abs(chi2 - 63) < 5 * (2 * 63) ** 0.5, "uniform over 1 … 64"
    epochs = {int(build_fields(result, tokens, epoch=epoch)["prefix"].sum()) for epoch in range(20)}
    assert len(epochs) > 5, "another one each epoch"


@pytest.mark.parametrize(("rows", "least"), [((64, 32), 32), ((32, 64), 1)])
def test_an_encoder_decoder_gets_both_parts(rows: tuple[int, int], least: int) -> None:
    """Wherever both sides fit: with rows of 64 and 32 after 32 … 62 of 63 tokens, with 32 and 64 after 1 … 31."""
    result, tokens = make_objective("prefix", family="encoder_decoder", rows=rows), make_text(63)
    assert result.max_tokens == 63
    cuts = []
    for sample in range(6_000):
        fields = build_fields(result, tokens, sample=sample)
        cut = len(fields["encoder_tokens"]) - 1
        assert fields["encoder_tokens"].tolist() == [*tokens[:cut].tolist(), EOS]
        assert fields["targets"].tolist() == [*tokens[cut:].tolist(), EOS]
        assert fields["tokens"].tolist() == [PAD, *tokens[cut:].tolist()]
        cuts.append(cut)
    counts = np.bincount(cuts, minlength=64)[least : least + 31]
    assert counts.sum() == 6_000, "both sides fit their rows"
    chi2 = float(((counts - 6_000 / 31) ** 2 / (6_000 / 31)).sum())
    assert abs(chi2 - 30) < 5 * (2 * 30) ** 0.5


def test_planned_lengths_are_those_of_any_epoch() -> None:
    result = make_objective("prefix", family="encoder_decoder", rows=(64, 64))
    for n in (2, 3, 17, 63):
        lengths = {len(build_fields(result, make_text(n), sample=3, epoch=epoch)["targets"]) for epoch in range(4)}
        assert len(lengths) == 1
    keys = chunk_keys(0, np.arange(5), np.zeros(5))
    assert result.sequence_lengths(np.array([0, 1, 2, 5, 63]), keys).min(1).tolist()[:3] == [0, 0, 2]
