"""Optimizers that need whole tensors, over parameters that are cut into boxes.

Each tensor has an owner among the ranks that hold its boxes. The owner keeps a full copy and the optimizer's state;
gradients travel to it and new weights back, each in one all-to-all: 2·(N−1)/N of the parameters' size per step.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.parallel.layout import Chunk


class OwnedTensors:
    """Full copies of the tensors that this rank owns.

    local: name → this rank's block. boxes: name → the box of every rank of `group`, in group order; a box that
    another rank of the group holds as well is sent by the first of them only.
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        boxes: Mapping[str, Sequence[Chunk]],
        shapes: Mapping[str, Sequence[int]],
        group: ProcessGroup,
    ) -> None:
        self.local, self.boxes, self.group = local, boxes, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.owners = _assign_owners(
            {name: torch.Size(shape).numel() for name, shape in shapes.items()}, self.ranks
        )
        self.full = {
            name: torch.zeros(tuple(shapes[name]), dtype=block.dtype, device=block.device)
            for name, block in local.items()
            if self.owners[name] == self.rank
        }

    def gather(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Blocks held everywhere → the full tensors owned here."""
        sent = [self._pack(blocks, owner) for owner in range(self.ranks)]
        received = [[name for name in self.full if self._sends(name, source)] for source in range(self.ranks)]
        sizes = [
            sum(_numel(self.boxes[name][source]) for name in names) for source, names in enumerate(received)
        ]
        flat = self._exchange(sent, sizes)
        full = {name: torch.empty_like(tensor) for name, tensor in self.full.items()}
        for source, names in enumerate(received):
            pieces = flat[source].split([_numel(self.boxes[name][source]) for name in names])
            for name, piece in zip(names, pieces, strict=True):
                _view(full[name], self.boxes[name][source]).copy_(piece.view(self.boxes[name][source][1]))
        return full

    def refresh(self) -> None:
        """Set the full copies from the blocks, after the blocks were loaded."""
        for name, tensor in self.gather(self.local).items():
            self.full[name].copy_(tensor)

    def scatter(self) -> None:
        """Set all ranks' blocks from the owners' full copies."""
        sent = []
        for target in range(self.ranks):
            parts = [
                _view(tensor, self.boxes[name][target]).reshape(-1) for name, tensor in self.full.items()
            ]
            sent.append(self._cat(parts))
        owned = [[name for name in self.local if self.owners[name] == owner] for owner in range(self.ranks)]
        flat = self._exchange(sent, [sum(self.local[name].numel() for name in names) for names in owned])
        for names, values in zip(owned, flat, strict=True):
            pieces = values.split([self.local[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                self.local[name].copy_(piece.view_as(self.local[name]))

    def _sends(self, name: str, rank: int) -> bool:
        boxes = self.boxes[name]
        return boxes.index(boxes[rank]) == rank

    def _pack(self, blocks: Mapping[str, Tensor], owner: int) -> Tensor:
        mine = [name for name in self.local if self.owners[name] == owner and self._sends(name, self.rank)]
        return self._cat([blocks[name].reshape(-1) for name in mine])

    def _cat(self, parts: list[Tensor]) -> Tensor:
        first = next(iter(self.local.values()))
        return torch.cat(parts) if parts else first.new_empty(0)

    def _exchange(self, sent: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
        if self.ranks == 1:
            return tuple(sent)
        flat = torch.cat(sent)
        received = flat.new_empty(sum(sizes))
        dist.all_to_all_single(received, flat, sizes, [part.numel() for part in sent], group=self.group)
        return received.split(sizes)


def _assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """An owner for each tensor: the largest first, to the rank that has least."""
    load = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return owners


def _numel(box: Chunk) -> int:
    return torch.Size(box[1]).numel()


def _view(tensor: Tensor, box: Chunk) -> Tensor:
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]
