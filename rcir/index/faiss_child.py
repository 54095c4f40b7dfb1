"""A process of its own that reads a FAISS file and searches it: a damaged one ends it alone."""

import sys

import faiss
import numpy as np

FLAGS = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE


def main() -> None:
    """Read the file that is named first, and search it for two of its vectors, or for zeros."""
    index = faiss.read_index(sys.argv[1], FLAGS)
    check(index)
    if index.is_trained and index.ntotal:
        index.search(np.zeros((2, index.d), np.float32), min(5, index.ntotal))


def check(index: faiss.Index) -> None:
    """Raise an exception unless what an index, and those within it, point to is there."""
    inner = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexPreTransform):
        check(inner.index)
    if isinstance(inner, faiss.IndexRefine):
        check(inner.base_index)
        check(inner.refine_index)
        if not inner.base_index.ntotal == inner.refine_index.ntotal == inner.ntotal:
            raise ValueError("as many vectors to refine by are not there")
    if isinstance(inner, faiss.IndexHNSW):
        # A neighbour that is not there is read as memory that is not there, by some query some day.
        neighbours = faiss.vector_to_array(inner.hnsw.neighbors)
        if len(neighbours) and not -1 <= neighbours.min() <= neighbours.max() < inner.ntotal:
            raise ValueError("neighbours that are not there")
        if inner.storage.ntotal != inner.ntotal:
            raise ValueError("as many vectors as there are neighbours are not there")
    if isinstance(inner, faiss.IndexIVF):
        check(inner.quantizer)
        for number in range(inner.nlist):
            size = inner.invlists.list_size(number)
            ids = faiss.rev_swig_ptr(inner.invlists.get_ids(number), size) if size else [0]
            if np.min(ids) < 0 or np.max(ids) >= max(inner.ntotal, 1):
                raise ValueError("ids that are not there")


if __name__ == "__main__":
    main()
