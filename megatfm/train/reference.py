"""The reference model of preference optimization: computes log-probabilities of answers by the initial model."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise_buffers, list_checkpoint_tensors
from megatfm.layers.lora import is_factor
from megatfm.layers.output_head import LMHead, RowLossRecorder
from megatfm.models import build
from megatfm.ops.cross_entropy import IGNORE
from megatfm.train.init_from import identify_checkpoint

MAX_BATCH_TOKENS = 2048
"""Largest number of tokens in a batch, padding included."""


class ReferenceModel:
    """The model of `train.init_from`, in float32 and without dropout, loaded at its first use.

    It has no adapters that the run adds: these start at zero, so they don't change the initial model.
    """

    def __init__(self, config: Config) -> None:
        """Raises UsageError unless the run starts from a complete model."""
        if config.train.init_from is None or config.train.init_include:
            raise UsageError(
                "task.form = 'preference' compares with the complete initial model: give it as --from, without "
                "train.init_include"
            )
        self._config, self._source = config, checkpoint.find_checkpoint(config.train.init_from)
        self._model: nn.Module | None = None

    @property
    def identity(self) -> str:
        """Identity of the model: the hash of its checkpoint's metadata."""
        identity = identify_checkpoint(self._source)
        assert isinstance(identity, dict)
        return str(identity["blake3"])

    def __call__(self, sequences: Sequence[tuple[NDArray[np.int64], tuple[int, int]]]) -> list[float]:
        """Return the log-probability of each sequence's answer, given the tokens before it.

        sequences: token ids [T], and begin and end of the answer in them.
        """
        scores = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]))
        while order:
            length = len(sequences[order[-1]][0]) - 1
            batch_size = max(1, MAX_BATCH_TOKENS // length)
            indices, order = order[-batch_size:], order[:-batch_size]
            tokens = torch.zeros(len(indices), length, dtype=torch.int64)
            targets = torch.full_like(tokens, IGNORE)
            for row, index in enumerate(indices):
                ids, (begin, end) = torch.from_numpy(sequences[index][0]), sequences[index][1]
                tokens[row, : len(ids) - 1] = ids[:-1]
                targets[row, begin - 1 : end - 1] = ids[begin:end]
            for index, score in zip(indices, self._score(tokens, targets), strict=True):
                scores[index] = score
        return scores

    @torch.no_grad()
    def _score(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> list[float]:
        model = self._load()
        device = next(model.parameters()).device
        head, recorder, targets = model.head, RowLossRecorder(), targets_BT.to(device)
        assert isinstance(head, LMHead)
        head.recorder = recorder
        model(tokens_BT.to(device), targets=targets)
        losses = recorder.sum_losses_by_row(targets)
        assert losses is not None
        return (-losses).tolist()

    def _load(self) -> nn.Module:
        if self._model is not None:
            return self._model
        stored = checkpoint.read_tensors(self._source, "model.")
        has_adapters = any(map(is_factor, stored))
        model_config = self._config.model
        model = build(model_config if has_adapters else model_config.model_copy(update={"lora": None}))
        initialise_buffers(model)
        for name, tensor in list_checkpoint_tensors(model).items():
            value = stored.get(f"model.{name}")
            if value is None or value.shape != tensor.shape:
                raise UsageError(
                    f"train.init_from = {self._source}: lacks {name} {list(tensor.shape)} of this model: start from a "
                    "model of the same sizes"
                )
            tensor.data.copy_(value)
        device = self._config.train.device
        use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self._model = model.eval().to("cuda" if use_gpu else "cpu")
        return self._model
