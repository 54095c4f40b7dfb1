"""A retriever as a folder of plain files, and back.

    manifest.json           format version, and the SHA-256 of every other file
    retriever.json          encoder, preprocessing, index, depth, controllers, what it was
                            calibrated on, and how many retrievers it was chosen among
    encoder.safetensors     weights, if it has an encoder
    controller.safetensors  score functions, labelled results of tuning split and calibration split
    index/                  the index's own files
    gallery.json            ids
    relevance.safetensors   labels of the gallery images or what else says which queries match them
    uncertainty.npy         uncertainties of the gallery images, if the encoder states any
    norms.npy               lengths of their vectors, unless it does or they are all 1
    items.safetensors       embeddings of the gallery images, if the encoder re-ranks by them
    digests.npy             digests of the gallery images, if they are known; of templates those of
                            all their pictures
    queries.safetensors     the queries that it was tuned and calibrated with: vectors,
                            uncertainties, and what says which gallery images they match
    queries.json            their groups and clusters, if they have any
    queries.npy             their digests

Nothing in it is, or is read as, a pickle.
"""

from typing import TYPE_CHECKING

from rcir.import_paths import lazily

if TYPE_CHECKING:
    from rcir.retrieval.storage.folder import check_place, load, save
    from rcir.retrieval.storage.weights import load_encoder, save_encoder, save_tensors

_HOMES = {
    "rcir.retrieval.storage.folder": ("check_place", "load", "save"),
    "rcir.retrieval.storage.weights": ("load_encoder", "save_encoder", "save_tensors"),
}

__all__ = ["check_place", "load", "load_encoder", "save", "save_encoder", "save_tensors"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
