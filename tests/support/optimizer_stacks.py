"""A stack of matrices against its matrices one by one."""

from typing import Any

import torch
from pydantic import TypeAdapter

from megatfm.config import OptimizerConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.optimizers import TorchOptimizer
from megatfm.optim.parameters import OPTIMIZERS, ParameterInfo, Role

RATE = 0.05
OPTIMIZER_SECTION: TypeAdapter[Any] = TypeAdapter(OptimizerConfig)


def check_stack_moves_as_matrices(name: str) -> None:
    """Assert that an optimizer moves a stack as its matrices, also after its state was stored and loaded.

    Muon and SOAP move all in the same products, which may round otherwise than one alone: Muon's are in bfloat16.
    SOAP's matrices are square here: the first covariance of others has eigenvalues of 0, whose eigenvectors may be any.
    """
    m, n = (5, 5) if name == "soap" else (6, 4)
    close = {"muon": {"rtol": 0, "atol": 2e-4}, "soap": {"rtol": 1e-9, "atol": 0}}.get(name)
    config = OPTIMIZER_SECTION.validate_python({"name": name, "lr": RATE})
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, m, n, generator=generator, dtype=torch.float64)

    def group_of(names: list[str], shape: tuple[int, ...], role: Role) -> OptimizerGroup:
        infos = {name: ParameterInfo(shape, role, True, True) for name in names}
        return next(group for group in OPTIMIZERS.get(name)(config, infos) if group.names)

    def bare(group: OptimizerGroup) -> int:
        return len(TorchOptimizer(group, {"stack": weights.clone()})._parts["stack"])

    alone = {str(i): weights[i].clone() for i in range(3)}
    one_by_one = TorchOptimizer(group_of(list(alone), (m, n), "matrix"), alone)
    stack, group = {"stack": weights.clone()}, group_of(["stack"], (3, m, n), "matrices")
    assert group.granularity == "whole_tensor"
    assert bare(group) == (1 if close else 3), "of these two, all matrices are moved at once"
    together = TorchOptimizer(group, stack)
    for _ in range(6):
        gradient = torch.randn(3, m, n, generator=generator, dtype=torch.float64)
        one_by_one.step(dict(zip(alone, gradient, strict=True)), RATE)
        together.step({"stack": gradient}, RATE)
        one_each = torch.stack(list(alone.values()))
        torch.testing.assert_close(stack["stack"], one_each, **(close or {"rtol": 0, "atol": 0}))
        kept, together = together.state(), TorchOptimizer(group, stack)
        together.load(kept)
