"""Properties of every family: inputs and outputs of forward, other inputs than tokens, stages, copies."""

import copy
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatfm
from megatfm.config import ModelConfig, ParallelConfig
from megatfm.errors import MegatfmError
from megatfm.layers import linear
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.initialisation import initialise
from megatfm.layers.linear import Linear
from megatfm.layers.output_head import HEADS, SentenceHead
from megatfm.models import build
from megatfm.models.base import make_sequence
from megatfm.parallel.pipeline_stages import compute_activation_shape
from megatfm.split_points import find_live_fields
from megatfm.train.resilience import forward_backward_with_replay
from tests.support.batches import CAUSAL, family_batch, global_batch
from tests.support.models import ADAMW, FAMILY_MODELS, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.tensors import move_parameters
from tests.support.workers import Workers

SIZES = {"vocab_size": 23, "d_model": 16, "n_layers": 2, "attention.n_heads": 2, "ffn.d_ff": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {},
    "discriminator": {"embedding.n_segments": 2},
    "encoder_decoder": {"position.name": "t5"},
    "electra": {"generator": {"d_model": 8, "n_heads": 2, "d_ff": 8}},
    "xlnet": {"attention.name": "two_stream", "position.name": "transformer_xl"},
}
WITH_HEADS = ("decoder", "encoder", "discriminator", "encoder_decoder")
TOKENS = torch.arange(12).view(2, 6)
CLASSES = torch.full((2, 6), -100).index_fill(1, torch.tensor([0]), 1)


def model_of(family: str, **options: Any) -> nn.Module:
    model = build(ModelConfig.from_dotted({**SIZES, **FAMILIES[family], **options, "family": family})).eval()
    initialise(model, 3)
    return model


def inputs_of(family: str) -> dict[str, Tensor]:
    sides = ("", "encoder_") if family == "encoder_decoder" else ("",)
    return {f"{side}tokens": TOKENS for side in sides}


@pytest.mark.parametrize("family", WITH_HEADS)
def test_targets_of_additional_heads_alone_give_their_losses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS._parts, "classes", SentenceHead)
    heads = {name: {"name": "classes", "classes": 2} for name in ("topic", "other")}
    model, inputs = model_of(family, extra_heads=heads), inputs_of(family)
    without = model(**inputs)
    assert without.losses is None
    assert without.logits is not None
    assert without.predictions.keys() == {"topic", "other"}
    output = model(**inputs, sentence_targets=CLASSES)
    expected = nn.functional.cross_entropy(without.predictions["topic"], torch.ones(2).long(), reduction="sum")
    torch.testing.assert_close(output.losses["topic"], expected)
    assert output.losses.keys() == {"topic", "other"}
    assert output.logits is None
    assert output.predictions is None
    assert torch.equal(output.hidden, without.hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("field", "hint"), [
    ("labels", "'(targets|labels)'"),
    ("input_ids", r"did you mean 'tokens'\?"),
    ("docments", r"did you mean 'documents'\?"),
])  # fmt: skip
def test_a_field_that_nothing_reads_is_refused(family: str, field: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"model.family = '{family}' does not read '{field}'.*{hint}"):
        model_of(family)(**inputs_of(family), **{field: TOKENS})


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_a_model_does_not_read_are_refused(family: str) -> None:
    model, inputs = model_of(family), inputs_of(family)
    model(**inputs, documents=torch.zeros_like(TOKENS), labels=None)
    reads_segments = family in ("discriminator", "xlnet")
    if reads_segments:
        model(**inputs, segments=torch.zeros_like(TOKENS))
    for field in ("sentence_targets", *(() if reads_segments else ("segments",))):
        with pytest.raises(TypeError, match=f"does not read '{field}'"):
            model(**inputs, **{field: CLASSES})
    if family != "decoder":
        with pytest.raises(TypeError, match="does not read 'prefix'"):
            model(**inputs, prefix=CLASSES)


def test_a_missing_input_is_named() -> None:
    with pytest.raises(TypeError, match="needs encoder_tokens, or the memory that"):
        model_of("encoder_decoder")(TOKENS)
    with pytest.raises(TypeError, match="the model needs tokens"):
        model_of("decoder")(targets=TOKENS)


def test_the_sides_of_a_batch_draw_from_different_random_keys() -> None:
    """The stacks of both sides count layers and sites alike, so equal keys would drop the same elements in both."""
    batch, keys = {"tokens": TOKENS, "encoder_tokens": TOKENS}, torch.tensor([5, -7])
    encoder, decoder = (make_sequence(batch, "tokens", side, keys=keys).rng_keys for side in ("encoder_", ""))
    assert encoder is not None
    assert decoder is not None
    assert torch.equal(decoder, keys)
    assert not torch.isin(encoder, decoder).any()
    assert make_sequence(batch, "tokens", "encoder_").rng_keys is None


