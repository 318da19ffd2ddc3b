"""Sections of a run: `[train]`, `[checkpoint]`, `[resume]`, `[evaluate]`, `[log]` and `[resilience]`."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.section import MAX_LENGTH, PathStr, Section


class TrainConfig(Section):
    """The run: how long, in what batches, from what seed, on what."""

    steps: PositiveInt = Field(examples=[1000], le=2**53)
    """Optimizer steps."""
    global_batch: PositiveInt = Field(examples=[32], le=MAX_LENGTH)
    """Rows per step, over all ranks."""
    micro_batch: PositiveInt = Field(examples=[8], le=MAX_LENGTH)
    """Rows that a rank takes through the model at once; the rest of its share is accumulated."""
    seed: NonNegativeInt = Field(default=0, le=2**63 - 1)
    """Seed of initial weights and of the sample order."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64", "fp8", "fp8-tensorwise"] = "auto"
    """Arithmetic of the model; weights and optimizer stay in float32 under bf16, fp8 and fp16, whose loss is scaled as
    its gradients need it. fp8: bf16 with the products of inner blocks in 8 bits, scaled by rows, or by tensors. auto:
    bf16 where it is faster than fp32: tried on CPUs, and on GPUs from Ampere on."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    compile: bool | Literal["auto", "autotune"] = "auto"
    """Compile each block with torch.compile. auto: on GPUs, wherever it is not refused. autotune: kernels are chosen by
    trying, for minutes at the start."""
    cuda_graphs: bool = False
    """Record forward and backward pass of a micro-batch as a CUDA graph, for each of its shapes: of a small model on
    one GPU, asking for thousands of kernels takes longer than running them."""
    recompute: str = Field(
        default="none",
        pattern=r"^(none|full|selective|\d+(\.\d+)? ?[kMG]B|\d{1,2} ?%)$",
        examples=["2 GB", "50 %"],
    )
    """Activations that the backward pass computes again: "full": all of a block but its input; "selective": what is
    cheap; a size: whole blocks, once those before them in a forward pass keep so much; a share: under compile, what
    costs least until each block keeps no more than that of what it would; "none"."""
    init_from: PathStr | None = None
    """Start from the weights (only) of this run or checkpoint, which must have all of the model's."""
    init_include: list[str] = Field(default_factory=list, examples=[["decoder.*"]])
    """Patterns over names of the weights that `init_from` is for; the others are drawn. Left out, all."""
    branch_from: PathStr | None = Field(default=None, examples=["runs/mine@1000"])
    """Go on from a checkpoint of another run, `RUN@STEP`, with its optimizer and at its place in the data."""
    freeze: list[str] = Field(default_factory=list, examples=[["decoder.layers.*"]])
    """Patterns over names of weights that stay as they are: no gradient, no optimizer state, no decay."""
    patience: NonNegativeInt = 0
    """Evaluations in a row without a better result on the first validation set after which the run ends; its best
    checkpoint is kept. The result is task.metric, or the loss where there is no task. 0: it never ends early."""
    hang_seconds: PositiveFloat = 600.0
    """When a rank hasn't moved for so long, all end and name it; a step, an evaluated batch, a save and the start
    must each take less."""

    @model_validator(mode="after")
    def _check_init_sources(self) -> Self:
        if self.init_include and self.init_from is None:
            raise ValueError(
                "init_include chooses among the weights of train.init_from: give that, or leave it out"
            )
        if self.init_from and self.branch_from:
            raise ValueError(
                "init_from takes weights, branch_from weights, optimizer and data: give one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_recompute(self) -> Self:
        if self.compile not in (False, "auto") and self.recompute.endswith("B"):
            raise ValueError(
                f"recompute = {self.recompute!r}: how much blocks keep is measured while they run, and compile = true "
                "leaves nothing to measure: choose recompute = 'full' or 'selective', or compile = false"
            )
        if self.compile is not True and self.compile != "autotune" and self.recompute.endswith("%"):
            raise ValueError(
                f"recompute = {self.recompute!r}: the compiler chooses what a share of a block's activations is: set "
                "compile = true, or recompute = 'full', 'selective' or a size such as '2 GB'"
            )
        return self


class CheckpointConfig(Section):
    """When the whole state is saved, and how much of it is kept."""

    every: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept, besides the last one of which a resume has compared every byte."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps divisible by this are never removed. 0: none is."""
    mode: Literal["async", "sync"] = "async"
    """async: training goes on while a copy of the state is written; it takes that much memory. sync: it waits."""
    verify_after_write: bool = False
    """Read every file from the disk again, and compare it, before a checkpoint counts."""
    local_dir: str = Field(default="", examples=["/local/scratch", "$TMPDIR"])
    """A folder on each node's own disk, for frequent saves; each node's files also go to the next node. Empty: none."""
    local_every: NonNegativeInt = 0
    """Steps between saves to `local`. 0: none is made there."""

    @model_validator(mode="after")
    def _check_local(self) -> Self:
        if (not self.local_dir) != (self.local_every == 0):
            raise ValueError("local and local_every go together: where, and how often")
        return self


class ResumeConfig(Section):
    """Settings that a resumed run may change against the run that it continues."""

    allow: list[Literal["data", "tokenizer", "seed", "schedule", "optimizer", "model", "batch"]] = Field(
        default_factory=list
    )
    """Groups of settings whose change is accepted on resume; any other change is refused with a diff."""


class EvaluateConfig(Section):
    """Evaluation on the named validation corpora."""

    every: NonNegativeInt = 0
    """Steps between evaluations; the last step is always evaluated. 0: only then."""
    max_rows: NonNegativeInt = 0
    """Rows of each set that are used, from its start; 0: all."""
    position_buckets: NonNegativeInt = 0
    """Stretches of the row whose losses are also reported, each on the first 1/N of these rows; 0: none."""
    sample_prompts: list[str] = Field(default_factory=list, examples=[["Once upon a time"]])
    """Prompts that are continued at each evaluation, for the log and the report."""
    sample_tokens: PositiveInt = 64
    """Tokens that a prompt is continued by, at most."""
    tasks: dict[str, PathStr] = Field(default_factory=dict, examples=[{"questions": "questions.toml"}])
    """Tasks of multiple choice or cloze, name → file, on which the model is evaluated besides (see `megatfm evaluate
    --task`): the bits per byte of the right answers, and accuracies."""


class LogConfig(Section):
    """Records written while training."""

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        first, end = map(int, self.profile.split(":")) if self.profile else (0, 1)
        if first >= end:
            raise ValueError(
                f"profile = {self.profile!r} records no step, as its end is not included: write "
                f"'{first}:{first + 1}' for step {first}"
            )
        return self

    every: PositiveInt = 10
    """Steps between lines on the screen and in the log; metrics hold every step."""
    sinks: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Sinks of metrics besides metrics.jsonl: tensorboard, wandb."""
    wandb_project: str = "megatfm"
    """Project name for the wandb sink."""
    layer_stats_every: NonNegativeInt = 0
    """Steps between records of each layer's root mean square weight, gradient and (but with train.compile) activation.
    0: none."""
    loss_by_source: bool = True
    """Record the training loss of each corpus of a mixture, too."""
    profile: str | None = Field(default=None, pattern=r"^\d+:\d+$", examples=["10:13"])
    """Write a torch profile of these steps, first:end (end not included), into the run directory."""
    memory_snapshot: bool = False
    """On GPUs, remember which line of Python each block of memory comes from, for the snapshot of a run that runs out
    of it. Such a run does so by itself when it is started again."""


class ResilienceConfig(Section):
    """Checks before and during training, and what happens when one fails."""

    preflight: bool = True
    """Before the first step, try the disk, the memory and a collective on every axis."""
    elastic: bool = False
    """Take the nearest layout and micro-batch that fit the number of processes, if the configured ones don't."""
    max_failures: PositiveInt = 3
    """Restarts in a row without a new checkpoint after which a run gives up (exit 76), under torchrun's agent."""
    max_skipped: NonNegativeInt = 10
    """Steps in a row that are skipped because loss or gradient is not finite; one more ends the run."""
    spike: Literal["off", "report", "rollback"] = "report"
    """A loss spike: report it, or also go back to the last checkpoint and skip the data since then."""
    spike_score: PositiveFloat = 10.0
    """Score from which a loss is a spike: (loss − median) / (1.4826 · median absolute deviation) of the last steps."""
    spike_window: Annotated[int, Field(ge=16)] = 128
    """Steps that the score looks back on; before a quarter of them are done, nothing counts as a spike."""
    max_rollbacks: PositiveInt = 3
    """Rollbacks to one checkpoint; one more ends the run."""
    replay_every: NonNegativeInt = 0
    """Every so many steps, compute the gradients twice and compare them bit for bit. 0: never."""
    compare_replicas_every: NonNegativeInt = 0
    """Every so many steps, compare hashes of the weights and the optimizer state over ranks that hold the same:
    dp_replicate, and dp_shard at zero = 0. 0: never."""
