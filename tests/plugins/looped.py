"""A decoder whose blocks run twice, as in Universal Transformers (Dehghani et al. 2019): a family of known parts."""

from dataclasses import replace

from torch import nn

from megatfm.layers.head import Head
from megatfm.models import MODELS
from megatfm.models.stack import Stack, StackInputs, sequence_metadata
from megatfm.models.steps import ForwardPass, ModelStep, ModelSteps
from megatfm.objectives import OBJECTIVES, Causal


@MODELS.register("looped")
class Looped(nn.Module):
    """Embedding, all blocks, all blocks again, norm and head."""

    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.decoder = Stack(config, "decoder")
        self.head = Head(config, self.decoder.embedding.tied_table(config))
        embedding, *blocks, norm = self.decoder.steps("decoder", StackInputs(self.sequence))
        again = [replace(step, name=f"again.{step.name}") for step in blocks]
        head = ModelStep("head", self.run_head, uses=("head",), reads=("hidden",))
        self.steps = ModelSteps([embedding, *blocks, *again, norm, head])

    def forward(self, tokens=None, **inputs):
        batch = ForwardPass({"tokens": tokens, **inputs})
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def sequence(self, batch):
        known = batch.get("positions"), batch.get("documents")
        return batch.once(
            "sequence", lambda: sequence_metadata(batch["tokens"], *known, rng_keys_B=batch.get("keys"))
        )

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