DEBERTA = {"attention.name": "deberta", "position.name": "deberta", "position.max_distance": 4}
LINFORMER = {
    "attention.name": "linformer", "attention.max_length": 8, "attention.projected_length": 4, "position.name": "none",
}  # fmt: skip
LONGFORMER = {
    "attention.name": "longformer", "attention.pattern.name": "longformer", "attention.pattern.width": 2,
    "attention.pattern.global_tokens": [0], "position.name": "none",
}  # fmt: skip
CHOICE = {"ffn.name": "moe", "ffn.n_experts": 3, "ffn.top_k": 2, "ffn.router.name": "expert_choice"}


@pytest.mark.parametrize(
    ("family", "options", "length"),
    [
        ("decoder", {}, 6), ("decoder", {"position.name": "shaw", "position.max_distance": 3}, 6),
        ("encoder", DEBERTA, 6), ("encoder", CHOICE, 6), ("encoder_decoder", {}, 1100), ("xlnet", {}, 6),
        ("encoder", LINFORMER, 6), ("encoder", LONGFORMER, 6),
    ],
)  # fmt: skip
def test_a_batch_without_rows_has_losses_and_gradients_of_0(family: str, options: dict[str, Any], length: int) -> None:
    model, tokens = model_of(family, **options), TOKENS.new_zeros(0, length)
    losses = model(**dict.fromkeys(inputs_of(family), tokens), targets=tokens).losses
    sum(losses.values()).backward()
    assert not any(losses.values())
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stack_gets_the_starts_of_documents(family: str) -> None:
    """For kernels that take packed rows: `cu_seqlens` reaches each attention."""
    model, starts = model_of(family), torch.tensor([0, 6, 12, 12], dtype=torch.int32)
    reached = list[Any]()

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        sequence = inputs[2].sequence if family == "xlnet" else inputs[1]
        reached.append(sequence.uniform_cu_seqlens())

    for name, module in model.named_modules():
        if name.endswith(".attn"):
            module.register_forward_pre_hook(note)
    batch = {**inputs_of(family), "cu_seqlens": starts, "documents": torch.zeros_like(TOKENS)}
    if family == "encoder_decoder":
        batch["encoder_cu_seqlens"] = starts
    if family == "electra":
        batch |= {"original": TOKENS, "targets": TOKENS, "keys": torch.arange(2)}
    model(**batch)
    assert len(reached) == (4 if family in ("electra", "encoder_decoder") else 2)
    assert all(item is starts for item in reached)


def test_the_last_stage_of_xlnet_needs_no_targets_where_there_are_queries() -> None:
    model, order = model_of("xlnet"), torch.stack([torch.randperm(6) for _ in range(2)])
    names = [point.name for point in model.split_points]
    carried = model.stage(names[:-2]).forward(tokens=TOKENS, order=order).carried()
    last = model.stage(names[-2:]).forward(tokens=TOKENS, order=order, query=carried["query"])
    assert torch.equal(last.logits, model(TOKENS, order=order).logits)


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("broken", ["embedding", "block"])
def test_a_failed_pass_keeps_the_cache_or_is_reported(family: str, broken: str) -> None:
    model, cache = model_of(family), KVCache(2, 6)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [-1, 0, 0, 0, 0, 0]])
    encoder = {"encoder_tokens": TOKENS} if family == "encoder_decoder" else {}
    logits = model(TOKENS, documents=documents, **encoder).logits

    def step(first: int, last: int) -> Tensor:
        positions = {"positions": torch.arange(first, last).expand(2, -1)}
        part = {"documents": documents[:, first:last], **positions, **encoder}
        return model(TOKENS[:, first:last], cache=cache, **part).logits

    step(0, 4)
    place = model.decoder.embedding if broken == "embedding" else model.decoder.layers["1"]

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = place.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        step(4, 5)
    handle.remove()
    if broken == "block":
        with pytest.raises(MegatfmError, match=r"some layers have 4 tokens, others 5\. Make a new KVCache"):
            step(4, 5)
        return
    assert cache.length == cache.documents.shape[1] == 4
    torch.testing.assert_close(torch.cat([step(4, 5), step(5, 6)], 1), logits[:, 4:])
    assert torch.equal(cache.documents, documents)


def test_documents_that_come_late_belong_to_the_later_tokens() -> None:
    """Tokens before them are of document 0."""
    model, cache = model_of("decoder"), KVCache(2, 6)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]])
    logits = model(TOKENS, documents=documents, positions=torch.arange(6).expand(2, 6)).logits
    model(TOKENS[:, :3], cache=cache)
    parts = [model(TOKENS[:, i : i + 1], documents=documents[:, i : i + 1], cache=cache).logits for i in (3, 4, 5)]
    torch.testing.assert_close(torch.cat(parts, 1), logits[:, 3:])


