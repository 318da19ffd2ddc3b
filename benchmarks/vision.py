"""A whole training step of a vision transformer against transformers and timm, on this CPU.

    python benchmarks/vision.py --preset vit-s16 --rows 4 --rounds 10 --out benchmarks/results/DATE-vision.md

Forward, backward, clipping and AdamW. Ours is the engine as `megatfm train` builds it from the preset; theirs are
`ViTForImageClassification` with scaled_dot_product_attention, and timm's model of the same sizes, with autocast for
bfloat16, clip_grad_norm_ and fused AdamW. Inputs are uint8 pixels that each side normalises. No stochastic depth, no
label smoothing. Each side is a process of its own that keeps what it frees, as training does; steps are interleaved,
one process waiting for the other, and sides alternate who goes first. A figure is the median over all rounds of
(their seconds / our seconds): above 1, megatfm is faster. timm needs torchvision, which is asked for nothing here: the
operators whose absence stops its import beside a CPU torch are declared.
"""

import argparse
import json
import sys
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import Step, get_cpu_name, make_side
from torch import Tensor, nn

from megatfm.config import ModelConfig, load_config
from megatfm.data.images import PatchLayout
from megatfm.objectives import build_objective
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import keep_freed_memory

LR, CLIP, BETAS, DECAY, SIZE = 1e-3, 1.0, (0.9, 0.999), 0.05, 224
MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators of torchvision's wheel that a CPU torch doesn't load."""
LIBRARY = torch.library.Library("torchvision", "DEF")
"""Kept, for the operators go with it."""


def build_transformers_model(model: ModelConfig) -> nn.Module:
    """Logits of pixel values, by transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=model.d_model, num_hidden_layers=model.n_layers, num_attention_heads=model.attention.n_heads,
        intermediate_size=model.ffn.d_ff, image_size=SIZE, patch_size=model.embedding.patch_size, num_labels=1000,
        layer_norm_eps=model.norm.eps, attn_implementation="sdpa",
    )  # fmt: skip
    vit = ViTForImageClassification(config).train()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit

        def forward(self, pixels: Tensor) -> Tensor:
            return self.vit(pixel_values=pixels).logits

    return Logits()


def build_timm_model(model: ModelConfig) -> nn.Module:
    """Logits of pixel values, by timm."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=SIZE, patch_size=model.embedding.patch_size, embed_dim=model.d_model, depth=model.n_layers,
        num_heads=model.attention.n_heads, mlp_ratio=model.ffn.d_ff / model.d_model, num_classes=1000,
    ).train()  # fmt: skip


def make_peer_step(side: str, model: ModelConfig, pixels: Tensor, labels: Tensor, precision: str) -> Step:
    """A step as a training script has it."""
    network = {"transformers": build_transformers_model, "timm": build_timm_model}[side](model)
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    mean, std = (torch.tensor(v)[:, None, None] for v in (model.embedding.mean, model.embedding.std))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = network((pixels / 255 - mean) / std)
            loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make_megatfm_step(args: argparse.Namespace, pixels: Tensor, labels: Tensor, precision: str) -> Step:
    """A step of the engine that `megatfm train` builds, with rows as the loader gives them."""
    rows = len(pixels)
    quiet = ["model.drop_path=0", "model.extra_heads.classifier.label_smoothing=0", "data.images.mixup=0"]
    sizes = [f"train.micro_batch={rows}", f"train.global_batch={rows}", "data.images.cutmix=0"]
    config = load_config(args.preset, [*quiet, *sizes, *args.set])
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), precision)
    lengths = (config.data.sequence_length,)
    objective = build_objective(config.objective, config.model, None, lengths, config.data.images)
    embedding = config.model.embedding
    layout = PatchLayout(embedding.patch_size, 3, embedding.n_special_tokens)
    images = [layout.build(image.permute(1, 2, 0).numpy()) for image in pixels]
    batch = {name: torch.stack([torch.tensor(image[name]) for image in images]) for name in images[0]}
    length = batch["grid"].shape[1]
    batch["labels"] = torch.full((rows, length), -100)
    batch["labels"][:, 0] = labels
    batch["positions"] = torch.arange(length).expand(rows, length).contiguous()
    batch["documents"] = torch.zeros(rows, length, dtype=torch.int64)
    arrays: dict[str, Any] = {name: values.numpy() for name, values in batch.items()}
    arrays["keys"] = torch.arange(rows).numpy()

    def step() -> float:
        stats = engine.forward_backward([arrays], objective)
        engine.step(LR, CLIP)
        return stats.loss

    return step


def serve_steps(job: argparse.Namespace) -> None:
    """Take a step for each line read."""
    torch.set_num_threads(job.threads)
    for schema in MISSING:  # transformers, too, imports torchvision where it is there
        LIBRARY.define(schema)
    keep_freed_memory(torch.device("cpu"))
    torch.manual_seed(0)
    pixels = torch.randint(256, (job.rows, 3, SIZE, SIZE)).to(torch.uint8)
    labels = torch.randint(1000, (job.rows,))
    with distributed.distributed_session(600, "cpu", 600):
        if job.side == "megatfm":
            side = make_side(make_megatfm_step(job, pixels, labels, job.precision))
        else:
            side = make_side(
                make_peer_step(job.side, load_config(job.preset).model, pixels, labels, job.precision)
            )
        for _ in sys.stdin:
            print(json.dumps(side()), flush=True)


def main() -> None:
    """Run what the arguments ask for; print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--preset", default="vit-s16")
    parser.add_argument("--rounds", type=int, default=10, help="of each pair of processes")
    parser.add_argument("--pairs", type=int, default=1, help="of processes, one after the other")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4, help="images of a step")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument(
        "--theirs", nargs="+", default=["transformers", "timm"], choices=["transformers", "timm"]
    )
    parser.add_argument("--set", nargs="*", default=[], help="settings of ours that are not the preset's")
    parser.add_argument("--out", type=common.make_output_file)
    parser.add_argument("--job", help="what a process is to do, in JSON: for the script itself")
    args = parser.parse_args()
    if args.job:
        serve_steps(argparse.Namespace(**json.loads(args.job)))
        return
    page = common.Page(
        args.out,
        f"# A whole step of {args.preset}, {common.today()}",
        "",
        f"torch {torch.__version__}, {get_cpu_name(instructions=True)}, {args.threads} threads, {args.rows} images of "
        f"{SIZE} × {SIZE}, {args.pairs} pairs of processes, {args.rounds} rounds each"
        f"{', ' + ' '.join(args.set) if args.set else ''}; `python benchmarks/vision.py`, whose head says how it is "
        "measured.",
        "",
        "| Precision | Theirs | Theirs / ours, clock | lowest – highest | Theirs / ours, CPU |",
        "|---|---|---|---|---|",
    )
    for precision in args.precisions:
        for side in args.theirs:
            job = {**vars(args), "precision": precision, "out": None}
            jobs = {**job, "side": "megatfm"}, {**job, "side": side}
            figures, _ = common.compare_processes(__file__, *jobs, args.pairs, args.rounds)
            page.add(
                f"| {precision} | {side} | **{figures['wall']:.2f}** | {figures['wall_lowest']:.2f} – "
                f"{figures['wall_highest']:.2f} | {figures['cpu']:.2f} |"
            )


if __name__ == "__main__":
    main()
