"""Training teaches an encoder something."""

import numpy as np
import torch

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import build_encoder
from training import train

OPTIONS = {"train": 1500, "validation": 200, "gallery": 500, "test": 1000}


def recall(encoder, splits):
    """Recall at 1 on classes that training never saw, by brute force."""
    preprocessing = Preprocessing()
    gallery, test = (
        encoder.embed(preprocessing(part.images)).vectors.double().numpy()
        for part in (splits.gallery, splits.test)
    )
    nearest = (test @ gallery.T).argmax(axis=1)
    return np.mean(splits.gallery.labels[nearest] == splits.test.labels)


def test_recall_on_unseen_classes_rises(tiny):
    config = tiny(epochs=2, data=DataConfig("digits", options=OPTIONS))
    splits = load_splits(config.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = recall(build_encoder(config.encoder, 1, (8, 16)), splits)
    assert recall(train(config).encoder(), splits) > untrained + 0.15
