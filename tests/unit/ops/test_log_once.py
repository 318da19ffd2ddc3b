"""Marks for torch.compile."""

import torch

from megatfm.ops.log_once import constant_when_compiled


def test_the_mark_is_torch_s_own() -> None:
    actual = dict(vars(constant_when_compiled(lambda: 3)))
    assert actual == dict(vars(torch.compiler.assume_constant_result(lambda: 3))) != {}
