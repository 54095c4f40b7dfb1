"""Retrievers in a bucket answer as local ones do, also behind a server."""

import numpy as np
import pytest

import rcir
from rcir.errors import CorruptRetriever, NoRetriever, SaveConflict
from rcir.serving.sources import ready_to_serve, source_of
from rcir.storage import as_text, list_objects, write_object

pytestmark = pytest.mark.distributed


def test_a_retriever_is_saved_loaded_and_served(bucket, folder, splits):
    place = f"{bucket}/some/retriever"
    with pytest.raises(NoRetriever, match=place):
        rcir.load(place)
    local = rcir.load(folder)
    assert as_text(local.save(place)) == place
    there, other = rcir.load(place), rcir.load(place)
    queries = list(splits.test.images[:20])
    expected = local.retrieve(queries, alpha=0.2, delta=0.1)
    answers = there.retrieve(queries, alpha=0.2, delta=0.1)
    assert [a.to_dict() for a in answers] == [a.to_dict() for a in expected]

    source = source_of(place)
    served = ready_to_serve(source)
    assert served.version == source_of(folder).version()
    assert [a.to_dict() for a in served.retriever.retrieve(queries, alpha=0.2, delta=0.1)] == [
        a.to_dict() for a in expected
    ]

    there.remove([there.ids[0]])
    there.save(place)
    assert source.version() != served.version
    other.remove([other.ids[1]])
    with pytest.raises(SaveConflict, match=place):
        other.save(place)
    assert len(rcir.load(place).ids) == len(local.ids) - 1
    assert np.array_equal(rcir.load(place).ids, there.ids)


def test_a_corrupt_object_is_refused(bucket, folder, monkeypatch, tmp_path):
    place = f"{bucket}/it"
    rcir.load(folder).save(place)
    (weights,) = [i for i in list_objects(place) if i.name.endswith("encoder.safetensors")]
    write_object(f"{place}/{weights.name}", b"x" * weights.size)
    monkeypatch.setenv("RCIR_CACHE", str(tmp_path / "empty"))
    with pytest.raises(CorruptRetriever, match=f"{place}/.*encoder"):
        rcir.load(place)
