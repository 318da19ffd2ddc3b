"""Small parts against their formulas: activations, embeddings, rotary positions, dropout, stochastic depth."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megatfm.config import ModelConfig
from megatfm.config.position import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout, DropPath
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.position import (
    LearnedPositions,
    compute_frequencies,
    compute_rotary_table,
    compute_scaled_frequencies,
    rotate,
)
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.models import build
from tests.support.tensors import draw, move_parameters


def test_swiglu_equals_its_formula() -> None:
    gate, activation = draw(3, 5), ACTIVATIONS.get("swiglu")
    assert activation.gated
    torch.testing.assert_close(activation.function(gate), gate / (1 + (-gate).exp()), rtol=1e-12, atol=1e-15)


# ------------------------------------------------------------------------------------------------- embeddings


SMALL = {
    "family": "encoder", "vocab_size": 23, "d_model": 12, "n_layers": 1, "attention.n_heads": 3, "ffn.d_ff": 20,
    "norm.name": "layer_norm", "norm.eps": 1e-3, "position.name": "learned", "position.max_positions": 9,
    "embedding.dim": 5, "embedding.norm": True,
}  # fmt: skip
IDS = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.randint(0, 3, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("offset", [0, 2])
def test_factorised_with_all_that_there_is(offset: int) -> None:
    """Scale on the tokens alone; sum, norm, then the projection from E to D (Lan et al. 2020; Clark et al. 2020)."""
    options = {"embedding.n_segments": 3, "embedding.scale": 1.5, "position.offset": offset}
    embedding = move_parameters(InputEmbedding(ModelConfig.from_dotted(**SMALL, **options), "encoder"), 1.0)
    sequence = SequenceMetadata(torch.arange(7).expand(2, 7))
    named = dict(embedding.named_parameters())
    assert {name: tuple(p.shape) for name, p in named.items()} == {
        "tokens.weight": (23, 5), "positions.weight": (9 + offset, 5), "segments.weight": (3, 5),
        "norm.weight": (5,), "norm.bias": (5,), "projection.weight": (12, 5), "projection.bias": (12,),
    }  # fmt: skip
    x = 1.5 * named["tokens.weight"][IDS] + named["positions.weight"][torch.arange(7) + offset]
    x = F.layer_norm(x + named["segments.weight"][SEGMENTS], (5,), named["norm.weight"], named["norm.bias"], 1e-3)
    expected = x @ named["projection.weight"].T + named["projection.bias"]
    torch.testing.assert_close(embedding(IDS, sequence, SEGMENTS), expected, rtol=1e-12, atol=1e-12)
    zero = embedding(IDS, sequence, torch.zeros_like(SEGMENTS))
    assert torch.equal(embedding(IDS, sequence), zero), "without segments, all are in the first"


def test_dropout_comes_after_the_norm_and_before_the_projection() -> None:
    embedding = move_parameters(InputEmbedding(ModelConfig.from_dotted(**SMALL, dropout=0.5), "encoder"), 1.0)
    sequence = SequenceMetadata(torch.arange(7).expand(2, 7), rng_keys=torch.tensor([5, 6]))
    inputs_of_projection: list[Tensor] = []
    embedding.projection.register_forward_pre_hook(lambda _, inputs: inputs_of_projection.append(inputs[0]))
    embedding(IDS, sequence)
    embedding.eval()(IDS, sequence)
    dropped, full = inputs_of_projection
    assert 0.2 < float((dropped == 0).double().mean()) < 0.8
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, 2 * full), rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------- rotary positions


B, N, T, H, THETA = 2, 3, 7, 8, 1000.0


def test_rope_equals_transformers() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 4, 3, 900, 1, 0, 77]])
    cos, sin = compute_rotary_table(positions, compute_frequencies(H, THETA))
    q, k = draw(B, N, T, H, seed=1), draw(B, N, T, H, seed=2)
    expected = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1)[:, 0], torch.cat((sin, sin), -1)[:, 0])
    torch.testing.assert_close(rotate(q, cos, sin), expected[0])
    torch.testing.assert_close(rotate(k, cos, sin), expected[1])
    for i in range(H // 2):  # the angles, by hand
        angle = positions.double() * THETA ** (-2 * i / H)
        torch.testing.assert_close(cos[:, 0, :, i], angle.cos(), rtol=0, atol=1e-13)
        torch.testing.assert_close(sin[:, 0, :, i], angle.sin(), rtol=0, atol=1e-13)


def test_a_row_longer_than_the_table_is_refused_also_where_a_rank_has_a_shard_of_it() -> None:
    learned = {"name": "learned", "max_positions": 6}
    config = ModelConfig(d_model=4, n_layers=1, attention={"n_heads": 1}, ffn={"d_ff": 6}, position=learned)
    positions = LearnedPositions(config, make_initialiser(config))
    row = SequenceMetadata(torch.arange(8)[None])
    for sequence in (row, SequenceShard(row, torch.tensor([0, 7]))):
        with pytest.raises(UsageError, match=r"a sequence has 8 tokens, but model\.position\.max_positions = 6"):
            positions(sequence)


@pytest.mark.parametrize("shift", [1, 1000, 10**6])
def test_a_score_depends_on_the_distance_alone(shift: int) -> None:
    q, k = draw(B, N, T, H, seed=1), draw(B, N, T, H, seed=2)
    positions = torch.arange(T).expand(B, T)

    def scores(start: int) -> torch.Tensor:
        table = compute_rotary_table(positions + start, compute_frequencies(H, THETA))
        return rotate(q, *table) @ rotate(k, *table).transpose(-1, -2)

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-8)


def test_bfloat16_is_turned_in_float32_also_far_out() -> None:
    x = draw(B, N, T, H).bfloat16()
    positions = torch.arange(T).expand(B, T) + 1_000_003
    table = compute_rotary_table(positions, compute_frequencies(H, THETA))
    assert table[0].dtype == torch.float64
    turned = rotate(x, *table)
    assert turned.dtype == torch.bfloat16
    exact = rotate(x.double(), *table)
    # Rounded once, at the end: bfloat16 keeps eight binary digits, and float32 is exact beside it.
    assert ((turned.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


LONGEST = 4096


def hf_frequencies(
    kind: str, width: int, theta: float, length: int | None = None, **parameters: float
) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, head_dim=width, max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
class TestFrequencies:
    def check(self, actual: tuple[torch.Tensor, float], expected: tuple[torch.Tensor, float]) -> None:
        """transformers computes in float32."""
        assert actual[0].dtype == torch.float64
        torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=1e-5, atol=0)
        assert actual[1] == pytest.approx(expected[1], rel=1e-12)

    def test_linear_scaling_equals_transformers(self, width: int, theta: float) -> None:
        expected = hf_frequencies("linear", width, theta, factor=8.0)
        self.check(compute_scaled_frequencies(width, theta, LinearScaling(factor=8.0)), expected)

    @pytest.mark.parametrize("stretch", [1.0, 2.0, 7.0])
    def test_ntk_scaling_equals_transformers(self, width: int, theta: float, stretch: float) -> None:
        """Their dynamic form at a length: `factor · length / longest − (factor − 1)` is the factor of our fixed one."""
        expected = hf_frequencies("dynamic", width, theta, length=int(stretch * LONGEST), factor=3.0)
        self.check(compute_scaled_frequencies(width, theta, NtkScaling(factor=3.0 * stretch - 2.0)), expected)

    @pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
    @pytest.mark.parametrize("betas", [(32.0, 1.0), (8.0, 2.0)])
    @pytest.mark.parametrize("attention_factor", [None, 1.3])
    def test_yarn_scaling_equals_transformers(
        self, width: int, theta: float, factor: float, betas: tuple[float, float], attention_factor: float | None
    ) -> None:
        options = {"factor": factor, "beta_fast": betas[0], "beta_slow": betas[1]}
        options |= {} if attention_factor is None else {"attention_factor": attention_factor}
        expected = hf_frequencies("yarn", width, theta, original_max_position_embeddings=1024, **options)
        scaling = YarnScaling(original_length=1024, **options)
        self.check(compute_scaled_frequencies(width, theta, scaling), expected)

    @pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 8.0)])
    def test_llama3_scaling_equals_transformers(self, width: int, theta: float, low: float, high: float) -> None:
        options = {"factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}
        expected = hf_frequencies("llama3", width, theta, original_max_position_embeddings=8192, **options)
        self.check(compute_scaled_frequencies(width, theta, Llama3Scaling(original_length=8192, **options)), expected)


# ---------------------------------------------------------------------------------------------------- dropout


ROWS, N_TOKENS, D = 64, 50, 96


def layout_of(keys: Tensor | None, length: int = N_TOKENS) -> SequenceMetadata:
    rows = 1 if keys is None else len(keys)
    return SequenceMetadata(torch.arange(length).expand(rows, length), rng_keys=keys)


def keys(n: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**62, (n,), generator=torch.Generator().manual_seed(seed))


def is_near_binomial_mean(observed: float, share: float, n: int) -> bool:
    """Within five standard deviations of a binomial's mean."""
    return abs(observed - share) <= 5 * math.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.003])
