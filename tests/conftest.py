"""Settings shared by all tests."""

from hypothesis import settings

# CI machines are small and busy, so an example's wall time says nothing.
settings.register_profile("neuroshard", deadline=None)
settings.load_profile("neuroshard")
