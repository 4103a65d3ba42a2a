"""Names for the tables of a model, unique over all of its embedding modules."""

from __future__ import annotations

from collections import Counter
from typing import Sequence


def qualified_name(module_path: str, table: str) -> str:
    """The table's name with its module's path in front ("" is the root module)."""
    return f"{module_path}.{table}" if module_path else table


def unique_names(tables: Sequence[tuple[str, str]]) -> list[str]:
    """One name per (module path, table name): the table's own, or the qualified one where two modules share it."""
    uses = Counter(name for _, name in tables)
    return [name if uses[name] == 1 else qualified_name(path, name) for path, name in tables]
