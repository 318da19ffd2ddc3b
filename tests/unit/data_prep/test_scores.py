"""Steps that have a model judge, words by spaCy, keys and accounts, against what no one here wrote."""

import io
import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.config.prep import PrepConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.execution.config_identity import identify_config
from megatfm.data_prep.filters.base import CountingFilter, make_filter
from megatfm.data_prep.filters.classifiers import LinearClassifier, hash_features
from megatfm.errors import UsageError
from megatfm.inference.text import open_text_model
from tests.support.small_runs import padded_decoder, random_model, tokenizer_model, write_trained_run

__all__ = ["tokenizer_model"]  # a fixture

PROSE = [
    "the", "house", "stood", "by", "a", "quiet", "river", "and", "the", "children", "walked", "along", "it", "every",
    "morning", "to", "school",
]  # fmt: skip
SPAM = [
    "buy", "cheap", "pills", "now", "click", "here", "free", "winner", "casino", "bonus", "offer", "limited", "order",
    "today", "best", "price",
]  # fmt: skip


def draw_texts(words: list[str], count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices([*words, "the", "now", "best"], k=40)) for _ in range(count)]


def make_config(*steps: dict[str, Any]) -> PrepConfig:
    return PrepConfig.model_validate({"out": "x", "read": {"builtin": "python-stdlib"}, "steps": steps})


def make_step(**step: Any) -> CountingFilter:
    return make_filter(make_config(step).steps[0])


def apply(text: str, **step: Any) -> Document | str:
    """The document that a step keeps, or its reason to drop it."""
    return make_step(**step)._filter.apply(Document("x", text), StepStats(""))


def apply_and_keep(text: str, **step: Any) -> Document:
    document = apply(text, **step)
    assert isinstance(document, Document)
    return document


@pytest.fixture(scope="module")
def weights() -> LinearClassifier:
    selected = draw_texts(PROSE, 60, 0) + draw_texts(SPAM, 60, 1)
    return LinearClassifier.fit(selected, [True] * 60 + [False] * 60, bits=12)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_linear_classifier_of_ones_own(weights: LinearClassifier, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    weights.save(path)
    good, bad = draw_texts(PROSE, 20, 2), draw_texts(SPAM, 20, 3)
    how = {"name": "linear_classifier", "file": str(path), "min_score": 0.5, "save_as": "quality"}
    for text in good:
        (places,) = hash_features([text], weights.ngrams, len(weights.weight))
        by_hand = 1 / (1 + math.exp(-weights.bias - weights.weight[places].astype(float).mean()))
        assert apply_and_keep(text, **how).fields["quality"] == pytest.approx(by_hand, abs=1e-6)
    assert {apply(text, **how) for text in bad} == {"probability_below_min_score"}
    reasons = {apply(text, **{**how, "min_score": 0.0, "max_score": 0.5}) for text in good}
    assert reasons == {"probability_above_max_score"}
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"bad\.npz: can't be read as weights"):
        apply("x", **{**how, "file": str(tmp_path / "bad.npz")})


def test_features_are_all_runs_of_words_of_each_text_alone() -> None:
    texts = ["One, two three.", "", "two"]
    features = [hash_features([text], 3, 2**20)[0] for text in texts]
    for expected, batched in zip(features, hash_features(texts, 3, 2**20), strict=True):
        np.testing.assert_array_equal(batched, expected)
    assert [len(item) for item in features] == [3 + 2 + 1, 0, 1]
    assert features[2][0] in features[0][:3]
    assert len(set(features[0].tolist())) == 6


