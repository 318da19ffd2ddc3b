"""Sections of a run: `[train]`, `[checkpoint]`, `[resume]`, `[evaluate]`, `[log]` and `[resilience]`."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.parts import PartName
from megatfm.config.section import MAX_LENGTH, PathStr, Section


class TrainConfig(Section):
    """The training run: steps, batches, seed, precision, device and initial weights."""

    steps: PositiveInt = Field(examples=[1000], le=2**53)
    """Optimizer steps."""
    global_batch: PositiveInt = Field(examples=[32], le=MAX_LENGTH)
    """Rows per step, over all ranks."""
    micro_batch: PositiveInt = Field(examples=[8], le=MAX_LENGTH)
    """Rows of a rank's forward pass; gradients of several micro-batches are accumulated."""
    seed: NonNegativeInt = Field(default=0, le=2**63 - 1)
    """Seed of initial weights and of the sample order."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64", "fp8", "fp8-tensorwise"] = "auto"
    """Compute precision. Weights and optimizer stay in float32 under bf16, fp8 and fp16; fp16 scales the loss. fp8:
    bf16 with the matrix multiplications of inner blocks in 8 bits, scaled by rows; fp8-tensorwise: by tensors. auto:
    bf16 if it is faster than fp32 (measured on CPUs; on GPUs from Ampere on)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    compile: bool | Literal["auto", "autotune"] = "auto"
    """Compile each block with torch.compile. auto: on GPUs, unless it is refused. autotune: choose kernels by timing
    them, for minutes at the start."""
    cuda_graphs: bool = False
    """Record forward and backward pass of a micro-batch as a CUDA graph for each of its shapes. For a small model on
    one GPU, launching thousands of kernels takes longer than running them."""
    recompute: str = Field(
        default="none", pattern=r"^(none|full|selective|\d+(\.\d+)? ?[kMG]B|\d{1,2} ?%)$", examples=["2 GB", "50 %"]
    )
    """Activations that the backward pass recomputes. full: all of a block but its input. selective: the cheap ones. A
    size: complete blocks, after the blocks before them keep this much. A share, with compile: the cheapest, until a
    block keeps at most this share. none."""
    init_from: PathStr | None = None
    """Start from the weights (only) of this run or checkpoint, which must have all of the model's."""
    init_include: list[str] = Field(default_factory=list, examples=[["decoder.*"]])
    """Patterns of the names of weights that `init_from` sets; the others are drawn. Left out, all."""
    branch_from: PathStr | None = Field(default=None, examples=["runs/mine@1000"])
    """Continue from a checkpoint of another run, `RUN@STEP`, with its optimizer and position in the data."""
    freeze: list[str] = Field(default_factory=list, examples=[["decoder.layers.*"]])
    """Patterns of the names of frozen weights: no gradient, no optimizer state, no decay."""
    patience: NonNegativeInt = 0
    """Evaluations in a row without a better result on the first validation set, after which the run ends; its best
    checkpoint is kept. The result is task.metric, or the loss without a task. 0: never end early."""
    gc_every: NonNegativeInt = 50
    """Steps between collections of Python's garbage, which all ranks do at the same step. 0: whenever Python starts
    one, on each rank at another time."""
    hang_seconds: PositiveFloat = 600.0
    """Seconds without progress of a rank, after which all ranks end and name it; a step, an evaluated batch, a save and
    the start must each take less."""

    @model_validator(mode="after")
    def _check_init_sources(self) -> Self:
        if self.init_include and self.init_from is None:
            raise ValueError("init_include chooses among the weights of train.init_from: give that, or leave it out")
        if self.init_from and self.branch_from:
            raise ValueError("init_from takes weights, branch_from weights, optimizer and data: give one of the two")
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
    """Times and places of checkpoints, and which of them are kept."""

    every: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept, besides the last one that a resume has verified byte by byte."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps divisible by this are never removed. 0: all may be removed."""
    mode: Literal["async", "sync"] = "async"
    """async: training continues while a copy of the state is written, in extra memory. sync: it waits."""
    verify_after_write: bool = False
    """Read every file from the disk again, and compare it, before a checkpoint counts."""
    local_dir: str = Field(default="", examples=["/local/scratch", "$TMPDIR"])
    """A folder on each node's local disk, for frequent saves; each node's files are also sent to the next node. Empty:
    none."""
    local_every: NonNegativeInt = 0
    """Steps between saves to `local_dir`. 0: none."""

    @model_validator(mode="after")
    def _check_local(self) -> Self:
        if (not self.local_dir) != (self.local_every == 0):
            raise ValueError("local_dir and local_every go together: give both, or neither")
        return self


