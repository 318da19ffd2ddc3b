"""The sections of a training config. Every field says what it means; `megatfm config schema` prints them."""

from math import prod
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.base import MAX_LENGTH, MAX_WIDTH, PathStr, Section, nearest_divisor
from megatfm.config.data import DataConfig as DataConfig


class ParallelConfig(Section):
    """The layout: the product of all axes is the number of processes."""

    engine: str = Field(default="native", min_length=1)
    """Who carries out the steps: "native", "deepspeed", or the name of a plugin's engine."""
    dp_replicate: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Data-parallel replicas, each holding a whole copy of its shards (with dp_shard > 1: HSDP)."""
    dp_shard: int = Field(default=-1, ge=-1, le=MAX_WIDTH)
    """Data-parallel ranks over which a ZeRO stage shards; -1: all that are left."""
    zero: Literal[0, 1, 2, 3] = 3
    """What is sharded over dp_shard: 1: optimizer state, 2: gradients too, 3: parameters too; 0: nothing."""
    grad_accumulation: Literal["unsharded", "sharded"] = "unsharded"
    """With several micro-batches a step: keep whole gradients, reduced once, or with zero = 2 or 3 only shards of them,
    reduced after each micro-batch: less memory, more traffic."""
    reduce_dtype: Literal["param", "bf16"] = "param"
    """Type in which gradients are summed over data ranks; full: the weights' own. bf16 sends half of it, and each rank
    rounds what it has added up over its micro-batches."""
    fsdp_prefetch: NonNegativeInt | None = None
    """With zero = 2 or 3: blocks ahead of the running one whose weights are asked for before it runs; 0: torch asks
    when a block's turn comes, and one ahead in the backward pass; left out: 1 on GPUs, else 0. Each takes its gathered
    weights of memory."""
    comm_buffers: Literal["torch", "process_group"] = "torch"
    """With zero = 2 or 3: who allocates what gathering and scattering send; "process_group": the process group
    itself, where it
    can (NCCL on a switch that computes), so that the network takes it without a copy."""
    tp: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Tensor-parallel ranks."""
    sequence_parallel: bool = True
    """With tp > 1, keep norms and residuals on shards of the sequence."""
    async_tp: bool = False
    """With sequence_parallel and train.compile, on the GPUs of one machine: what tensor-parallel ranks send goes in
    pieces, each under way while products of the piece before are made."""
    pp: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Pipeline ranks, each with its share of the layers."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"] = (
        "1f1b"
    )
    """Order in which pipeline ranks take micro-batches forward and backward."""
    virtual_stages: PositiveInt | None = None
    """Stages on each pipeline rank of an interleaved schedule; left out: 2."""
    pp_split_points: list[str] = Field(default_factory=list, examples=[["decoder.layers.5"]])
    """Steps of the model with which all pipeline stages but the first begin; left out: where costs are most equal."""
    cp: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Context-parallel ranks, each with its part of every row."""
    cp_method: Literal["auto", "ring", "ulysses"] = "auto"
    """How full attention looks across parts: "ring": keys and values go round, or are fetched where documents leave
    less than half to send; "heads": ranks exchange tokens for heads, each has all tokens of some (Ulysses); auto: heads
    where it can and sends less."""
    ep: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Ranks of dp_shard × cp among which experts are divided, and which send each other tokens; divides their product.
    """
    expert_tp: Literal["by_expert", "by_channel", "folded"] = "by_expert"
    """What tensor-parallel ranks do with experts: "by_expert": each has some of them; "by_channel": each has a part
    of every
    one's inner channels; "folded": they are among the ranks that `ep` divides, each with its own tokens."""

    @model_validator(mode="after")
    def _pipeline(self) -> Self:
        fixed = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(self.pp_schedule)
        if fixed and self.virtual_stages not in (None, fixed):
            raise ValueError(
                f"virtual_stages = {self.virtual_stages}: pp_schedule = {self.pp_schedule!r} has {fixed} on "
                f"each rank: leave "
                "it out, or use pp_schedule = 'interleaved'"
            )
        if self.pp_split_points and self.pp == 1:
            raise ValueError("pp_split_points are for pipeline stages, and pp = 1: leave them out")
        return self

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank."""
        if self.pp_schedule in ("gpipe", "1f1b"):
            return 1
        return self.virtual_stages or 2

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.pp_schedule in ("interleaved-zero-bubble", "zbv", "dualpipev")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.grad_accumulation == "sharded" and self.zero < 2:
            raise ValueError(
                f"grad_accumulation = 'sharded': zero = {self.zero} doesn't shard gradients: use zero = 2 or 3, or "
                "grad_accumulation = 'unsharded'"
            )
        if self.reduce_dtype == "bf16" and self.zero >= 2 and self.grad_accumulation == "unsharded":
            raise ValueError(
                f"reduce_dtype = 'bf16': zero = {self.zero} would add micro-batches up in it, too: set "
                f"grad_accumulation = "
                "'sharded', or zero = 0 or 1"
            )
        axes = {key: getattr(self, key) for key in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
        if (ranks := abs(prod(axes.values()))) > MAX_WIDTH:
            raise ValueError(
                f"{' × '.join(key for key, size in axes.items() if size > 1)} are {ranks} processes: choose sizes "
                f"whose product is at most {MAX_WIDTH}"
            )
        if self.dp_shard == 0:
            raise ValueError("dp_shard = 0: choose -1 (all ranks that are left) or a positive number")
        if self.async_tp and not (self.tp > 1 and self.sequence_parallel):
            why = "tp = 1" if self.tp == 1 else "without sequence_parallel they add up whole tensors"
            raise ValueError(
                f"async_tp = true is for tensor-parallel ranks that gather and scatter tokens, and {why}: leave it "
                "out, or set tp = 2 or more and sequence_parallel = true"
            )
        self._folds_experts()
        return self

    def _folds_experts(self) -> None:
        if self.expert_tp != "by_expert" and self.tp == 1:
            raise ValueError(
                f"expert_tp = {self.expert_tp!r} is for tensor-parallel ranks, and tp = 1: leave it out"
            )
        if self.expert_tp == "folded" and not self.sequence_parallel:
            raise ValueError(
                "expert_tp = 'folded': without sequence_parallel, ranks of tp have no tokens of their own to send: set "
                "sequence_parallel = true, or expert_tp = 'by_channel'"
            )
        if self.expert_tp == "folded" and self.ep == 1:
            raise ValueError(
                f"expert_tp = 'folded' divides experts among ranks of ep, and ep = 1: set ep = {self.tp}, or leave it "
                "out"
            )
        if self.expert_mesh_size > 0 and self.expert_mesh_size % self.ep:
            axes = [
                "dp_shard",
                *(["cp"] if self.cp > 1 else []),
                *(["tp"] if self.expert_tp == "folded" else []),
            ]
            raise ValueError(
                f"ep = {self.ep} does not divide {' × '.join(axes)} = {self.expert_mesh_size}, over which "
                "experts lie: the "
                f"nearest that does is {nearest_divisor(self.expert_mesh_size, self.ep)}"
            )

    @property
    def expert_mesh_size(self) -> int:
        """How many ranks `ep` divides; negative where dp_shard is left open."""
        return self.dp_shard * self.cp * (self.tp if self.expert_tp == "folded" else 1)


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
    """Checkpoints of steps that this divides are kept for ever. 0: none is."""
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
    """What a resumed run may change against the run that it continues."""

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


class LogConfig(Section):
    """What is written down while training."""

    @model_validator(mode="after")
    def _profiles_a_step(self) -> Self:
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
    """Where metrics go besides metrics.jsonl: tensorboard, wandb."""
    wandb_project: str = "megatfm"
    """Project name for the wandb sink."""
    layer_stats_every: NonNegativeInt = 0
    """Steps between records of each layer's root mean square weight, gradient and (but with train.compile) activation.
    0: none."""
    profile: str | None = Field(default=None, pattern=r"^\d+:\d+$", examples=["10:13"])
    """Write a torch profile of these steps, first:end (end not included), into the run directory."""
    memory_snapshot: bool = False
    """On GPUs, remember which line of Python each block of memory comes from, for the snapshot of a run that runs out
    of it. Such a run does so by itself when it is started again."""
