import pytest
import torch

from rcir.embedding import Embedding


@pytest.mark.parametrize(
    "parts",
    [
        {"mean": torch.zeros(3)},
        {"mean": torch.zeros(3, 2, 2)},
        {"mean": torch.zeros(3, 2), "variance": torch.ones(3)},
        {"mean": torch.zeros(3, 2), "variance": torch.ones(2, 2)},
        {"mean": torch.zeros(3, 2), "uncertainty": torch.ones(3, 1)},
        {"mean": torch.zeros(3, 2), "uncertainty": torch.ones(4)},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts):
    with pytest.raises(ValueError, match="has shape"):
        Embedding(**parts)


def test_rows_are_taken_from_every_part():
    whole = Embedding(torch.arange(6.0).view(3, 2), torch.arange(3.0)[:, None], torch.arange(3.0))
    for rows in (slice(1, 3), torch.tensor([1, 2])):
        part = whole[rows]
        assert part.mean.tolist() == [[2, 3], [4, 5]]
        assert part.variance.tolist() == [[1], [2]]
        assert part.uncertainty.tolist() == [1, 2]


def test_batches_are_joined_in_order():
    one, two = torch.full((1, 2), 1.0), torch.full((2, 2), 2.0)
    parts = [Embedding(one, one[:, :1]), Embedding(two, two[:, :1])]
    joined = Embedding.concatenate(parts)
    assert joined.mean.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert joined.variance.tolist() == [[1], [2], [2]]
    assert joined.uncertainty is None
