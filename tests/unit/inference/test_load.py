"""Opening runs and checkpoints, good ones and bad ones, and where a prompt stands."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatfm
from megatfm import checkpoint
from megatfm.config import ModelConfig
from megatfm.convert.convert import convert
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.decoding import Prompts, Sampling, generate
from megatfm.inference.evaluate import evaluate_run
from megatfm.inference.evaluation_tasks import open_tasks
from megatfm.inference.harness import HarnessRequests
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.task_evaluation import predict_file
from megatfm.inference.text import TextModel, generate_text, generate_text_beam, open_text_model
from megatfm.objectives import SpecialTokens
from megatfm.objectives.base import make_prefix_lm_example, make_seq2seq_example
from megatfm.registry import import_plugins
from tests.support.forked_commands import run_command
from tests.support.hf_folders import edit_config, edit_tensors, write_gpt2
from tests.support.small_runs import (
    SMALL_DECODER,
    padded_decoder,
    random_model,
    write_next_checkpoint,
    write_trained_run,
)
from tests.support.tensors import assert_aligned_inputs, is_misaligned, misalign


def test_a_run_and_its_checkpoint_open_alike(run: Path) -> None:
    original = random_model(padded_decoder(), torch.float32)
    for path in (run, run / "checkpoints" / "step-00000030"):
        loaded = open_text_model(path)
        assert (loaded.step, loaded.run_dir, loaded.config.name) == (30, run, "small")
        assert not loaded.model.training
        assert loaded.model.head.weight is loaded.model.decoder.embedding.tokens.weight
        for name, parameter in original.named_parameters():
            assert torch.equal(loaded.model.get_parameter(name), parameter)


def test_megatfm_load_gives_the_model(run: Path) -> None:
    tokens = torch.tensor([[1, 5, 9]])
    (run / "tokenizer.model").unlink()  # not needed for the model alone
    output = megatfm.load(run)(tokens)
    assert torch.equal(output.logits, random_model(padded_decoder(), torch.float32)(tokens).logits)
    assert output.hidden.shape == (1, 3, SMALL_DECODER.d_model)


def test_parameters_are_in_the_dtype_that_is_asked_for(tmp_path: Path, tokenizer_model: bytes) -> None:
    """A run's and a converted folder's; text can be made of them, too."""
    exact = random_model(SMALL_DECODER, torch.float32)
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(SMALL_DECODER, torch.float32).bfloat16())
    convert(run, tmp_path / "theirs", "hf")
    tokens = torch.tensor([[1, 5, 9, 300, 2]])
    for path in (run, tmp_path / "theirs"):
        for asked, dtype in (
            ("auto", torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16),
        ):  # fmt: skip
            model = megatfm.load(path, dtype=asked)
            assert {parameter.dtype for parameter in model.parameters()} == {dtype}
            logits, expected_logits = model(tokens).logits.float(), exact(tokens).logits
            assert (logits - expected_logits).norm() < 0.03 * expected_logits.norm()
            assert isinstance(model.generate("Gr", max_tokens=5), str)
        assert {parameter.dtype for parameter in megatfm.load(path).parameters()} == {torch.float32}
        with pytest.raises(UsageError, match="dtype = 'int8': choose one of auto, float32"):
            megatfm.load(path, dtype="int8")
        assert run_command("generate", str(path), "--max-tokens=3") == 0


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a checkpoint nor a run directory"):
        open_text_model(tmp_path)
    (tmp_path / "launch.json").write_text("{}")
    with pytest.raises(UsageError, match=f"the run has saved no checkpoint yet: `megatfm status {tmp_path}` says how"):
        open_text_model(tmp_path)
    with pytest.raises(UsageError, match=r"there is no such folder: .*`hf download meta-llama/Tiny --local-dir Tiny`"):
        open_text_model("meta-llama/Tiny")
    (tmp_path / "runs").mkdir()
    for gone in (tmp_path / "runs/gone", "gone"):
        with pytest.raises(UsageError, match=r"gone: there is no such folder: give one with a run or checkpoint$"):
            open_text_model(gone)


@pytest.mark.parametrize(("file", "framework"), [
    ("latest_checkpointed_iteration.txt", "Megatron-LM"),
    ("common.pt", "Megatron-LM"),
    ("mp_rank_00/model_optim_rng.pt", "Megatron-LM"),
    ("__0_0.distcp", r"torch\.distributed\.checkpoint \(torchtitan"),
    ("checkpoint_metadata.json", "nanotron"),
])  # fmt: skip
def test_a_checkpoint_of_another_framework_is_named_with_the_way_here(
    tmp_path: Path, file: str, framework: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')  # as Megatron-LM's, and ours
    message = f"is a checkpoint of {framework}.*, which is not read: .*`megatfm convert FOLDER NEW --to megatfm`$"
    with pytest.raises(UsageError, match=message):
        open_text_model(tmp_path)
    with pytest.raises(UsageError, match=message):
        convert(tmp_path, tmp_path / "new", "megatfm")


def test_a_checkpoint_of_olmo_core_is_no_folder_of_transformers(tmp_path: Path) -> None:
    """Its config.json is of its own kind."""
    (tmp_path / "model_and_optim").mkdir()
    (tmp_path / "model_and_optim/__0_0.distcp").touch()
    (tmp_path / "config.json").write_text('{"model": {"d_model": 64}}')
    with pytest.raises(UsageError, match="is a checkpoint of OLMo-core, which is not read"):
        convert(tmp_path, tmp_path / "new", "megatfm")


def test_another_tokenizer_is_refused(run: Path, tokenizer_model: bytes) -> None:
    other_model = tokenizer_model.replace(b"identity", b"identify")
    assert other_model != tokenizer_model
    (run / "tokenizer.model").write_bytes(other_model)
    with pytest.raises(UsageError, match="not the tokenizer that step-00000030 was trained with"):
        open_text_model(run)


def test_a_config_of_another_version_is_named(run: Path) -> None:
    config = json.loads(json.dumps(checkpoint.read_state(run / "checkpoints" / "step-00000030")["config"]))
    config["model"]["horns"] = 2
    write_next_checkpoint(run, {"config": config, "megatfm": "9.9"})
    with pytest.raises(MegatfmError, match=r"model\.horns.*9\.9"):
        open_text_model(run)


@pytest.mark.parametrize(("state", "tensors", "message"), [
    ({}, {"model.extra": torch.zeros(2)}, r"model\.extra is in the checkpoint, but not in the model"),
    ({}, {"model.decoder.norm.weight": torch.zeros(2)}, r"model\.decoder\.norm\.weight is \[2\], but \[32\]"),
    ({"step": None}, {}, r"step-00000031: not a checkpoint of a run: its state has no step"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_its_run_is_named(
    run: Path, state: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    write_next_checkpoint(run, state, tensors)
    with pytest.raises(MegatfmError, match=message):
        open_text_model(run)


def test_loaded_weights_are_aligned_like_new_ones(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit holds only so, see tests/support/tensors.py."""
    tokens, read = torch.tensor([[1, 5, 9]]), checkpoint.read_tensors
    planted = lambda *args: {name: misalign(tensor) for name, tensor in read(*args).items()}  # noqa: E731
    monkeypatch.setattr(checkpoint, "read_tensors", planted)
    model = open_text_model(run).model
    assert [name for name, parameter in model.named_parameters() if is_misaligned(parameter)] == []
    with assert_aligned_inputs():
        logits = model(tokens).logits
    assert torch.equal(logits, random_model(padded_decoder(), torch.float32)(tokens).logits)


