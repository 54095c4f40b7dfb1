"""The labels of galleries whose encoder has distances of its own."""

import numpy as np
import pytest
import torch

import rcir
from rcir.data import ImageSet, Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import Encoder, EncoderConfig

LABELS, SHAPE = 30, (8, 16)


class Colours(Encoder):
    """The normalised pixels; candidates are ranked by half of their distance, or not at all."""

    def __init__(self, reranks):
        super().__init__(EncoderConfig("deterministic", dim=128))
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.has_distances = reranks

    @property
    def reranks(self):
        return self.has_distances

    def forward(self, images):
        return Embedding(torch.nn.functional.normalize(images.flatten(1) - 0.5))

    def rerank(self, queries, candidates):
        near = candidates.vectors.view(len(queries), -1, 128)
        return (queries.vectors[:, None] - near).norm(dim=2) / 2


def draw(n, seed):
    rng = np.random.default_rng(seed)
    means = np.random.default_rng(9).normal(128, 40, (LABELS, *SHAPE))
    labels = rng.permutation(np.arange(n) % LABELS)
    images = np.clip(means[labels] + rng.normal(0, 90, (n, *SHAPE)), 0, 255)
    return ImageSet(images.round().astype(np.uint8), labels, [f"{seed}-{i}" for i in range(n)])


@pytest.mark.parametrize(("risk", "depth"), [("miss", 4), ("recall", 16)])
def test_half_of_the_distance_gives_the_sets_of_the_distance_itself(risk, depth):
    gallery, known, asked = draw(4 * LABELS, 0), draw(300, 1), draw(60, 2)
    answers = []
    for reranks in (False, True):
        retriever = rcir.Retriever.build(Colours(reranks), Preprocessing(), gallery, depth=depth)
        retriever.calibrate_splits(None, retriever.searcher.search_labelled(known))
        answers.append(retriever.retrieve(list(asked.images), 0.2, 0.1, risk=risk))
    assert max(answer.size for answer in answers[0]) > 1
    for plain, own in zip(*answers, strict=True):
        assert plain.ids == own.ids
        assert plain.probabilities == pytest.approx(own.probabilities, abs=1e-4)
        assert 2 * own.distances == pytest.approx(plain.distances, abs=1e-5)
