"""The whole training config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from megatfm.config import layout_checks
from megatfm.config.data import DataConfig
from megatfm.config.deepspeed import DeepSpeedConfig, check_compatibility
from megatfm.config.model import ModelConfig
from megatfm.config.objective import CausalObjective, ObjectiveConfig, PluginObjective
from megatfm.config.optimizer import CosineSchedule, OptimizerConfig, ScheduleConfig, ScheduleFreeConfig, WSDSchedule
from megatfm.config.parallel import ParallelConfig
from megatfm.config.parts import explain_unknown_name, iter_part_names
from megatfm.config.section import PathStr, Section, check_path, merge_into_section
from megatfm.config.stages import check_image_rows
from megatfm.config.task import TaskConfig
from megatfm.config.training import (
    CheckpointConfig,
    EvaluateConfig,
    LogConfig,
    ResilienceConfig,
    ResumeConfig,
    TrainConfig,
)
from megatfm.errors import UsageError


class Config(Section):
    """All settings of a run. `megatfm config show CONFIG` prints them resolved."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, examples=["my-run"])
    """Name of the run: letters, digits, '.', '_' and '-'."""
    run_dir: PathStr | None = None
    """The run directory; left out, `runs/NAME` under the current directory."""
    plugins: list[str] = Field(default_factory=list)
    """Importable packages that register further parts."""
    model: ModelConfig
    objective: ObjectiveConfig = CausalObjective()
    data: DataConfig
    task: TaskConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    optimizer: OptimizerConfig
    lr_schedule: ScheduleConfig = CosineSchedule()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()

    def with_changes(self, keys: Mapping[str, Any]) -> Self:
        """Return a validated copy with new values of dotted keys, as `Section.with_changes` does.

        Raises UsageError with the message of `load_config` for keys and values that make no config.
        """
        from megatfm.config.validation_errors import format_config_error  # which imports this module

        values = merge_into_section(self, keys)
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            raise UsageError(format_config_error(error, type(self), values)) from None

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.data.tokenizer is None and self.reads_text:
            raise ValueError("data.tokenizer: field required; for example 'corpora/quickstart/tokenizer.model'")
        if not self.plugins and (error := self.find_unknown_part()):
            raise ValueError(error)
        self._check_weight_average()
        if isinstance(self.optimizer, ScheduleFreeConfig) and self.lr_schedule.name != "constant":
            raise ValueError(
                f"lr_schedule.name = {self.lr_schedule.name!r}: optimizer.name = {self.optimizer.name!r} averages "
                "weights in place of a falling rate: choose lr_schedule.name = 'constant' (with warmup_steps)"
            )
        return self

    def _check_weight_average(self) -> None:
        """Refuse `optimizer.ema_decay` beside what `megatfm.optim.parameters.with_weight_average` can't average."""
        optimizer, reason = self.optimizer, ""
        if isinstance(optimizer, ScheduleFreeConfig):
            reason = "averages weights itself"
        elif getattr(optimizer, "moments_dtype", "param") != "param":
            reason = "keeps its state in another precision (moments_dtype)"
        if optimizer.ema_decay is not None and reason:
            raise ValueError(
                f"optimizer.ema_decay = {optimizer.ema_decay:g}: optimizer.name = {optimizer.name!r} {reason}: choose "
                "adamw, lion, muon, soap, adafactor or lamb, without moments_dtype, or leave ema_decay out"
            )

    def find_unknown_part(self) -> str | None:
        """Return an error for a name that neither megatfm nor an imported plugin registers; None without one."""
        names = [*iter_part_names(self)]
        for kind in self.model.layer_type:
            names += iter_part_names(self.model.type_config(kind), f"model.layer_type.{kind}.")
        return explain_unknown_name(names, self.plugins)

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        check_compatibility(self.parallel, self.train, self.optimizer, self.deepspeed)
        self._check_schedule()
        self._check_micro_batch()
        self._check_patience()
        layout_checks.check_tensor_parallel(self)
        layout_checks.check_row_lengths(self)
        check_image_rows(self)
        layout_checks.check_expert_parallel(self)
        layout_checks.check_context_parallel(self)
        layout_checks.check_global_tokens(self)
        layout_checks.check_compile(self)
        layout_checks.check_gpu_only(self)
        layout_checks.check_soft_moe(self)
        layout_checks.check_pipeline(self)
        layout_checks.check_sample_prompts(self)
        return self

    def _check_schedule(self) -> None:
        schedule, steps = self.lr_schedule, self.train.steps
        if schedule.warmup_steps > steps:
            raise ValueError(
                f"lr_schedule.warmup_steps = {schedule.warmup_steps} is longer than the run, train.steps = "
                f"{steps}: choose at most {steps}"
            )
        if isinstance(schedule, WSDSchedule):
            remaining_share = 1 - schedule.warmup_steps / steps
            if schedule.decay_ratio > remaining_share:
                raise ValueError(
                    f"lr_schedule.decay_ratio = {schedule.decay_ratio:g} leaves no room for lr_schedule.warmup_steps = "
                    f"{schedule.warmup_steps} of train.steps = {steps}: choose at most {remaining_share:g}"
                )

    def _check_patience(self) -> None:
        if not self.train.patience:
            return
        validation, task = self.data.validation, self.task
        if not validation and not (task and task.validation):
            raise ValueError(
                f"train.patience = {self.train.patience} waits for better results on a validation set, and there is "
                f"none: give {'task.validation' if task else 'data.validation'}, or leave it out"
            )
        if not self.evaluate.every and task is None:
            raise ValueError(
                f"train.patience = {self.train.patience} counts evaluations, and evaluate.every = 0 has one, at the "
                "last step: set evaluate.every, or leave it out"
            )

    def _check_micro_batch(self) -> None:
        rows, micro_batch = self.train.global_batch, self.train.micro_batch
        if rows % micro_batch:
            nearest = max(1, round(rows / micro_batch)) * micro_batch
            raise ValueError(
                f"train.global_batch = {rows} is not a multiple of "
                f"train.micro_batch = {micro_batch}: the nearest that is one is {nearest}"
            )

    @property
    def run_folder(self) -> Path:
        """The run directory, absolute. Raises UsageError if its path is no UTF-8."""
        return check_path(Path(self.run_dir) if self.run_dir else Path.cwd() / "runs" / self.name)

    @property
    def reads_text(self) -> bool:
        """Whether the objective needs a tokenizer; a plugin's says so later."""
        return getattr(self.objective, "reads_text", not isinstance(self.objective, PluginObjective))

    def find_compile_conflict(self) -> str | None:
        """Return why blocks can't be compiled, and what to set instead; None if they can."""
        return layout_checks.find_compile_conflict(self)


def list_global_batches(config: Config) -> dict[int, str]:
    """Return rows of a step → the key that sets it, `train.global_batch` first."""
    batches = {config.train.global_batch: "train.global_batch"}
    for number, stage in enumerate(config.data.rampup):
        if stage.global_batch:
            batches.setdefault(stage.global_batch, f"data.rampup[{number}].global_batch")
    return batches
