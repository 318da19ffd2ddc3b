"""A decoder whose blocks run twice, as in Universal Transformers (Dehghani et al. 2019): a family of known parts."""

from dataclasses import replace

from torch import nn

from megatfm.layers.head import Head
from megatfm.models import MODELS
from megatfm.models.stack import Reads, Stack, layout_of
from megatfm.models.steps import Pass, Step, Steps
from megatfm.objectives import OBJECTIVES, Causal


@MODELS.register("looped")
class Looped(nn.Module):
    """Embedding, all blocks, all blocks again, norm and head."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.decoder = Stack(config, "decoder")
        self.head = Head(config, self.decoder.embedding.tied_table(config))
        embedding, *blocks, norm = self.decoder.steps("decoder", Reads(self.layout))
        again = [replace(step, name=f"again.{step.name}") for step in blocks]
        head = Step("head", self.run_head, uses=("head",), reads=("hidden",))
        self.steps = Steps([embedding, *blocks, *again, norm, head])

    def forward(self, tokens=None, **inputs):
        batch = Pass({"tokens": tokens, **inputs})
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def layout(self, batch):
        known = batch.get("positions"), batch.get("documents")
        return batch.once("layout", lambda: layout_of(batch["tokens"], *known, keys_B=batch.get("keys")))

    def run_head(self, batch):
        hidden_BTD, targets = batch.carry["hidden"], batch.get("targets")
        if targets is None:
            batch.logits = self.head(hidden_BTD)
        else:
            batch.losses["causal"] = self.head(hidden_BTD, targets)


@OBJECTIVES.register("looped_causal")
class LoopedCausal(Causal):
    families = ("looped",)

    def __init__(self, special, config, model, row_lengths):
        super().__init__(special, model=model)  # with the defaults of its section
