"""AdamW whose moments are kept in bfloat16: half the state. Its arithmetic is torch's fused AdamW, in the weights' own
precision; what it leaves is rounded by chance, as small changes of a long mean would otherwise never be more than half
a step of bfloat16, and be lost."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatfm import keyed
from megatfm.engines.interface import ShardLocation
from megatfm.ops.rounding import element_hashes, stochastic_round

CHUNK_ELEMENTS = 2**24
"""Elements whose moments are in full precision at a time: what they take beside the state stays small."""


@dataclass(frozen=True)
class Slice:
    """Rows of a weight, of its gradient and moments, and where they are in the whole tensor."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    place: ShardLocation


class BF16StateAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019). Moments are rounded by hashes of the step, the parameter's name and the
    element: as a rank that holds another part of the tensor would round them. Of a step that `found_inf` spoils, only
    the count moves: moments in bfloat16 are rounded to themselves."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "step": 0})
        self._places: dict[Tensor, ShardLocation] = {}
        self._step_supports_amp_scaling = True

    def set_shard_locations(self, places: Mapping[Tensor, ShardLocation]) -> None:
        """Say where weights are in the whole tensors; one without a place is a whole one without a name."""
        self._places = dict(places)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            chunk: list[Slice] = []
            for piece in self._pieces(group["params"]):
                if chunk and sum(p.weight.numel() for p in chunk) + piece.weight.numel() > CHUNK_ELEMENTS:
                    self._move(chunk, group)
                    chunk = []
                chunk.append(piece)
            if chunk:
                self._move(chunk, group)

    def _pieces(self, weights: list[Tensor]) -> Iterator[Slice]:
        for weight in weights:
            if weight.grad is None or not weight.numel():
                continue
            state = self.state[weight]
            if not state:
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(weight, dtype=torch.bfloat16)
            shape = tuple(weight.shape)
            whole = self._places.get(weight, ShardLocation("", shape, (0,) * len(shape)))
            tensors = weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]
            rows = max(1, CHUNK_ELEMENTS * shape[0] // weight.numel())
            for first in range(0, shape[0], rows):
                w, g, mean, square = (tensor[first : first + rows] for tensor in tensors)
                offsets = (whole.offsets[0] + first, *whole.offsets[1:])
                yield Slice(w, g, mean, square, ShardLocation(whole.name, whole.shape, offsets))

    def _move(self, pieces: list[Slice], group: dict[str, Any]) -> None:
        weights = [piece.weight for piece in pieces]
        means = [piece.mean.to(piece.weight.dtype) for piece in pieces]
        squares = [piece.square.to(piece.weight.dtype) for piece in pieces]
        before = torch.full((), group["step"] - 1, dtype=torch.float32, device=weights[0].device)
        adamw(
            weights, [piece.gradient for piece in pieces], means, squares, [], [before.clone() for _ in pieces],
            fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            found_inf=getattr(self, "found_inf", None),
        )  # fmt: skip
        for piece, mean, square in zip(pieces, means, squares, strict=True):
            place = piece.place
            key = int(keyed.random_uint64(1, "moments", place.name, group["step"])[0] >> 1)
            random = element_hashes(key, place.shape, place.offsets, tuple(mean.shape), mean.device)
            piece.mean.copy_(stochastic_round(mean.float(), random))
            piece.square.copy_(stochastic_round(square.float(), random >> 16))