# ----------------------------------------------------------------------------------- other inputs than tokens


V = SIZES["vocab_size"]


class Chances(nn.Module):
    """The expected vector of tokens that are known by their probabilities [B, T, V] alone."""

    def __init__(self, config: ModelConfig, initial: Any) -> None:
        super().__init__()
        self.matrix = Linear(V, config.d_model, initial("embedding", V, config.d_model), bias=False)

    def forward(self, chances_BTV: Tensor) -> Tensor:
        return self.matrix(chances_BTV)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "electra"])
def test_a_field_in_place_of_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDINGS._parts, "chances", Chances)
    options = {"embedding.tied": False} | ({"n_encoder_layers": 1} if family == "encoder_decoder" else {})
    of_tokens = move_parameters(model_of(family, **options), 0.5)
    of_chances = model_of(family, **options, **{"embedding.name": "chances"}).double()
    weights = of_tokens.state_dict()
    for name in [name for name in weights if name.endswith("embedding.tokens.weight")]:
        weights[name.replace("tokens.weight", "chances.matrix.weight")] = weights.pop(name).T
    of_chances.load_state_dict(weights)
    tokens, inputs = torch.randint(V, TOKENS.shape), inputs_of(family)
    chances = {name.replace("tokens", "chances"): F.one_hot(tokens, V).double() for name in inputs}
    other = {"order": torch.stack([torch.randperm(6) for _ in range(2)])} if family == "xlnet" else {}
    expected = of_tokens(**dict.fromkeys(inputs, tokens), **other).hidden
    torch.testing.assert_close(of_chances(**chances, **other).hidden, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="chances"):
        of_chances(**dict.fromkeys(inputs, tokens), **other)


# --------------------------------------------------------------------------------- calls to the first product


HOPS = 9
"""Loop, engine, its pass, objective, model, stack, block, sublayer, matrix."""
HERE = Path(megatfm.__file__).parent


def list_called_functions() -> list[str]:
    """The functions of the package between the loop and the first product, the outermost first."""
    actual, real = list[str](), linear.F.linear

    def noted(*args: Any) -> Tensor:
        if not actual:
            frames = [frame for frame in traceback.extract_stack() if HERE in Path(frame.filename).parents]
            actual.extend(f"{Path(frame.filename).relative_to(HERE)} {frame.name}" for frame in frames)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear.F, "linear", noted)
        engine = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW)
        forward_backward_with_replay(engine, microbatches(engine, global_batch(3)), CAUSAL, 1, replay_every=0)
    return actual


def test_the_way_is_short(workers: Workers) -> None:
    (result,) = workers.run(list_called_functions, 1)
    assert result[0] == "train/resilience.py forward_backward_with_replay"
    assert result[-1] == "layers/linear.py forward"
    assert len(result) <= HOPS, result


# ----------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_stages_of_one_split_point_in_turn_are_forward(name: str) -> None:
    config = FAMILY_MODELS[name]
    model = build(config).double().train()
    initialise(model, 7)
    batch = {key: value for key, value in family_batch(config).items() if key != "ahead"}
    points, carry, losses = model.split_points, {}, {}
    assert len({point.name for point in points}) == len(points)
    for i, point in enumerate(points):
        assert carry.keys() == find_live_fields(points, i).keys()
        output = model.stage({point.name}).forward(**batch, **carry)
        carry = {name: output.carried()[name] for name in find_live_fields(points, i + 1)}
        for name, spec in find_live_fields(points, i + 1).items():
            assert carry[name].shape == compute_activation_shape(spec, batch, 1)
            assert carry[name].dtype == (torch.int64 if spec.d_model is None else torch.float64)
        losses |= output.losses or {}
    expected = model(**batch).losses
    assert losses.keys() == expected.keys()
    for term, value in expected.items():
        assert torch.equal(losses[term], value)


# ----------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_copy_has_the_same_losses_and_separate_weights(name: str) -> None:
    config = FAMILY_MODELS[name]
    model = build(config).train()
    initialise(model, 3)
    batch = {key: value for key, value in family_batch(config).items() if key != "ahead"}
    fresh = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    losses = model(**batch).losses
    for other in (*fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied = other(**batch).losses
        assert copied.keys() == losses.keys()
        assert all(torch.equal(copied[term], losses[term]) for term in losses)
        owned = {parameter.data_ptr() for parameter in other.parameters()}
        assert owned.isdisjoint(parameter.data_ptr() for parameter in model.parameters())
        assert len(owned) == len({parameter.data_ptr() for parameter in model.parameters()}), "ties are kept"
