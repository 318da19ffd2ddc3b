"""A whole training step of an image model against transformers and timm.

    python benchmarks/vision.py --preset vit-s16 --rows 4 --rounds 10 --out benchmarks/results/DATE-vision.md

Presets: ViT's, swin-t, swinv2-t, mvitv2-t (which transformers lacks). Forward, backward, clipping and AdamW. Ours is
the engine as `megatfm train` builds it from the preset; theirs are transformers' class, with
scaled_dot_product_attention where it has that, and timm's model of the same sizes, with autocast for bfloat16,
clip_grad_norm_ and fused AdamW. Inputs are uint8 pixels that each side normalises. No stochastic depth, no label
smoothing, no compilation. Each side is a process of its own: ours keeps what it frees, as training does; theirs is
"plain" as Python starts it, "alike" keeping what it frees, too. Steps are interleaved, one process waiting for the
other, and sides alternate who goes first. A figure is the median over all rounds of (their seconds / our seconds):
above 1, megatfm is faster. timm needs torchvision, which is asked for nothing here: the operators whose absence stops
its import beside a CPU torch are declared.

`TARGETS` says what is expected of one H100, in images a second, by `--device cuda --rows 128 --precisions bf16 --set
train.compile=true`. It was written before a GPU was there, and nothing of it is measured.
"""

import argparse
import itertools
import json
import statistics
import sys
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import Step, get_cpu_name, make_side
from torch import Tensor, nn

from megatfm.config import Config, load_config
from megatfm.data.images import PatchLayout
from megatfm.data.loader import without_documents
from megatfm.objectives import build_objective
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import keep_freed_memory

LR, CLIP, BETAS, DECAY = 1e-3, 1.0, (0.9, 0.999), 0.05
TARGETS = {"vit-s16": 7_500, "swin-t": 4_500}
"""Preset → images a second of ours that are expected of an H100, in bfloat16 with compiled blocks."""
MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators of torchvision's wheel that a CPU torch doesn't load."""
LIBRARY = torch.library.Library("torchvision", "DEF")
"""Kept alive, since it owns the operators."""


TIMM_NAMES = {
    "swin-t": "swin_tiny_patch4_window7_224",
    "swinv2-t": "swinv2_tiny_window8_256",
    "mvitv2-t": "mvitv2_tiny",
}


def build_transformers_model(config: Config) -> nn.Module:
    """Build transformers' model as a module from pixel values to logits. Raises SystemExit if it has none."""
    import transformers

    model, size = config.model, config.data.images.size
    common = {"image_size": size, "patch_size": model.embedding.patch_size, "num_labels": 1000}
    if model.stages is None:
        network = transformers.ViTForImageClassification(transformers.ViTConfig(
            hidden_size=model.d_model, num_hidden_layers=model.n_layers, num_attention_heads=model.attention.n_heads,
            intermediate_size=model.ffn.d_ff, layer_norm_eps=model.norm.eps, attn_implementation="sdpa", **common,
        ))  # fmt: skip
    elif model.attention.name == "windowed":
        kind = "Swinv2" if model.position.name == "log_relative_2d" else "Swin"
        settings = getattr(transformers, f"{kind}Config")(
            embed_dim=model.d_model, depths=list(model.stages.layers), num_heads=list(model.stages.heads),
            window_size=model.attention.pattern.window, drop_path_rate=0.0, **common,
        )  # fmt: skip
        network = getattr(transformers, f"{kind}ForImageClassification")(settings)
    else:
        raise SystemExit(f"transformers has no {config.name}: leave it out of --theirs")

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.train()

        def forward(self, pixels: Tensor) -> Tensor:
            return self.network(pixel_values=pixels).logits

    return Logits()


def build_timm_model(config: Config) -> nn.Module:
    """Build timm's model as a module from pixel values to logits."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    model = config.model
    if model.stages is not None:
        return timm.create_model(TIMM_NAMES[config.name], drop_path_rate=0.0).train()
    return VisionTransformer(
        img_size=config.data.images.size, patch_size=model.embedding.patch_size, embed_dim=model.d_model,
        depth=model.n_layers, num_heads=model.attention.n_heads, mlp_ratio=model.ffn.d_ff / model.d_model,
        num_classes=1000,
    ).train()  # fmt: skip


def make_peer_step(side: str, config: Config, pixels: Tensor, labels: Tensor, precision: str) -> Step:
    """Return a step as in a plain training script."""
    build = {"transformers": build_transformers_model, "timm": build_timm_model}[side]
    network, device = build(config).to(pixels.device), pixels.device
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    mean, std = (
        torch.tensor(v, device=device)[:, None, None] for v in (config.model.embedding.mean, config.model.embedding.std)
    )

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = network((pixels / 255 - mean) / std)
            loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make_megatfm_step(args: argparse.Namespace, pixels: Tensor, labels: Tensor, precision: str) -> Step:
    """Return a step of the engine that `megatfm train` builds, on rows like the loader's."""
    rows = len(pixels)
    quiet = ["model.drop_path=0", "model.extra_heads.classifier.label_smoothing=0", "data.images.mixup=0"]
    sizes = [f"train.micro_batch={rows}", f"train.global_batch={rows}", "data.images.cutmix=0"]
    config = load_config(args.preset, [*quiet, *sizes, *args.set])
    engine = build_engine(config, build_mesh(config.parallel, 1, args.device), torch.device(args.device), precision)
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
    arrays: dict[str, Any] = without_documents({name: values.numpy() for name, values in batch.items()})
    arrays["keys"] = torch.arange(rows).numpy()

    def step() -> float:
        stats = engine.forward_backward([arrays], objective)
        engine.step(LR, CLIP)
        return stats.loss

    return step


