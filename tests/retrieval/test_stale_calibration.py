"""A calibration is refused as soon as anything that it depends on has changed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.retrieval.retriever import Retriever
from tests.retrieval.retrievers import build, guarantee, retrieve, search
from tests.retrieval.whole_numbers import GALLERY, TEST


def test_a_retriever_without_calibration_gives_neighbours_only():
    fresh = build()
    queries = search(fresh, TEST)
    for call in (
        *(lambda: retrieve(fresh, 0.3), lambda: guarantee(fresh, 0.3), fresh.recalibrate),
        *(lambda: fresh.check(queries), lambda: fresh.extend_calibration(queries)),
    ):
        with pytest.raises(StaleCalibration, match="not calibrated"):
            call()
    assert fresh.search(TEST.vectors[:2]).positions.shape == (2, 150)


def edit_weights(retriever):
    with torch.no_grad():
        next(retriever.encoder.parameters()).add_(1e-3)


def change_precision_and_back(retriever):
    retriever.encoder.bfloat16().float()


def replace_memory(retriever):
    values = next(retriever.encoder.parameters())
    values.data = values.data * 1.001


def add_forward_hook(retriever):
    layer = next(iter(retriever.encoder.children()))
    layer.register_forward_hook(lambda _module, _inputs, output: output)


def add_forward_pre_hook(retriever):
    retriever.encoder.network.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / 2,))


def change_preprocessing(retriever):
    changed = replace(retriever.preprocessing, mean=(0.5,))
    retriever.searcher = replace(retriever.searcher, preprocessing=changed)


def change_depth(retriever):
    retriever.searcher = replace(retriever.searcher, max_depth=10)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (edit_weights, "encoder"),
        (change_precision_and_back, "encoder"),
        (replace_memory, "encoder"),
        (add_forward_hook, "encoder"),
        (add_forward_pre_hook, "encoder"),
        (change_preprocessing, "preprocessing"),
        (change_depth, "depth"),
    ],
)
def test_a_change_in_memory_makes_the_calibration_stale(loaded, splits, change, name):
    image = splits.test.images[0]
    loaded.retrieve(image, 0.3, 0.1)
    change(loaded)
    with pytest.raises(StaleCalibration, match=name):
        loaded.retrieve(image, 0.3, 0.1)


def test_changed_weights_stay_stale_when_they_are_saved(loaded, splits, tmp_path):
    edit_weights(loaded)
    changed = Retriever.load(loaded.save(tmp_path / "changed"))
    with pytest.raises(StaleCalibration, match="encoder"):
        changed.retrieve(splits.test.images[0], 0.3, 0.1)


def test_a_replaced_layer_changes_the_fingerprint(loaded):
    before = loaded.encoder.fingerprint()
    loaded.encoder.network.backbone[1] = torch.nn.Tanh()
    assert loaded.encoder.fingerprint() != before


def test_removing_a_hook_restores_the_calibration(loaded, splits):
    image = splits.test.images[0]
    before = loaded.retrieve(image, 0.3, 0.1)
    handle = loaded.encoder.network.register_forward_hook(lambda *_: None)
    with pytest.raises(StaleCalibration, match="encoder"):
        loaded.retrieve(image, 0.3, 0.1)
    handle.remove()
    assert loaded.retrieve(image, 0.3, 0.1).to_dict() == before.to_dict()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"vectors": GALLERY.vectors + 1}, "index"),
        ({"ids": [f"item {row}" for row in range(300)]}, "gallery"),
        ({"labels": GALLERY.labels[::-1]}, "gallery"),
        ({"uncertainty": GALLERY.uncertainty * 2}, "gallery"),
        ({"model": "clip"}, "options"),
        ({"metric": "cosine"}, "options"),
        ({"leave_one_out": True}, "options"),
    ],
    ids=str,
)
def test_everything_an_answer_depends_on_is_in_a_fingerprint(change, name):
    arguments = {
        "vectors": GALLERY.vectors,
        "labels": GALLERY.labels,
        "uncertainty": GALLERY.uncertainty,
        "metric": "euclidean",
    }
    before, after = (
        Retriever.from_embeddings(**options).searcher.fingerprints()
        for options in (arguments, arguments | change)
    )
    assert name in {part for part, digest in before.items() if digest != after[part]}


def test_names_labels_and_uncertainties_cannot_be_written_to(certified):
    for values in (certified.ids, certified.labels, certified.searcher.gallery.uncertainty):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = values[1]


@pytest.mark.parametrize("argument", ["uncertainty", "labels"])
def test_the_gallery_keeps_copies_of_what_it_was_built_from(argument):
    given = {"uncertainty": GALLERY.uncertainty.copy(), "labels": GALLERY.labels.copy()}
    built = build(**given)
    before = built.searcher.fingerprints()
    given[argument][:] = 7
    assert built.searcher.fingerprints() == before
    kept = built.searcher.gallery.uncertainty if argument == "uncertainty" else built.labels
    assert kept.tolist() == getattr(GALLERY, argument).tolist()


def test_a_diverged_encoder_is_refused(loaded, splits):
    with torch.no_grad():
        next(loaded.encoder.parameters()).fill_(torch.nan)
    with pytest.raises(InvalidData, match="NaN"):
        loaded.search(splits.test.images[:2])
    with pytest.raises(InvalidData, match="NaN"):
        Retriever.build(loaded.encoder, loaded.preprocessing, splits.gallery)


def test_an_empty_gallery_or_search_and_a_lone_encoder_are_refused(retriever, splits):
    parts = retriever.encoder, retriever.preprocessing
    with pytest.raises(InvalidData, match="at least one image"):
        Retriever.build(*parts, splits.gallery.subset(np.arange(0)))
    with pytest.raises(InvalidConfig, match="whole number, at least 1"):
        Retriever.build(*parts, splits.gallery, depth=0)
    for encoder, preprocessing in ((parts[0], None), (None, parts[1])):
        with pytest.raises(InvalidConfig, match="preprocessing"):
            replace(retriever.searcher, encoder=encoder, preprocessing=preprocessing)


def test_options_of_vectors_are_refused_with_images_and_embeddings(retriever, splits, certified):
    embedding = Embedding(torch.from_numpy(GALLERY.vectors[:2]))
    with pytest.raises(InvalidConfig, match="model"):
        certified.retrieve(embedding, 0.3, 0.1, model="clip")
    with pytest.raises(InvalidConfig, match="uncertainty"):
        retriever.retrieve(splits.test.images[0], 0.3, 0.1, uncertainty=0.5)
    with pytest.raises(InvalidConfig, match="model"):
        retriever.retrieve(splits.test.images[0], 0.3, 0.1, model="clip")
