"""Search for a placement: feasibility, column splits, placement, refinement."""

from torchrec_neuroshard.search.config import SearchConfig, SearchResult
from torchrec_neuroshard.search.driver import find_placement

__all__ = ["SearchConfig", "SearchResult", "find_placement"]
