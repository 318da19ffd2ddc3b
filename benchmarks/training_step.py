"""Whole training steps, against a GPT in plain PyTorch and against image models of transformers and timm.

    python benchmarks/training_step.py gpt2 --rounds 10 --threads 2 --out benchmarks/results/DATE-whole-step.md
    python benchmarks/training_step.py images --preset vit-s16 --out benchmarks/results/DATE-vision-step.md

Forward, backward, clipping and AdamW. Ours is the engine as `megatfm train` builds it from the preset, in
a process that keeps what it frees, as training does; theirs is a plain script with scaled_dot_product_attention,
autocast for bfloat16, clip_grad_norm_ and fused AdamW, in a process of its own: "plain" as Python starts it, "alike"
keeping what it frees, too. Same sizes, inputs, threads; no dropout, stochastic depth or label smoothing on either side.
Steps are interleaved, one process waiting for the other, and sides alternate who goes first. There are several pairs of
processes, since two processes of the same code differ. Seconds are wall seconds and CPU seconds over all threads.
Absolute times mean nothing, except for the first step, which compiles.

gpt2: GPT-2 124M with the defaults, against the model below. images: ViT's, swin-t, swinv2-t, mvitv2-t (which
transformers lacks), uint8 pixels that each side normalises, against transformers' class and timm's model of the same
sizes. timm needs torchvision, which is asked for nothing here: the operators whose absence stops its import beside a
CPU torch are declared. `TARGETS` says what is expected of one H100, in images a second, by `--device cuda --rows 128
--precisions bf16 --set train.compile=true`. It was written before a GPU was there, and nothing of it is measured.

A figure is the median over all rounds of (their seconds / our seconds): above 1, megatfm is faster.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import Config, PatchEmbeddingConfig, Windows2dPatternConfig, load_config, require_variant
from megatfm.data.images import PatchLayout
from megatfm.data.loader import without_documents
from megatfm.objectives import Causal, Objective, SpecialTokens, build_objective
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.process_state import keep_freed_memory

CLIP = 1.0


class Recipe(NamedTuple):
    lr: float
    betas: tuple[float, float]
    weight_decay: float


GPT2_RECIPE, IMAGE_RECIPE = Recipe(6e-4, (0.9, 0.95), 0.1), Recipe(1e-3, (0.9, 0.999), 0.05)


def make_plain_step(
    model: nn.Module, compute_loss: Callable[[], Tensor], recipe: Recipe, device: str, precision: str
) -> common.Step:
    """Return a step as in a short training script."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = compute_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make_engine_step(
    config: Config, objective: Objective, batch: Mapping[str, Any], recipe: Recipe, device: str, precision: str
) -> common.Step:
    """Return a step of the engine that `megatfm train` builds, on rows like the loader's."""
    engine = build_engine(config, build_mesh(config.parallel, 1, device), torch.device(device), precision)
    arrays = {**batch, "keys": torch.arange(config.train.micro_batch).numpy()}

    def step() -> float:
        stats = engine.forward_backward([arrays], objective)
        engine.step(recipe.lr, CLIP)
        return stats.loss

    return step


def serve_steps(job: argparse.Namespace) -> None:
    """Take a step for each line of stdin, and print its seconds."""
    torch.set_num_threads(job.threads)
    if job.memory == "alike":
        keep_freed_memory(torch.device(job.device))
    torch.manual_seed(0)
    with distributed.distributed_session(600, job.device, 600):
        side = common.make_side(make_gpt2_step(job) if job.preset == GPT2 else make_image_step(job))
        for _ in sys.stdin:
            print(json.dumps(side()), flush=True)


def step_arguments(*, pairs: int, threads: int, rows: int) -> Callable[[common.Run], common.Run]:
    """Decorate a part with the arguments of whole steps, with its own defaults."""
    arguments = [
        common.argument("--rounds", type=int, default=10, help="of each pair of processes"),
        common.argument("--pairs", type=int, default=pairs, help="of processes, one after the other"),
        common.argument("--threads", type=int, default=threads),
        common.argument("--rows", type=int, default=rows, help="rows or images of a step"),
        common.argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]),
        common.argument("--memory", nargs="+", default=["plain", "alike"], choices=["plain", "alike"]),
        common.argument("--set", nargs="*", default=[], help="settings of ours that are not the preset's"),
        common.argument("--out", type=common.make_output_file),
    ]

    def declare(run: common.Run) -> common.Run:
        for add in reversed(arguments):
            add(run)
        return run

    return declare


