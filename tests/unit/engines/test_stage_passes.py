"""What pipeline stages send: in the type that the other side has made room for."""

from types import SimpleNamespace

import pytest
import torch

from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.errors import MegatfmError


def test_a_carry_of_another_type_than_the_next_stage_takes_is_refused() -> None:
    """A plugin's float32 under bf16: gloo would fail by the size, and NCCL read beyond the end."""
    passes = PipelineForwardBackward.__new__(PipelineForwardBackward)
    passes._dtype = torch.bfloat16
    passes._pipeline = SimpleNamespace(stages={1: SimpleNamespace(rank=1)})  # type: ignore[assignment]
    stream = {"x": SimpleNamespace(d_model=8)}
    with pytest.raises(
        MegatfmError, match=r"x goes to the next pipeline stage in torch\.float32, and that takes it in"
    ):
        passes._send(stream, {"x": torch.ones(2, 8)}, 1, None)  # type: ignore[arg-type]
    with pytest.raises(MegatfmError, match=r"in torch\.int32, and that takes it in torch\.int64"):
        passes._send({"x": SimpleNamespace(d_model=None)}, {"x": torch.ones(2, dtype=torch.int32)}, 1, None)  # type: ignore[dict-item, arg-type]
