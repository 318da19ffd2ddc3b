"""Samples one by one come in the order that is written down, from anywhere in it."""

from itertools import islice

import numpy as np
import pytest

from megatfm.data import Corpus, ShuffledSamples


@pytest.mark.parametrize("streams", [1, 7, 64, 300])
def test_samples_come_in_order_and_each_once_an_epoch(corpus: Corpus, streams: int) -> None:
    samples = ShuffledSamples(corpus, seed=3, streams=streams)
    read = list(islice(samples, 250))
    assert samples.position == 250
    places = [samples.order.place(position) for position in range(250)]
    assert [number for number, _ in read] == [int(corpus.blocks[place.block]) + place.row for place in places]
    for epoch in (read[:100], read[100:200]):
        assert sorted(number for number, _ in epoch) == list(range(100))
    for number, tokens in read[::20]:
        np.testing.assert_array_equal(tokens, corpus.sample(number).tokens)


@pytest.mark.parametrize("streams", [1, 7, 64])
def test_it_goes_on_from_any_position(corpus: Corpus, streams: int) -> None:
    whole = [number for number, _ in islice(ShuffledSamples(corpus, seed=3, streams=streams), 250)]
    for position in (0, 1, 6, 7, 93, 99, 100, 101, 199):
        again = ShuffledSamples(corpus, seed=3, streams=streams, position=position)
        assert [number for number, _ in islice(again, 250 - position)] == whole[position:]
