"""Likelihoods of continuations and tasks without training: the same on any ranks and in any batches."""

import gzip
import lzma
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn

import megatfm
from megatfm.config import EvaluationTaskConfig
from megatfm.convert.load import load_hf_model
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference import evaluate
from megatfm.inference.batched_generation import TextRequest, generate_texts
from megatfm.inference.decoding import Sampling
from megatfm.inference.evaluate import measure_compressors
from megatfm.inference.evaluation_tasks import evaluate_questions
from megatfm.inference.likelihood import Continuation, encode_continuation, group_by_shape, round_up_length, score
from megatfm.inference.prompts import PromptOptions
from megatfm.inference.text import generate_text, open_text_model
from megatfm.models import build
from megatfm.tasks.question_scores import Likelihood
from megatfm.tasks.questions import open_evaluation_task
from tests.support.files import write_lines
from tests.support.hf_folders import build_hf_gpt2, build_hf_llama
from tests.support.layouts import extend
from tests.support.small_runs import SMALL_DECODER, random_model, write_trained_run
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

    drawn = [Continuation(draw(longest), draw(6), draw(longest) if encoder else None, prefix) for _ in range(n - 1)]
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
    is_greedy = bool((logs.argmax(-1) == targets).all())
    return Likelihood(float(logs[range(len(targets)), targets].sum()), len(targets), is_greedy)


def check(results: list[Likelihood], expected: list[Likelihood]) -> None:
    assert [r.n_tokens for r in results] == [e.n_tokens for e in expected]
    assert [r.is_greedy for r in results] == [e.is_greedy for e in expected]
    actual, by_row = (torch.tensor([r.log_probability for r in s], dtype=torch.float64) for s in (results, expected))
    torch.testing.assert_close(actual, by_row, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_any_batch_gives_what_each_row_alone_gives(name: str) -> None:
    model = random_model(MODELS[name])
    continuations = draw_continuations(23, encoder=name == "encoder-decoder")
    expected = [by_hand(model, continuation) for continuation in continuations]
    for batch_size in (1, 7, 32):
        check(score(model, continuations, batch_size=batch_size), expected)


def test_all_tokens_of_a_prefix_see_one_another() -> None:
    model = random_model(SMALL_DECODER)
    continuations = draw_continuations(9, prefix=True)
    results = score(model, continuations, batch_size=4)
    check(results, [by_hand(model, continuation) for continuation in continuations])
    causal = score(model, [Continuation(c.context, c.targets) for c in continuations])
    assert causal != results


def test_a_greedy_continuation_is_marked() -> None:
    model = random_model(SMALL_DECODER)
    context = [3, 1, 4]
    for _ in range(3):
        with torch.no_grad():
            context.append(int(model(torch.tensor([context])).logits[0, -1].argmax()))
    greedy, other = Continuation(context[:3], context[3:]), Continuation(context[:3], [*context[3:5], 7])
    assert [likelihood.is_greedy for likelihood in score(model, [greedy, other])] == [True, False]


@pytest.mark.parametrize("make", [build_hf_gpt2, build_hf_llama])
def test_likelihoods_are_transformers_s(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    reference = make().double()
    reference.save_pretrained(tmp_path)
    model = load_hf_model(tmp_path, dtype=torch.float64)
    continuations = draw_continuations(8, vocabulary=60, longest=20)
    expected = [by_hand(reference, continuation) for continuation in continuations]
    actual = [likelihood.log_probability for likelihood in score(model, continuations, batch_size=3)]
    log_probabilities = [likelihood.log_probability for likelihood in expected]
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(log_probabilities), rtol=1e-10, atol=1e-10)


def scored_on_rank() -> list[list[Likelihood]]:
    torch.set_num_threads(1)
    return [
        score(random_model(MODELS[name], torch.float32), draw_continuations(23), batch_size=batch_size)
        for name, batch_size in (("decoder", 1), ("experts", 7), ("decoder", 32))
    ]


def test_ranks_change_no_bit(workers: Workers) -> None:
    """Ranks have different numbers of 23 rows; with 5 ranks and large batches some have none."""
    alone = scored_on_rank()
    for ranks in (2, 3, 5):
        assert workers.run(scored_on_rank, ranks) == [alone] * ranks


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
    assert list(group_by_shape(shapes, 3)) == [[4], [1, 5], [0, 2, 3], [6]]
    assert [round_up_length(n) for n in (1, 16, 17)] == [16, 16, 32]
    assert [round_up_length(n, limit=20) for n in (1, 17, 20)] == [16, 20, 20]


def test_continuations_that_can_t_be_scored_are_refused() -> None:
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
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(SMALL_DECODER, torch.float32), objective)
    loaded = open_text_model(run)
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
    loaded = open_text_model(write_trained_run(tmp_path / "run", tokenizer_model, model, "prefix"))
    tokenizer = loaded.tokenizer
    continuation = encode_continuation(loaded, "import textwrap", "as größer")
    assert continuation.encoder == [*tokenizer.encode("import textwrap"), tokenizer.eos]
    assert continuation.context == [tokenizer.pad]
    assert continuation.targets == tokenizer.encode("as größer").tolist()


