import pytest

from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_negatives": 0}, r"mining\.num_negatives is 0; at least 1"),
        ({"num_negatives": 11, "pool": 10}, "raise it"),
        ({"margin": -0.1}, "must not be negative"),
        ({"margin": float("nan")}, "must not be negative"),
        ({"positive": "easiest"}, "choose one of nearest, random, farthest"),
        ({"negatives": "hard"}, "choose one of hardest, margin-violating, semi-hard, top-random"),
        ({"cache": "some"}, r"mining\.cache 'some' is unknown; choose one of full, sampled"),
        ({"sample": 1}, r"mining\.sample is 1; at least 2"),
        ({"refresh": 0}, r"mining\.refresh is 0; at least 1"),
        ({"cache": "sampled", "scope": "batch"}, r"mining\.cache is \"sampled\" but mining\.scope"),
        ({"samples_per_class": 1, "scope": "batch"}, r"mining\.samples_per_class is 1; at least 2"),
        (
            {"samples_per_class": 4},
            r"mining\.samples_per_class is 4 but mining\.scope is \"epoch\"",
        ),
    ],
)
def test_configurations_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(InvalidConfig, match=message):
        MiningConfig(**wrong)


def test_batch_hard_and_a_sampled_cache_are_configurations():
    batch_hard = MiningConfig(
        "farthest", "hardest", num_negatives=1, scope="batch", samples_per_class=4
    )
    assert (batch_hard.scope, batch_hard.samples_per_class) == ("batch", 4)
    sampled = MiningConfig(cache="sampled")
    assert (sampled.sample, sampled.refresh) == (5000, 1000)
