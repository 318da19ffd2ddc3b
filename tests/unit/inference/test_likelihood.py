"""Likelihoods of continuations: against transformers and one unpadded row at a time, on any ranks, in any batches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatfm.convert.load import load_model as load_hf
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.likelihood import (
    Continuation,
    blocks_of_shape,
    encode_continuation,
    padded_length,
    score,
)
from megatfm.inference.text import load
from megatfm.models import build
from megatfm.tasks.question_scores import Likelihood
from tests.support.hf_folders import hf_gpt2, hf_llama
from tests.support.trained_runs import SMALL_DECODER, random_model, write_trained_run
from tests.support.workers import Workers

EXPERTS = SMALL_DECODER.with_changes({"ffn": {"name": "moe", "d_ff": 24, "n_experts": 4, "top_k": 2}})
MODELS = {
    "decoder": SMALL_DECODER,
    "experts": EXPERTS,
    "encoder-decoder": SMALL_DECODER.with_changes({"family": "encoder_decoder"}),
    "windows": SMALL_DECODER.with_changes({"attention.pattern": {"name": "window", "width": 5}}),
}


def draw_continuations(
    n: int, *, vocabulary: int = 400, longest: int = 40, encoder: bool = False, prefix: bool = False
) -> list[Continuation]:
    """Continuations of all lengths, and two that are equal."""
    random = torch.Generator().manual_seed(2)

    def draw(most: int) -> list[int]:
        n_tokens = int(torch.randint(1, most + 1, (1,), generator=random))
        return torch.randint(1, vocabulary, (n_tokens,), generator=random).tolist()

    drawn = [
        Continuation(draw(longest), draw(6), draw(longest) if encoder else None, prefix) for _ in range(n - 1)
    ]
    return [*drawn, drawn[0]]


def by_hand(model: nn.Module, continuation: Continuation) -> Likelihood:
    """Score one row without padding, from all logits."""
    tokens = torch.tensor([continuation.tokens])
    inputs = {}
    if continuation.encoder is not None:
        inputs["encoder_tokens"] = torch.tensor([continuation.encoder])
    if continuation.prefix:
        inputs["prefix"] = torch.arange(tokens.shape[1])[None] < len(continuation.context)
    with torch.no_grad():
        logs = model(tokens, **inputs).logits[0].double().log_softmax(-1)[len(continuation.context) - 1 :]
    targets = torch.tensor(continuation.targets)
    return Likelihood(
        float(logs[range(len(targets)), targets].sum()),
        len(targets),
        bool((logs.argmax(-1) == targets).all()),
    )


def check(results: list[Likelihood], expected: list[Likelihood]) -> None:
    assert [r.n_tokens for r in results] == [e.n_tokens for e in expected]
    assert [r.is_greedy for r in results] == [e.is_greedy for e in expected]
    actual, by_row = (
        torch.tensor([r.log_probability for r in s], dtype=torch.float64) for s in (results, expected)
    )
    torch.testing.assert_close(actual, by_row, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_any_batch_gives_what_each_row_alone_gives(name: str, batch_size: int) -> None:
    model = random_model(MODELS[name])
    continuations = draw_continuations(23, encoder=name == "encoder-decoder")
    check(
        score(model, continuations, batch_size=batch_size),
        [by_hand(model, continuation) for continuation in continuations],
    )


def test_all_tokens_of_a_prefix_see_one_another() -> None:
    model = random_model(SMALL_DECODER)
    continuations = draw_continuations(9, prefix=True)
    results = score(model, continuations, batch_size=4)
    check(results, [by_hand(model, continuation) for continuation in continuations])
    causal = score(model, [Continuation(c.context, c.targets) for c in continuations])
    assert causal != results


def test_a_greedy_continuation_is_told() -> None:
    model = random_model(SMALL_DECODER)
    context = [3, 1, 4]
    for _ in range(3):
        with torch.no_grad():
            context.append(int(model(torch.tensor([context])).logits[0, -1].argmax()))
    greedy, other = Continuation(context[:3], context[3:]), Continuation(context[:3], [*context[3:5], 7])
    assert [likelihood.is_greedy for likelihood in score(model, [greedy, other])] == [True, False]


@pytest.mark.parametrize("make", [hf_gpt2, hf_llama])
def test_likelihoods_are_transformers_s(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    reference = make().double()
    reference.save_pretrained(tmp_path / "hf")
    model = load_hf(tmp_path / "hf", dtype=torch.float64)
    continuations = draw_continuations(8, vocabulary=60, longest=20)
    expected = []
    for row in continuations:
        with torch.no_grad():
            logs = reference(torch.tensor([row.tokens])).logits[0].log_softmax(-1)[len(row.context) - 1 :]
        expected.append(float(sum(logs[place, target] for place, target in enumerate(row.targets))))
    actual = [likelihood.log_probability for likelihood in score(model, continuations, batch_size=3)]
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-10, atol=1e-10)


def scored_on_rank() -> list[list[Likelihood]]:
    torch.set_num_threads(1)
    return [
        score(random_model(MODELS[name], torch.float32), draw_continuations(23), batch_size=batch_size)
        for name, batch_size in (("decoder", 1), ("experts", 7), ("decoder", 32))
    ]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_change_no_bit(workers: Workers, ranks: int) -> None:
    """Of 23 rows every rank has another number; with 5 ranks and large batches some have none."""
    alone = scored_on_rank()
    for results in workers.run(scored_on_rank, ranks):
        assert results == alone


def refused_on_rank() -> str:
    model = build(SMALL_DECODER).eval()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(MegatfmError) as refused:
        score(model, draw_continuations(2, longest=3), batch_size=2)
    return str(refused.value)


def test_ranks_without_rows_fail_with_the_others(workers: Workers) -> None:
    for reason in workers.run(refused_on_rank, 3):
        assert reason.startswith("logits are not finite")


def test_blocks_hold_one_shape_and_follow_from_shapes_alone() -> None:
    shapes = [16, 32, 16, 16, 48, 32, 16]
    assert list(blocks_of_shape(shapes, 3)) == [[4], [1, 5], [0, 2, 3], [6]]
    assert [padded_length(n) for n in (1, 16, 17)] == [16, 16, 32]
    assert [padded_length(n, limit=20) for n in (1, 17, 20)] == [16, 20, 20]


def test_what_can_t_be_scored_is_refused() -> None:
    config = SMALL_DECODER.with_changes({"position": {"name": "learned", "max_positions": 20}})
    model = random_model(config)
    fits = Continuation(list(range(1, 20)), [3, 4])
    (likelihood,) = score(model, [fits])
    check([likelihood], [by_hand(model, fits)])
    with pytest.raises(UsageError, match=r"text 2 has 21 tokens, but model.position.max_positions = 20"):
        score(model, [fits, Continuation(list(range(1, 21)), [3, 4])])
    with pytest.raises(UsageError, match="batch = 0"):
        score(model, [fits], batch_size=0)


@pytest.mark.parametrize("objective", ["causal", "prefix"])
def test_text_is_cut_where_the_context_ends(tmp_path: Path, tokenizer_model: bytes, objective: str) -> None:
    run = write_trained_run(
        tmp_path / "run", tokenizer_model, random_model(SMALL_DECODER, torch.float32), objective
    )
    loaded = load(run)
    tokenizer = loaded.tokenizer
    continuation = encode_continuation(loaded, "import textwrap", " as größer")
    assert continuation.context == [tokenizer.bos, *tokenizer.encode("import textwrap")]
    assert tokenizer.decode([*continuation.context, *continuation.targets]) == "import textwrap as größer"
    assert continuation.prefix == (objective == "prefix")
    assert encode_continuation(loaded, "import ", "os") == encode_continuation(loaded, "import", " os")
    assert encode_continuation(loaded, "", "os").context == [tokenizer.bos]
    inside = encode_continuation(loaded, "impor", "t textwrap")
    assert inside.context == [tokenizer.bos, *tokenizer.encode("impor")]
    assert inside.targets
    with pytest.raises(UsageError, match="makes no token"):
        encode_continuation(loaded, "a", "")


def test_an_encoder_reads_the_context(tmp_path: Path, tokenizer_model: bytes) -> None:
    model = random_model(MODELS["encoder-decoder"], torch.float32)
    loaded = load(write_trained_run(tmp_path / "run", tokenizer_model, model, "prefix"))
    tokenizer = loaded.tokenizer
    continuation = encode_continuation(loaded, "import textwrap", "as größer")
    assert continuation.encoder == [*tokenizer.encode("import textwrap"), tokenizer.eos]
    assert continuation.context == [tokenizer.pad]
    assert continuation.targets == tokenizer.encode("as größer").tolist()
