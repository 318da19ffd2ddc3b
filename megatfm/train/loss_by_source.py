"""Training loss of each corpus of a mixture: which rows of a step are of which corpus."""

from megatfm.config import Config
from megatfm.data.loader import DataLoader
from megatfm.data.mixture import Mixture
from megatfm.engines.interface import RowSources
from megatfm.engines.registry import ENGINES
from megatfm.train.corpora import Corpora


class MixtureSources:
    """Names the corpus of each row where `log.loss_by_source` asks for it; `note` says for the log why it can't."""

    def __init__(self, config: Config, corpora: Corpora) -> None:
        self._mixture = corpora.train if isinstance(corpora.train, Mixture) else None
        self.note = ""
        if self._mixture and not config.log.loss_by_source:
            self._mixture = None
        if self._mixture and (reason := _conflict(config, corpora)):
            self._mixture = None
            self.note = f"log.loss_by_source: the loss is not told by corpus, since {reason}"

    def of_rows(self, loader: DataLoader) -> RowSources | None:
        """The corpora of the rows that the loader gave last; None if they are not requested."""
        if not self._mixture:
            return None
        sources = [self._mixture.row_sources(positions) for positions in loader.row_positions]
        return RowSources(list(self._mixture.sources), sources)


def _conflict(config: Config, corpora: Corpora) -> str:
    """Return why losses can't be separated by rows; "" if they can."""
    engine = config.parallel.engine
    if not corpora.objective.predicts_tokens:
        return (
            f"objective.name = {config.objective.name!r} predicts no tokens by the head over the vocabulary"
        )
    if config.train.cuda_graphs:
        return "train.cuda_graphs = true repeats passes as they were recorded"
    if not ENGINES.has(engine, "loss_by_source"):
        return f"parallel.engine = {engine!r} does not declare it among its features"
    return ""
