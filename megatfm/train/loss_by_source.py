"""Training loss by corpus of a mixture: which rows of a step come from which corpus."""

from megatfm.config import Config
from megatfm.data.loader import DataLoader
from megatfm.data.mixture import Mixture
from megatfm.engines.interface import RowSources
from megatfm.engines.registry import ENGINES
from megatfm.train.corpora import Corpora


class MixtureSources:
    """Looks up the corpus of each row, for `log.loss_by_source`. `note`: for the log, why this is impossible, if so."""

    def __init__(self, config: Config, corpora: Corpora) -> None:
        self._mixture = corpora.train if isinstance(corpora.train, Mixture) else None
        self.note = ""
        if self._mixture and not config.log.loss_by_source:
            self._mixture = None
        if self._mixture and (reason := _find_conflict(config, corpora)):
            self._mixture = None
            self.note = f"log.loss_by_source: the loss can't be split by corpus, since {reason}"

    def of_rows(self, loader: DataLoader) -> RowSources | None:
        """Return the corpus of each row in the loader's last batch; None if this is off or impossible."""
        if not self._mixture:
            return None
        sources = [self._mixture.find_source_indices(positions) for positions in loader.row_positions]
        return RowSources(list(self._mixture.sources), sources)


def _find_conflict(config: Config, corpora: Corpora) -> str:
    """Return why losses can't be split by rows; "" if they can."""
    engine = config.parallel.engine
    if not corpora.objective.predicts_tokens:
        return f"objective.name = {config.objective.name!r} doesn't predict tokens by the head over the vocabulary"
    if config.train.cuda_graphs:
        return "train.cuda_graphs = true replays recorded passes"
    if not ENGINES.has(engine, "loss_by_source"):
        return f"parallel.engine = {engine!r} does not declare it among its features"
    return ""
