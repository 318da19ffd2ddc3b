"""Heads against their formulas: masked tokens, sentences, several layers' vectors, preferences."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import Config, ModelConfig
from megatfm.convert.load import load_hf_model
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.layers.loss_terms import PREFERENCE_TERMS, Preference
from megatfm.models import build
from megatfm.verify.verify import verify
from tests.support.hf_encoders import ENCODER_TOKENS, build_hf_encoder
from tests.support.tensors import move_parameters

T = 12
SMALL = {
    "family": "encoder", "vocab_size": 23, "d_model": 12, "n_layers": 1, "attention.n_heads": 3, "ffn.d_ff": 20,
    "norm.name": "layer_norm", "norm.eps": 1e-3, "norm.placement": "post", "ffn.activation": "gelu",
    "position.name": "learned", "position.max_positions": T, "lm_head.name": "transform", "lm_head.bias": True,
}  # fmt: skip


def drawn(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def build_encoder(**options: object) -> torch.nn.Module:
    return move_parameters(build(ModelConfig.from_dotted(**(SMALL | options))), 0.5)


def same_with_gradients(model: torch.nn.Module, actual: Tensor, expected: Tensor, touched: str) -> None:
    """Values, and every gradient of parameters that begin with `touched`, which must be there."""
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    named = dict(model.named_parameters())
    first, second = (
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in (actual, expected)
    )
    for name, result, reference in zip(named, first, second, strict=True):
        assert (result is None) == (reference is None), name
        if reference is None:
            continue
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)
        assert not name.startswith(touched) or reference.norm() > 1e-6, name


def norm(x: Tensor, layer: torch.nn.Module) -> Tensor:
    return F.layer_norm(x, layer.weight.shape, layer.weight, layer.bias, 1e-3)


def test_nothing_masked_costs_nothing() -> None:
    model = build_encoder()
    loss = model(drawn(23, 2, T, seed=0), targets=torch.full((2, T), -100)).losses["masked"]
    loss.backward()
    assert loss == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


SPANS = {0: [(2, 4), (6, 6), (9, 10)], 1: [(1, 1), (3, 7)]}
"""Row → first and last token of each masked span; the boundaries are the tokens beside them."""


@pytest.mark.parametrize(("head", "targets"), [
    ("text_classifier", "sentence_targets"), ("multiple_choice", "choice_targets"), ("span_extraction", "answer_marks"),
])  # fmt: skip
def test_dropout_of_a_head_without_random_keys_is_refused(head: str, targets: str) -> None:
    model = build_encoder(extra_heads={"sentence": {"name": head, "dropout": 0.5}}).train()
    first, zeros = (torch.arange(T) == 0).expand(2, T), torch.zeros(2, T, dtype=torch.int64)
    batch = {"tokens": zeros, targets: zeros.where(first, -100), "examples": zeros.where(first, -1)}
    batch |= {"parts": zeros} if head == "multiple_choice" else {}
    with pytest.raises(UsageError, match=r"^dropout before the classifier in training needs random keys.*pass keys"):
        model(**batch)
    model(**batch, keys=torch.tensor([3, 4]))
    model.eval()(**batch)


@pytest.mark.parametrize(("head", "targets", "missing"), [
    ({"name": "text_classifier", "both_orders": True}, "sentence_targets", "parts"),
    ({"name": "multiple_choice"}, "choice_targets", "parts"), ({"name": "span_extraction"}, "answer_marks", "examples"),
], ids=["both orders", "choices", "spans"])  # fmt: skip
def test_targets_without_the_fields_beside_them_are_refused(head: dict[str, Any], targets: str, missing: str) -> None:
    model, zeros = build_encoder(extra_heads={"sentence": head}).eval(), torch.zeros(2, T, dtype=torch.int64)
    fields = {} if missing == "examples" else {"examples": zeros}
    with pytest.raises(TypeError, match=f"come with the field '{missing}', and the batch has none: give it, too"):
        model(tokens=zeros, **{targets: zeros}, **fields)


def test_spans_from_their_boundaries() -> None:
    """Joshi et al. 2020, section 2.2: h = LN(GELU(W₂ LN(GELU(W₁ [x_{s−1}; x_{e+1}; p_{i−s+1}])))), then the table."""
    model = build_encoder(extra_heads={"boundary": {}})
    tokens, targets = drawn(23, 2, T, seed=4), torch.full((2, T), -100)
    left, right = torch.zeros(2, T, dtype=torch.int64), torch.zeros(2, T, dtype=torch.int64)
    original = drawn(23, 2, T, seed=5)
    for row, spans in SPANS.items():
        for first, last in spans:
            for i in range(first, last + 1):
                targets[row, i], left[row, i], right[row, i] = original[row, i], i - (first - 1), last + 1 - i
    hidden, head, expected = model(tokens).hidden, model.boundary, torch.zeros((), dtype=torch.float64)
    for row, spans in SPANS.items():
        for first, last in spans:
            for i in range(first, last + 1):
                place = head.positions.weight[i - first]
                x = torch.cat([hidden[row, first - 1], hidden[row, last + 1], place])
                x = norm(F.gelu(head.dense1.weight @ x + head.dense1.bias), head.norm1)
                x = norm(F.gelu(head.dense2.weight @ x + head.dense2.bias), head.norm2)
                logits = model.encoder.embedding.tokens.weight @ x + head.bias
                expected = expected - logits.log_softmax(-1)[original[row, i]]
    losses = model(tokens, targets=targets, span_left=left, span_right=right).losses
    same_with_gradients(model, losses["boundary"], expected, "boundary")
    both = losses["masked"] + losses["boundary"]
    model.zero_grad()
    both.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_label_smoothing_is_for_training_only() -> None:
    model = build_encoder(**{"lm_head.label_smoothing": 0.1})
    tokens, targets = drawn(23, 1, T, seed=6), drawn(23, 1, T, seed=7)
    logits = model(tokens).logits[0]
    plain = F.cross_entropy(logits, targets[0], reduction="sum")
    smoothed = F.cross_entropy(logits, targets[0], reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(model(tokens, targets=targets).losses["masked"], smoothed)
    torch.testing.assert_close(model.eval()(tokens, targets=targets).losses["masked"], plain)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder", "discriminator"])
def test_heads_get_the_sequence_in_each_family(family: str) -> None:
    """An answer's first and last token among those of its text, which the sequence's documents tell."""
    head = {"lm_head.name": "none", "lm_head.bias": False, "extra_heads": {"span": {"name": "span_extraction"}}}
    model = build_encoder(**head, family=family)
    tokens, marks, examples = drawn(23, 1, T, seed=8), torch.zeros(1, T, dtype=torch.int64), torch.full((1, T), -1)
    marks[0, 6], marks[0, 9], examples[0, 5] = 1, 2, 0
    batch = {"tokens": tokens, "documents": torch.tensor([[0] * 5 + [1] * 7])}
    if family == "encoder_decoder":
        batch |= {"encoder_tokens": tokens, "encoder_documents": batch["documents"]}
    scores = model(**batch).predictions["span"][0, 5:]
    expected = (F.cross_entropy(scores[:, 0], torch.tensor(1)) + F.cross_entropy(scores[:, 1], torch.tensor(4))) / 2
    loss = model(**batch, answer_marks=marks, examples=examples).losses["answer_span"]
    same_with_gradients(model, loss, expected, "span.classifier.weight")


# ---------------------------------------------------------------------------------- vectors of several layers


def head(**options: Any) -> dict[str, Any]:
    return {"extra_heads": {"sentence": {"name": "text_classifier", "classes": 3, "pooler": "none", **options}}}


def test_layers_are_those_of_transformers(tmp_path: Path) -> None:
    hf_model = build_hf_encoder("BertForMaskedLM")
    hf_model.save_pretrained(tmp_path / "bert")
    plain = load_hf_model(tmp_path / "bert")
    config = plain.config.with_changes({**head(layers=[0, 1, -1]), "lm_head": {"name": "none", "bias": False}})
    built = build(config).eval()
    initialise(built, 3)
    built.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        states = hf_model(ENCODER_TOKENS, output_hidden_states=True).hidden_states
        features = torch.cat([states[0], states[1], states[-1]], -1)[:, 0]
        expected = built.sentence.classifier(features)
        torch.testing.assert_close(built(ENCODER_TOKENS).predictions["sentence"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("parallel", "frozen"), [
    ({"tp": 2, "dp_shard": 1}, ["encoder.norm.*"]),
    ({"dp_shard": 2}, ["encoder.*"]),
], ids=["tp2", "zero3, frozen features"])  # fmt: skip
def test_layouts_compute_the_same(parallel: dict[str, Any], frozen: list[str]) -> None:
    assert not verify(layers_config(parallel, frozen)).wrong


def layers_config(parallel: dict[str, Any], frozen: list[str]) -> Config:
    sizes = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "attention": {"n_heads": 4}, "ffn": {"d_ff": 48}}
    return Config.model_validate({
        "name": "layers", "parallel": parallel, "objective": {"name": "text_classification"},
        "model": {**sizes, "family": "encoder", "lm_head": {"name": "none"}, **head(layers=[-2, -1], pooler="tanh")},
        "data": {"train": "none", "tokenizer": "none", "sequence_length": 32},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 2, "freeze": frozen},
    })  # fmt: skip


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the model has 2 blocks.*there is no 3"):
        build(layers_config({}, []).model.with_changes(head(layers=[3])))
    with pytest.raises(ValueError, match="lie on other pipeline stages"):
        layers_config({"pp": 2, "dp_shard": 1}, [])


# ------------------------------------------------------------------------------------------------ preferences


LENGTH = 16
CONFIG = ModelConfig(
    vocab_size=31, d_model=16, n_layers=2, attention={"n_heads": 2}, ffn={"d_ff": 24}, embedding={"tied": False},
)  # fmt: skip
Pairs = list[list[tuple[list[int], list[int], int, float]]]
"""Rows of pairs: chosen and rejected tokens with the last target, tokens of the prompt, the reference's log-ratio."""