# ------------------------------------------------------------------------------------- tasks without training


PROMPTS = [
    "import", "", "größer 東京 textwrap", "def wrap(self, text):" * 3, "x", "import textwrap as t", "y " * 9,
]  # fmt: skip


def write_run(folder: Path, tokenizer_model: bytes, name: str = "decoder") -> Path:
    objective = "prefix" if name == "encoder-decoder" else "causal"
    return write_trained_run(folder / "run", tokenizer_model, random_model(MODELS[name], torch.float32), objective)


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_texts_of_many_prompts_are_those_of_each(tmp_path: Path, tokenizer_model: bytes, name: str) -> None:
    loaded = open_text_model(write_run(tmp_path, tokenizer_model, name), dtype="float64")
    vocabulary = loaded.tokenizer.vocab_size
    alone = [
        generate_text(loaded, prompt, Sampling(vocab_size=vocabulary), 8, 1, PromptOptions(sentinel="never"))[0]
        for prompt in PROMPTS
    ]
    assert len(set(alone)) > 3
    letter = next(letter for letter in alone[0][1:] if letter.isprintable())
    requests = [TextRequest(prompt, 8, sampling=Sampling(vocab_size=vocabulary)) for prompt in PROMPTS]
    stopped = [TextRequest(prompt, 8, (letter, "nowhere"), Sampling(vocab_size=vocabulary)) for prompt in PROMPTS]
    for batch_size in (1, 3, 32):
        assert generate_texts(loaded, requests, batch_size=batch_size) == alone
        assert generate_texts(loaded, stopped, batch_size=batch_size) == [text.split(letter)[0] for text in alone]


def write_task(folder: Path, kind: str, answers: list[str], more: str = "", prompts: Sequence[str] = PROMPTS) -> Path:
    pairs = enumerate(zip(prompts, answers, strict=True))
    rows = [{"ask": prompt or "z", "answer": answer, "key": number % 3} for number, (prompt, answer) in pairs]
    write_lines(folder / "rows.jsonl", rows)
    path = folder / "task.toml"
    path.write_text(f'kind = "{kind}"\ndata = "rows.jsonl"\nprompt = "{{{{ ask }}}}"\n{more}')
    return path


def evaluated(run: Path, task: Path) -> list[Any]:
    torch.set_num_threads(1)
    loaded, opened = open_text_model(run, dtype="float64"), open_evaluation_task(task)
    return [evaluate_questions(loaded, opened, batch_size=batch_size) for batch_size in (1, 7, 32)]


def test_a_text_is_drawn_the_same_in_any_batch(tmp_path: Path, tokenizer_model: bytes) -> None:
    """A draw is numbered by the request, not by its place in a block."""
    loaded = open_text_model(write_run(tmp_path, tokenizer_model), dtype="float64")
    sampling = Sampling(temperature=1.0, seed=3, vocab_size=loaded.tokenizer.vocab_size)
    requests = [TextRequest(prompt, 8, sampling=sampling) for prompt in (*PROMPTS, *PROMPTS[:3])]
    alone = generate_texts(loaded, requests, batch_size=1)
    assert alone[:3] != alone[-3:], "equal prompts have draws of their own"
    for batch_size in (3, 32):
        assert generate_texts(loaded, requests, batch_size=batch_size) == alone


