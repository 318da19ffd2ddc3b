"""The batches of a run: what ranks must be able to divide among them, known before any of them starts."""

from megatfm.config.root import Config


def global_batches(config: Config) -> dict[int, str]:
    """Rows of every step that there is in a run → the key that asks for it, `train.global_batch` first."""
    batches = {config.train.global_batch: "train.global_batch"}
    for number, stage in enumerate(config.data.rampup):
        if stage.global_batch:
            batches.setdefault(stage.global_batch, f"data.rampup[{number}].global_batch")
    return batches
