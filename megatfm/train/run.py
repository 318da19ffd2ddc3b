"""A training run, from a config to an exit code: opens all that it needs, then trains."""

import logging

import torch.distributed as dist

from megatfm.checkpoint.chunked_io import count_progress
from megatfm.config import Config
from megatfm.config.parts import find_unread_key
from megatfm.config.world_size import check_global_batches
from megatfm.engines.interface import PRECISIONS, Engine
from megatfm.errors import UsageError
from megatfm.files import NewPaths
from megatfm.object_collectives import all_gather_object
from megatfm.optim.lr_schedules import check_schedule
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_plugins
from megatfm.tracking import utilization
from megatfm.tracking.console import RunLog
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train import resume
from megatfm.train.build import build_engine, choose_precision
from megatfm.train.corpora import Corpora, make_batch_schedule, open_corpora, open_tokenizer
from megatfm.train.decision_log import DecisionLog
from megatfm.train.evaluation import Evaluator, Sampler
from megatfm.train.evaluation_tasks import TaskEvaluator
from megatfm.train.process_state import keep_freed_memory
from megatfm.train.profiling import (
    explain_out_of_memory,
    record_allocations,
    should_record_allocations,
    start_flight_recorder,
)
from megatfm.train.rank_monitor_client import RankMonitor
from megatfm.train.resilience import adapt_layout, check_progress
from megatfm.train.run_state import RunContext
from megatfm.train.signals import StopSignals
from megatfm.train.trainer import Trainer

log = logging.getLogger("megatfm")


def train(
    config: Config,
    flops_per_token: utilization.FlopsPerToken | None = None,
    sampler: Sampler | None = None,
    new_paths: NewPaths | None = None,
) -> int:
    """Train or resume the run of a config; return the exit code. Every rank calls this.

    flops_per_token: function that returns a token's FLOPs, from which MFU is computed. sampler: continues the prompts
    of `evaluate.sample_prompts`. new_paths: files and folders created for this run, which are removed if it is refused.
    """
    import_plugins(config.plugins)
    if error := config.find_unknown_part():
        raise UsageError(error)
    config, tokenizer = open_tokenizer(config)
    folder, new_paths = config.run_folder, new_paths or NewPaths()
    start_flight_recorder(folder, config.train.device)
    hang = config.train.hang_seconds
    with (
        distributed.distributed_session(
            max(hang, distributed.RENDEZVOUS_SECONDS), config.train.device, 1.5 * hang + 60
        ) as process,
        RankMonitor(process, hang) as monitor,
        StopSignals(process.device) as signals,
    ):
        monitor.progress = count_progress
        keep_freed_memory(process.device)
        requested, config = config, adapt_layout(config, process.world_size)
        mesh = build_mesh(config.parallel, process.world_size, process.device.type)
        make_batch_schedule(config)  # refuses stages of `data.rampup` that don't fit
        check_global_batches(config, mesh.data_ranks)
        corpora = open_corpora(config, tokenizer)
        monitor.tick(0, "start")
        with RunDirectory(folder, process.rank, new_paths) as run, RunLog(run, config.train.steps) as run_log:
            monitor.attach_run_log(run.log_path, run.log_failure)
            if should_record_allocations(run.folder, config.log.memory_snapshot):
                record_allocations(process.device)
            decisions, nodes = DecisionLog.from_run(run), resume.discover_nodes(config, run)
            latest = resume.find_resume_point(run.checkpoints, nodes, decisions)
            check_progress(run, latest.step if latest else 0, config.resilience.max_failures)
            branch_from = None if latest else config.train.branch_from
            branch = resume.find_branch_point(branch_from) if branch_from else None
            monitor.tick(0, "start")
            precision = choose_precision(resume.choose_stored_precision(config, latest or branch), process.device)
            context = RunContext(config, requested, run, run_log, monitor, decisions, nodes, process.launcher)
            with explain_out_of_memory(run.folder, process.rank, process.device):
                engine = build_engine(config, mesh, process.device, precision)
            trainer = _make_trainer(context, engine, corpora, precision, flops_per_token, sampler)
            check_schedule(config.lr_schedule, config.train.steps)
            _refuse_unread_keys(config)
            monitor.tick(0, "start")
            with explain_out_of_memory(run.folder, process.rank, process.device):
                trainer.restore(latest, branch)
                return trainer.train(signals)


def _make_trainer(
    context: RunContext,
    engine: Engine,
    corpora: Corpora,
    precision: str,
    flops_per_token: utilization.FlopsPerToken | None,
    sampler: Sampler | None,
) -> Trainer:
    """Return the training loop, with its evaluations and, where a token's FLOPs are known, its MFU."""
    config = context.config
    tasks = TaskEvaluator(engine, config, corpora.tokenizer) if config.evaluate.tasks else None
    evaluator = Evaluator(engine, corpora, config, sampler, tasks)
    mfu = None
    if flops_per_token and context.run.is_main:
        dtype = PRECISIONS[precision].compute_dtype
        peak = utilization.get_peak_flops(engine.device, dtype)
        if warning := utilization.find_slow_dtype(peak, engine.device, dtype):
            log.warning("%s", warning)
        mfu = utilization.Utilization(*flops_per_token(config), peak, dist.get_world_size())
    return Trainer(context, engine, corpora, evaluator, precision, mfu)


def _refuse_unread_keys(config: Config) -> None:
    """Raise UsageError on all ranks for a key of a plugin's section that no part has read on any: a part may be on some
    ranks alone. A collective."""
    errors = all_gather_object(find_unread_key(config))
    if errors[0] and all(errors):
        raise UsageError(errors[0])
