"""Direct preference optimisation at the head, against torch's autograd through whole logits and trl's formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.layers.preference import PREFERENCE_TERMS, Preference
from megatfm.models import build

LENGTH = 16
CONFIG = ModelConfig(
    vocab_size=31,
    d_model=16,
    n_layers=2,
    attention={"n_heads": 2},
    ffn={"d_ff": 24},
    embedding={"tied": False},
)
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
        ratio = answer_log_probability(model, chosen, n_prompt) - answer_log_probability(
            model, rejected, n_prompt
        )
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
        ratios = [
            [float(answer_log_probability(model, tokens, n).detach()) for tokens in pair]
            for *pair, n, _ in row
        ]
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
