"""A decoder whose blocks run twice, as in Universal Transformers (Dehghani et al. 2019): a family of known parts."""

from dataclasses import replace

from megatfm.layers.output_head import LMHead
from megatfm.models import MODELS, Model
from megatfm.models.base import filter_names_below, list_sequence_fields, make_sequence, make_view
from megatfm.models.stack import Stack
from megatfm.objectives import OBJECTIVES, Causal
from megatfm.split_points import SplitPoint


@MODELS.register("looped")
class Looped(Model):
    """Embedding, all blocks, all blocks again, norm and head."""

    is_causal = True

    def __init__(self, config):
        super().__init__(config)
        self.decoder = Stack(config, "decoder")
        self.decoder.depths = [*self.decoder.depths, *self.decoder.depths]
        self.head = LMHead(config, self.decoder.embedding.tied_table(config))
        self.runs_head = True
        self.accept("tokens", *list_sequence_fields(config))
        embedding, *blocks, norm = self.decoder.split_points("decoder")
        repeated = [replace(point, name=f"repeated.{point.name}") for point in blocks]
        self.split_points = [embedding, *blocks, *repeated, norm, SplitPoint("head", ("head",), ("hidden",))]

    def forward(self, tokens=None, *, targets=None, keys=None, hidden=None, **fields):
        batch = self.read(tokens=tokens, targets=targets, keys=keys, **fields)
        sequence = make_sequence(batch, "tokens", keys=keys)
        losses, logits = {}, None
        if self.decoder is not None:
            hidden, losses = self.decoder(tokens, sequence, hidden=hidden)
        if self.runs_head and targets is None:
            logits = self.head(hidden)
        elif self.runs_head:
            losses["causal"] = self.head(hidden, targets)
        return self.output(batch, hidden, losses, logits)

    def stage(self, names):
        """The model of a pipeline stage: without the parts that are not among the names."""
        view = make_view(self)
        first, second = filter_names_below("decoder", names), filter_names_below("repeated.decoder", names)
        view.decoder = self.decoder and self.decoder.stage(first | second)
        if view.decoder is not None:
            n = len(self.decoder.layer_of_depth)
            view.decoder.depths = [d for below in (first, second) for d in range(n) if f"layers.{d}" in below]
        view.runs_head = "head" in names
        return view


@OBJECTIVES.register("looped_causal")
class LoopedCausal(Causal):
    model_families = ("looped",)

    def __init__(self, special, config, model, row_lengths):
        super().__init__(special, model=model)  # with the defaults of its section