def test_the_fit_is_a_minimum(weights: LinearClassifier) -> None:
    """The loss's gradient by autograd is 0 at the fitted weights."""
    selected, labels = draw_texts(PROSE, 60, 0) + draw_texts(SPAM, 60, 1), [1.0] * 60 + [-1.0] * 60
    w = torch.tensor(weights.weight, dtype=torch.float64, requires_grad=True)
    b = torch.tensor(weights.bias, dtype=torch.float64, requires_grad=True)
    logits = torch.stack([w[torch.tensor(feature)].mean() + b for feature in hash_features(selected, 2, 2**12)])
    loss = torch.nn.functional.softplus(-torch.tensor(labels) * logits).mean() + 1e-4 / 2 * (w @ w)
    loss.backward()
    assert max(float(w.grad.abs().max()), float(b.grad.abs())) < 2e-4


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run of a small decoder."""
    model = random_model(padded_decoder(), torch.float32)
    return write_trained_run(tmp_path / "run", request.getfixturevalue("tokenizer_model"), model)


def test_perplexity_under_a_run(run: Path) -> None:
    text = "def indent(text, prefix): return text.splitlines(True)\n" * 3
    how = {"name": "perplexity", "run": str(run), "save_as": "perplexity", "max_tokens": 30}
    actual = apply_and_keep(text, **how)
    model = open_text_model(run)
    ids = [model.tokenizer.bos, *model.tokenizer.encode_batch([text], 1)[0][:30]]
    row, total = model.config.data.sequence_length, 0.0
    with torch.no_grad():
        for at in range(1, len(ids)):
            begin = (at - 1) // row * row
            logits = model.model(torch.tensor([list(map(int, ids[begin:at]))])).logits[0, -1]
            total -= float(torch.log_softmax(logits.double(), -1)[int(ids[at])])
    assert actual.fields["perplexity"] == pytest.approx(math.exp(total / 30), rel=1e-4)
    assert apply(text, **how, max_score=1.5) == "perplexity_above_max_score"
    assert apply(text, **how, min_score=1e6) == "perplexity_below_min_score"


@pytest.mark.parametrize(("logit", "limits", "result", "event"), [
    (math.nan, {}, "perplexity_not_a_number", None),
    (math.nan, {"max_score": 9.0}, "perplexity_not_a_number", None),
    (-1000.0, {}, "Infinity", "infinite"),  # e^1000 is more than a float holds
    (-1000.0, {"max_score": 1e300}, "perplexity_above_max_score", "infinite"),
])  # fmt: skip
def test_perplexity_that_is_no_number(
    logit: float, limits: dict[str, float], result: str, event: str | None, run: Path
) -> None:
    """A document of NaN is dropped; infinity is stored as a text, since JSON has no word for it."""
    step = make_step(name="perplexity", run=str(run), save_as="perplexity", **limits)
    logits = torch.full((600, 600), logit)
    logits[:, 599] = 0.0  # an id that the text lacks
    step._filter._model = lambda ids: SimpleNamespace(logits=logits[None, : ids.shape[1]])
    document = step(Document("x", "def indent"))
    assert (document.fields["perplexity"] if document else None) == (None if "perplexity" in result else result)
    assert list(step.counts.dropped) == ([result] if document is None else [])
    assert step.counts.found == ({event: 1} if event else {})


def test_scores_of_classifiers_that_are_no_numbers(weights: LinearClassifier, tmp_path: Path) -> None:
    """Diverged weights, for example, give such scores."""
    replace(weights, bias=math.nan).save(tmp_path / "c.npz")
    assert apply("x", name="linear_classifier", file=str(tmp_path / "c.npz")) == "probability_not_a_number"
    write_classifier(tmp_path / "one", 1)
    step = make_step(name="classifier", folder=str(tmp_path / "one"), save_as="q")
    for score, result in ((math.nan, "score_not_a_number"), (math.inf, "Infinity"), (-math.inf, "-Infinity")):
        torch.nn.init.constant_(step._filter._model.classifier.bias, score)
        document = step._filter.apply(Document("x", "the house"), StepStats(""))
        assert (document if isinstance(document, str) else document.fields["q"]) == result


def write_classifier(folder: Path, outputs: int) -> None:
    """A small BERT that classifies, and its tokenizer, saved by the libraries that read them."""
    import tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[UNK]", *dict.fromkeys(PROSE + SPAM)])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=60, num_labels=outputs, initializer_range=0.5, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["code for the model", "code for the tokenizer", "pickled weights"])
def test_no_code_of_a_classifier_is_run(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked whether it may run: the answer that waits here would allow it."""
    write_classifier(tmp_path, 2)
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    if kind == "pickled weights":
        (tmp_path / "model.safetensors").unlink()
        torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    else:
        path = tmp_path / ("config.json" if "model" in kind else "tokenizer_config.json")
        known = json.loads(path.read_text())
        auto = {
            "AutoConfig": "mine.Config",
            "AutoModelForSequenceClassification": "mine.Model",
            "AutoTokenizer": ["mine.Tokenizer", None],
        }
        path.write_text(json.dumps({**known, "model_type": "mine", "tokenizer_class": "Mine", "auto_map": auto}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    is_read = kind == "code for the tokenizer"  # by its tokenizer.json, which says all
    with nullcontext() if is_read else pytest.raises(UsageError, match="can't be read as a classifier"):
        apply("x", name="classifier", folder=str(tmp_path), label="LABEL_0")
    assert not ran.exists()
    assert "Do you wish" not in "".join(capfd.readouterr())


def test_keys_of_a_plugins_step_are_its_own() -> None:
    step = {"name": "mine", "word_tokenizer": "space", "file": "no", "run": "r", "files": ["a"], "folder": "f"}
    values = {"out": "x", "read": {"builtin": "python-stdlib"}, "plugins": ["mine"], "steps": [step]}
    assert identify_config(PrepConfig.model_validate(values))["steps"] == [step]


def test_a_transformer_that_classifies(tmp_path: Path) -> None:
    """Against transformers' own pipeline, which truncates, tokenizes and normalizes by itself."""
    from transformers import pipeline

    selected = draw_texts(PROSE, 4, 8) + draw_texts(SPAM, 4, 9)
    for outputs, label in ((3, "LABEL_2"), (1, None)):
        folder = tmp_path / str(outputs)
        write_classifier(folder, outputs)
        judge = pipeline("text-classification", str(folder), top_k=None, device="cpu")
        how = {"name": "classifier", "folder": str(folder), "save_as": "q", "max_tokens": 30}
        how |= {} if label is None else {"label": label}
        scores = []
        for text in selected:
            applies = "none" if label is None else "softmax"
            (output,) = judge([text], truncation=True, max_length=30, function_to_apply=applies)
            scores.append(next(item["score"] for item in output if label in (None, item["label"])))
            assert apply_and_keep(text, **how).fields["q"] == pytest.approx(scores[-1], abs=2e-6)
        below, above = sorted(scores)[3:5]
        assert above - below > 1e-5  # or it would be a matter of rounding which are kept
        middle = (below + above) / 2
        is_kept = [isinstance(apply(text, **how, min_score=middle), Document) for text in selected]
        assert is_kept == [score > middle for score in scores]
        assert sum(is_kept) == 4
    for folder, options, message in (
        (tmp_path / "3", {"label": "x"}, "has no label 'x'; its labels are LABEL_0, LABEL_1, LABEL_2"),
        (tmp_path / "1", {"label": "LABEL_0"}, "has a single output, a number without a label: leave label out"),
        (tmp_path, {}, r"has no config\.json: folder is that of a model"),
    ):
        with pytest.raises(UsageError, match=message):
            apply("x", name="classifier", folder=str(folder), **options)
    configs = (make_config({"name": "classifier", "folder": str(tmp_path / name)}) for name in "13")
    first, second = (identify_config(config)["steps"] for config in configs)
    assert first != second
    assert set(first[0]["folder"]) >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_language_model_is_no_classifier(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    write_classifier(tmp_path, 1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=60, num_labels=1, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"lacks the weights .*classifier.*: it was trained for something else"):
        apply("x", name="classifier", folder=str(tmp_path))


def test_fasttext_scores_equal_the_library(tmp_path: Path) -> None:
    fasttext = pytest.importorskip("fasttext")
    kinds = (("hq", PROSE), ("lq", SPAM))
    lines = [f"__label__{label} {text}" for label, words in kinds for text in draw_texts(words, 99, 4)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    model = fasttext.train_supervised(str(tmp_path / "train.txt"), epoch=30, dim=8, thread=1, verbose=0)
    model.save_model(str(tmp_path / "m.bin"))
    how = {"name": "fasttext", "file": str(tmp_path / "m.bin"), "label": "__label__hq"}
    good, bad = draw_texts(PROSE, 1, 5)[0], draw_texts(SPAM, 1, 6)[0]
    actual = apply_and_keep(good.replace(" ", "\n", 3), **how, save_as="q", min_score=0.5)
    by_label = {label: p for p, label in model.f.predict(f"{good}\n", -1, 0.0, "strict")}
    assert actual.fields["q"] == pytest.approx(by_label["__label__hq"], abs=1e-5)
    assert apply(bad, **how, min_score=0.5) == "probability_below_min_score"
    with pytest.raises(UsageError, match="has no label 'x'; its labels are __label__hq, __label__lq"):
        apply(good, **{**how, "label": "x"})


@pytest.mark.parametrize(("library", "values", "out"), [
    ("fasttext", {"name": "fasttext", "file": "x", "label": "y"}, "pip install fasttext-wheel, or fit"),
    ("presidio_analyzer", {"name": "presidio", "entities": ["US_SSN"]}, "pip install presidio-analyzer, or use"),
    ("transformers", {"name": "classifier", "folder": "x"}, "pip install transformers, or fit"),
    ("spacy", {"name": "fineweb", "word_tokenizer": "spacy"}, "pip install spacy, or leave it out"),
])  # fmt: skip
def test_a_missing_library_is_named(
    library: str, values: dict[str, Any], out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(UsageError, match=out):
        apply("x", **values)


def test_words_by_spacy_are_datatrove_s() -> None:
    pytest.importorskip("spacy")
    from datatrove.utils.word_tokenizers import SpaCyTokenizer

    from megatfm.data_prep.filters.heuristics import _SpacyWords

    reference, spacy_words = SpaCyTokenizer("en"), _SpacyWords("en")
    for text in (*draw_texts(PROSE, 3, 7), "Don't — it's $5.00!  (e.g. U.S. \n\n e-mail: a@b.org)…", ""):
        assert spacy_words(text) == reference.word_tokenize(text)


def test_presidio_replaces_entities() -> None:
    pytest.importorskip("presidio_analyzer")
    apply_and_keep("Pay to US 078-05-1120 or call.", name="presidio", entities=["US_SSN", "IBAN_CODE"])
    text = "IBAN DE89 3704 0044 0532 0130 00."
    assert apply_and_keep(text, name="presidio", entities=["IBAN_CODE"]).text == "IBAN <IBAN_CODE>."
    with pytest.raises(UsageError, match="no recogniser of 'en' finds 'PERSON' by its form; there are: "):
        apply("x", name="presidio", entities=["PERSON"])


def spelled(*parts: str) -> str:
    """Put together here, so that no scanner takes this file for one that leaks."""
    return "".join(parts)


LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6yZ8bC0eF3hJ5kL7nP9qR1tU4wX6zA2cD5fG8iK0lM3oN6rS9"
TRUE = {
    "an AWS key id": (spelled("AKIA", "IOSFODNN7EXAMPLE"), "<SECRET>"),
    "an AWS secret": (spelled("aws_secret_access_key = ", LETTERS[:40]), "aws_secret_access_key = <SECRET>"),
    "a Google key": (spelled("AIza", LETTERS[:35]), "<SECRET>"),
    "a GitHub token": (spelled("ghp_", LETTERS[:36]), "<SECRET>"),
    "a GitHub PAT": (spelled("github_pat_", LETTERS[:22], "_", LETTERS[:59]), "<SECRET>"),
    "a GitLab token": (spelled("glpat-", LETTERS[:20]), "<SECRET>"),
    "a Slack token": (spelled("xoxb-", "123456789012-", LETTERS[:24]), "<SECRET>"),
    "a Stripe key": (spelled("sk_live_", LETTERS[:24]), "<SECRET>"),
    "an Azure key": (spelled("AccountKey=", "a" * 86, "=="), "AccountKey=<SECRET>"),
    "a JWT": (spelled("eyJhbGciOiJIUzI1NiJ9.", "eyJzdWIiOiIxMjM0NTYifQ.", LETTERS[:43]), "<SECRET>"),
    "a private key": (
        spelled("-----BEGIN RSA ", "PRIVATE KEY-----\n", LETTERS, "\n-----END RSA ", "PRIVATE KEY-----"), "<SECRET>",
    ),
    "a card": ("4111 1111 1111 1111", "<CARD>"),
    "a card with dashes": ("5500-0000-0000-0004", "<CARD>"),
    "an Amex": ("3782 822463 10005", "<CARD>"),
    "a bare card": ("6011000990139424", "<CARD>"),
    "an IBAN": ("DE89 3704 0044 0532 0130 00", "<IBAN>"),
    "a bare IBAN": ("GB82WEST12345698765432", "<IBAN>"),
    "a short IBAN": ("NO93 8601 1117 947", "<IBAN>"),
}  # fmt: skip
FALSE = {
    "a card whose check digit is wrong": "4111 1111 1111 1112", "a number of no network": "9111111111111111",
    "part of a longer number": "411111111111111112345678", "a decimal": "0.4111111111111111",
    "an IBAN with a wrong check": "DE88 3704 0044 0532 0130 00",
    "an IBAN of another length": "DE89 3704 0044 0532 0130 0",
    "a hash": "9e107d9d372bb6826bd81d3542a419d6e4d909c290d0fb1c",
    "a name like a token": "ghp_short hf_model npm_config_registry xoxo",
    "a public key": "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0\n-----END PUBLIC KEY-----",
    "base64 of JSON": "eyJhbGciOiJIUzI1NiJ9", "a time stamp": "20261122 190857 1234567",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*TRUE, *FALSE])
def test_keys_cards_and_accounts(kind: str) -> None:
    text, expected = TRUE[kind] if kind in TRUE else (FALSE[kind], FALSE[kind])
    for before, after in (("", ""), ("See (", "), and"), ("x: ", ".\nNEXT LINE")):
        assert apply_and_keep(f"{before}{text}{after}", name="pii", phone="").text == f"{before}{expected}{after}"
    assert apply_and_keep(text, name="pii", secret="", card="", iban="", phone="").text == text
