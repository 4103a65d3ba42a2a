"""Settings shared by all tests."""

from typing import Callable

import pytest
from hypothesis import settings
from wanted_torchrec import check_torchrec

# CI machines are small and busy, so an example's wall time says nothing.
settings.register_profile("neuroshard", deadline=None)
settings.load_profile("neuroshard")


@pytest.fixture(scope="session", autouse=True)
def torchrec_version(record_testsuite_property: Callable[[str, object], None]) -> None:
    """All tests fail on another TorchRec than the wanted one; the JUnit report says which it was."""
    version = check_torchrec()
    if version is not None:
        record_testsuite_property("torchrec", version)
