"""ELECTRA's joint training, which transformers has not, against its two halves; and SpanBERT's loss beside BERT's.

transformers has a generator and a discriminator. Given the tokens that ours sampled, their losses and gradients are the
reference, added up for the shared tables; that the samples are right is a matter of statistics.
"""

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.convert.electra_pair import SHARED_EMBEDDINGS, choose_exported_models
from megatfm.convert.weight_mapping import to_hf
from megatfm.models import build
from tests.support.hf_encoders import BERT_ENCODER, PAD, VOCABULARY, draw_tokens
from tests.support.reference_gradients import VANISHING, LargestErrors, build_pair, dtype_fixture, perturb

WEIGHT, LENGTHS = 50.0, (13, 9, 11)
CONFIG = ModelConfig.from_dotted(
    **(BERT_ENCODER | {"family": "electra"}),
    generator={"d_model": 12, "n_heads": 2, "d_ff": 20, "n_layers": 2},
    **{"embedding.dim": 10},
)
KEYS = torch.tensor([7, 8, 9])
FREQUENT = 5
"""Often the masked token, and often what the generator samples: then it is no replacement."""


dtype = dtype_fixture()


def batch() -> dict[str, Tensor]:
    """Odd lengths, padded; a third of the tokens masked, 9 of 10 of them shown as token 3."""
    longest = max(LENGTHS)
    real = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    original = draw_tokens(VOCABULARY, len(LENGTHS), longest, seed=0, low=PAD + 1).where(real, PAD)
    masked = (draw_tokens(3, *original.shape, seed=1) == 0) & real
    original = original.masked_fill(masked & (draw_tokens(2, *original.shape, seed=4) == 0), FREQUENT)
    displayed = original.masked_fill(masked & (draw_tokens(10, *original.shape, seed=2) > 0), 3)
    return {
        "tokens": displayed, "original": original, "targets": original.where(masked, -100),
        "documents": real.long() - 1, "segments": draw_tokens(2, *original.shape, seed=3), "keys": KEYS,
    }  # fmt: skip


