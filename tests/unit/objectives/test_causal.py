"""Next tokens, prefixes and permutations: what is made of a document, what is predicted, and how terms count."""

from collections import Counter

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


CLS, SEP = 4, 5
TEXTS = 2000
LENGTH = 500


def find_text_targets(fields: dict[str, np.ndarray]) -> np.ndarray:
    """Which tokens of the text, without its marks, are predicted."""
    return fields["targets"][~np.isin(fields["tokens"], (SEP, CLS))] != IGNORE


def test_fields_of_a_permuted_sequence() -> None:
    result, cuts = make_objective("permutation"), set()
    for sample in range(200):
        tokens = make_text(20, sample)
        fields = build_fields(result, tokens, sample=sample)
        marks = np.flatnonzero(np.isin(fields["tokens"], (SEP, CLS)))
        first = int(marks[0])
        cuts.add(first)
        assert fields["tokens"][marks].tolist() == [SEP, SEP, CLS]
        assert marks[1:].tolist() == [21, 22]
        assert np.delete(fields["tokens"], marks).tolist() == tokens.tolist(), "nothing is masked"
        assert fields["segments"].tolist() == [0] * (first + 1) + [1] * (21 - first) + [2]
        expected = fields["targets"] != IGNORE
        assert (fields["targets"][expected] == fields["tokens"][expected]).all()
        assert not expected[marks].any()
        assert (fields["order"] > 0).tolist() == expected.tolist()
        assert sorted(fields["order"][expected]) == list(range(1, expected.sum() + 1))
    assert cuts == set(range(1, 20)), "both segments have a token, and every cut is drawn"


@pytest.fixture(scope="module")
def chosen() -> np.ndarray:
    """[texts, tokens]."""
    result, text = make_objective("permutation"), make_text(LENGTH)
    return np.stack([find_text_targets(build_fields(result, text, sample=i)) for i in range(TEXTS)])


def test_every_position_is_predicted_at_the_same_rate(chosen: np.ndarray) -> None:
    """A token's rate has a standard deviation of 0.0083; that of a whole text's sum is less, spans being spread."""
    rates = chosen.mean(0)
    assert rates.mean() == pytest.approx(1 / 6, abs=0.0005)
    assert abs(rates - 1 / 6).max() < 5 * 0.0084
    for edge in (rates[:10], rates[-10:]):
        assert edge.mean() == pytest.approx(1 / 6, abs=0.011)


@pytest.mark.parametrize(("every", "n"), [(6, 2), (6, 11), (3, 7), (2, 40)])
def test_short_texts_are_predicted_at_the_same_rate(every: int, n: int) -> None:
    result = make_objective("permutation", tokens_per_prediction=every)
    actual = np.stack([find_text_targets(build_fields(result, make_text(n), sample=i)) for i in range(2000)])
    assert actual.mean() == pytest.approx(1 / every, abs=5 * (0.25 * 5 / (2000 * n)) ** 0.5)


def test_span_lengths_are_uniform() -> None:
    """Runs of targets are spans if contexts are so wide that spans hardly ever touch or reach beyond the text."""
    result, runs = make_objective("permutation", tokens_per_prediction=100), Counter[int]()
    for sample in range(TEXTS):
        targets = find_text_targets(build_fields(result, make_text(LENGTH), sample=sample))
        edges = np.flatnonzero(np.diff(targets, prepend=False, append=False)).reshape(-1, 2)
        runs.update(int(end - begin) for begin, end in edges if begin > 0 and end < LENGTH)
    total = sum(n for length, n in runs.items() if length <= 5)
    assert total > 2500
    assert sum(n for length, n in runs.items() if length > 5) < 0.01 * total
    expected = total / 5
    assert sum((runs[i] - expected) ** 2 / expected for i in range(1, 6)) < 4 + 6 * 8**0.5


def test_a_context_has_one_span(chosen: np.ndarray) -> None:
    """Spread like contexts of K · L: the number of targets in a text varies far less than if each were drawn alone."""
    assert chosen.sum(1).var() < 0.5 * LENGTH * (1 / 6) * (5 / 6)


def test_orders_are_uniform() -> None:
    result, orders = make_objective("permutation"), Counter[tuple[int, ...]]()
    for sample in range(6000):
        order = build_fields(result, make_text(18), sample=sample)["order"]
        if order.max() == 3:
            orders[tuple(order[order > 0])] += 1
    expected = sum(orders.values()) / 6
    assert expected > 100
    assert len(orders) == 6
    assert sum((n - expected) ** 2 / expected for n in orders.values()) < 5 + 6 * 10**0.5


def test_permutations_differ_by_epoch() -> None:
    result, text = make_objective("permutation"), make_text(60)
    assert len({build_fields(result, text, epoch=i)["order"].tobytes() for i in range(20)}) == 20


def test_target_counts_equal_the_predicted_tokens() -> None:
    result = make_objective("permutation")
    fields = build_fields(result, make_text(60))
    (count,) = result.target_counts({name: torch.from_numpy(values)[None] for name, values in fields.items()}).values()
    assert int(count) == (fields["order"] > 0).sum() > 0
