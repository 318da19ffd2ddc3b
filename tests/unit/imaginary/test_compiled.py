"""Compiled blocks on the imaginary GPU: what they save, their kernels, graph breaks and recompilations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from megatfm.config import load_config
from megatfm.errors import MegatfmError
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.traced import run_trace
from megatfm.imaginary.kernels import Fusion
from tests.support.layouts import EXTENDED

WIDTHS = [
    "model.n_layers=2", "train.micro_batch=1", "model.d_model=512", "model.attention.n_heads=8", "model.ffn.d_ff=1024",
]  # fmt: skip
SMALL = [*WIDTHS, "model.vocab_size=512"]


def trace_and_estimate(preset: str, gpus: int, *overrides: str) -> tuple[Any, int]:
    """Return the facts of a trace, and the modelled bytes that a block saves."""
    facts = run_trace(preset, overrides, gpus, 0).facts
    config = load_config(preset, [*overrides, "train.precision=bf16"])
    with open_estimator(config, load_cluster("h100", gpus)) as opened:
        estimate = opened.estimate(opened.base)
    assert facts["is_compiled"]
    assert estimate.compiled
    return facts, estimate.memory[0].saved_in_blocks // len(facts["saved"])


@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize(("preset", "gpus", "overrides"), [
    pytest.param("gpt2-124m", 1, [*SMALL, "parallel.zero=1", "train.global_batch=2"], id="gpt2, dropout"),
    pytest.param("bert-base", 1, [*SMALL, "train.global_batch=2"], id="bert, dropout", marks=EXTENDED),
    pytest.param("albert-base", 1, [*SMALL, "train.global_batch=2"], id="albert, one block for all", marks=EXTENDED),
    pytest.param("vit-s16", 1, ["model.n_layers=2", "train.micro_batch=2", "train.global_batch=4"], id="vit",
                 marks=EXTENDED),
    pytest.param("llama3-8b", 2, [*SMALL, "model.attention.n_kv_heads=2", "train.global_batch=4"], id="llama, zero3",
                 marks=EXTENDED),
])  # fmt: skip
def test_a_compiled_block_is_traced_whole_and_saves_what_is_modelled(
    preset: str, gpus: int, overrides: list[str]
) -> None:
    """The first block holds tables of positions, too. A graph break would be an error here."""
    facts, modelled = trace_and_estimate(preset, gpus, *overrides)
    *_, last = facts["saved"].values()
    assert modelled == pytest.approx(last, rel=0.02)
    assert not facts["graph_breaks"]
    assert not facts["waits"]
    fused = sum(times for name, times in facts["kernels"].items() if name.endswith(": fused"))
    assert fused >= 2 * facts["microbatches"] * 2 * 2, "of two blocks in each pass: norms, and what follows matmuls"
    if facts["optimizer"] > facts["passes"]:
        return  # at the fullest moment no block is live
    owners = [owner.split(" ", 2) for owner in facts["at_peak"]]
    assert any(line.startswith("layers/linear.py") for _, layer, line in owners if layer != "-")


@EXTENDED
@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_experts_break_the_graph_of_a_compiled_block(recompute: str) -> None:
    experts = ["model.ffn.n_experts=8", "parallel.ep=4", "train.global_batch=4", f"train.recompute={recompute}"]
    facts, modelled = trace_and_estimate("olmoe-1b-7b", 4, *SMALL, *experts)
    saved = facts["saved"].values()
    assert modelled == pytest.approx(sum(saved) / len(saved), rel=0.02)
    assert any(line.startswith("layers/block.py") for line in facts["graph_breaks"])
    assert {where.partition(" at ")[2].partition(":")[0] for where in facts["waits"]} == {"parallel/expert_parallel.py"}


@EXTENDED
@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_over_ranks_breaks_the_graph_of_a_compiled_block(recompute: str) -> None:
    """Once a pass; only the first block, which makes the tables of positions, has its own code."""
    overrides = [
        "model.attention.n_kv_heads=2",
        "train.global_batch=4",
        "parallel.cp=2",
        f"train.recompute={recompute}",
    ]
    facts, modelled = trace_and_estimate("llama3-8b", 4, *SMALL, *overrides)
    saved = facts["saved"].values()
    assert modelled == pytest.approx(sum(saved) / len(saved), rel=0.02)
    assert {line.partition(":")[0] for line in facts["graph_breaks"]} == {"layers/attention/gqa.py"}
    assert sum(facts["recompilations"].values()) == 1
    assert not facts["waits"]


@pytest.mark.usefixtures("forked_traces")
def test_a_block_that_can_not_be_compiled_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaking.py").write_text(
        "import torch\n"
        "from megatfm.layers.feed_forward import ACTIVATIONS, Activation\n"
        "def square(x):\n"
        "    torch._dynamo.graph_break()\n"
        "    return x * x\n"
        "ACTIVATIONS.register('breaking')(Activation(square))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["plugins=['breaking']", "model.ffn.activation=breaking", "parallel.zero=1", "train.global_batch=1"]
    message = r"block can't be compiled: .*graph_break.*: trace eager ones by train.compile"
    with pytest.raises(MegatfmError, match=message):
        run_trace("gpt2-124m", [*SMALL, *words], 1, 0)


def test_pointwise_operators_between_matmuls_are_one_kernel_and_store_what_is_read() -> None:
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        shifted = x.sin() + 1  # read by the matmul and by the last kernel
        product = shifted @ weight
        return (product.view(-1).exp().view(4, 4) + shifted).cos(), shifted.neg()

    graph = make_fx(forward)(torch.randn(4, 4), torch.randn(4, 4)).graph
    fusion = Fusion(graph)
    names = {node: node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"}
    assert [names[node] for node in fusion.separate] == ["mm"]
    assert sorted(names[node] for node in fusion.stored) == ["add", "cos", "neg"]
    assert len(fusion.first) == 2, "before the matmul, and after it"
