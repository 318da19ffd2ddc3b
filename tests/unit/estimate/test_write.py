"""The config that a chosen layout is written as."""

import pytest

from megatfm.config import load_config
from megatfm.errors import UsageError
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import estimator
from megatfm.estimate.write import layout_config, write_layout


def test_the_written_config_is_the_chosen_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("written")
    with estimator(load_config("gpt2-124m", []), load_cluster("h100", 8), (1, 2)) as small:
        chosen = small.base.with_changes({"parallel.tp": 2, "parallel.zero": 1, "train.micro_batch": 4})
        estimate = small.estimate(chosen)
    write_layout("gpt2-124m", estimate, folder / "best.toml")
    text = layout_config("gpt2-124m", estimate)
    assert "tp = 2" in text
    assert load_config(str(folder / "best.toml"), []).parallel == estimate.config.parallel
    with pytest.raises(UsageError, match="there is such a file"):
        write_layout("gpt2-124m", estimate, folder / "best.toml")
