"""Next-token prediction: what it makes of a document, and how its terms count."""

import numpy as np
import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.models import build
from megatfm.objectives import OBJECTIVES, SpecialTokens

SPECIAL = SpecialTokens(bos=1, eos=2, pad=0)
OBJECTIVE = OBJECTIVES.get("causal")(SPECIAL)


@pytest.mark.parametrize("document", [[], [7], [7, 8, 9]])
@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_every_token_is_predicted_once(document: list[int], dtype: type) -> None:
    tokens = np.array(document, dtype)
    built = OBJECTIVE.build(tokens, (0, 0, 0))
    assert built["tokens"].tolist() == [1, *document]
    assert built["targets"].tolist() == [*document, 2]
    assert OBJECTIVE.lengths(np.array([len(document)])).tolist() == [len(built["tokens"])]
    again = OBJECTIVE.build(tokens, (5, 6, 7))
    assert {k: v.tolist() for k, v in again.items()} == {k: v.tolist() for k, v in built.items()}


def test_the_term_is_a_sum_over_counted_targets_and_knows_documents() -> None:
    model = build(ModelConfig(vocab_size=11, d_model=8, n_layers=1, n_heads=2, d_ff=8)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    first, second = OBJECTIVE.build(np.array([7, 8]), (0, 0, 0)), OBJECTIVE.build(np.array([9]), (0, 0, 1))
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
    assert terms.keys() == OBJECTIVE.weights.keys() == OBJECTIVE.counts(batch).keys() == {"causal"}
    assert float(terms["causal"].detach()) == pytest.approx(nats, rel=1e-12)
    assert int(OBJECTIVE.counts(batch)["causal"]) == 5
