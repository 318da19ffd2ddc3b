"""DeepSpeed trains a model of transformers, writes a universal checkpoint, and a run of ours goes on from it."""

import argparse
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megatfm import checkpoint
from megatfm.config import Config, load_section
from megatfm.convert.convert import convert
from megatfm.convert.deepspeed_universal import UniversalFolder, from_universal
from megatfm.convert.weight_mapping import to_hf
from megatfm.errors import EXIT_OK, UsageError
from megatfm.train.run import train
from tests.support.forked_commands import run_command
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)
TINY = LlamaConfig(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
STEPS = 3


def train_by_deepspeed(folder: Path, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Three steps under DeepSpeed alone; the universal checkpoint is in folder/universal. Its own word for what it
    holds: key → name → tensor."""
    from megatfm.engines.deepspeed.internals import ignore_warnings
    from megatfm.engines.deepspeed.library import import_deepspeed as deepspeed

    model = LlamaForCausalLM(TINY)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "hf")
    package = deepspeed(torch.device("cpu"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    with ignore_warnings():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(STEPS):
            tokens = torch.randint(512, (1, 24))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_checkpoint(str(folder / "theirs"), tag="global_step3")
        utils = importlib.import_module("deepspeed.utils")
        state = utils.safe_get_full_optimizer_state
        actual = {
            "fp32": {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()},
            **{key: {n: state(p, key) for n, p in model.named_parameters()} for key in ("exp_avg", "exp_avg_sq")},
        }  # fmt: skip
        if dist.get_rank() == 0:
            tool = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
            tool.main(
                argparse.Namespace(input_folder=str(folder / "theirs/global_step3"),
                                   output_folder=str(folder / "universal"), num_extract_workers=1,
                                   num_merge_workers=1, keep_temp_folder=False, strict=True,
                                   inject_missing_state=True),
            )  # fmt: skip
        engine.destroy()
    return actual


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_weights_and_adam_s_state_go_over_to_the_bit(
    workers: Workers, corpus: Path, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on with them."""
    expected, *_ = workers.run(train_by_deepspeed, 2, tmp_path, stage, timeout=250)
    source, like, actual = tmp_path / "universal", tmp_path / "hf", tmp_path / "ours"
    assert run_command("convert", str(source), str(actual), "--to", "megatfm", "--hf-config", str(like)) == 0
    assert "with Adam's state of step 3" in capsys.readouterr().out
    stored = checkpoint.read_tensors(actual / f"checkpoints/step-{STEPS:08d}")
    mappings = UniversalFolder(source, like).mappings
    for key, tensor in expected.items():
        prefix, suffix = ("model.", "") if key == "fp32" else ("optimizer.", f".{key}")
        weights = {n: stored[f"{prefix}{n}{suffix}"] for mapping in mappings for n in mapping.megatfm}
        back = to_hf(mappings, weights)
        assert back.keys() == tensor.keys()
        assert [name for name in tensor if not torch.equal(back[name], tensor[name])] == []
    assert {t.item() for name, t in stored.items() if name.endswith(".step")} == {float(STEPS)}
    convert(actual, tmp_path / "again", "hf")
    converted = LlamaForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert [n for n, t in expected["fp32"].items() if not torch.equal(converted[n], t)] == []

    config = load_section(
        Config,
        actual / "config.toml",
        [
            f"run_dir={tmp_path / 'run'}",
            f"data.train={corpus / 'train'}",
            f"data.tokenizer={corpus / 'tokenizer.model'}",
            *("data.sequence_length=32", "train.steps=4", "train.global_batch=4", "train.precision=fp32"),
            *("lr_schedule.warmup_steps=1", "log.sinks=[]", "parallel.engine=deepspeed", f"parallel.zero={stage}"),
        ],
    )
    assert workers.run(train, 2, config, timeout=200) == [EXIT_OK] * 2
    after = checkpoint.read_tensors(tmp_path / f"run/checkpoints/step-{STEPS + 1:08d}")
    assert {t.item() for name, t in after.items() if name.endswith(".step")} == {float(STEPS + 1)}


def test_a_folder_that_is_no_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ds_to_universal --input_folder \S+/global_stepN"):
        from_universal(tmp_path, tmp_path / "new", tmp_path)
