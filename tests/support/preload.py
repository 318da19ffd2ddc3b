"""Imports of the server from which ranks and commands are forked, so that none of them imports these again.

No search for garbage traverses these modules: not while they are imported, and in no fork.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import os
import sys
import traceback
from types import SimpleNamespace

MODULES = [
    "numpy", "pytest", "torch", "torch.nn.attention.varlen", "torch.distributed.fsdp", "torch.distributed.tensor.debug",
    "torch.distributed.launcher.api", "torch._dynamo", "megatfm.cli", "megatfm.train.run",
    "megatfm.verify.rank_processes", "megatfm.engines.native.engine", "megatfm.inference.text",
    "megatfm.describe.description",
    "megatfm.commands.training",  # and the launchers, which most commands import
]  # fmt: skip
if "PYTEST_XDIST_WORKER" in os.environ:  # seconds that many files share, and a single file seldom needs
    MODULES += [
        "scipy.stats", "tensorboardX", "transformers.models.bert.modeling_bert",
        "torch._inductor.compile_fx",  # DeepSpeed's optimizers import it, too
        # The other commands, and what they import when they run.
        "megatfm.commands.conversion", "megatfm.commands.estimate", "megatfm.commands.evaluation",
        "megatfm.commands.finetuning", "megatfm.commands.from_model", "megatfm.commands.runs",
        "megatfm.commands.verify", "megatfm.data.images", "megatfm.data_prep.clean", "megatfm.estimate.estimator",
        "megatfm.estimate.recorded",
        "megatfm.report.run_charts", "megatfm.tasks.answers",
    ]  # fmt: skip


def list_callers() -> list[SimpleNamespace]:
    """As inspect.stack: file and function of each frame, the innermost first."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return [SimpleNamespace(filename=code.co_filename, function=code.co_name) for code in codes]


atexit.register(os._exit, 0)  # of the server: taking modules apart takes a second, and nobody looks at its exit code
gc.disable()
from tests.support.process_state import leave_files_in_page_cache  # noqa: E402

leave_files_in_page_cache()
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# Each run would multiply for three tenths of a second of CPU to measure it: once here, in bf16 and fp32, is enough.
import torch  # noqa: E402

torch.set_num_threads(1)  # a pool of threads would be missing in forks
utilization = sys.modules["megatfm.tracking.utilization"]
for name, function in (("build", "measure_bf16_speedup"), ("startup_checks", "time_matmul")):
    setattr(sys.modules[f"megatfm.train.{name}"], function, functools.cache(getattr(utilization, function)))
sys.modules["megatfm.train.build"].is_bf16_faster(torch.device("cpu"))
sys.modules["megatfm.train.startup_checks"].time_matmul(torch.float32, torch.device("cpu"))
utilization.MATMUL_SECONDS = 0.0  # type: ignore[attr-defined]
# torchrun's rendezvous names its callers at each event by inspect.stack, which looks among all modules for the source
# of each frame: half a second of CPU here. On a busy machine, agents that did so lost one another.
for name in ("events", "rendezvous.dynamic_rendezvous"):
    vars(sys.modules[f"torch.distributed.elastic.{name}"])["inspect"] = SimpleNamespace(stack=list_callers)
importlib.import_module("tests.support.forked_commands").list_modules_with_popen()
gc.freeze()
gc.enable()
