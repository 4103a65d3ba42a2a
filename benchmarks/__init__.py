"""Comparisons of planners by measured plans (see README.md in this folder)."""