def make_page(args: argparse.Namespace, inputs: str) -> common.Page:
    return common.Page(
        args.out,
        f"A whole step of {args.preset}",
        f"torch {torch.__version__}, {common.get_cpu_name(instructions=True)}, {args.threads} threads, {inputs}, "
        f"{args.pairs} pairs of processes, {args.rounds} rounds each{', ' + ' '.join(args.set) if args.set else ''}; "
        "`python benchmarks/training_step.py`, whose head says how it is measured.",
        table=(
            "| Precision | | Theirs | Memory | Theirs / ours, clock | lowest – highest | Theirs / ours, CPU | "
            "First step, s |"
        ),
    )


def add_rows(page: common.Page, args: argparse.Namespace, states: list[str], peers: list[str]) -> None:
    for precision, state, peer, memory in itertools.product(args.precisions, states, peers, args.memory):
        job = {**make_job(args, precision), "state": state}
        jobs = {**job, "side": "megatfm", "memory": "alike"}, {**job, "side": peer, "memory": memory}
        figures, first = common.compare_processes(__file__, *jobs, args.pairs, args.rounds)
        page.add(
            f"| {precision} | {state} | {peer} | {memory} | **{figures['wall']:.2f}** | {figures['wall_lowest']:.2f} – "
            f"{figures['wall_highest']:.2f} | {figures['cpu']:.2f} | {first[0]:.0f} / {first[1]:.0f} |"
        )


