import numpy as np
import pytest
from scipy.io import savemat

from rcir.data import mat
from rcir.data.mat import read_mat
from rcir.errors import InvalidData


@pytest.fixture
def path(tmp_path):
    savemat(tmp_path / "numbers.mat", {"numbers": np.arange(3)})
    return tmp_path / "numbers.mat"


@pytest.mark.parametrize(("squeeze", "shape"), [(True, (3,)), (False, (1, 3))])
def test_what_is_taken_is_given(path, squeeze, shape):
    assert read_mat(path, lambda content: content["numbers"].shape, squeeze) == shape


def test_what_is_not_as_expected_is_invalid(path):
    with pytest.raises(InvalidData, match=r"numbers\.mat cannot be read .*names.*: fetch it again"):
        read_mat(path, lambda content: content["names"])


def test_too_little_memory_is_no_damage(path, monkeypatch):
    def fail(path, squeeze_me):
        raise MemoryError

    monkeypatch.setattr(mat, "loadmat", fail)
    with pytest.raises(MemoryError):
        read_mat(path, len)
