"""The whole training config."""

from math import gcd
from typing import Self

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from megatfm.config.base import PathStr, Section, divisors, nearest_divisor, variants_of
from megatfm.config.deepspeed import DeepSpeedConfig, check_compatibility
from megatfm.config.experts import MoEConfig, SoftMoEConfig
from megatfm.config.families import FAMILIES, suggest_family
from megatfm.config.gpu_only import check as check_gpu_only
from megatfm.config.model import ModelConfig
from megatfm.config.objective import CausalObjective, ObjectiveConfig, PluginObjective
from megatfm.config.optimizer import OptimizerConfig, ScheduleFreeConfig
from megatfm.config.patterns import BigBirdPatternConfig, LongformerPatternConfig
from megatfm.config.resilience import ResilienceConfig
from megatfm.config.schedule import CosineSchedule, ScheduleConfig, WSDSchedule
from megatfm.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ParallelConfig,
    ResumeConfig,
    TrainConfig,
)
from megatfm.registry import did_you_mean

ENGINES = ("native", "deepspeed")
"""Those that divide experts and rows over ranks; of a plugin's engine nobody knows."""


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
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    optimizer: OptimizerConfig
    lr_schedule: ScheduleConfig = CosineSchedule()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        if self.data.tokenizer is None and not isinstance(self.objective, PluginObjective):
            raise ValueError(
                "data.tokenizer: field required; for example 'corpora/quickstart/tokenizer.model'"
            )
        family = self.model.family
        if family not in FAMILIES and not self.plugins:
            raise ValueError(
                f"model.family = {family!r}: unknown{did_you_mean(suggest_family(family), FAMILIES)}; there are: "
                f"{', '.join(FAMILIES)}; others need the package that registers them in plugins"
            )
        parts: list[tuple[str, Section, str]] = [("", self, "optimizer"), ("", self, "lr_schedule")]
        kinds = ("attention", "ffn", "norm", "position", "embedding", "init")
        parts += [("model.", self.model, part) for part in kinds]
        for place, holder, key in parts:
            section = getattr(holder, key)
            if type(section).__name__.startswith("Plugin") and not self.plugins:
                name, known = section.name, variant_names(type(holder).model_fields[key])
                raise ValueError(
                    f"{place}{key}.name = {name!r}: unknown{did_you_mean(name, known)}; there are: {', '.join(known)}; "
                    "others need the package that registers them in plugins"
                )
        if isinstance(self.optimizer, ScheduleFreeConfig) and self.lr_schedule.name != "constant":
            raise ValueError(
                f"lr_schedule.name = {self.lr_schedule.name!r}: optimizer.name = {self.optimizer.name!r} "
                f"averages weights in "
                "place of a falling rate: choose lr_schedule.name = 'constant' (with warmup_steps)"
            )
        return self

    @model_validator(mode="after")
    def _deepspeed_carries_it(self) -> Self:
        check_compatibility(self.parallel, self.train, self.optimizer, self.deepspeed)
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.lr_schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"lr_schedule.warmup_steps = {self.lr_schedule.warmup_steps} is longer than the run, train.steps = "
                f"{self.train.steps}: choose at most {self.train.steps}"
            )
        if isinstance(self.lr_schedule, WSDSchedule):
            left = 1 - self.lr_schedule.warmup_steps / self.train.steps
            if self.lr_schedule.decay_ratio > left:
                raise ValueError(
                    f"lr_schedule.decay_ratio = {self.lr_schedule.decay_ratio:g} leaves no room for "
                    f"lr_schedule.warmup_steps = "
                    f"{self.lr_schedule.warmup_steps} of train.steps = {self.train.steps}: choose at most {left:g}"
                )
        if self.train.global_batch % self.train.micro_batch:
            nearest = max(1, round(self.train.global_batch / self.train.micro_batch)) * self.train.micro_batch
            raise ValueError(
                f"train.global_batch = {self.train.global_batch} is not a multiple of "
                f"train.micro_batch = {self.train.micro_batch}: the nearest that is one is {nearest}"
            )
        divided = self.model.tp_dims_for(self.parallel.expert_tp)

        def divides(tp: int, key: str) -> bool:
            return divided[key] % tp == 0 or (key.endswith("n_kv_heads") and tp % divided[key] == 0)

        for key, count in divided.items():
            if not divides(self.parallel.tp, key):
                whole = [n for each, n in divided.items() if not each.endswith("n_kv_heads")] or [count]
                smaller = [t for t in divisors(gcd(*whole)) if t < self.parallel.tp]
                fitting = [t for t in smaller if all(divides(t, each) for each in divided)]
                raise ValueError(
                    f"parallel.tp = {self.parallel.tp} does not divide model.{key} = {count}: the nearest tp that fits "
                    f"is {fitting[-1]}"
                )
        tp = self.parallel.tp if self.parallel.sequence_parallel else 1
        longest, limiting = self.model.longest_row
        lengths = {
            "data.sequence_length": self.data.sequence_length,
            "data.target_length": self.data.target_length or 0,
            **{
                f"data.rampup[{i}].sequence_length": s.sequence_length or 0
                for i, s in enumerate(self.data.rampup)
            },
        }
        for key, length in lengths.items():
            if longest is not None and length > longest:
                raise ValueError(
                    f"{key} = {length}: model.{limiting} = {longest}, and a document as long as the row would have "
                    f"tokens beyond: choose {key} = {longest}, or model.{limiting} = {length}"
                )
            if length % tp:
                raise ValueError(
                    f"{key} = {length} does not divide into parallel.tp = {tp} shards of the sequence: choose "
                    f"{length - length % tp or tp}, or parallel.sequence_parallel=false"
                )
            if self.parallel.cp > 1 and 0 < length < 2 * self.parallel.cp * tp:
                raise ValueError(
                    f"{key} = {length} is too short for parallel.cp = {self.parallel.cp}, which cuts rows into "
                    f"{2 * self.parallel.cp} runs of at least {tp}: choose at least {2 * self.parallel.cp * tp}"
                )
        together = self.model.attention.queries_together
        if together > 1 and together % tp:
            raise ValueError(
                f"parallel.tp = {tp}: model.attention.name = {self.model.attention.name!r} cuts its queries in groups "
                f"of {together}, not a multiple of it: choose tp = {gcd(tp, together)}, or "
                "parallel.sequence_parallel=false"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_divided(self) -> Self:
        ep, tp = self.parallel.ep, self.parallel.tp if self.parallel.expert_tp == "by_expert" else 1
        experts = {key: n // tp for key, n in self.model.tp_dims.items() if key.endswith("n_experts")}
        if ep > 1 and not experts:
            raise ValueError(
                f"parallel.ep = {ep}, but the model has no experts to divide: set parallel.ep = 1, or "
                "model.ffn.name = 'moe'"
            )
        for key, n in experts.items():
            if n % ep:
                among = f" and parallel.tp = {tp}" if tp > 1 else ""
                raise ValueError(
                    f"parallel.ep = {ep}{among} do{'' if among else 'es'} not divide model.{key} = {n * tp}: the "
                    f"nearest ep that does is {nearest_divisor(gcd(*experts.values()), ep)}"
                )
        if ep > 1 and self.parallel.engine not in ENGINES:
            raise ValueError(
                f"parallel.ep = {ep}: parallel.engine = {self.parallel.engine!r} does not divide experts: choose "
                "engine = 'native', or ep = 1"
            )
        if ep > 1 and self.train.recompute.endswith("B"):
            raise ValueError(
                f"train.recompute = {self.train.recompute!r}: ranks have different numbers of rows under parallel.ep = "
                f"{ep}, and would not compute the same blocks again: set train.recompute = 'full' or 'selective'"
            )
        return self

    @model_validator(mode="after")
    def _check_context_parallel(self) -> Self:
        parallel = self.parallel
        if parallel.cp > 1 and parallel.engine not in ENGINES:
            raise ValueError(
                f"parallel.cp = {parallel.cp}: parallel.engine = {parallel.engine!r} does not cut rows: choose "
                "engine = 'native', or cp = 1"
            )
        if parallel.cp > 1 and parallel.cp_method == "ulysses":
            kinds = [
                self.model.layer_config(depth).attention
                for depth in range(max(1, len(self.model.layer_types)))
            ]
            heads = [(attention.n_heads, attention.kv_heads) for attention in kinds]
            if self.model.generator is not None:
                heads.append((self.model.generator.n_heads, self.model.generator.n_heads))
            for of_queries, of_keys in heads:
                n, k = of_queries // parallel.tp, max(1, of_keys // parallel.tp)
                if n % parallel.cp or (k % parallel.cp and parallel.cp % k):
                    raise ValueError(
                        f"parallel.cp_method = 'ulysses': {n} query and {k} key heads of a tensor-parallel "
                        f"rank can't be "
                        f"dealt to parallel.cp = {parallel.cp} ranks: choose context = 'ring'"
                    )
        if parallel.cp > 1 and self.train.recompute.endswith("B"):
            raise ValueError(
                f"parallel.cp = {parallel.cp}: train.recompute = {self.train.recompute!r} measures blocks on each "
                "rank, and ranks with unequal parts of rows may decide otherwise: choose recompute = 'full' or "
                "'selective'"
            )
        return self

    @model_validator(mode="after")
    def _has_global_tokens(self) -> Self:
        length = self.data.sequence_length
        for depth in range(max(1, len(self.model.layer_types))):
            pattern = self.model.layer_config(depth).attention.pattern
            if (
                isinstance(pattern, LongformerPatternConfig)
                and max(pattern.global_tokens, default=0) >= length
            ):
                raise ValueError(
                    f"model.attention.pattern.global_tokens has the place {max(pattern.global_tokens)}, but rows have "
                    f"data.sequence_length = {length} tokens: name places below {length}"
                )
        return self

    def refuses_compile(self) -> str | None:
        """Why blocks can't be compiled, and what to set instead; None where they can."""
        model, parallel = self.model, self.parallel
        patterns = {
            model.layer_config(depth).attention.pattern for depth in range(max(1, len(model.layer_types)))
        }
        kinds = [model, *(model.type_config(kind) for kind in model.layer_type)]
        if any(isinstance(pattern, BigBirdPatternConfig) and pattern.n_random_blocks for pattern in patterns):
            return (
                "train.compile = true: model.attention.pattern.name = 'bigbird' draws random blocks for each length, "
                "which can't be compiled: leave train.compile out, or set model.attention.pattern.n_random_blocks = 0"
            )
        if self.train.recompute != "none" and any(isinstance(kind.ffn, MoEConfig) for kind in kinds):
            return (
                f"train.recompute = {self.train.recompute!r}: blocks with ffn.name = 'moe' are compiled around their "
                "experts, and can't be computed again: set train.recompute = 'none', or train.compile = false"
            )
        if parallel.pp > 1 and parallel.splits_backward:
            return _repeats(parallel.pp_schedule, "train.compile", self.train.compile, False)
        if self.train.recompute.endswith("B"):
            return "train.recompute measures how much blocks keep while they run: set train.compile = false"
        return None

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.train.compile not in (False, "auto") and (why := self.refuses_compile()):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _has_what_gpus_alone_do(self) -> Self:
        check_gpu_only(self)
        return self

    @model_validator(mode="after")
    def _soft_mixtures_are_not_cut_by_channels(self) -> Self:
        kinds = [self.model, *(self.model.type_config(kind) for kind in self.model.layer_type)]
        if self.parallel.tp > 1 and any(isinstance(kind.ffn, SoftMoEConfig) for kind in kinds):
            raise ValueError(
                f"parallel.tp = {self.parallel.tp}: ffn.name = 'soft_moe' is not cut over tensor-parallel ranks: set "
                "parallel.tp = 1, and use dp_shard, cp, ep or pp"
            )
        return self

    @model_validator(mode="after")
    def _pipeline_goes_with_the_rest(self) -> Self:
        parallel, train = self.parallel, self.train
        if parallel.pp == 1:
            return self
        if parallel.splits_backward and train.recompute != "none":
            raise ValueError(_repeats(parallel.pp_schedule, "train.recompute", train.recompute, "none"))
        if parallel.grad_accumulation == "sharded":
            raise ValueError(
                "parallel.grad_accumulation = 'sharded': under pipeline stages gradients are reduced once a "
                "step: leave it out"
            )
        return self


def _repeats(schedule: str, key: str, value: object, other: object) -> str:
    return (
        f"parallel.pp_schedule = {schedule!r} takes backward passes in two parts, which {key} = {value!r} "
        f"would repeat: "
        f"use parallel.pp_schedule = 'interleaved' or '1f1b', or {key} = {other!r}"
    )


def variant_names(field: FieldInfo) -> list[str]:
    """The names among which a field's section is chosen, without a plugin's."""
    defaults = [section.model_fields["name"].default for section in variants_of(field.annotation)]
    return [name for name in defaults if isinstance(name, str)]
