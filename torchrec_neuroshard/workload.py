"""Workload files: tables and a batch size as JSON (the format is described in the README).

``batch_size`` of a workload is *global*: samples per iteration over all ranks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from torchrec_neuroshard.access import ID_ORDERS, REUSE_EDGES, AccessDistribution
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, Table

_DATA_TYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16"}
_OPTIMIZERS = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
    "row_wise_adagrad": "rowwise_adagrad",
    "adam": "adam",
}
# TorchRec's names, written out because this module does without TorchRec.
_SHARDING_TYPES = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
_COMPUTE_KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching", "key_value")
_CONSTRAINT_FIELDS = ("sharding_types", "compute_kernels", "min_partition", "load_factor", "prefetch_pipeline")

_TABLE_FIELDS = (
    "name",
    "num_embeddings",
    "embedding_dim",
    "pooling_factor",
    "features",
    "weighted",
    "unpooled",
    "data_type",
    "constraint",
    "alpha",
    "reuse_histogram",
    "reuse_histogram_of",
    "reuse_histogram_lookups",
    "reuse_histogram_batch_size",
    "id_order",
)
_ID_ORDERS = {order: order for order in ID_ORDERS}
_LARGEST = 10**12  # above any table or batch, below what overflows on the way


class WorkloadError(ValueError):
    """A workload file that cannot be used; the message names the file, the field and the remedy."""


@dataclass(frozen=True)
class Workload:
    """Tables and the batch they see.

    Attributes:
        name: what reports call it.
        batch_size: global samples per iteration; None when the file leaves it open.
        tables: the tables, in file order.
        constraints: table name -> {"sharding_types", "min_partition", "compute_kernels"} as in TorchRec's
            ``ParameterConstraints``, for tables that have any.
        zipf: [tables] Zipf exponent of each table; None where unknown or where a reuse histogram says more.
        features: [tables][features] feature names of each table.
        feature_pooling: [tables][features] mean ids per sample of each feature.
        caches: table name -> {"load_factor", "prefetch_pipeline"} as in TorchRec's ``CacheParams``, for tables
            that have any.
    """

    name: str
    batch_size: int | None
    tables: tuple[Table, ...]
    constraints: Mapping[str, Mapping[str, Any]]
    zipf: tuple[float | None, ...]
    features: tuple[tuple[str, ...], ...]
    feature_pooling: tuple[tuple[float, ...], ...]
    caches: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Workload:
        """Reads a workload file.

        Raises:
            WorkloadError: the file is missing, is not JSON, or a field has no usable value.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise WorkloadError(
                f"{path}: cannot be read ({error.strerror}); give the path of a workload file"
            ) from error
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{path}: not a JSON file ({error}); see the README for the format") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: Any, where: str = "workload") -> Workload:
        """Checks and reads the content of a workload file; ``where`` names it in messages.

        Raises:
            WorkloadError: a field has no usable value.
        """
        if not isinstance(content, dict):
            raise WorkloadError(f"{where}: expected a JSON object, got {type(content).__name__}")
        reader = _Reader(where)
        entries = content.get("tables")
        if not isinstance(entries, list) or not entries:
            raise WorkloadError(f"{where}: field 'tables' must be a list of at least one table")
        batch_size = content.get("batch_size")
        if batch_size is not None:
            batch_size = reader.integer(content, "batch_size", "")
        optimizer = reader.choice(content, "optimizer", "", _OPTIMIZERS, "sgd")
        default_alpha = reader.optional_number(content, "alpha", "")
        id_order = reader.choice(content, "id_order", "", _ID_ORDERS, ID_ORDERS[0])
        rows: list[_Row] = []
        for index, entry in enumerate(entries):
            place = f"tables[{index}]"
            if not isinstance(entry, dict):
                raise WorkloadError(f"{where}: {place} must be an object, got {type(entry).__name__}")
            rows.append(_parse_table(reader, entry, index, place, optimizer, default_alpha, id_order))
        for name, count in Counter(row.table.name for row in rows).items():
            if count > 1:
                raise WorkloadError(f"{where}: {count} tables are named {name!r}; names must be unique")
        return cls(
            name=str(content.get("name", Path(where).stem)),
            batch_size=batch_size,
            tables=tuple(row.table for row in rows),
            constraints={row.table.name: row.constraint for row in rows if row.constraint},
            zipf=tuple(row.alpha for row in rows),
            features=tuple(row.features for row in rows),
            feature_pooling=tuple(row.feature_pooling for row in rows),
            caches={row.table.name: row.cache for row in rows if row.cache},
        )


