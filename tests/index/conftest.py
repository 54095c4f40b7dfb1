"""What the tests of local and of remote indexes share."""

import pytest


@pytest.fixture
def rounding():
    """By how much of itself a distance may differ when it is asked for again."""
    return 0
