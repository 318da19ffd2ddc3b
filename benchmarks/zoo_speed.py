"""Forward and backward of GPT-2 124M and BERT-base against transformers' (its sdpa path), on this CPU.

    python benchmarks/zoo_speed.py --rounds 10 --threads 2 --out benchmarks/results/DATE-zoo-speed.json

Both sides have the same dtype, threads, batch, targets and compile state, and random weights. Rounds are interleaved
and alternate who goes first; the figure is the median over rounds of (their seconds / our seconds): above 1, megatfm
is faster. Seconds are taken twice: of the clock, and of the CPU over all threads, which says more on a machine that
others use. Absolute times mean nothing by themselves.
"""

from collections.abc import Callable
from platform import python_version

import common
import torch
import transformers
from common import Step, compare, get_cpu_name, make_side, summarize
from torch import nn

from megatfm.config import load_config
from megatfm.layers.initialisation import initialise
from megatfm.models import build

Loss = Callable[[], torch.Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_gpt2_losses(rows: int, length: int, dtype: torch.dtype, compiled: bool) -> tuple[Loss, Loss]:
    """Return both sides' next-token loss of all tokens; transformers shifts the targets itself."""
    config = transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    reference = _prepare(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), dtype, compiled
    )
    model = _prepare(_build_megatfm("gpt2-124m"), dtype, compiled)
    tokens = torch.randint(0, 50257, (rows, length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return (
        lambda: model(inputs, targets=targets).losses["causal"] / targets.numel(),
        lambda: reference(input_ids=inputs, labels=inputs).loss,
    )


def make_bert_losses(rows: int, length: int, dtype: torch.dtype, compiled: bool) -> tuple[Loss, Loss]:
    """Return both sides' loss of masked tokens (15 %) and next-sentence prediction."""
    config = transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    reference = transformers.BertForPreTraining._from_config(config, attn_implementation="sdpa")
    reference = _prepare(reference, dtype, compiled)
    model = _prepare(_build_megatfm("bert-base"), dtype, compiled)
    tokens = torch.randint(0, 30522, (rows, length))
    targets = tokens.where(torch.rand(rows, length) < 0.15, -100)
    sentence = torch.full_like(tokens, -100)
    sentence[:, 0] = torch.arange(rows) % 2

    def step_of_ours() -> torch.Tensor:
        losses = model(tokens, targets=targets, sentence_targets=sentence).losses
        return losses["masked"] / (targets >= 0).sum() + losses["sentence"] / rows

    return (
        step_of_ours,
        lambda: reference(input_ids=tokens, labels=targets, next_sentence_label=torch.arange(rows) % 2).loss,
    )


MODELS = {"gpt2-124m": make_gpt2_losses, "bert-base": make_bert_losses}


def _build_megatfm(preset: str) -> nn.Module:
    overrides = [f"model.{rate}=0" for rate in ("dropout", "attention.dropout", "ffn.dropout")]
    model = build(load_config(preset, overrides).model)
    initialise(model, 0)
    return model


def _prepare(model: nn.Module, dtype: torch.dtype, compiled: bool) -> nn.Module:
    model = model.to(dtype).train()
    return torch.compile(model) if compiled else model  # type: ignore[return-value]


def make_pass(loss: Loss) -> Step:
    """Return a function that runs a forward and a backward pass."""
    return lambda: loss().backward()


def main() -> None:
    """Run what the arguments ask for; print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--states", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--out", type=common.make_output_file)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for name in args.models:
        for dtype in args.dtypes:
            for state in args.states:
                torch.manual_seed(0)
                torch._dynamo.reset()
                actual, expected = MODELS[name](args.rows, args.length, DTYPES[dtype], state == "compiled")
                figures = summarize(compare(make_side(make_pass(actual)), make_side(make_pass(expected)), args.rounds))
                row: dict[str, str | float] = {"model": name, "dtype": dtype, "state": state, **figures}
                results.append(row)
                print(
                    "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else str(v) for k, v in row.items()),
                    flush=True,
                )
    if args.out:
        facts = {
            "date": common.today(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": python_version(),
            "processor": get_cpu_name(instructions=True),
            "threads": args.threads,
            "rows": args.rows,
            "length": args.length,
            "rounds": args.rounds,
        }
        common.write_json(args.out, {**facts, "results": results}, indent=2)


if __name__ == "__main__":
    main()
