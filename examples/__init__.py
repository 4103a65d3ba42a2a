"""Examples; run them from the root of the repository with ``python -m examples.NAME``."""
