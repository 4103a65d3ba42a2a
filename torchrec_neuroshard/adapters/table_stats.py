"""Measured pooling factors, access distributions and id orders of a model's tables."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.access import ID_ORDERS, AccessDistribution
from torchrec_neuroshard.adapters.module_kinds import ModuleKind, module_kind
from torchrec_neuroshard.adapters.names import qualified_name, unique_names

_SCHEMA = 1

# Enough lookups to fit a table's distribution; the pooling factor goes on being counted.
DEFAULT_MAX_LOOKUPS = 200_000

# Ids count as sorted by popularity when the first eighth of the rows takes more than half of what it would then take
# beyond its share of the rows; where sorting would hardly matter, they do not.
_FIRST_BLOCK = 8
_ORDER_MATTERS = 0.05


class TableStatsError(ValueError):
    """Statistics that cannot be used; the message says which table or field and what to do."""


@dataclass(frozen=True)
class TableStats:
    """What the training data says about each table, independent of the batch size.

    Tables are keyed by name; where two modules of a model share a table name, by "module.path.name".

    Attributes:
        pooling_factors: table -> mean ids per sample, summed over the table's features.
        access: table -> access distribution. Where only a reuse histogram is known:
            :meth:`AccessDistribution.from_reuse_histogram
            <torchrec_neuroshard.access.AccessDistribution.from_reuse_histogram>`.
        id_orders: table -> one of :data:`~torchrec_neuroshard.access.ID_ORDERS`; "scattered" where missing.
    """

    pooling_factors: Mapping[str, float] = field(default_factory=dict)
    access: Mapping[str, AccessDistribution] = field(default_factory=dict)
    id_orders: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, order in self.id_orders.items():
            if order not in ID_ORDERS:
                raise TableStatsError(
                    f"id order of table {name!r} must be one of {', '.join(ID_ORDERS)}, got {order!r}"
                )
        for name, value in self.pooling_factors.items():
            if not (math.isfinite(value) and value >= 0):
                raise TableStatsError(f"pooling factor of table {name!r} must be a number of at least 0, got {value!r}")

    @classmethod
    def from_batches(
        cls,
        batches: Iterable[KeyedJaggedTensor],
        module_or_configs: nn.Module | Iterable[BaseEmbeddingConfig],
        max_lookups: int = DEFAULT_MAX_LOOKUPS,
    ) -> TableStats:
        """Measures statistics on sample batches.

        Args:
            batches: KeyedJaggedTensors, or batches that hold one as ``sparse_features`` as TorchRec's ``Batch`` does.
            module_or_configs: the model (its embedding collections are found), or the tables' configs.
            max_lookups: ids kept per table for the access distribution, first come first kept.

        Raises:
            TableStatsError: no batches or tables, a feature that a batch lacks, or ids outside a table.
        """
        if max_lookups < 1:
            raise TableStatsError(f"max_lookups must be positive, got {max_lookups}")
        if isinstance(batches, KeyedJaggedTensor):
            raise TableStatsError("batches must be a list of KeyedJaggedTensors: give [kjt] for a single one")
        counters = [_Counter(name, config, max_lookups) for name, config in _named_configs(module_or_configs)]
        if not counters:
            raise TableStatsError(
                "no tables: give a model that holds EmbeddingBagCollections or EmbeddingCollections, or their configs"
            )
        samples = 0
        for number, batch in enumerate(batches):
            features: Any = getattr(batch, "sparse_features", batch)
            if not isinstance(features, KeyedJaggedTensor):
                raise TableStatsError(f"batch {number} is a {type(batch).__name__}, expected a KeyedJaggedTensor")
            if features.stride() == 0:
                continue
            samples += features.stride()
            columns = features.to_dict()
            for counter in counters:
                counter.count(columns, number)
        if samples == 0:
            raise TableStatsError("no samples: give at least one batch that is not empty")
        access = {counter.name: counter.distribution() for counter in counters}
        return cls(
            {counter.name: counter.lookups / samples for counter in counters},
            access,
            {counter.name: counter.id_order(access[counter.name]) for counter in counters},
        )

    def pooling_factor(self, module_path: str, table: str) -> float | None:
        """The table's pooling factor; None when it was not measured."""
        qualified = qualified_name(module_path, table)
        return self.pooling_factors.get(qualified, self.pooling_factors.get(table))

    def distribution(self, module_path: str, table: str) -> AccessDistribution | None:
        """The table's access distribution; None when it was not measured."""
        return self.access.get(qualified_name(module_path, table), self.access.get(table))

    def id_order(self, module_path: str, table: str) -> str:
        """How the table's ids lie; "scattered" when it was not measured."""
        return self.id_orders.get(qualified_name(module_path, table), self.id_orders.get(table, ID_ORDERS[0]))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        tables: dict[str, dict[str, Any]] = {}
        for name, factor in self.pooling_factors.items():
            tables.setdefault(name, {})["pooling_factor"] = float(factor)
        for name, access in self.access.items():
            tables.setdefault(name, {})["access"] = {"counts": access.counts.tolist(), "masses": access.masses.tolist()}
        for name, order in self.id_orders.items():
            tables.setdefault(name, {})["id_order"] = order
        return {"schema": _SCHEMA, "tables": tables}

    @classmethod
    def from_json(cls, content: Any, where: str = "table stats") -> TableStats:
        """Reads what :meth:`to_json` wrote; ``where`` names it in messages.

        Instead of "access" a table may have "reuse_histogram": {"shares": [17], "rows", "lookups", "share_of"
        (optional)}, the arguments of ``AccessDistribution.from_reuse_histogram``.

        Raises:
            TableStatsError: a field is missing or has no usable value.
        """
        if not isinstance(content, dict) or not isinstance(content.get("tables"), dict):
            raise TableStatsError(f"{where}: expected a JSON object with 'schema' and 'tables'")
        if content.get("schema") != _SCHEMA:
            raise TableStatsError(
                f"{where}: field 'schema' is {content.get('schema')!r}, this version reads {_SCHEMA}; "
                "measure again with TableStats.from_batches"
            )
        factors: dict[str, float] = {}
        access: dict[str, AccessDistribution] = {}
        orders: dict[str, str] = {}
        for name, entry in content["tables"].items():
            try:
                if "pooling_factor" in entry:
                    factors[name] = float(entry["pooling_factor"])
                if "access" in entry:
                    curve = entry["access"]
                    access[name] = AccessDistribution(
                        np.asarray(curve["counts"], dtype=np.float64), np.asarray(curve["masses"], dtype=np.float64)
                    )
                elif "reuse_histogram" in entry:
                    reuse = entry["reuse_histogram"]
                    access[name] = AccessDistribution.from_reuse_histogram(
                        reuse["shares"], int(reuse["rows"]), float(reuse["lookups"]), reuse.get("share_of", "rows")
                    )
                if "id_order" in entry:
                    orders[name] = str(entry["id_order"])
            except (KeyError, TypeError, ValueError) as error:
                raise TableStatsError(f"{where}: field 'tables.{name}' is not usable ({error})") from error
        return cls(factors, access, orders)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the statistics to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableStats:
        """Reads a file that :meth:`save` wrote.

        Raises:
            TableStatsError: the file is missing, is not JSON, or has no usable content.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise TableStatsError(f"{path}: cannot be read ({error.strerror}); give a TableStats file") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise TableStatsError(f"{path}: not a JSON file ({error})") from error
        return cls.from_json(content, str(path))


class _Counter:
    """Counts one table's lookups over batches."""

    def __init__(self, name: str, config: BaseEmbeddingConfig, max_lookups: int) -> None:
        self.name = name
        self.lookups = 0
        self._config = config
        self._room = max_lookups
        self._ids: list[NDArray[np.int64]] = []

    def count(self, columns: Mapping[str, Any], batch: int) -> None:
        """Adds the lookups of one batch, over all features of the table."""
        for feature in self._config.feature_names:
            if feature not in columns:
                raise TableStatsError(
                    f"batch {batch} has no feature {feature!r}, which table {self.name!r} looks up; "
                    f"it has {', '.join(columns)}"
                )
            ids = columns[feature].values()
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._config.num_embeddings:
                raise TableStatsError(
                    f"batch {batch}: ids of feature {feature!r} span [{int(ids.min())}, {int(ids.max())}], but table "
                    f"{self.name!r} has rows [0, {self._config.num_embeddings})"
                )
            self.lookups += ids.numel()
            kept = ids[: self._room].detach().to("cpu", torch.int64).numpy()
            if kept.size:
                self._room -= kept.size
                self._ids.append(kept.copy())

    def distribution(self) -> AccessDistribution:
        """The access distribution of the ids kept."""
        try:
            return AccessDistribution.from_ids(self._kept(), self._config.num_embeddings)
        except ValueError as error:
            raise TableStatsError(f"table {self.name!r}: {error}") from error

    def id_order(self, access: AccessDistribution) -> str:
        """Whether popular rows come first among the ids kept, whose distribution is ``access``."""
        ids, rows = self._kept(), self._config.num_embeddings
        first = -(-rows // _FIRST_BLOCK)
        excess = access.top_mass(first) - first / rows
        if ids.size == 0 or excess < _ORDER_MATTERS:
            return "scattered"
        return "frequency" if float(np.mean(ids < first)) - first / rows > excess / 2 else "scattered"

    def _kept(self) -> NDArray[np.int64]:
        return np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.int64)


def _named_configs(
    module_or_configs: nn.Module | Iterable[BaseEmbeddingConfig],
) -> list[tuple[str, BaseEmbeddingConfig]]:
    """(unique table name, config) of every table."""
    if isinstance(module_or_configs, nn.Module):
        found = [(path, config) for path, kind in _outermost_kinds(module_or_configs) for config in kind.configs]
    else:
        found = [("", config) for config in module_or_configs]
    return list(zip(unique_names([(path, config.name) for path, config in found]), [config for _, config in found]))


def _outermost_kinds(model: nn.Module, path: str = "") -> Iterator[tuple[str, ModuleKind]]:
    """(path, kind) of the embedding modules, not of those inside one: a feature-processed collection has its own."""
    kind = module_kind(model)
    if kind is not None:
        yield path, kind
        return
    for name, child in model.named_children():
        yield from _outermost_kinds(child, qualified_name(path, name))