def make_job(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return what a process of a part is to do, but for its side."""
    return {**vars(args), "precision": precision, "out": None, "run": None}


# ----------------------------------------------------------------------------------------------------------- gpt2

GPT2 = "gpt2-124m"
VOCABULARY, WIDTH, LAYERS, HEADS = 50257, 768, 12, 12


class PlainBlock(nn.Module):
    """A block as GPT-2's: normalised before attention and feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Learned positions, tied head, the loss by F.cross_entropy."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks, self.norm = nn.ModuleList(PlainBlock() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def make_gpt2_step(job: argparse.Namespace) -> common.Step:
    drawn = torch.randint(0, VOCABULARY, (job.rows, job.length + 1))
    tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    is_compiled = job.state == "compiled"
    if job.side != "megatfm":
        model = PlainGPT(job.length)
        run = torch.compile(model) if is_compiled else model
        return make_plain_step(model, lambda: run(tokens, targets), GPT2_RECIPE, "cpu", job.precision)
    quiet = ["model.dropout=0", "model.attention.dropout=0", *(["train.compile=true"] if is_compiled else [])]
    lengths = [f"model.position.max_positions={job.length}", f"data.sequence_length={job.length}"]
    rows = [f"train.micro_batch={job.rows}", f"train.global_batch={job.rows}"]
    config = load_config(GPT2, [*quiet, *lengths, *rows, *job.set])
    batch = {"tokens": tokens.numpy(), "targets": targets.numpy()}
    objective = Causal(SpecialTokens(bos=1, eos=2, pad=0))
    return make_engine_step(config, objective, batch, GPT2_RECIPE, "cpu", job.precision)


@step_arguments(pairs=3, threads=2, rows=2)
@common.argument("--length", type=int, default=512)
@common.argument("--states", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
def run_gpt2(args: argparse.Namespace) -> None:
    args.preset, args.device = GPT2, "cpu"
    add_rows(make_page(args, f"{args.rows} rows of {args.length} tokens"), args, args.states, ["PyTorch"])


# --------------------------------------------------------------------------------------------------------- images

TARGETS = {"vit-s16": 7_500, "swin-t": 4_500}
"""Preset → images a second of ours that are expected of an H100, in bfloat16 with compiled blocks."""
TIMM_NAMES = {
    "swin-t": "swin_tiny_patch4_window7_224", "swinv2-t": "swinv2_tiny_window8_256", "mvitv2-t": "mvitv2_tiny",
}  # fmt: skip


def get_patch_embedding(config: Config) -> PatchEmbeddingConfig:
    return require_variant(config.model.embedding, PatchEmbeddingConfig, "model.embedding")


def build_transformers_model(config: Config) -> nn.Module:
    """Build transformers' model as a module from pixel values to logits. Raises SystemExit if it has none."""
    import transformers

    model, embedding = config.model, get_patch_embedding(config)
    options: dict[str, Any] = {
        "image_size": config.data.images.size, "patch_size": embedding.patch_size, "num_labels": 1000,
    }  # fmt: skip
    if model.stages is None:
        options |= {"layer_norm_eps": model.norm.eps, "attn_implementation": "sdpa"}
        network = transformers.ViTForImageClassification(transformers.ViTConfig(
            hidden_size=model.d_model, num_hidden_layers=model.n_layers, num_attention_heads=model.attention.n_heads,
            intermediate_size=model.ffn.d_ff, **options,
        ))  # fmt: skip
    elif isinstance(model.attention.pattern, Windows2dPatternConfig):
        kind = "Swinv2" if model.position.name == "log_relative_2d" else "Swin"
        settings = getattr(transformers, f"{kind}Config")(
            embed_dim=model.d_model, depths=list(model.stages.n_layers), num_heads=list(model.stages.n_heads),
            window_size=model.attention.pattern.window, drop_path_rate=0.0, **options,
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
        img_size=config.data.images.size, patch_size=get_patch_embedding(config).patch_size, embed_dim=model.d_model,
        depth=model.n_layers, num_heads=model.attention.n_heads, mlp_ratio=model.ffn.d_ff / model.d_model,
        num_classes=1000,
    ).train()  # fmt: skip


def make_image_step(job: argparse.Namespace) -> common.Step:
    common.declare_torchvision_operators()  # transformers, too, imports torchvision where it is there
    config = load_config(job.preset)
    size = config.data.images.size
    pixels = torch.randint(256, (job.rows, 3, size, size)).to(torch.uint8)
    labels = torch.randint(1000, (job.rows,))
    if job.side == "megatfm":
        return make_megatfm_image_step(job, pixels, labels)
    network = {"transformers": build_transformers_model, "timm": build_timm_model}[job.side](config).to(job.device)
    pixels, labels, embedding = pixels.to(job.device), labels.to(job.device), get_patch_embedding(config)
    mean, std = (torch.tensor(v, device=job.device)[:, None, None] for v in (embedding.mean, embedding.std))

    def compute_loss() -> Tensor:
        return F.cross_entropy(network((pixels / 255 - mean) / std).float(), labels)

    return make_plain_step(network, compute_loss, IMAGE_RECIPE, job.device, job.precision)


def make_megatfm_image_step(job: argparse.Namespace, pixels: Tensor, labels: Tensor) -> common.Step:
    """Return our step on rows like the loader's."""
    rows = len(pixels)
    quiet = ["model.drop_path=0", "model.extra_heads.classifier.label_smoothing=0", "data.images.mixup=0"]
    sizes = [f"train.micro_batch={rows}", f"train.global_batch={rows}", "data.images.cutmix=0"]
    config = load_config(job.preset, [*quiet, *sizes, *job.set])
    lengths = (config.data.sequence_length,)
    objective = build_objective(config.objective, config.model, None, lengths, config.data.images)
    embedding = get_patch_embedding(config)
    layout = PatchLayout(embedding.patch_size, 3, embedding.n_special_tokens)
    images = [layout.build(image.permute(1, 2, 0).numpy()) for image in pixels]
    batch = {name: torch.stack([torch.tensor(image[name]) for image in images]) for name in images[0]}
    length = batch["grid"].shape[1]
    batch["labels"] = torch.full((rows, length), -100)
    batch["labels"][:, 0] = labels
    batch["positions"] = torch.arange(length).expand(rows, length).contiguous()
    batch["documents"] = torch.zeros(rows, length, dtype=torch.int64)
    arrays: dict[str, Any] = without_documents({name: values.numpy() for name, values in batch.items()})
    return make_engine_step(config, objective, arrays, IMAGE_RECIPE, job.device, job.precision)


def measure_rate(job: dict[str, Any]) -> str:
    """Measure our images a second alone, beside what is expected of an H100."""
    side = common.SideProcess(__file__, {**job, "side": "megatfm", "memory": "alike"})
    seconds = statistics.median(side()["wall"] for _ in range(job["rounds"]))
    side.close()
    target = f" (expected of an H100: {TARGETS[job['preset']]:,})" if job["preset"] in TARGETS else ""
    return f"Ours alone, {job['precision']}: {job['rows'] / seconds:,.1f} images/s{target}."


@step_arguments(pairs=1, threads=1, rows=4)
@common.argument("--preset", default="vit-s16")
@common.argument("--device", default="cpu", choices=["cpu", "cuda"])
@common.argument("--theirs", nargs="+", default=["transformers", "timm"], choices=["transformers", "timm"])
def run_images(args: argparse.Namespace) -> None:
    size = load_config(args.preset).data.images.size
    page = make_page(args, f"{args.rows} images of {size} × {size}")
    add_rows(page, args, ["eager"], args.theirs)
    page.add("", *(measure_rate(make_job(args, precision)) for precision in args.precisions))


PARTS = {"gpt2": run_gpt2, "images": run_images}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        serve_steps(argparse.Namespace(**json.loads(sys.argv[2])))
    else:
        common.run_part(__doc__, PARTS)
