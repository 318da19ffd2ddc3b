"""What a model returns."""

from typing import NamedTuple

from torch import Tensor


class Output(NamedTuple):
    """A tuple, because FSDP looks for tensors in tuples and not in other classes."""

    hidden: Tensor
    """After the last norm, [B, T, D]; of the decoder in an encoder-decoder, of the discriminator in ELECTRA."""
    logits: Tensor | None = None
    """[B, T, V], when no targets were given; of ELECTRA [B, T], the log-odds that a token was replaced."""
    losses: dict[str, Tensor] | None = None
    """Summed cross-entropy in nats of each term of the loss, when targets were given."""
    predictions: dict[str, Tensor] | None = None
    """What each of `model.heads` predicts, by name, when no targets were given: of "sentence" logits [B, C]."""