def test_rate_and_scale(rate: float) -> None:
    dropped = Dropout(rate, "here")(torch.ones(ROWS, N_TOKENS, D, dtype=torch.float64), layout_of(keys()))
    n = dropped.numel()
    assert is_near_binomial_mean(float((dropped == 0).double().mean()), rate, n)
    (scale,) = dropped[dropped != 0].unique().tolist()
    assert scale == pytest.approx(1 / (1 - rate), rel=2e-5), "the rate is a multiple of 1/65,536"
    assert is_near_binomial_mean(float((dropped == 0)[:, 0].double().mean()), rate, n // N_TOKENS), "a token alone"
    assert is_near_binomial_mean(float((dropped == 0)[..., 1].double().mean()), rate, n // D), "a channel alone"


def test_masks_of_rows_tokens_channels_layers_and_places_are_independent() -> None:
    x, sequence = torch.ones(ROWS, N_TOKENS, D), layout_of(keys())
    first = Dropout(0.3, "here")(x, sequence) == 0
    remaining = {
        "another place": Dropout(0.3, "there")(x, sequence) == 0,
        "another layer": Dropout(0.3, "here")(x, sequence.at_layer(0)) == 0, "other rows": first.roll(1, 0),
        "other tokens": first.roll(1, 1), "the next channel": first.roll(1, 2),
        "a channel of the next hash": first.roll(4, 2),
        "another step": Dropout(0.3, "here")(x, layout_of(keys(seed=1))) == 0,
    }  # fmt: skip
    for subject, other in remaining.items():
        assert is_near_binomial_mean(float((first & other).double().mean()), 0.09, first.numel()), subject
    layers = [Dropout(0.3, "here")(x, sequence.at_layer(depth)) == 0 for depth in range(3)]
    assert is_near_binomial_mean(float((layers[1] & layers[2]).double().mean()), 0.09, first.numel())


def test_a_row_is_dropped_alike_in_any_batch() -> None:
    dropout, x = Dropout(0.4, "here"), torch.randn(ROWS, N_TOKENS, D, generator=torch.Generator().manual_seed(1))
    full = dropout(x, layout_of(keys()))
    assert torch.equal(full, dropout(x, layout_of(keys()))), "and once more"
    parts = [dropout(x[i : i + 8], layout_of(keys()[i : i + 8])) for i in range(0, ROWS, 8)]
    assert torch.equal(torch.cat(parts), full)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(dropout(x[order], layout_of(keys()[order])), full[order])


def test_evaluation_drops_nothing_and_training_without_keys_is_refused() -> None:
    x = torch.ones(1, N_TOKENS, D)
    dropout, path = Dropout(0.4, "here"), DropPath("here")
    with pytest.raises(UsageError, match=r"^dropout in training needs random keys.*pass keys"):
        dropout(x, layout_of(None))
    with pytest.raises(UsageError, match=r"^stochastic depth in training needs random keys"):
        path(x, layout_of(None).at_layer(1, 0.9))
    assert torch.equal(path(x, layout_of(None).at_layer(1, 0.0)), x)
    assert torch.equal(dropout.eval()(x, layout_of(None)), x)
    assert torch.equal(path.eval()(x, layout_of(keys(1)).at_layer(1, 0.9)), x)
    assert torch.equal(Dropout(0.0, "here")(x, layout_of(None)), x)


def test_drop_path_leaves_out_whole_rows_at_its_rate() -> None:
    x, many = torch.ones(20_000, 1, 4, dtype=torch.float64), keys(20_000)
    path = DropPath("here")
    out = path(x, layout_of(many, 1).at_layer(2, 0.3))
    assert (out == out[:, :, :1]).all()
    assert is_near_binomial_mean(float((out[:, 0, 0] == 0).double().mean()), 0.3, len(many))
    assert out[out != 0].unique().tolist() == [pytest.approx(1 / 0.7)]
    deeper = path(x, layout_of(many, 1).at_layer(3, 0.3))
    is_dropped_twice = ((out == 0) & (deeper == 0))[:, 0, 0]
    assert is_near_binomial_mean(float(is_dropped_twice.double().mean()), 0.09, len(many)), "layers are independent"
    assert torch.equal(path(x, layout_of(many, 1).at_layer(2, 0.0)), x)


CONFIG = ModelConfig(
    family="encoder", vocab_size=31, d_model=16, n_layers=4, dropout=0.2, drop_path=0.4,
    attention={"n_heads": 4, "dropout": 0.3}, ffn={"d_ff": 24, "activation": "gelu", "dropout": 0.1},
    norm={"name": "layer_norm", "placement": "post"}, embedding={"norm": True, "n_segments": 2},
    position={"name": "learned", "max_positions": 11}, init={"std": 0.3},
)  # fmt: skip


def test_depths_rise_linearly_from_zero() -> None:
    assert build(CONFIG).encoder.skip_rates == [pytest.approx(0.4 * i / 3) for i in range(4)]


@pytest.fixture
def model() -> torch.nn.Module:
    return move_parameters(build(CONFIG), 0.3)


TOKENS = torch.randint(0, 31, (6, 11), generator=torch.Generator().manual_seed(4))


def test_a_model_s_rows_do_not_depend_on_their_neighbours(model: torch.nn.Module) -> None:
    logits = model(TOKENS, keys=keys(6)).logits
    alone = torch.cat([model(TOKENS[i : i + 1], keys=keys(6)[i : i + 1]).logits for i in range(6)])
    torch.testing.assert_close(logits, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits, model(TOKENS, keys=keys(6, seed=1)).logits)
    assert not torch.allclose(logits, model.eval()(TOKENS).logits)


def test_recomputing_drops_the_same(model: torch.nn.Module) -> None:
    def gradients(run: object) -> list[Tensor]:
        model.zero_grad()
        run().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def forward() -> Tensor:
        return model(TOKENS, keys=keys(6)).hidden

    plain = gradients(forward)
    torch.manual_seed(99)
    recomputed = gradients(lambda: checkpoint(forward, use_reentrant=False, preserve_rng_state=False))
    assert plain
    assert all(torch.equal(first, second) for first, second in zip(plain, recomputed, strict=True))