def test_generating_and_sampling_reckon_in_torchs_memory(run: Path) -> None:
    loaded = open_text_model(run)
    with assert_aligned_inputs():
        for temperature in (0.0, 1.0):
            generate(loaded.model, torch.tensor([[1, 5, 9], [1, 7, 2]]), max_tokens=4, temperature=temperature)


@pytest.fixture
def stranger(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose config names a package that lies in the current directory and in the run."""
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, run):
        (folder / "strangers_code.py").write_text("open('victim', 'w').close()\n")
    config = checkpoint.read_state(run / "checkpoints" / "step-00000030")["config"]
    assert isinstance(config, dict)
    write_next_checkpoint(run, {"config": {**config, "plugins": ["strangers_code"]}})
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f'plugins = ["strangers_code"]\n{text.replace("plugins = []", "")}')
    return run


@pytest.mark.parametrize("words", [
    ["generate", "run"],
    ["generate", "run/checkpoints/step-00000031"],
    ["convert", "run", "new", "--to", "hf"],
    ["convert", "run", "new", "--to", "moe", "--experts", "2"],
    ["evaluate", "run"],
    ["describe", "run"],
    ["describe", "run/config.toml", "model.n_layers=1"],
    ["verify", "run", "parallel.tp=2"],
], ids=" ".join)  # fmt: skip
def test_a_stranger_s_run_runs_no_code(stranger: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*words) == 2
    assert "names plugins, whose code would run: strangers_code: " in (output := capsys.readouterr().err)
    assert "--trust-plugins" in output
    assert not Path("victim").exists()
    assert not Path("new").exists()
    assert str(stranger.resolve()) not in sys.path


@pytest.mark.parametrize("way", ["trusted", "imported", "named"])
def test_plugins_that_the_user_trusts_or_names_are_imported(stranger: Path, way: str) -> None:
    with pytest.raises(UsageError, match="strangers_code"):
        megatfm.load(stranger)
    if way == "imported":
        import_plugins(["strangers_code"])
    if way == "named":
        assert run_command("describe", str(stranger), "plugins=strangers_code", "model.vocab_size=400") == 0
    else:
        megatfm.load(stranger, trust_plugins=way == "trusted")
    assert Path("victim").exists()


def test_wrong_requests_to_a_model_are_one_line(run: Path) -> None:
    model = megatfm.load(run)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert repr(model) == f"megatfm.Model({str(run)!r}: decoder, {count:,} parameters, float32 on cpu)"
    for arguments, why in (
        ({"prompt": 5}, "prompt = 5 is not a string"),
        ({"max_tokens": 0}, "max_tokens = 0: choose"),
        ({"num_beams": -1}, "num_beams = -1: choose"),
        ({"bos": "eos"}, "bos = 'eos': choose one of auto, bos, none"),
        ({"sentinel": "no"}, "sentinel = 'no': choose one of auto, always, never"),
        ({"chat": True}, "chat: needs a tokenizer.json, in which special tokens are spelled"),
        ({"chat": True, "bos": "bos"}, "chat: the template decides what stands before the prompt"),
        ({"chat": True, "image": "a.png"}, "a chat prompt with an image is not supported"),
        ({"image": "a.png"}, "family = 'decoder' reads no image beside a prompt"),
    ):
        with pytest.raises(UsageError, match=why):
            model.generate(**arguments)
    with pytest.raises(UsageError, match="fit: a dict is not a config: give a file"):
        megatfm.fit({"name": "x"})  # type: ignore[arg-type]


def test_a_folder_without_what_a_command_evaluates_is_one_line(run: Path, tmp_path: Path) -> None:
    for evaluate in (lambda folder: evaluate_run(folder, {}, False), lambda folder: predict_file(folder, "rows.csv")):
        with pytest.raises(UsageError, match=r"not a run directory \(it has no config\.toml\)"):
            evaluate(tmp_path)
    with pytest.raises(UsageError, match=r"a run without a \[task\]: give one that `megatfm finetune` trained"):
        predict_file(run, "rows.csv")
    with pytest.raises(UsageError, match="limit = -1: choose 1 or more questions of each task"):
        open_tasks({}, -1)


def test_a_table_that_lacks_ids_of_the_tokenizer_is_refused(tmp_path: Path, tokenizer_model: bytes) -> None:
    small = SMALL_DECODER.with_changes({"vocab_size": 300})
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(small, torch.float32))
    with pytest.raises(MegatfmError, match="the model has 300 rows, fewer than its tokenizer's 400 ids"):
        open_text_model(run)
    folder, table = write_gpt2(tmp_path / "gpt2"), "transformer.wte.weight"
    edit_tensors(folder, lambda tensors: tensors.update({table: tensors[table][:99].clone()}))
    edit_config(folder, vocab_size=99)
    with pytest.raises(MegatfmError, match=r"vocabulary has 99 entries, its tokenizer's \d+: one of the two"):
        megatfm.load(folder).generate("import")


# ---------------------------------------------------------------------------------------------------- prompts


TEXT = "import textwrap"
PAIRS = SMALL_DECODER.model_copy(update={"family": "encoder_decoder"})


def opened(folder: Path, tokenizer_model: bytes, config: ModelConfig, objective: str) -> TextModel:
    return open_text_model(
        write_trained_run(folder / "run", tokenizer_model, random_model(config, torch.float32), objective)
    )


def special_of(loaded: TextModel) -> SpecialTokens:
    return SpecialTokens(*(getattr(loaded.tokenizer, role) for role in ("bos", "eos", "pad")))


def check(prompts: Prompts, fields: dict[str, np.ndarray]) -> None:
    """The prompt is what the fields of a sequence start with, before anything that was wanted."""
    inputs = len(prompts.tokens[0])
    assert prompts.tokens[0].tolist() == fields["tokens"][:inputs].tolist()
    assert fields["targets"][: inputs - 1].tolist() == [-100] * (inputs - 1)
    assert fields["targets"][inputs - 1] != -100
    if prompts.encoder is not None:
        assert prompts.encoder[0].tolist() == fields["encoder_tokens"].tolist()
    if prompts.prefix:
        assert fields["prefix"][:inputs].all()
        assert not fields["prefix"][inputs:].any()


@pytest.mark.parametrize("text", [TEXT, "a <extra_1> b <extra_id_0>"])
@pytest.mark.parametrize("config", [SMALL_DECODER, PAIRS])
def test_prompts_of_span_corruption_are_its_inputs(
    text: str, config: ModelConfig, tmp_path: Path, tokenizer_model: bytes
) -> None:
    loaded = opened(tmp_path, tokenizer_model, config, "span_corruption")
    s, encode = loaded.tokenizer.sentinels, loaded.tokenizer.encode
    inputs = [*encode(TEXT), s[0]] if text == TEXT else [*encode("a "), s[1], *encode(" b "), s[0]]
    expected_tokens = np.array([s[0], 9])
    make = make_seq2seq_example if config is PAIRS else make_prefix_lm_example
    check(build_prompts(loaded, text), make(np.array(inputs), expected_tokens, special_of(loaded)))


@pytest.mark.parametrize("sentinel", ["auto", "always", "never"])
@pytest.mark.parametrize("config", [SMALL_DECODER, PAIRS])
def test_a_prompt_of_a_converted_model_is_tokenized_unchanged(
    config: ModelConfig, sentinel: str, tmp_path: Path, tokenizer_model: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what it was trained for: T5's tasks have no sentinel. A run's own objective is known."""
    run = opened(tmp_path, tokenizer_model, config, "span_corruption")
    plain, first = run.tokenizer.encode(TEXT).tolist(), run.tokenizer.sentinels[0]

    def encode_prompt_ids(loaded: TextModel) -> list[int]:
        prompts = build_prompts(loaded, TEXT, PromptOptions(sentinel=sentinel))
        return [token for token in (prompts.encoder or prompts.tokens)[0].tolist() if token != loaded.tokenizer.eos]

    assert encode_prompt_ids(run) == (plain if sentinel == "never" else [*plain, first])
    assert caplog.text == ""
    expected = [*plain, first] if sentinel == "always" else plain
    assert encode_prompt_ids(replace(run, knows_objective=False)) == expected
    assert ("put <extra_0> where text is to be filled in" in caplog.text) == (sentinel == "auto")


@pytest.mark.parametrize(("config", "objective", "text", "options", "message"), [
    (PAIRS, "causal", TEXT, {"bos": "bos"}, "bos = 'bos': an encoder-decoder's prompt is its encoder's"),
    (PAIRS, "span_corruption", "a <extra_9>", {}, "<extra_9>: the tokenizer has 4 sentinels"),
    (SMALL_DECODER.model_copy(update={"family": "encoder"}), "masked", TEXT, {}, "'encoder' makes no text"),
])  # fmt: skip
def test_prompts_that_a_model_can_not_continue_are_refused(
    tmp_path: Path, tokenizer_model: bytes, config: ModelConfig, objective: str, text: str, options: Any, message: str
) -> None:
    loaded = opened(tmp_path, tokenizer_model, config, objective)
    with pytest.raises(UsageError, match=message):
        build_prompts(loaded, text, PromptOptions(**options))


@pytest.mark.parametrize("objective", ["prefix", "ul2"])
@pytest.mark.parametrize("config", [SMALL_DECODER, PAIRS])
def test_prompts_of_a_prefix_objective_are_its_prefix(
    config: ModelConfig, objective: str, tmp_path: Path, tokenizer_model: bytes
) -> None:
    """UL2's end of a text is a prefix, too, after its mode token where there is one."""
    loaded = opened(tmp_path, tokenizer_model, config, objective)
    tokens, special = loaded.tokenizer.encode(TEXT), special_of(loaded)
    mode = loaded.tokenizer.modes.get("S") if objective == "ul2" else None
    if config is PAIRS:
        inputs = tokens if mode is None else np.append(mode, tokens)
        check(build_prompts(loaded, TEXT), make_seq2seq_example(inputs, np.array([9]), special))
    else:
        first = special.bos if mode is None else mode
        check(build_prompts(loaded, TEXT), make_prefix_lm_example(np.append(first, tokens), np.array([9]), special))


def test_prompts_of_pairs_are_those_of_training(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded = opened(tmp_path, tokenizer_model, PAIRS, "causal")
    tokens, special = loaded.tokenizer.encode(TEXT), special_of(loaded)
    full = make_seq2seq_example(np.zeros(0, np.int64), np.append(tokens, 9), special)
    prompts = build_prompts(loaded, TEXT)
    assert prompts.tokens[0].tolist() == full["tokens"].tolist()[:-1]
    assert prompts.encoder[0].tolist() == full["encoder_tokens"].tolist()
    assert not prompts.prefix
    with pytest.raises(UsageError, match="'encoder_decoder' has no likelihood of a text from its beginning"):
        HarnessRequests(loaded, 1).loglikelihood_rolling(["a"])


@pytest.mark.parametrize(
    ("config", "objective", "separator"),
    [(SMALL_DECODER, "prefix", ""), (PAIRS, "prefix", ""), (PAIRS, "span_corruption", "\n"), (PAIRS, "answers", "\n")],
)
def test_samples_and_beams_from_a_prompt(
    config: ModelConfig, objective: str, separator: str, tmp_path: Path, tokenizer_model: bytes
) -> None:
    """A text that does not continue the prompt, such as an answer, is shown on a line of its own."""
    loaded = opened(tmp_path, tokenizer_model, config, objective)
    shown: list[str] = []
    (greedy,) = generate_text(loaded, TEXT, Sampling(vocab_size=400), 9, 1, on_text=shown.append)
    assert "".join(shown) == TEXT + separator + greedy
    assert generate_text_beam(loaded, TEXT, 9, 1, 0.0) == greedy
    assert generate_text_beam(loaded, TEXT, 9, 8, 0.6)


def test_text_ends_with_the_positions(tmp_path: Path, tokenizer_model: bytes, caplog: pytest.LogCaptureFixture) -> None:
    config = SMALL_DECODER.with_changes({"position.name": "learned", "position.max_positions": 12})
    loaded = opened(tmp_path, tokenizer_model, config, "causal")
    length = 1 + len(loaded.tokenizer.encode("import"))
    generate_text_beam(loaded, "import", 40, 2, 0.6)
    assert f"the model makes {13 - length} tokens at most, for model.position.max_positions = 12" in caplog.text
