"""Routers against references written out here, one token after the other: outputs, losses and every gradient."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from megatfm.config import Config, ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.feed_forward import FFNS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.moe import moe
from megatfm.layers.moe.moe import MoE
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.base import make_sequence
from megatfm.ops import keyed_random as keyed
from tests.support.tensors import draw

B, T, D, WIDTH, E = 2, 9, 6, 5, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4, [0] * 6 + [-1] * 3])
TOKENS = torch.randint(0, 8, (B, T), generator=torch.Generator().manual_seed(5))


def config_of(family: str = "encoder", **ffn: Any) -> ModelConfig:
    ffn = {"name": "moe", "d_ff": WIDTH, "n_experts": E, "top_k": 2} | ffn
    if ffn["name"] == "soft_moe":
        del ffn["top_k"]
    sizes = {"vocab_size": 8, "d_model": D, "n_layers": 1, "attention.n_heads": 1, "family": family}
    return ModelConfig.from_dotted({**sizes, "ffn": ffn})


def make(**ffn: Any) -> Any:
    config = config_of(**ffn)
    module = FFNS.get(config.ffn.name)(config, make_initialiser(config)).double()
    for seed, tensor in enumerate((*module.parameters(), *module.buffers())):
        tensor.data.copy_(draw(*tensor.shape, seed=seed))
    for buffer in module.buffers():
        buffer.abs_().div_(buffer.sum())
    return module


def sequence() -> SequenceMetadata:
    metadata = SequenceMetadata(torch.arange(T).expand(B, T), DOCUMENTS, rng_keys=torch.tensor([11, 12]))
    metadata.tokens = TOKENS
    return metadata


def expert(module: Any, e: int, x: Tensor) -> Tensor:
    mixture = module.experts
    return mixture.w_down[e] @ (F.silu(mixture.w_gate[e] @ x) * (mixture.w_up[e] @ x))


def compare(module: Any, written_out: Any) -> dict[str, float]:
    """Output, terms of the loss, and the gradients of a sum of all, by the module and as they are written out."""
    actual: list[list[Tensor]] = []
    for by in (module, written_out):
        module.zero_grad()
        x = draw(B, T, D, seed=1).requires_grad_()
        result = by(x, sequence())
        y, losses = (result.y, result.losses) if hasattr(result, "losses") else (result, {})
        outputs = y[DOCUMENTS >= 0]
        (outputs.sin().sum() + sum(losses.values(), torch.zeros(()))).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in (x, *module.parameters())]
        assert any(grad.any() for grad in grads)
        actual.append([outputs, *losses.values(), *grads])
    for output, expected in zip(*actual, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    return {name: value.item() for name, value in losses.items()}


def draws(place: nn.Module, b: int, t: int, width: int) -> Tensor:
    return keyed.draw_uniform(place.token_rng_keys(sequence()), width)[b, t]  # type: ignore[operator]


def add_at(y: Tensor, b: int, t: int, output: Tensor) -> Tensor:
    return y.index_put((torch.tensor(b), torch.tensor(t)), output, accumulate=True)


def real_places() -> list[tuple[int, int]]:
    return [(b, t) for b in range(B) for t in range(T) if DOCUMENTS[b, t] >= 0]


def cv_squared(sums: Tensor) -> Tensor:
    return sums.var(correction=0) / sums.mean().square()


@pytest.mark.parametrize("training", [True, False])
def test_noisy_top_k(training: bool) -> None:
    """Shazeer et al. 2017, equations 3 to 11, with Φ as an integral and both losses over the whole batch."""
    module = make(router={"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1}).train(training)
    router = module.router

    def noisy(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, importance, load = torch.zeros_like(x), [], []
        for b, t in real_places():
            clean, spread = router.weight @ x[b, t], F.softplus(router.noise_weight @ x[b, t])
            draw = draws(router.noise, b, t, 2 * E)
            normal = (-2 * draw[:E].log()).sqrt() * (2 * math.pi * draw[E:]).cos()
            h = clean + training * normal * spread
            best = h.argsort(descending=True)[:2].tolist()
            gates = torch.zeros(E, dtype=x.dtype).index_put((torch.tensor(best),), h[best].softmax(0))
            y = add_at(y, b, t, sum(gates[e] * expert(module, e, x[b, t]) for e in best))
            bars = torch.stack([torch.cat([h[:e], h[e + 1 :]]).sort(descending=True).values[1] for e in range(E)])
            importance.append(gates)
            load.append(0.5 * (1 + torch.erf((clean - bars) / spread / math.sqrt(2))))
        return y, torch.stack(importance), torch.stack(load)

    with torch.no_grad():
        x = draw(B, T, D, seed=1)
        _, importance, load = noisy(x)
        router.importance.copy_(importance.mean(0))
        router.load.copy_(load.mean(0))

    def written_out(x: Tensor, _: SequenceMetadata) -> SimpleNamespace:
        """State says what this batch has, so that terms and gradients are those of CV² itself."""
        y, importance, load = noisy(x)
        losses = {"importance": importance, "load": load}
        losses = {name: len(values) * cv_squared(values.sum(0)) for name, values in losses.items()}
        return SimpleNamespace(y=y, losses=losses)

    losses = compare(module, written_out)
    assert all(value > 0.1 for value in losses.values())
    if training:
        module.accumulate_counts(module(x, sequence()).counts)
        router.load.zero_()
        module.update(module.observed)
        torch.testing.assert_close(router.load, load.mean(0), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(router.importance, importance.mean(0), rtol=1e-6, atol=1e-7)


def test_terms_are_flat_where_all_is_even() -> None:
    numbers = torch.rand(1, 3, E, dtype=torch.float64, requires_grad=True)
    term = moe.cv_squared_loss(numbers, torch.ones(1, 3, dtype=torch.bool), torch.full((E,), 0.3).double())
    term.backward()
    assert float(term.abs().detach()) < 1e-12
    assert float(numbers.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("training", [True, False])
def test_gshard_router_equals_loops(training: bool) -> None:
    module = make(router={"name": "gshard"}).train(training)
    went = []

    def written_out(x: Tensor, _: SequenceMetadata) -> Tensor:
        y = torch.zeros_like(x)
        for b, t in real_places():
            gates = (module.router.weight @ x[b, t]).softmax(0)
            first, second = gates.argsort(descending=True)[:2].tolist()
            share = gates[second] / (gates[first] + gates[second])
            result = (1 - share) * expert(module, first, x[b, t])
            goes = not training or bool(2 * share > draws(module.router.sample_second, b, t, 1)[0])
            went.append(goes)
            y = add_at(y, b, t, result + goes * share * expert(module, second, x[b, t]))
        return y

    compare(module, written_out)
    assert all(went) != training
    assert any(went)
    counts = module(torch.randn(B, T, D).double(), sequence()).counts
    assert int(counts["dropped"]) == 0, "a second expert that nobody went to was not dropped"


def test_hash_router_sends_equal_tokens_to_equal_experts() -> None:
    module = make(router={"name": "hash"}).train()
    choices = module.router(torch.zeros(B, T, D), sequence()).expert_indices
    flat = zip(TOKENS.flatten().tolist(), choices.flatten(0, 1).tolist(), strict=True)
    by_token = {token: tuple(chosen) for token, chosen in flat}
    assert all(by_token[int(TOKENS[b, t])] == tuple(choices[b, t].tolist()) for b in range(B) for t in range(T))
    assert len(set(by_token.values())) > 2
    assert all(len(set(chosen)) == 2 for chosen in by_token.values())

    def written_out(x: Tensor, _: SequenceMetadata) -> Tensor:
        def expected_output(b: int, t: int) -> Any:
            return sum(expert(module, e, x[b, t]) for e in by_token[int(TOKENS[b, t])]) / 2

        return torch.stack([torch.stack([expected_output(b, t) for t in range(T)]) for b in range(B)])

    compare(module, written_out)


def test_expert_choice_router_equals_loops() -> None:
    module = make(router={"name": "expert_choice"}).train()
    numbers = []

    def written_out(x: Tensor, _: SequenceMetadata) -> Tensor:
        y = torch.zeros_like(x)
        for b in range(B):
            real = [t for t in range(T) if DOCUMENTS[b, t] >= 0]
            gates = {t: (module.router.weight @ x[b, t]).softmax(0) for t in real}
            uses: dict[int, int] = dict.fromkeys(real, 0)
            for e in range(E):
                for t in sorted(real, key=lambda t: -gates[t][e].item())[: math.ceil(2 * T / E)]:
                    y = add_at(y, b, t, gates[t][e] * expert(module, e, x[b, t]))
                    uses[t] += 1
            numbers.extend(uses.values())
        return y

    compare(module, written_out)
    assert len(set(numbers)) > 2


def test_soft_mixtures_are_by_document() -> None:
    module = make(name="soft_moe", slots=2).train()

    def written_out(x: Tensor, _: SequenceMetadata) -> Tensor:
        y = torch.zeros_like(x)
        for b, document in ((0, 0), (0, 1), (1, 0)):
            places = (DOCUMENTS[b] == document).nonzero()[:, 0]
            local = x[b, places]
            logits = local @ module.weight.T
            slots = logits.softmax(0).T @ local
            result = torch.stack([expert(module, s // 2, slots[s]) for s in range(2 * E)])
            y = y.index_put((torch.tensor(b), places), logits.softmax(1) @ result)
        return y

    compare(module, written_out)


@pytest.mark.parametrize(("family", "ffn", "message"), [
    ("decoder", {"router": {"name": "expert_choice"}}, "leaks the future in a causal model"),
    ("encoder_decoder", {"router": {"name": "expert_choice"}}, "leaks the future in a causal model"),
    ("decoder", {"name": "soft_moe"}, "'soft_moe' leaks the future in a causal model"),
    ("encoder", {"router": {"name": "expert_choice"}, "capacity_factor": 1.0},
     "capacity_factor = 1.0 has no meaning with"),
    ("encoder", {"router": {"name": "hash", "aux_loss_coef": 0.1}}, "aux_loss_coef = 0.1 has no meaning with router"),
    ("encoder", {"router": {"name": "gshard"}, "top_k": 1}, "chooses two: set top_k = 2"),
    ("encoder", {"router": {"name": "noisy_top_k"}, "top_k": E}, "set top_k = 3 or less"),
    ("encoder", {"name": "soft_moe", "capacity_factor": 2.0}, "capacity_factor has no meaning"),
])  # fmt: skip
def test_contradictory_options_of_routers_are_refused(family: str, ffn: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(family, **ffn)


def test_soft_mixtures_are_not_cut_over_tensor_parallel_ranks() -> None:
    values = {
        "name": "soft", "model": config_of(name="soft_moe").model_dump(exclude_none=True),
        "objective": {"name": "masked"}, "optimizer": {"name": "adamw", "lr": 1e-3},
        "data": {"train": "x", "tokenizer": "x", "sequence_length": 32},
        "train": {"steps": 10, "global_batch": 4, "micro_batch": 2},
    }  # fmt: skip
    for layout in ({}, {"cp": 2}, {"dp_shard": 2, "ep": 2}):
        Config.model_validate({**values, "parallel": layout})
    values["model"]["attention"] |= {"n_heads": 2, "head_dim": 2}  # type: ignore[index]
    with pytest.raises(ValidationError, match="'soft_moe' is not cut over tensor-parallel ranks"):
        Config.model_validate({**values, "parallel": {"tp": 2}})


def test_a_hash_needs_tokens() -> None:
    module: MoE = make(router={"name": "hash"})
    with pytest.raises(Exception, match="hashes token ids, but the model's input has none"):
        module(torch.zeros(B, T, D).double(), SequenceMetadata(torch.arange(T).expand(B, T)))


def test_a_hash_uses_the_tokens_of_a_part_of_a_row() -> None:
    """Parts of rows are those of context parallelism."""
    module, places = make(router={"name": "hash"}), torch.tensor([1, 4, 7])
    full = {"full_row_positions": torch.arange(T).expand(B, T), "full_row_documents": DOCUMENTS}
    part = make_sequence({"tokens": TOKENS[:, places], "token_indices": places, **full}, "tokens")
    expert_indices = module.router(torch.zeros(B, 3, D), part).expert_indices
    assert torch.equal(expert_indices, module.router(torch.zeros(B, T, D), sequence()).expert_indices[:, places])


@pytest.mark.parametrize(("router", "purpose"), [
    ({"name": "gshard"}, "the gshard router's sampling of second experts"),
    ({"name": "noisy_top_k"}, "the noisy_top_k router's noise"),
    ({"name": "switch", "jitter": 0.1}, "the switch router's jitter"),
], ids=["gshard", "noisy_top_k", "switch"])  # fmt: skip
def test_a_router_that_lacks_random_keys_is_named(router: dict[str, Any], purpose: str) -> None:
    module = make(router=router, top_k=1 if router["name"] == "switch" else 2)
    x = torch.ones(1, 3, D, dtype=torch.float64)
    without_keys = SequenceMetadata(torch.arange(3)[None])
    with pytest.raises(UsageError, match=rf"^{purpose} in training needs random keys.*pass keys"):
        module(x, without_keys)
    module.eval()(x, without_keys)
