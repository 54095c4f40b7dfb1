"""Indexing, concatenation and validation of `Embedding`."""

import pytest
import torch

from rcir.embedding import Embedding
from rcir.errors import InvalidData


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("vectors", (3,)), ("vectors", (3, 2, 2)), ("variance", (3,)), ("variance", (2, 2))),
        *(("uncertainty", (3, 1)), ("uncertainty", (4,)), ("draws", (4, 3, 2)), ("draws", ())),
    ],
    ids=str,
)
def test_parts_of_different_lengths_are_refused(name, shape):
    with pytest.raises(InvalidData, match="shape"):
        Embedding.from_tensors({"vectors": torch.zeros(3, 2), name: torch.zeros(shape)})


def test_indexing_selects_rows_of_every_part():
    whole = Embedding(torch.arange(6.0).view(3, 2), torch.arange(3.0)[:, None], torch.arange(3.0))
    for rows in (slice(1, 3), torch.tensor([1, 2])):
        part = whole[rows]
        assert part.vectors.tolist() == [[2, 3], [4, 5]]
        assert part.variance.tolist() == [[1], [2]]
        assert part.uncertainty.tolist() == [1, 2]


def test_concatenation_keeps_the_order_and_extra_tensors():
    extra = {"concentration": torch.arange(3.0), "draws": torch.arange(12.0).view(3, 2, 2)}
    whole = Embedding(torch.arange(6.0).view(3, 2), torch.arange(3.0)[:, None], extra=extra)
    assert list(whole.tensors) == ["vectors", "variance", "concentration", "draws"]
    joined = Embedding.concatenate([whole[2:], whole[torch.tensor([0, 1])]])
    assert joined.vectors.tolist() == [[4, 5], [0, 1], [2, 3]]
    assert joined.variance.tolist() == [[2], [0], [1]]
    assert joined.uncertainty is None
    assert joined.extra["concentration"].tolist() == [2, 0, 1]
    assert joined.extra["draws"][0].tolist() == [[8, 9], [10, 11]]
    again = Embedding.from_tensors(whole.tensors)
    assert again.uncertainty is None
    assert all(torch.equal(again.tensors[name], values) for name, values in whole.tensors.items())


def test_embeddings_with_different_parts_or_a_reserved_name_are_refused():
    one = torch.zeros(1, 2)
    with pytest.raises(InvalidData, match="variance"):
        Embedding.concatenate([Embedding(one), Embedding(one, one)])
    with pytest.raises(InvalidData, match="rename"):
        Embedding(one, extra={"variance": torch.ones(1, 1)})