def judged(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The losses, and the tokens that the discriminator was given."""
    judged_tokens: list[Tensor] = []
    hook = model.discriminator.encoder.embedding.register_forward_pre_hook(
        lambda _, args: judged_tokens.append(args[0])
    )
    losses = model(**inputs).losses
    hook.remove()
    return losses, judged_tokens[0]


def test_losses_and_every_gradient(dtype: torch.dtype) -> None:
    actual = build(CONFIG).to(dtype)
    perturb(actual)
    actual.generator.head.bias.data[FREQUENT] += 5
    inputs = batch()
    losses, corrupted = judged(actual, inputs)
    real, masked = inputs["documents"] == 0, inputs["targets"] != -100
    (losses["generator"] / masked.sum() + WEIGHT * losses["discriminator"] / real.sum()).backward()
    assert torch.equal(corrupted[~masked], inputs["original"][~masked])
    replaced = corrupted != inputs["original"]
    assert 0 < replaced.sum() < masked.sum(), "some samples are the original token"
    assert (corrupted == FREQUENT)[replaced].any()

    figures, reference = LargestErrors(), dict[str, Tensor]()
    for part in choose_exported_models(CONFIG):
        expected = build_hf_half(
            part.name, part.hf_config, to_hf(part.mappings, dict(actual.named_parameters())), dtype
        )
        generates = part.folder == "generator"
        output = expected(
            input_ids=inputs["tokens"] if generates else corrupted,
            attention_mask=real.long(),
            token_type_ids=inputs["segments"],
            labels=inputs["targets"] if generates else replaced.long(),
        )
        figures.compare_logits(losses[part.folder] / (masked if generates else real).sum(), output.loss, dtype)
        (output.loss * (1 if generates else WEIGHT)).backward()
        gradients = {name: p.grad for name, p in expected.named_parameters()}
        for mapping in part.mappings:
            for name, gradient in zip(
                mapping.megatfm, mapping.from_hf([gradients[n] for n in mapping.hf]), strict=True
            ):
                reference[name] = reference.get(name, torch.zeros_like(gradient)) + gradient
    see_gradients(actual, reference, dtype)


def build_hf_half(name: str, config: dict[str, object], weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    kind = getattr(transformers, name)
    options = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    expected = kind(kind.config_class(**options, attn_implementation="eager")).to(dtype).eval()
    named = dict(expected.named_parameters())
    assert named.keys() == weights.keys()
    for key, parameter in named.items():
        parameter.data.copy_(weights[key])
    return expected


def see_gradients(actual: nn.Module, reference: dict[str, Tensor], dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    full = float(torch.stack([g.norm() for g in reference.values()]).norm())
    assert reference.keys() == dict(actual.named_parameters()).keys()
    for name, parameter in actual.named_parameters():
        norm, error = float(reference[name].norm()), float((parameter.grad - reference[name]).norm())
        if norm <= VANISHING * full:
            assert name.endswith("wk.bias"), f"nothing to compare for {name}"
            norm = full
        assert error <= tolerance * norm, f"{name}: {error / norm:.1e}"
    assert {f"discriminator.{name}" for name in SHARED_EMBEDDINGS} <= reference.keys()


def test_no_gradient_goes_from_the_discriminator_into_the_generator() -> None:
    actual = build(CONFIG).double()
    perturb(actual)
    actual(**batch()).losses["discriminator"].backward()
    shared = {f"discriminator.{name}" for name in SHARED_EMBEDDINGS}
    touched = {name for name, p in actual.named_parameters() if p.grad is not None and p.grad.any()}
    assert shared <= touched
    assert not [name for name in touched if name.startswith("generator.")]


def test_samples_follow_the_generator_s_distribution() -> None:
    """Pearson's χ² over 12,000 samples at each of two places, at one in 10⁵."""
    actual = build(CONFIG).double()
    perturb(actual)
    n = 12_000
    row = {name: values[:1] for name, values in batch().items()}
    places = (row["targets"][0] != -100).nonzero()[:2, 0]
    shares = actual.generator(row["tokens"], documents=row["documents"], segments=row["segments"]).logits[0, places]
    keys = torch.randint(0, 2**62, (n,), generator=torch.Generator().manual_seed(1))
    many = {name: values.expand(n, -1) for name, values in row.items() if name != "keys"}
    counts = torch.zeros(2, VOCABULARY)
    with torch.no_grad():
        for part in range(0, n, 4000):
            piece = {name: values[part : part + 4000] for name, values in many.items()}
            _, corrupted = judged(actual, piece | {"keys": keys[part : part + 4000]})
            for i, place in enumerate(places):
                counts[i] += torch.bincount(corrupted[:, place], minlength=VOCABULARY)
    for observed, logits in zip(counts.double(), shares.detach(), strict=True):
        expected = n * logits.softmax(-1)
        often = expected >= 5
        statistic = ((observed - expected).square() / expected)[often].sum()
        degrees = int(often.sum()) - 1
        assert degrees > 10
        # Wilson & Hilferty 1931: the cube root is nearly normal; 4.3 standard deviations.
        limit = degrees * (1 - 2 / (9 * degrees) + 4.3 * (2 / (9 * degrees)) ** 0.5) ** 3
        assert statistic < limit


def test_samples_depend_on_the_row_s_key_alone() -> None:
    actual = build(CONFIG).double()
    perturb(actual)
    inputs = batch()
    _, full = judged(actual, inputs)
    rows = [judged(actual, {name: values[i : i + 1] for name, values in inputs.items()})[1] for i in range(3)]
    assert torch.equal(torch.cat(rows), full)
    _, other = judged(actual, inputs | {"keys": KEYS + 1})
    assert not torch.equal(other, full)


def test_spanbert_is_bert_and_one_loss_more(dtype: torch.dtype) -> None:
    """The boundary loss from transformers' hidden vectors, span by span (the head alone is in tests/unit/layers)."""
    figures = LargestErrors()
    plain = ModelConfig.from_dotted(**BERT_ENCODER)
    pair = build_pair(plain, dtype)
    actual = build(plain.with_changes({"extra_heads": {"boundary": {}}})).to(dtype)
    perturb(actual, seed=5)
    actual.load_state_dict(pair.model.state_dict(), strict=False)
    tokens, targets = draw_tokens(VOCABULARY, 1, 13, seed=6, low=PAD + 1), torch.full((1, 13), -100)
    left, right = torch.zeros(1, 13, dtype=torch.int64), torch.zeros(1, 13, dtype=torch.int64)
    spans = [(2, 2), (4, 8), (10, 11)]
    for first, last in spans:
        for i in range(first, last + 1):
            targets[0, i], left[0, i], right[0, i] = 5 + i, i - first + 1, last + 1 - i
    losses = actual(tokens, targets=targets, span_left=left, span_right=right).losses
    expected = pair.reference(input_ids=tokens, labels=targets, output_hidden_states=True)
    hidden, head = expected.hidden_states[-1][0], actual.boundary
    boundary_loss = torch.zeros((), dtype=dtype)
    for first, last in spans:
        around = torch.cat([hidden[first - 1], hidden[last + 1]]).expand(last - first + 1, -1)
        x = torch.cat([around, head.positions.weight[: last - first + 1]], -1)
        for dense, norm in ((head.dense1, head.norm1), (head.dense2, head.norm2)):
            x = F.layer_norm(F.gelu(dense(x)), (norm.weight.numel(),), norm.weight, norm.bias, plain.norm.eps)
        logits = x @ pair.reference.bert.embeddings.word_embeddings.weight.T + head.bias
        boundary_loss = boundary_loss + F.cross_entropy(logits, targets[0, first : last + 1], reduction="sum")
    n = (targets != -100).sum()
    figures.compare_logits(losses["masked"] / n, expected.loss, dtype)
    figures.compare_logits(losses["boundary"] / n, boundary_loss / n, dtype)
    ((losses["masked"] + losses["boundary"]) / n).backward()
    (expected.loss + boundary_loss / n).backward()
    for name, parameter in pair.model.named_parameters():
        parameter.grad = actual.get_parameter(name).grad
    figures.compare_gradients(pair, dtype)
    assert figures.compared > 20