@dataclass(frozen=True)
class _Row:
    """What one entry of ``tables`` says."""

    table: Table
    alpha: float | None
    features: tuple[str, ...]
    feature_pooling: tuple[float, ...]
    constraint: dict[str, Any]
    cache: dict[str, Any]


@dataclass(frozen=True)
class _Reader:
    """Reads fields and says which file and field is wrong."""

    where: str

    def fail(self, place: str, key: str, wanted: str, value: Any) -> WorkloadError:
        field = f"{place}.{key}" if place else key
        return WorkloadError(f"{self.where}: field '{field}' must be {wanted}, got {value!r}")

    def integer(self, entry: Mapping[str, Any], key: str, place: str) -> int:
        value = entry.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise self.fail(place, key, f"a whole number from 1 to {_LARGEST:.0e}", value)
        return value

    def optional_number(self, entry: Mapping[str, Any], key: str, place: str) -> float | None:
        value = entry.get(key)
        if value is None:
            return None
        if not _is_number(value):
            raise self.fail(place, key, f"a number from 0 to {_LARGEST:.0e}", value)
        return float(value)

    def flag(self, entry: Mapping[str, Any], key: str, place: str) -> bool:
        value = entry.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(place, key, "true or false", value)
        return bool(value)

    def choice(self, entry: Mapping[str, Any], key: str, place: str, known: Mapping[str, str], default: str) -> str:
        value = entry.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value.lower() not in known:
            raise self.fail(place, key, f"one of {', '.join(known)}", value)
        return known[value.lower()]

    def words(self, entry: Mapping[str, Any], key: str, place: str, known: tuple[str, ...]) -> list[str]:
        value = entry[key]
        if not isinstance(value, list) or not value or any(word not in known for word in value):
            raise self.fail(place, key, f"a list of some of {', '.join(known)}", value)
        return list(value)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= _LARGEST


