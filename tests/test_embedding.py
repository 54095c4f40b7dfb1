import pytest
import torch

from rcir.embedding import Embedding
from rcir.errors import InvalidData


@pytest.mark.parametrize(
    "parts",
    [
        {"vectors": torch.zeros(3)},
        {"vectors": torch.zeros(3, 2, 2)},
        {"vectors": torch.zeros(3, 2), "variance": torch.ones(3)},
        {"vectors": torch.zeros(3, 2), "variance": torch.ones(2, 2)},
        {"vectors": torch.zeros(3, 2), "uncertainty": torch.ones(3, 1)},
        {"vectors": torch.zeros(3, 2), "uncertainty": torch.ones(4)},
        {"vectors": torch.zeros(3, 2), "extra": {"draws": torch.ones(4, 3, 2)}},
        {"vectors": torch.zeros(3, 2), "extra": {"scale": torch.ones(())}},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts):
    with pytest.raises(ValueError, match="has shape"):
        Embedding(**parts)


def test_rows_are_taken_from_every_part():
    whole = Embedding(torch.arange(6.0).view(3, 2), torch.arange(3.0)[:, None], torch.arange(3.0))
    for rows in (slice(1, 3), torch.tensor([1, 2])):
        part = whole[rows]
        assert part.vectors.tolist() == [[2, 3], [4, 5]]
        assert part.variance.tolist() == [[1], [2]]
        assert part.uncertainty.tolist() == [1, 2]


def test_batches_are_joined_in_order():
    one, two = torch.full((1, 2), 1.0), torch.full((2, 2), 2.0)
    parts = [Embedding(one, one[:, :1]), Embedding(two, two[:, :1])]
    joined = Embedding.concatenate(parts)
    assert joined.vectors.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert joined.variance.tolist() == [[1], [2], [2]]
    assert joined.uncertainty is None


def test_what_else_a_method_states_is_sliced_joined_and_kept_by_name():
    extra = {"concentration": torch.arange(3.0), "draws": torch.arange(12.0).view(3, 2, 2)}
    whole = Embedding(torch.arange(6.0).view(3, 2), extra=extra)
    assert list(whole.tensors) == ["vectors", "concentration", "draws"]
    joined = Embedding.concatenate([whole[2:], whole[torch.tensor([0, 1])]])
    assert joined.extra["concentration"].tolist() == [2, 0, 1]
    assert joined.extra["draws"][0].tolist() == [[8, 9], [10, 11]]
    again = Embedding.from_tensors(whole.tensors)
    assert again.variance is None
    assert all(torch.equal(again.tensors[name], values) for name, values in whole.tensors.items())


def test_embeddings_that_hold_different_things_are_not_joined():
    one = torch.zeros(1, 2)
    with pytest.raises(InvalidData, match="vectors or vectors, variance"):
        Embedding.concatenate([Embedding(one), Embedding(one, one)])


def test_an_attribute_is_no_name_of_anything_else():
    with pytest.raises(InvalidData, match="rename"):
        Embedding(torch.zeros(1, 2), extra={"variance": torch.ones(1, 1)})