def draw_pairs() -> Pairs:
    random = torch.Generator().manual_seed(4)
    rows: Pairs = []
    for sizes in ([(4, 5), (3, 3)], [(6, 4)], []):
        row = []
        for lengths in sizes:
            chosen, rejected = (torch.randint(0, 31, (n + 1,), generator=random).tolist() for n in lengths)
            row.append((chosen, [*chosen[:2], *rejected[2:]], 2, float(torch.randn((), generator=random))))
        rows.append(row)
    return rows


def as_batch(rows: Pairs) -> dict[str, Tensor]:
    """The fields of these rows, as packing lays them out."""
    names = ("tokens", "targets", "pairs", "documents", "positions")
    batch = {name: torch.zeros(len(rows), LENGTH, dtype=torch.int64) for name in names}
    batch["targets"].fill_(-100)
    batch["documents"].fill_(-1)
    batch["reference"] = torch.zeros(len(rows), LENGTH)
    for r, row in enumerate(rows):
        at = 0
        for number, (chosen, rejected, n_prompt, reference) in enumerate(row, start=1):
            batch["reference"][r, at + n_prompt - 1] = reference
            for side, tokens in enumerate((chosen, rejected)):
                span = slice(at, at + len(tokens) - 1)
                batch["tokens"][r, span] = torch.tensor(tokens[:-1])
                batch["targets"][r, at + n_prompt - 1 : span.stop] = torch.tensor(tokens[n_prompt:])
                batch["pairs"][r, span] = -1 if side else 1
                batch["documents"][r, span] = 2 * number - 2 + side
                batch["positions"][r, span] = torch.arange(len(tokens) - 1)
                at = span.stop
            first = int(batch["reference"][r].nonzero()[number - 1])
            batch["pairs"][r, first] = 2
    return batch


