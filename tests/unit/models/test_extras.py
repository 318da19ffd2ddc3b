"""Stacks of blocks that differ, and what blocks give besides their outputs: loss terms and counts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatfm.config import CausalObjective, Config, ModelConfig, PermutationObjective, SpanCorruptionObjective
from megatfm.engines import activation_checkpointing
from megatfm.errors import UsageError
from megatfm.layers.block import collect_auxiliary_losses
from megatfm.layers.initialisation import initialise
from megatfm.layers.loss_terms import BlockOutput
from megatfm.layers.output_head import HEADS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.objectives import SpecialTokens, build_objective
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import verify
from tests.plugins import plugin

plugin("chosen")
CONFIG = ModelConfig.from_dotted(
    {"vocab_size": 23, "d_model": 16, "n_layers": 3, "attention.n_heads": 2, "n_mtp_heads": 1}
    | {"ffn": {"name": "chosen", "d_ff": 24, "choices": 3, "rate": 0.1, "weight": 0.25}}
)
XLNET = {"family": "xlnet", "attention.name": "two_stream", "position.name": "transformer_xl", "n_mtp_heads": 0}
SPECIAL = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=23, cls=3, sep=4, sentinels=range(22, 17, -1))
TOKENS = torch.arange(12).view(2, 6)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]])
REAL = 10


def networks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "Chosen"]


def listen(model: nn.Module) -> list[tuple[Tensor, Any, BlockOutput]]:
    """Inputs, layout and output of every call of a network."""
    calls: list[tuple[Tensor, Any, BlockOutput]] = []
    for ffn in networks(model):
        ffn.register_forward_hook(lambda module, inputs, output: calls.append((*inputs, output)))
    return calls


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_terms_are_summed_and_counts_told_once(how: str) -> None:
    model = build(CONFIG).train()
    initialise(model, 3)
    ffns, result, begun = networks(model), listen(model), list[nn.Module]()
    for ffn in ffns:
        ffn.register_forward_pre_hook(lambda module, inputs: begun.append(module))
    assert len(ffns) == 4, "three blocks and a future head's"
    blocks = [*model.decoder.layers.values(), model.future["1"].layers["0"]]
    activation_checkpointing.recompute(model, blocks, how)
    output = model(TOKENS, targets=TOKENS.roll(-1, 1), documents=DOCUMENTS)
    assert len(result) == 4
    by_token = [ffn.router(x_BTD).logsumexp(-1).square() for ffn, (x_BTD, _, _) in zip(ffns, result, strict=True)]
    expected = torch.stack([numbers_BT[DOCUMENTS >= 0].sum() for numbers_BT in by_token]).sum()
    torch.testing.assert_close(output.losses["router"], expected)
    sum(output.losses.values()).backward()
    assert len(begun) == (4 if how == "none" else 8), "what is computed again is not told again"
    for ffn, (_, _, one) in zip(ffns, result, strict=False):
        assert torch.equal(ffn.observed["load"], one.counts["load"])
        assert int(one.counts["load"].sum()) == REAL
        ffn.reset_counts()
    model.eval()(TOKENS, targets=TOKENS)
    assert not any(ffn.observed for ffn in ffns)
    assert model(TOKENS).losses is None


def test_counts_of_micro_batches_add_up() -> None:
    model = build(CONFIG).train()
    initialise(model, 3)
    for _ in range(3):
        model(TOKENS, targets=TOKENS, documents=DOCUMENTS)
    assert [int(ffn.observed["load"].sum()) for ffn in networks(model)] == [3 * REAL] * 4


def test_an_objective_takes_the_terms_up() -> None:
    objective = build_objective(CausalObjective(), CONFIG, SPECIAL, (6,))
    assert objective.loss_weights == {"causal": 1.0, "future_1": 1.0, "router": 0.25}
    batch = {"tokens": TOKENS, "targets": TOKENS.clone(), "positions": TOKENS % 6, "documents": DOCUMENTS}
    batch["keys"] = torch.arange(2)
    batch["targets"][:, -2:] = -100
    batch["targets"][0, 2] = -100
    counts = {name: int(n) for name, n in objective.target_counts(batch).items()}
    assert counts["router"] == REAL, "padding counts for nothing"
    assert counts["causal"] == 7
    assert objective.likelihood_term == "causal"
    del batch["documents"]
    assert int(objective.target_counts(batch)["router"]) == 12, "rows that bring no documents have no padding"
    assert collect_auxiliary_losses(CONFIG.with_changes({"ffn": {"name": "dense", "d_ff": 8}})) == {}


def test_tokens_of_both_sides_count() -> None:
    model = CONFIG.with_changes({"family": "encoder_decoder", "position.name": "t5", "n_mtp_heads": 0})
    objective = build_objective(SpanCorruptionObjective(), model, SPECIAL, (6, 4))
    batch = {"positions": TOKENS[:, :4], "encoder_positions": TOKENS, "encoder_documents": DOCUMENTS}
    batch |= {"targets": TOKENS[:, :4], "documents": torch.tensor([[0, 0, -1, -1], [0, -1, -1, -1]])}
    assert int(objective.target_counts(batch)["router"]) == REAL + 3


def xlnet() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch whose second row has fewer targets, so that its queries are filled up."""
    torch.manual_seed(0)
    model = build(CONFIG.with_changes(XLNET)).train()
    initialise(model, 3)
    targets = torch.full((2, 6), -100)
    targets[0, :3], targets[1, 1] = 5, 7
    order = torch.tensor([[1, 2, 3, 0, 0, 0], [0, 1, 0, 0, 0, 0]])
    return model, {"tokens": TOKENS, "targets": targets, "order": order, "documents": DOCUMENTS}