def _parse_table(
    reader: _Reader,
    entry: Mapping[str, Any],
    index: int,
    place: str,
    optimizer: str,
    default_alpha: float | None,
    default_order: str,
) -> _Row:
    unknown = sorted(set(entry) - set(_TABLE_FIELDS))
    if unknown:
        raise WorkloadError(
            f"{reader.where}: field '{place}.{unknown[0]}' is unknown; a table has {', '.join(_TABLE_FIELDS)}"
        )
    name = entry.get("name", f"t{index}")
    if not isinstance(name, str) or not name or "." in name:
        raise reader.fail(place, "name", "a text without dots (module paths are split at dots)", name)
    rows = reader.integer(entry, "num_embeddings", place)
    dim = reader.integer(entry, "embedding_dim", place)
    if dim % WIDTH_MULTIPLE:
        nearest = -(-dim // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        raise reader.fail(place, "embedding_dim", f"a multiple of {WIDTH_MULTIPLE} for FBGEMM (pad to {nearest})", dim)
    unpooled, weighted = reader.flag(entry, "unpooled", place), reader.flag(entry, "weighted", place)
    if unpooled and weighted:
        raise WorkloadError(
            f"{reader.where}: field '{place}.weighted': sequence tables (unpooled, in an EmbeddingCollection) take no "
            "weights; remove one of the two fields"
        )
    features, feature_pooling = _parse_features(reader, entry, name, place)
    alpha = reader.optional_number(entry, "alpha", place)
    access = _parse_reuse_histogram(reader, entry, place, rows, sum(feature_pooling))
    if access is None:
        alpha = default_alpha if alpha is None else alpha
        access = None if alpha is None else AccessDistribution.zipf(rows, alpha)
    constraint, cache = _parse_constraint(reader, entry, place)
    table = Table(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        pooling_factor=sum(feature_pooling),
        num_features=len(features),
        weighted=weighted,
        data_type=reader.choice(entry, "data_type", place, _DATA_TYPES, "fp32"),
        optimizer=optimizer,
        access=access,
        id_order=reader.choice(entry, "id_order", place, _ID_ORDERS, default_order),
        unpooled=unpooled,
    )
    return _Row(table, alpha, features, feature_pooling, constraint, cache)


def _parse_features(
    reader: _Reader, entry: Mapping[str, Any], table: str, place: str
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Feature names and mean ids per sample of each feature of a table."""
    pooling = reader.optional_number(entry, "pooling_factor", place)
    features = entry.get("features")
    if features is None:
        return (f"{table}_f0",), (1.0 if pooling is None else pooling,)
    if isinstance(features, list) and features and all(isinstance(feature, str) and feature for feature in features):
        if len(set(features)) < len(features):
            raise reader.fail(place, "features", "a list of different names", features)
        total = float(len(features)) if pooling is None else pooling
        return tuple(features), (total / len(features),) * len(features)
    if isinstance(features, list) and features and all(map(_is_number, features)):
        if pooling is not None and abs(sum(features) - pooling) > 0.01 * max(pooling, 1.0):
            raise reader.fail(place, "pooling_factor", f"the sum of 'features', {sum(features):g}", pooling)
        names = tuple(f"{table}_f{index}" for index in range(len(features)))
        return names, tuple(float(ids) for ids in features)
    raise reader.fail(place, "features", "a list of ids per feature, or a list of feature names", features)


def _parse_reuse_histogram(
    reader: _Reader, entry: Mapping[str, Any], place: str, rows: int, pooling: float
) -> AccessDistribution | None:
    """The access distribution that a table's reuse histogram stands for; None when it has none."""
    shares = entry.get("reuse_histogram")
    details = ("reuse_histogram_of", "reuse_histogram_lookups", "reuse_histogram_batch_size")
    if shares is None:
        for key in details:
            if entry.get(key) is not None:
                raise reader.fail(place, key, "left out where there is no 'reuse_histogram'", entry[key])
        return None
    if entry.get("alpha") is not None:
        raise reader.fail(place, "alpha", "left out beside a 'reuse_histogram', which says more", entry["alpha"])
    if not isinstance(shares, list) or not all(map(_is_number, shares)):
        raise reader.fail(place, "reuse_histogram", f"a list of {len(REUSE_EDGES)} shares that sum to 1", shares)
    share_of = reader.choice(entry, "reuse_histogram_of", place, {"rows": "rows", "lookups": "lookups"}, "rows")
    lookups = reader.optional_number(entry, "reuse_histogram_lookups", place)
    samples = reader.optional_number(entry, "reuse_histogram_batch_size", place)
    if (lookups is None) == (samples is None):
        wanted = "given, or 'reuse_histogram_batch_size' (samples), but not both: a histogram holds for one batch"
        raise reader.fail(place, "reuse_histogram_lookups", wanted, lookups)
    if lookups is None and samples is not None:
        lookups = samples * pooling
    try:
        return AccessDistribution.from_reuse_histogram(shares, rows, lookups or 0.0, share_of)  # type: ignore[arg-type]
    except ValueError as error:
        raise WorkloadError(f"{reader.where}: field '{place}.reuse_histogram' is not usable: {error}") from error


def _parse_constraint(reader: _Reader, entry: Mapping[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table's constraint and cache settings: an object, or words such as "row_wise fused_uvm load_factor 0.2"."""
    value = entry.get("constraint")
    if value is None:
        return {}, {}
    if isinstance(value, str):
        value = _constraint_of_words(reader, value, place)
    if not isinstance(value, dict) or set(value) - set(_CONSTRAINT_FIELDS):
        raise reader.fail(place, "constraint", f"an object with some of {', '.join(_CONSTRAINT_FIELDS)}", value)
    place = f"{place}.constraint"
    constraint: dict[str, Any] = {}
    if "sharding_types" in value:
        constraint["sharding_types"] = reader.words(value, "sharding_types", place, _SHARDING_TYPES)
    if "compute_kernels" in value:
        constraint["compute_kernels"] = reader.words(value, "compute_kernels", place, _COMPUTE_KERNELS)
    if "min_partition" in value:
        constraint["min_partition"] = reader.integer(value, "min_partition", place)
    cache: dict[str, Any] = {}
    load_factor = reader.optional_number(value, "load_factor", place)
    if load_factor is not None:
        if not 0 < load_factor <= 1:
            raise reader.fail(place, "load_factor", "above 0 and at most 1", load_factor)
        cache["load_factor"] = load_factor
    if reader.flag(value, "prefetch_pipeline", place):
        cache["prefetch_pipeline"] = True
    return constraint, cache


def _constraint_of_words(reader: _Reader, text: str, place: str) -> dict[str, Any]:
    constraint: dict[str, Any] = {}
    words = iter(text.split())
    for word in words:
        if word in _SHARDING_TYPES:
            constraint.setdefault("sharding_types", []).append(word)
        elif word in _COMPUTE_KERNELS:
            constraint.setdefault("compute_kernels", []).append(word)
        elif word == "prefetch":
            constraint["prefetch_pipeline"] = True
        elif word in ("load_factor", "min_partition"):
            number = next(words, "")
            try:
                constraint[word] = float(number) if word == "load_factor" else int(number)
            except ValueError:
                raise reader.fail(place, "constraint", f"a number after {word}", text) from None
        else:
            known = ", ".join((*_SHARDING_TYPES, *_COMPUTE_KERNELS))
            raise reader.fail(
                place,
                "constraint",
                f"an object, or words among {known}, prefetch, load_factor NUMBER, min_partition NUMBER",
                text,
            )
    return constraint