class ResumeConfig(Section):
    """Settings that may change on resume."""

    allow: list[Literal["data", "tokenizer", "seed", "schedule", "optimizer", "model", "batch"]] = Field(
        default_factory=list
    )
    """Groups of settings that may change on resume; any other change is refused with a diff."""


class EvaluateConfig(Section):
    """Evaluation on the validation corpora."""

    every: NonNegativeInt = 0
    """Steps between evaluations; the last step is always evaluated. 0: only the last step."""
    max_rows: NonNegativeInt = 0
    """Number of first rows of each set that are evaluated; 0: all."""
    position_buckets: NonNegativeInt = 0
    """Number of parts of the row whose losses are also reported, each on the first 1/N of these rows; 0: none."""
    sample_prompts: list[str] = Field(default_factory=list, examples=[["Once upon a time"]])
    """Prompts that are continued at each evaluation, for the log and the report."""
    sample_tokens: PositiveInt = 64
    """Maximal new tokens of a prompt."""
    tasks: dict[str, PathStr] = Field(default_factory=dict, examples=[{"questions": "questions.toml"}])
    """Name → file of multiple-choice or cloze tasks that are also evaluated (see `megatfm evaluate --task`): bits per
    byte of the right answers, and accuracies."""


class LogConfig(Section):
    """Records written while training."""

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if repeated := [name for name in self.sinks if self.sinks.count(name) > 1]:
            raise ValueError(f"sinks = {self.sinks} names {repeated[0]!r} twice: name it once")
        return self

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
    sinks: Annotated[list[str], PartName("log sink", ("tensorboard", "wandb"))] = Field(
        default_factory=lambda: ["tensorboard"]
    )
    """Sinks of metrics besides metrics.jsonl: tensorboard, wandb."""
    wandb_project: str = "megatfm"
    """Project name for the wandb sink."""
    layer_stats_every: NonNegativeInt = 0
    """Steps between records of each layer's root mean square weight, gradient and (without train.compile) activation.
    0: none."""
    loss_by_source: bool = True
    """Record the training loss of each corpus of a mixture, too."""
    profile: str | None = Field(default=None, pattern=r"^\d+:\d+$", examples=["10:13"])
    """Write a torch profile of these steps, first:end (end not included), into the run directory."""
    memory_snapshot: bool = False
    """Record which line of Python allocated each block of memory, on GPUs, for the snapshot of a run that runs out of
    it. Such a run does so automatically when it is started again."""


class ResilienceConfig(Section):
    """Checks before and during training, and the reaction to their failure."""

    preflight: bool = True
    """Test the disk, the memory and a collective on every axis before the first step."""
    elastic: bool = False
    """Use the nearest layout and micro-batch that fit the number of processes, if the configured ones don't."""
    max_failures: PositiveInt = 3
    """Restarts in a row without a new checkpoint after which a run gives up (exit 76), under torchrun's agent."""
    max_skipped: NonNegativeInt = 10
    """Steps in a row that may be skipped because loss or gradient is not finite; one more ends the run."""
    spike: Literal["off", "report", "rollback"] = "report"
    """A loss spike: report it, or also go back to the last checkpoint and skip the data since then."""
    spike_score: PositiveFloat = 10.0
    """Score from which a loss is a spike: (loss − median) / (1.4826 · median absolute deviation) of the last steps."""
    spike_window: Annotated[int, Field(ge=16)] = 128
    """Number of last steps in the score; nothing counts as a spike before a quarter of them are done."""
    max_rollbacks: PositiveInt = 3
    """Maximal rollbacks to one checkpoint; one more ends the run."""
    replay_every: NonNegativeInt = 0
    """Steps between checks that compute the gradients twice and compare them bit for bit. 0: never."""
    compare_replicas_every: NonNegativeInt = 0
    """Steps between comparisons of hashes of weights and optimizer state over ranks that hold the same: dp_replicate,
    and at zero = 0 dp_shard and cp. 0: never."""