def test_predicted_tokens_alone_count_in_the_query_stream() -> None:
    """Rows by themselves, whose queries need no or other filling up, have the same terms and counts."""
    model, batch = xlnet()
    calls = listen(model)
    together = model(**batch).losses
    loads = [int(ffn.observed["load"].sum()) for ffn in networks(model)]
    assert loads == [REAL + 4, REAL + 4, 4], "the content stream has ended before the last block"
    assert {x.shape[1] for x, _, _ in calls} == {6, 4}, "three targets, filled up to whole groups of two"
    alone = [model(**{name: value[row : row + 1] for name, value in batch.items()}).losses for row in range(2)]
    for term, value in together.items():
        torch.testing.assert_close(value, sum(losses[term] for losses in alone))
    objective = build_objective(PermutationObjective(), CONFIG.with_changes(XLNET), SPECIAL, (6,))
    assert int(objective.target_counts({**batch, "positions": TOKENS})["router"]) == REAL + 4


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2, "zero": 3}], ids=["tp2", "pp2", "zero3"])
def test_the_query_stream_is_the_same_in_every_layout(layout: dict[str, int]) -> None:
    """The reference takes the global batch at once, and so fills other queries up than micro-batches do."""
    config = Config.model_validate({
        "name": "queries", "plugins": ["chosen"], "model": CONFIG.with_changes({**XLNET, "vocab_size": 64}),
        "objective": {"name": "permutation", "tokens_per_prediction": 2},
        "data": {"train": "nowhere/train", "tokenizer": "nowhere/tokenizer.model", "sequence_length": 18},
        "optimizer": {"name": "adamw", "lr": 1e-3}, "parallel": {"dp_shard": 1, **layout},
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 1, "seed": 1},
    })  # fmt: skip
    actual = verify(config)
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert actual.config.data.sequence_length == 18, "of which queries come in groups of 2"
    expected = (draw_batch(actual.config)["targets"] >= 0).sum(1).reshape(-1, actual.config.train.micro_batch)
    assert len(np.unique(-(-expected.max(1) // 2))) > 1


def test_heads_that_share_a_term_add_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squares(nn.Module):
        input_fields, term = ("targets",), "causal"

        def __init__(self, config: ModelConfig, section: Any, tokens: Any) -> None:
            super().__init__()
            self.scale = section.scale

        def forward(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
            return self.scale * hidden_BTD.square().sum()

    monkeypatch.setitem(HEADS._parts, "squares", Squares)
    heads = {name: {"name": "squares", "scale": scale} for name, scale in (("one", 2.0), ("two", 3.0))}
    models = [build(CONFIG), build(CONFIG.with_changes({"extra_heads": heads}))]
    for model in models:
        initialise(model, 3)
    plain, more = (model(TOKENS, targets=TOKENS) for model in models)
    torch.testing.assert_close(more.losses["causal"], plain.losses["causal"] + 5 * plain.hidden.square().sum())


def test_terms_that_contradict_one_another_are_refused() -> None:
    kinds = {"layer_types": ["a", "b"], "layer_type.a": {}, "layer_type.b.ffn.weight": 0.5}
    with pytest.raises(UsageError, match=r"two parts of the model add a term 'router' to the loss"):
        collect_auxiliary_losses(CONFIG.with_changes(kinds))


# ----------------------------------------------------------------------------------------- blocks that differ


SMALL = {"vocab_size": 23, "d_model": 16, "n_layers": 3, "attention.n_heads": 2, "ffn.d_ff": 24}
plugin("dilated")
KINDS = {
    "layer_types": ["near", "far"],
    "layer_type.near.attention.pattern": {"name": "dilated", "width": 2, "step": 2},
    "layer_type.near.position.theta": 100.0,
    "layer_type.far": {"ffn.d_ff": 40, "attention.n_kv_heads": 1, "position.name": "none"},
}


def test_blocks_are_as_their_kind_says() -> None:
    config = ModelConfig.from_dotted({**SMALL, **KINDS})
    model = build(config).double()
    initialise(model, 3)
    blocks = list(model.decoder.layers.values())
    assert [block.kind for block in blocks] == ["near", "far", "near"]
    assert [block.depth for block in blocks] == [0, 1, 2]
    assert [block.ffn.w_up.weight.shape[0] for block in blocks] == [24, 40, 24]
    assert [block.attn.wk.weight.shape[0] for block in blocks] == [16, 8, 16]
    near = plugin("dilated").Dilated(2, 2, causal=True)
    assert [block.attn.core.pattern == near for block in blocks] == [True, False, True]

    # Each block alone, from a model of its kind only, with the same weights.
    tokens = torch.arange(12).view(2, 6)
    x = model.decoder.embedding.tokens(tokens)
    for depth, block in enumerate(blocks):
        alone = build(config.layer_config(depth).with_changes({"n_layers": 1})).double().decoder.layers["0"]
        alone.load_state_dict(block.state_dict())
        x = alone(x, SequenceMetadata(torch.arange(6).expand(2, 6)))
    torch.testing.assert_close(model(tokens).hidden, model.decoder.norm(x))


def test_turned_positions_differ_by_block() -> None:
    """Blocks of one width, whose tables of angles must not be taken for one another's."""
    kinds = {**SMALL, **KINDS, "layer_type.far": {}}
    model = build(ModelConfig.from_dotted(kinds))
    initialise(model, 3)
    other = build(ModelConfig.from_dotted({**kinds, "layer_type.near.position.theta": 10_000.0}))
    other.load_state_dict(model.state_dict())
    tokens = torch.arange(12).view(2, 6)
    assert not torch.allclose(model(tokens).logits, other(tokens).logits)


def test_some_blocks_without_a_shared_bias() -> None:
    config = ModelConfig.from_dotted(
        {**SMALL, "position.name": "t5", "layer_types": ["biased", "bare"], "layer_type.biased": {}}
        | {"layer_type.bare.position.name": "none"}
    )
    model = build(config)
    initialise(model, 3)
    assert model.decoder.has_position_bias == [True, False, True]
    assert model(torch.arange(6)[None]).logits.isfinite().all()


def test_a_stack_s_encoding_for_one_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^model.layer_type.a.position: t5 is shared by all blocks of a stack"):
        build(ModelConfig.from_dotted({**SMALL, "layer_types": ["a"], "layer_type.a.position.name": "t5"}))