def test_rows_of_the_table_without_a_token_are_not_generated(tmp_path: Path, tokenizer_model: bytes) -> None:
    """A vocabulary is padded for layouts; here such rows are the likeliest everywhere."""
    loaded = open_text_model(write_run(tmp_path, tokenizer_model), dtype="float64")
    size = loaded.tokenizer.vocab_size
    model = type("Padded", (nn.Module,), {"is_causal": True, "takes_cache": True, "config": loaded.model.config})()
    model.inner, padding = loaded.model, torch.full((1, 1, 8), 1e3, dtype=torch.float64)

    def forward(tokens: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        logits = model.inner(tokens, **inputs).logits[..., :size]
        return SimpleNamespace(logits=torch.cat([logits, padding.expand(*logits.shape[:2], 8)], -1))

    model.forward = forward
    requests = [TextRequest(prompt, 8) for prompt in PROMPTS]
    assert generate_texts(replace(loaded, model=model), requests) == generate_texts(loaded, requests)


KINDS = get_args(EvaluationTaskConfig.model_fields["kind"].annotation)
"""Every kind of task that the config knows."""
OPTIONS = {
    "choice": 'choices = ["{{ answer }}", "import os", "größer"]\nanswer = "key"\nunconditional_prompt = "z"\n',
    "generation": 'max_tokens = 6\nstop = []\ndelimiter = ""\n',
}
METRICS = {
    "choice": {"accuracy", "accuracy_per_token", "accuracy_per_byte", "accuracy_pmi", "bits_per_byte"},
    "cloze": {"accuracy", "bits_per_byte", "perplexity"},
    "generation": {"exact_match", "f1"},
    "retrieval": {"recall_at_1", "recall_at_10", "reciprocal_rank"},
}
SUMS = {"bits_per_byte", "perplexity"}
"""Metrics whose last bits depend on the batch."""


@pytest.mark.parametrize(
    ("kind", "shots"),
    extend(
        [(kind, shots) for kind in KINDS for shots in (0, 2) if (kind, shots) != ("retrieval", 2)],
        kept=[("choice", 2), ("cloze", 0), ("generation", 0), ("retrieval", 0)],
    ),
)
def test_ranks_and_batches_change_no_decision(
    workers: Workers, tmp_path: Path, tokenizer_model: bytes, kind: str, shots: int
) -> None:
    run = write_run(tmp_path, tokenizer_model)
    loaded = open_text_model(run, dtype="float64")
    texts = generate_texts(loaded, [TextRequest(prompt or "z", 6) for prompt in PROMPTS])
    answers = [text.strip() or "none" for text in texts[:3]] + ["größer", "東京", "x y", "import"]
    task = write_task(tmp_path, kind, answers, f"{OPTIONS.get(kind, '')}shots = {shots}\n")
    alone = evaluated(run, task)
    for results in workers.run(evaluated, 3, run, task):
        assert results == alone, "to the last bit at one batch size"
    first = alone[0].summary["metrics"]
    assert first.keys() == METRICS[kind]
    sums = {"bits_per_byte", "perplexity"}
    expected = {
        name: pytest.approx(value, rel=1e-12, abs=0) if name in sums else value for name, value in first.items()
    }
    assert [result.summary["metrics"] for result in alone[1:]] == [expected] * 2
    if kind == "generation" and not shots:
        n_exact = sum(text == answer for text, answer in zip(texts, answers, strict=True))
        assert first["exact_match"] >= n_exact / len(PROMPTS)
        assert [record["text"] for record in alone[0].records] == texts


@pytest.mark.parametrize(("kind", "message"), [
    ("choice", r"row 2: its text has \d+ tokens, but model.position.max_positions = 20"),
    ("cloze", r"row 2: its text has \d+ tokens, but model.position.max_positions = 20"),
    ("generation", r"row 2: a prompt of \d+ tokens and 6 more, but .*max_positions = 20: shorten it by"),
])  # fmt: skip
def test_a_question_beyond_the_positions_is_named_by_its_row(
    tmp_path: Path, tokenizer_model: bytes, kind: str, message: str
) -> None:
    config = SMALL_DECODER.with_changes({"position": {"name": "learned", "max_positions": 20}})
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(config, torch.float32))
    task = write_task(tmp_path, kind, ["x"] * 3, OPTIONS.get(kind, ""), ("a", "größer " * 30, "東京 " * 40))
    with pytest.raises(UsageError, match=f"rows.jsonl, {message}"):
        evaluate_questions(open_text_model(run), open_evaluation_task(task))


