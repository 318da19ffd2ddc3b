"""Owners of live memory: sums by owner, and at the fullest moment of a phase."""

from megatfm.imaginary.ledger import Ledger


def test_owners_at_the_fullest_moment() -> None:
    """Two blocks' tensors grow to 90 bytes, then one is freed and a smaller one made."""
    ledger = Ledger()
    ledger.add(1, 40, None)
    ledger.begin("passes")
    for key, layer, n_bytes in ((2, "layers.0", 20), (3, "layers.1", 30)):
        ledger.layer = layer
        ledger.add(key, n_bytes, None)
    ledger.remove(2)
    ledger.resize(3, 10)
    ledger.add(4, 35, None)
    assert (ledger.live_bytes, ledger.peak) == (85, 90)
    bytes_by_owner = {tuple(owner.split()[:2]): n_bytes for owner, n_bytes in ledger.at_peak().items()}
    assert bytes_by_owner == {("build", "-"): 40, ("passes", "layers.1"): 30, ("passes", "layers.0"): 20}
    ledger.begin("optimizer")
    assert ledger.peak == sum(ledger.at_peak().values()) == 85


def test_a_storage_that_the_ledger_does_not_know_is_no_loss() -> None:
    ledger = Ledger()
    ledger.remove(7)
    assert ledger.live_bytes == 0
    assert 7 not in ledger
