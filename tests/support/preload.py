"""Imports of the server from which ranks and commands are forked, so that none of them imports these again.

No search for garbage traverses these modules: not while they are imported, and in no fork.
"""

import atexit
import contextlib
import gc
import importlib
import os

from tests.support.page_cache import leave_files_in_page_cache

MODULES = [
    "numpy", "pytest", "torch", "torch.nn.attention.varlen", "torch.distributed.fsdp", "torch.distributed.tensor.debug",
    "torch._dynamo", "megatfm.cli", "megatfm.train.run", "megatfm.verify.rank_processes",
    "megatfm.engines.native.engine", "megatfm.inference.samples", "megatfm.describe.description",
]  # fmt: skip
if "PYTEST_XDIST_WORKER" in os.environ:  # seconds that many files share, and a single file seldom needs
    MODULES += [
        "scipy.stats", "tensorboardX", "transformers.models.bert.modeling_bert",
        "torch._inductor.compile_fx",  # DeepSpeed's optimizers import it, too
        # What commands import when they run.
        "megatfm.commands.from_model", "megatfm.data.images", "megatfm.data_prep.clean", "megatfm.estimate.recorded",
        "megatfm.report.evaluation_charts", "megatfm.tasks.answers",
    ]  # fmt: skip

leave_files_in_page_cache()
atexit.register(os._exit, 0)  # of the server: taking modules apart takes a second, and nobody looks at its exit code
gc.disable()
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()
gc.enable()