def answer_log_probability(model: torch.nn.Module, tokens: list[int], n_prompt: int) -> Tensor:
    """log p(answer | prompt) of one sequence alone, by all of its logits."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return F.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), tokens[1:]][n_prompt - 1 :].sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_those_of_the_paper(smoothing: float) -> None:
    model = build(CONFIG).double().train()
    initialise(model, 3)
    for parameter in model.parameters():
        parameter.data *= 3
    rows, beta = draw_pairs(), 0.7
    losses, margins = [], []
    for chosen, rejected, n_prompt, reference in (pair for row in rows for pair in row):
        ratio = answer_log_probability(model, chosen, n_prompt) - answer_log_probability(model, rejected, n_prompt)
        # trl's DPOTrainer with label_smoothing: -logsigmoid(β h)(1 − ε) − logsigmoid(−β h) ε.
        scaled = beta * (ratio - torch.tensor(reference).double())
        losses.append(-F.logsigmoid(scaled) * (1 - smoothing) - F.logsigmoid(-scaled) * smoothing)
        margins.append(float(scaled.detach()))
    torch.stack(losses).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    model.head.preference = Preference(beta, smoothing)
    losses_of_pairs = model(**as_batch(rows)).losses
    actual = {name: term.detach() for name, term in losses_of_pairs.items()}
    assert actual.keys() == set(PREFERENCE_TERMS)
    assert float(actual["preference"]) == pytest.approx(float(torch.stack(losses).sum().detach()), rel=1e-12)
    assert float(actual["reward_margin"]) == pytest.approx(sum(margins), rel=1e-12)
    assert float(actual["reward_accuracy"]) == sum(margin > 0 for margin in margins)
    (2 * losses_of_pairs["preference"]).backward()
    assert expected.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, 2 * gradient, rtol=1e-10, atol=1e-13)


def test_at_the_reference_the_loss_is_log_2() -> None:
    model = build(CONFIG).double().eval()
    initialise(model, 3)
    rows = []
    for row in draw_pairs():
        ratios = [[float(answer_log_probability(model, tokens, n).detach()) for tokens in pair] for *pair, n, _ in row]
        rows.append([(a, b, n, up - down) for (a, b, n, _), (up, down) in zip(row, ratios, strict=True)])
    with torch.no_grad():
        actual = model(**as_batch(rows)).losses
    assert float(actual["preference"]) == pytest.approx(3 * math.log(2), abs=1e-6)
    assert float(actual["reward_margin"]) == pytest.approx(0, abs=1e-5)


def test_a_batch_without_pairs_is_a_loss_of_0() -> None:
    model = build(CONFIG).double().train()
    initialise(model, 3)
    actual = model(**as_batch([[], []])).losses["preference"]
    actual.backward()
    assert float(actual.detach()) == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
