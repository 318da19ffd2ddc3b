"""The `[parallel]` section: the layout, its mesh axes and pipeline schedule."""

from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatfm.config.parts import PartName
from megatfm.config.section import MAX_WIDTH, Section, find_nearest_divisor


class ParallelConfig(Section):
    """The layout: the product of all axes is the number of processes."""

    engine: Annotated[str, PartName("engine", ("native", "deepspeed"))] = Field(default="native", min_length=1)
    """Engine that runs the steps: "native", "deepspeed", or the name of a plugin's engine."""
    dp_replicate: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Data-parallel replicas, each with a copy of all shards (with dp_shard > 1: HSDP)."""
    dp_shard: int = Field(default=-1, ge=-1, le=MAX_WIDTH)
    """Data-parallel ranks over which, with those of cp, a ZeRO stage shards; -1: all remaining ranks."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage, sharded over dp_shard × cp: 1: optimizer state, 2: gradients too, 3: parameters too; 0: nothing."""
    grad_accumulation: Literal["unsharded", "sharded"] = "unsharded"
    """Gradients over several micro-batches. unsharded: kept in full and reduced once. sharded, with zero = 2 or 3:
    reduced to shards after each micro-batch, with less memory and more traffic."""
    reduce_dtype: Literal["param", "bf16"] = "param"
    """Type in which gradients are summed over data ranks. param: the weights'. bf16: half the traffic; each rank rounds
    the sum of its micro-batches."""
    fsdp_prefetch: NonNegativeInt | None = None
    """Number of blocks whose weights are gathered ahead of the running one, each in extra memory, with zero = 2 or 3.
    0: torch gathers a block's weights in its turn, and one block ahead in the backward pass. Left out: 1 on GPUs, else
    0."""
    comm_buffers: Literal["torch", "process_group"] = "torch"
    """Allocator of the buffers of all-gathers and reduce-scatters, with zero = 2 or 3. "process_group": the process
    group, if it supports that (NCCL on a switch that computes), so that the network needs no copy."""
    tp: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Tensor-parallel ranks."""
    sequence_parallel: bool = True
    """Keep norms and residuals on shards of the sequence, with tp > 1."""
    async_tp: bool = False
    """Overlap the traffic of tensor-parallel ranks with matrix multiplications, chunk by chunk: with sequence_parallel
    and train.compile, on the GPUs of one machine."""
    pp: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Pipeline ranks, each with a share of the layers."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"] = "1f1b"
    """Order of the forward and backward passes of micro-batches on pipeline ranks."""
    virtual_stages: PositiveInt | None = None
    """Stages on each pipeline rank of an interleaved schedule; left out: 2."""
    pp_split_points: list[str] = Field(default_factory=list, examples=[["decoder.layers.5"]])
    """First split point of each pipeline stage but the first; left out: stages of about equal cost."""
    cp: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Context-parallel ranks, each with a part of every row."""
    cp_method: Literal["auto", "ring", "ulysses"] = "auto"
    """Communication of full attention. ring: keys and values circulate, or are fetched if documents need less than half
    of them. ulysses: ranks exchange tokens for heads, so that each has all tokens of some heads. auto: ulysses if it is
    possible and sends less."""
    ep: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Ranks of dp_shard × cp over which experts are divided, and which exchange tokens; a divisor of that product."""
    expert_tp: Literal["by_expert", "by_channel", "folded"] = "by_expert"
    """Division of experts over tensor-parallel ranks. by_expert: each has some experts. by_channel: each has a part of
    every expert's inner channels. folded: tensor-parallel ranks are among those that `ep` divides, each with its own
    tokens."""

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        fixed = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(self.pp_schedule)
        if fixed and self.virtual_stages not in (None, fixed):
            raise ValueError(
                f"virtual_stages = {self.virtual_stages}: pp_schedule = {self.pp_schedule!r} has {fixed} on each "
                "rank: leave it out, or use pp_schedule = 'interleaved'"
            )
        if self.pp_split_points and self.pp == 1:
            raise ValueError("pp_split_points are for pipeline stages, and pp = 1: leave them out")
        return self

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages on each rank."""
        if self.pp_schedule in ("gpipe", "1f1b"):
            return 1
        return self.virtual_stages or 2

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of weights apart from those of inputs."""
        return self.pp_schedule in ("interleaved-zero-bubble", "zbv", "dualpipev")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.grad_accumulation == "sharded" and self.zero < 2:
            raise ValueError(
                f"grad_accumulation = 'sharded': zero = {self.zero} doesn't shard gradients: use zero = 2 or 3, or "
                "grad_accumulation = 'unsharded'"
            )
        if self.reduce_dtype == "bf16" and self.zero >= 2 and self.grad_accumulation == "unsharded":
            raise ValueError(
                f"reduce_dtype = 'bf16': zero = {self.zero} would also add up micro-batches in bf16: set "
                "grad_accumulation = 'sharded', or zero = 0 or 1"
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
            reason = "tp = 1" if self.tp == 1 else "without sequence_parallel they add up whole tensors"
            raise ValueError(
                f"async_tp = true is for tensor-parallel ranks that gather and scatter tokens, and {reason}: leave it "
                "out, or set tp = 2 or more and sequence_parallel = true"
            )
        self._check_expert_tp()
        return self

    def _check_expert_tp(self) -> None:
        if self.expert_tp != "by_expert" and self.tp == 1:
            raise ValueError(f"expert_tp = {self.expert_tp!r} is for tensor-parallel ranks, and tp = 1: leave it out")
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
            axes = ["dp_shard", *(["cp"] if self.cp > 1 else []), *(["tp"] if self.expert_tp == "folded" else [])]
            raise ValueError(
                f"ep = {self.ep} does not divide {' × '.join(axes)} = {self.expert_mesh_size}, over which experts "
                f"lie: the nearest that does is {find_nearest_divisor(self.expert_mesh_size, self.ep)}"
            )

    @property
    def zero_shards(self) -> int:
        """Number of ranks over which ZeRO shards, except experts under `ep`; negative if dp_shard = −1."""
        return self.dp_shard * self.cp

    @property
    def effective_zero(self) -> int:
        """ZeRO stage; 0 where all ranks see the same tokens, so that there is nothing to shard."""
        return 0 if (self.dp_replicate, self.dp_shard, self.cp) == (1, 1, 1) else self.zero

    @property
    def expert_mesh_size(self) -> int:
        """Number of ranks that `ep` divides; negative if dp_shard = −1."""
        return self.dp_shard * self.cp * (self.tp if self.expert_tp == "folded" else 1)
