"""The whole training config."""

from typing import Self

from pydantic import Field, model_validator

from megatfm.config.base import PathStr, Section
from megatfm.config.model import ModelConfig
from megatfm.config.objective import CausalObjective, ObjectiveConfig
from megatfm.config.optimizer import OptimizerConfig
from megatfm.config.resilience import ResilienceConfig
from megatfm.config.schedule import ScheduleConfig
from megatfm.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ParallelConfig,
    ResumeConfig,
    TrainConfig,
)


class Config(Section):
    """Everything that decides a run. `megatfm config show CONFIG` prints it resolved."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, examples=["my-run"])
    """Name of the run: letters, digits, '.', '_' and '-'."""
    run_dir: PathStr | None = None
    """The run directory; left out, `runs/NAME` under the current directory."""
    plugins: list[str] = Field(default_factory=list)
    """Importable packages that register parts of their own."""
    model: ModelConfig
    objective: ObjectiveConfig = CausalObjective()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is longer than the run, train.steps = "
                f"{self.train.steps}: choose at most {self.train.steps}"
            )
        if self.train.global_batch % self.train.micro_batch:
            nearest = max(1, round(self.train.global_batch / self.train.micro_batch)) * self.train.micro_batch
            raise ValueError(
                f"train.global_batch = {self.train.global_batch} does not divide into micro-batches of "
                f"train.micro_batch = {self.train.micro_batch}: the nearest that does is {nearest}"
            )
        heads = {
            "model.n_heads": self.model.n_heads,
            "model.n_kv_heads": self.model.kv_heads,
            "model.d_ff": self.model.d_ff,
        }
        for key, count in heads.items():
            if count % self.parallel.tp:
                raise ValueError(
                    f"parallel.tp = {self.parallel.tp} does not divide {key} = {count}: choose a tp that divides it, "
                    f"e.g. {max(t for t in range(1, self.parallel.tp) if count % t == 0)}"
                )
        if (
            self.parallel.tp > 1
            and self.parallel.sequence_parallel
            and self.data.sequence_length % self.parallel.tp
        ):
            raise ValueError(
                f"data.sequence_length = {self.data.sequence_length} does not divide into parallel.tp = "
                f"{self.parallel.tp} shards of the sequence: choose "
                f"{self.data.sequence_length - self.data.sequence_length % self.parallel.tp or self.parallel.tp}, "
                "or parallel.sequence_parallel=false"
            )
        return self
