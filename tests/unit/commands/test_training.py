"""What `megatfm train` sets before torch is there."""

import pytest

from megatfm.commands.training import enable_expandable_segments


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_grows_its_segments_unless_something_is_set(name: str) -> None:
    environment: dict[str, str] = {}
    enable_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment = {name: "max_split_size_mb:512"}
    enable_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:512"}