def test_the_nearest_answer_is_found(tmp_path: Path, tokenizer_model: bytes) -> None:
    """Answers that are the prompts are their own nearest; of shuffled ones the ranks are counted by hand."""
    run = write_run(tmp_path, tokenizer_model)
    same = write_task(tmp_path, "retrieval", [prompt or "z" for prompt in PROMPTS])
    loaded = open_text_model(run)
    assert evaluate_questions(loaded, open_evaluation_task(same)).summary["metrics"]["recall_at_1"] == 1
    candidates = [*PROMPTS[3:], "a", "b", "z"]
    task = open_evaluation_task(write_task(tmp_path, "retrieval", candidates))
    records = evaluate_questions(loaded, task).records
    model = megatfm.load(run)
    prompts, answers = (model.encode(texts) for texts in ([prompt or "z" for prompt in PROMPTS], candidates))
    for number, record in enumerate(records):
        similarities = torch.cosine_similarity(prompts[number], answers)
        assert record["rank"] == int(similarities.argsort(descending=True).tolist().index(number)) + 1


def test_vectors_that_are_not_finite_find_nothing(tmp_path: Path, tokenizer_model: bytes) -> None:
    """Each right answer would be the nearest: none is nearer than NaN."""
    loaded = open_text_model(write_run(tmp_path, tokenizer_model))
    next(loaded.model.parameters()).data.fill_(math.nan)
    task = open_evaluation_task(write_task(tmp_path, "retrieval", [prompt or "z" for prompt in PROMPTS]))
    with pytest.raises(MegatfmError, match="task: vectors are not finite"):
        evaluate_questions(loaded, task)


def test_texts_are_compressed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is gone before the next but one is decoded; sizes are those of one-shot compressors."""
    n_alive = 0

    class Text(bytes):
        def __del__(self) -> None:
            nonlocal n_alive
            n_alive -= 1

    texts = [random.Random(number).choices(b"abcdefgh ", k=3000) for number in range(8)]

    def decode(*_: Any) -> Iterator[bytes]:
        nonlocal n_alive
        for text in texts:
            n_alive += 1
            assert n_alive <= 2
            yield Text(text)

    monkeypatch.setattr(evaluate, "_iter_texts", decode)
    corpus: Any = SimpleNamespace(folder="a", n_text_bytes=24_000)
    actual = measure_compressors(corpus, tokenizer=None)  # type: ignore[arg-type]
    joined = b"".join(map(bytes, texts))
    expected = {}
    for name, compress in {
        "gzip -9": partial(gzip.compress, mtime=0),
        "xz -9": partial(lzma.compress, preset=9),
    }.items():
        expected[f"{name}, per document"] = sum(len(compress(bytes(text))) for text in texts) / 3000
        expected[f"{name}, joined"] = len(compress(joined)) / 3000
    assert actual == expected


def test_a_corpus_without_text_has_nothing_to_compress() -> None:
    empty: Any = SimpleNamespace(folder="corpora/vectors", n_text_bytes=0, n_blocks=0)
    with pytest.raises(UsageError, match="corpora/vectors: has no text that could be compressed: leave out"):
        measure_compressors(empty, tokenizer=None)  # type: ignore[arg-type]
