"""The sections of a training config. Every field says what it means; `megatfm config schema` prints them."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.base import PathStr, Section
from megatfm.config.data import DataConfig as DataConfig


class ParallelConfig(Section):
    """The layout: the product of all axes is the number of processes."""

    dp_replicate: PositiveInt = 1
    """Data-parallel replicas, each holding a whole copy of its shards (with dp_shard > 1: HSDP)."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Data-parallel ranks over which parameters, gradients and optimizer state are sharded; -1: all that are left."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    sequence_parallel: bool = True
    """With tp > 1, keep norms and residuals on shards of the sequence."""
    pp: PositiveInt = 1
    """Pipeline stages (reserved: only 1 yet)."""
    cp: PositiveInt = 1
    """Context-parallel ranks (reserved: only 1 yet)."""
    ep: PositiveInt = 1
    """Expert-parallel ranks (reserved: only 1 yet)."""

    @model_validator(mode="after")
    def _reserved(self) -> Self:
        for axis in ("pp", "cp", "ep"):
            if getattr(self, axis) != 1:
                raise ValueError(
                    f"{axis} = {getattr(self, axis)}: this axis is not there yet: use {axis} = 1 with tp or dp_shard"
                )
        if self.dp_shard == 0:
            raise ValueError("dp_shard = 0: choose -1 (all ranks that are left) or a positive number")
        return self


class TrainConfig(Section):
    """The run: how long, in what batches, from what seed, on what."""

    steps: PositiveInt = Field(examples=[1000])
    """Optimizer steps."""
    global_batch: PositiveInt = Field(examples=[32])
    """Rows per step, over all ranks."""
    micro_batch: PositiveInt = Field(examples=[8])
    """Rows that a rank takes through the model at once; the rest of its share is accumulated."""
    seed: NonNegativeInt = 0
    """Seed of initial weights and of the sample order."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Arithmetic of the model; weights and optimizer stay in float32 under bf16. auto: bf16 where it is faster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    compile: bool = False
    """Compile each block with torch.compile."""
    init_from: PathStr | None = None
    """Start from the weights (only) of this run or checkpoint."""
    hang_seconds: PositiveFloat = 600.0
    """When a rank hasn't moved for so long, all end and name it; a step, an evaluated batch, a save and the start
    must each take less."""


class CheckpointConfig(Section):
    """When the whole state is saved, and how much of it is kept."""

    every: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""


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

    every: PositiveInt = 10
    """Steps between lines on the screen and in the log; metrics hold every step."""
    sinks: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Where metrics go besides metrics.jsonl: tensorboard, wandb."""
    wandb_project: str = "megatfm"
    """Project name for the wandb sink."""
    profile: str | None = Field(default=None, pattern=r"^\d+:\d+$", examples=["10:13"])
    """Write a torch profile of these steps, first:end (end not included), into the run directory."""
