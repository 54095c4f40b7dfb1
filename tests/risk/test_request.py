"""Mixes of groups that can be asked for, and that cannot."""

import math

import pytest

from rcir.errors import InvalidConfig
from rcir.risk import Request

SHARES = {"a": 0.1, "b": 0.6, "c": 0.3}


@pytest.mark.parametrize(
    "mix",
    [
        {},
        {"a": 0.5},
        {"a": 1.5, "b": -0.5},
        {"a": math.nan, "b": 1.0},
        {"a": "all"},
        {"a": None},
        "every",
        0.5,
    ],
)
def test_shares_that_are_no_mix_are_refused(mix):
    with pytest.raises(InvalidConfig, match="mix is"):
        Request(0.3, 0.1, mix=mix)


@pytest.mark.parametrize("mix", ["any", SHARES])
@pytest.mark.parametrize(
    "options",
    [
        {"group": "a"},
        {"abstain": True},
        {"risk": "false-discovery"},
        {"alpha": {"miss": 0.1, "recall": 0.5}},
        {"delta": None},
    ],
)
def test_mixes_of_what_no_mix_is_had_of_are_refused(mix, options):
    with pytest.raises(InvalidConfig):
        Request(**{"alpha": 0.3, "delta": 0.1, "mix": mix, **options})


def test_shares_go_with_neither_simultaneous_nor_anytime():
    for option in ("simultaneous", "anytime"):
        with pytest.raises(InvalidConfig, match="neither simultaneous nor anytime"):
            Request(0.3, 0.1, mix=SHARES, **{option: True})


def test_mixes_that_can_be_had_are_taken():
    assert Request(0.3, 0.1, mix=SHARES).mix == SHARES
    assert Request(0.3, 0.1, risk="recall", mix={"a": 1, "b": 0}).mix == {"a": 1, "b": 0}
    assert Request(0.3, 0.1, mix="any", simultaneous=True).simultaneous
    assert Request({"recall": 0.3}, 0.1, mix="any").risk == "recall"
