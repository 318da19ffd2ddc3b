"""Replaced-token detection: what the generator sees and predicts, and what the discriminator is asked."""

from typing import Any

import pytest
import torch

MASK, CLS, SEP, IGNORE = 3, 4, 5, -100


def test_85_of_100_chosen_tokens_are_masked(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result, n, masked, chosen = make_objective("replaced_token"), 400, 0, 0
    for sample in range(2500):
        tokens = make_text(n, sample)
        fields = build_one(result, tokens, sample=sample)
        assert fields["original"].tolist() == [CLS, *tokens.tolist(), SEP]
        taken = fields["targets"] != IGNORE
        assert (fields["targets"][taken] == fields["original"][taken]).all()
        changed = fields["tokens"] != fields["original"]
        assert (fields["tokens"][changed] == MASK).all(), "no random tokens"
        assert taken[changed].all()
        masked, chosen = masked + int(changed.sum()), chosen + int(taken.sum())
    assert abs(chosen - 150_000) < 5 * (1e6 * 0.15 * 0.85) ** 0.5
    assert abs(masked - 0.85 * chosen) < 5 * (chosen * 0.85 * 0.15) ** 0.5


def test_the_terms_and_their_counts(make_objective: Any) -> None:
    result = make_objective("replaced_token")
    assert dict(result.loss_weights) == {"generator": 1.0, "discriminator": 50.0}
    batch = {
        "targets": torch.tensor([[IGNORE, 7, IGNORE, IGNORE]]),
        "documents": torch.tensor([[0, 0, 0, -1]]),
    }
    assert {name: int(count) for name, count in result.target_counts(batch).items()} == {
        "generator": 1,
        "discriminator": 3,
    }
    assert make_objective("replaced_token", discriminator_weight=10).loss_weights[
        "discriminator"
    ] == pytest.approx(10)