def serve_steps(job: argparse.Namespace) -> None:
    """Take a step for each line of stdin, and print its seconds."""
    torch.set_num_threads(job.threads)
    for schema in MISSING:  # transformers, too, imports torchvision where it is there
        LIBRARY.define(schema)
    if job.memory == "alike":
        keep_freed_memory(torch.device(job.device))
    torch.manual_seed(0)
    size = load_config(job.preset).data.images.size
    pixels = torch.randint(256, (job.rows, 3, size, size)).to(torch.uint8)
    labels = torch.randint(1000, (job.rows,))
    with distributed.distributed_session(600, job.device, 600):
        if job.side == "megatfm":
            side = make_side(make_megatfm_step(job, pixels, labels, job.precision))
        else:
            side = make_side(
                make_peer_step(
                    job.side,
                    load_config(job.preset),
                    pixels.to(job.device),
                    labels.to(job.device),
                    job.precision,
                )
            )
        for _ in sys.stdin:
            print(json.dumps(side()), flush=True)


def measure_rate(job: dict[str, Any]) -> str:
    """Measure our images a second alone, beside what is expected of an H100."""
    side = common.SideProcess(__file__, {**job, "side": "megatfm", "memory": "alike"})
    seconds = statistics.median(side()["wall"] for _ in range(job["rounds"]))
    side.close()
    target = f" (expected of an H100: {TARGETS[job['preset']]:,})" if job["preset"] in TARGETS else ""
    return f"Ours alone, {job['precision']}: {job['rows'] / seconds:,.1f} images/s{target}."


def main() -> None:
    """Run what the arguments ask for; print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--preset", default="vit-s16")
    parser.add_argument("--rounds", type=int, default=10, help="of each pair of processes")
    parser.add_argument("--pairs", type=int, default=1, help="of processes, one after the other")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4, help="images of a step")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--theirs", nargs="+", default=["transformers", "timm"], choices=["transformers", "timm"])
    parser.add_argument("--memory", nargs="+", default=["plain", "alike"], choices=["plain", "alike"])
    parser.add_argument("--set", nargs="*", default=[], help="settings of ours that are not the preset's")
    parser.add_argument("--out", type=common.make_output_file)
    parser.add_argument("--job", help="what a process is to do, in JSON: for the script itself")
    args = parser.parse_args()
    if args.job:
        serve_steps(argparse.Namespace(**json.loads(args.job)))
        return
    size = load_config(args.preset).data.images.size
    page = common.Page(
        args.out,
        f"# A whole step of {args.preset}, {common.today()}",
        "",
        f"torch {torch.__version__}, {get_cpu_name(instructions=True)}, {args.threads} threads, {args.rows} images of "
        f"{size} × {size}, {args.pairs} pairs of processes, {args.rounds} rounds each"
        f"{', ' + ' '.join(args.set) if args.set else ''}; `python benchmarks/vision.py`, whose head says how it is "
        "measured.",
        "",
        "| Precision | Theirs | | Theirs / ours, clock | lowest – highest | Theirs / ours, CPU |",
        "|---|---|---|---|---|---|",
    )
    for precision, side, memory in itertools.product(args.precisions, args.theirs, args.memory):
        job = {**vars(args), "precision": precision, "out": None}
        jobs = {**job, "side": "megatfm", "memory": "alike"}, {**job, "side": side, "memory": memory}
        figures, _ = common.compare_processes(__file__, *jobs, args.pairs, args.rounds)
        page.add(
            f"| {precision} | {side} | {memory} | **{figures['wall']:.2f}** | {figures['wall_lowest']:.2f} – "
            f"{figures['wall_highest']:.2f} | {figures['cpu']:.2f} |"
        )
    page.add("", *(measure_rate({**vars(args), "precision": name, "out": None}) for name in args.precisions))


if __name__ == "__main__":
    main()
