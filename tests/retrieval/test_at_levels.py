"""The sets of a query at several alphas, from one search."""

import pytest

from rcir.errors import InvalidData, InvalidRiskLevel, RiskUnattainable

ALPHAS = (0.7, 0.5, 0.95, 0.6)


@pytest.mark.parametrize("options", [{}, {"distinct": "label"}, {"group": "True"}])
def test_they_are_those_that_are_asked_for_one_by_one(retriever, splits, options):
    queries = list(splits.test.images[:6])
    found = retriever.at_levels(queries, ALPHAS, 0.1, **options)
    assert all(one.alphas == tuple(sorted(one.alphas)) for one in found)
    for column, alpha in enumerate(found[0].alphas):
        answers = retriever.retrieve(queries, alpha, 0.1, simultaneous=True, **options)
        assert [one.sizes[column] for one in found] == [answer.size for answer in answers]
        for one, answer in zip(found, answers, strict=True):
            assert one.largest.ids[: answer.size] == answer.ids
    assert [one.largest.guarantee.alpha for one in found] == [found[0].alphas[0]] * 6


def test_levels_that_are_not_certified_are_left_out(retriever, splits):
    (found,) = retriever.at_levels([splits.test.images[0]], [1e-6, 0.95], 0.1)
    assert found.alphas == (0.95,)
    with pytest.raises(RiskUnattainable):
        retriever.at_levels([splits.test.images[0]], [1e-6, 1e-5], 0.1)


def test_levels_that_are_none_are_refused(retriever, splits):
    with pytest.raises(InvalidData, match="no alphas"):
        retriever.at_levels([splits.test.images[0]], [], 0.1)
    with pytest.raises(InvalidRiskLevel):
        retriever.at_levels([splits.test.images[0]], [0.5, 1.5], 0.1)
