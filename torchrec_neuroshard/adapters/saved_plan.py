"""Plans in files: saved once, and loaded in place of a search where the inputs are the same."""

from __future__ import annotations

import dataclasses
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

import torch
from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlanLoader,
    PlannerError,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import CacheParams

from torchrec_neuroshard.adapters.compat import error_type
from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.names import qualified_name

SCHEMA_VERSION = 1

_SHOWN = 5  # differences that an error lists
_LONGEST = 120  # characters of a value that an error shows
_MOST = 2**60  # rows or columns
_REMEDY = "Delete the file, or drop plan_loader=, to plan afresh; then save the new plan."


class Planner(Protocol):
    """What :meth:`PlanFile.save` needs of a planner."""

    @property
    def plan_inputs(self) -> Mapping[str, Any] | None:
        """What the last plan was made for; None on a rank that made none."""

    def get_selected_options(self) -> list[ShardingOption]:
        """The options of the last plan."""


class PlanFile(PlanLoader):
    """A plan in a JSON file, to be given to :class:`NeuroShardPlanner` as ``plan_loader``.

    The file holds where the shards of each table lie, and what the plan was made for: the tables, their constraints,
    the ranks and the batch size. A planner with other inputs refuses it, and names what differs. Where there is no file
    yet, the planner searches. Tables that TorchRec's planner places for us are not part of it.

    Args:
        path: of the file.

    Example::

        saved = PlanFile("plan.json")
        planner = NeuroShardPlanner(topology, batch_size, plan_loader=saved)
        plan = planner.collective_plan(model, sharders, pg)  # of the file, where there is one
        saved.save(planner)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def save(self, planner: Planner) -> None:
        """Writes the planner's last plan, at once or not at all; on ranks that another one's plan was sent to, nothing.

        Args:
            planner: a NeuroShardPlanner.

        Raises:
            PlannerError: the planner has no plan.
        """
        inputs, options = planner.plan_inputs, planner.get_selected_options()
        if inputs is None:
            if getattr(planner, "report", None) is not None:
                return
            raise PlannerError(
                f"{self.path}: there is no plan to save yet. Call plan() or collective_plan() first.",
                error_type("INPUT_VALIDATION"),
            )
        planned = [option for option in options if qualified_name(option.path, option.name) in inputs["tables"]]
        document = {"schema": SCHEMA_VERSION, "inputs": inputs, "tables": [_to_plain(option) for option in planned]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.partial")  # one name: what a kill leaves is written over
        try:
            with open(aside, "w") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def load(self) -> dict[int, ShardingOption] | None:
        """The file's sharding options by TorchRec's ``storage_hash``; None where there is no file.

        Raises:
            PlannerError: the file is not a plan that this version can read.
        """
        document = self._document()
        if document is None:
            return None
        batch_size = _get(_get(document, "inputs", dict, self.path), "batch_size", int, f"{self.path}: inputs")
        options = []
        for number, entry in enumerate(_get(document, "tables", list, self.path)):
            where = f"{self.path}: tables[{number}]"
            try:
                options.append(_from_plain(entry, batch_size, where))
            except (ValueError, TypeError, RuntimeError, OverflowError) as error:
                if isinstance(error, PlannerError):
                    raise
                raise _unreadable(f"{where}: {str(error).splitlines()[0]}") from error
        return {option.storage_hash(): option for option in options}

    def plan_context_hash(self) -> str | None:
        """None: inputs are compared one by one (:meth:`check`), not by TorchRec's hash of its whole search space."""
        return None

    def get_plan_id(self) -> str:
        """The path, by which TorchRec's planner names a plan."""
        return str(self.path)

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Refuses a plan that was made for other inputs.

        Args:
            inputs: from :func:`plan_inputs`.

        Raises:
            PlannerError: what differs.
        """
        document = self._document()
        if document is None:
            return
        found = _differences(_get(document, "inputs", dict, self.path), json.loads(json.dumps(inputs)), "")
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise PlannerError(
                f"{self.path}: the plan was saved for other inputs: {'; '.join(found[:_SHOWN])}{more}. {_REMEDY}",
                error_type("PLANNER_INPUT_CONTEXT_MISMATCH"),
            )

    def _document(self) -> dict[str, Any] | None:
        """The file's object; None where there is no file."""
        try:
            document = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(f"{self.path}: cannot be read as JSON ({error})") from error
        schema = _get(document, "schema", int, self.path)
        if schema != SCHEMA_VERSION:
            raise _unreadable(f"{self.path}: schema is {schema}, this version reads {SCHEMA_VERSION}")
        return document


def plan_inputs(
    tables: Sequence[ShardableTable],
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, Any]:
    """What a plan is made for, as plain data: what has to be the same for it to be used again.

    Memory is not part of it: whether a plan fits is checked when it is loaded. Nor are ``table_stats``, which decide
    how good a plan is and not whether it runs; pooling factors in constraints are part of those.

    Args:
        tables: the tables.
        topology: the machines.
        batch_size: samples per rank.
        constraints: the user's, by table name.
    """
    default = ParameterConstraints()
    names = {entry.name for entry in tables}
    return {
        "world_size": topology.world_size,
        "local_world_size": topology.local_world_size,
        "compute_device": topology.compute_device,
        "batch_size": batch_size,
        "tables": {
            qualified_name(entry.module_path, entry.name): {
                "num_embeddings": entry.table.num_embeddings,
                "embedding_dim": entry.table.embedding_dim,
                "num_features": entry.table.num_features,
                "data_type": entry.table.data_type,
                "weighted": entry.table.weighted,
                "unpooled": entry.table.unpooled,
                "optimizer": entry.table.optimizer,
            }
            for entry in tables
        },
        "constraints": {
            name: {
                field.name: _plain(getattr(constraint, field.name))
                for field in dataclasses.fields(constraint)
                if getattr(constraint, field.name) != getattr(default, field.name)
            }
            for name, constraint in sorted((constraints or {}).items())
            if name in names
        },
    }


def _plain(value: Any) -> Any:
    """A field of constraints as JSON has it; objects by their type, as their text may hold an address."""
    if value is None or isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return type(value).__name__


def _differences(saved: Any, current: Any, where: str) -> list[str]:
    """What differs, each as a phrase."""
    if isinstance(saved, dict) and isinstance(current, dict):
        result = []
        for key in [*saved, *(key for key in current if key not in saved)]:
            inner = f"{where}[{key!r}]" if where else key
            if key not in saved:
                result.append(f"{inner} is new: {_short(current[key])}")
            elif key not in current:
                result.append(f"{inner} is gone: it was {_short(saved[key])}")
            else:
                result += _differences(saved[key], current[key], inner)
        return result
    return [] if saved == current else [f"{where} was {saved!r} and is {current!r}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _to_plain(option: ShardingOption) -> dict[str, Any]:
    rows, dim = option.tensor.shape
    load_factor = option.cache_params.load_factor if option.cache_params is not None else None
    return {
        "module": option.path,
        "name": option.name,
        "num_embeddings": rows,
        "embedding_dim": dim,
        "dtype": str(option.tensor.dtype).removeprefix("torch."),
        "is_pooled": option.is_pooled,
        "sharding_type": option.sharding_type,
        "compute_kernel": option.compute_kernel,
        "cache_load_factor": load_factor,
        "shards": [
            {"rank": shard.rank, "offset": list(shard.offset), "size": list(shard.size)} for shard in option.shards
        ],
    }


def _from_plain(entry: Any, batch_size: int, where: str) -> ShardingOption:
    """What :func:`_to_plain` wrote, on the meta device and without its module."""
    kind, dtype = _get(entry, "sharding_type", str, where), _get(entry, "dtype", str, where)
    try:
        partition_by = get_partition_by_type(kind)
    except ValueError as error:
        raise _unreadable(f"{where}: sharding_type is {kind!r}, which TorchRec does not know") from error
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise _unreadable(f"{where}: dtype is {dtype!r}, which torch does not know")
    size = _get(entry, "num_embeddings", int, where), _get(entry, "embedding_dim", int, where)
    load_factor = entry.get("cache_load_factor")
    if load_factor is not None and not (_is_number(load_factor) and 0.0 < load_factor <= 1.0):
        raise _unreadable(f"{where}: cache_load_factor must be a share above 0 and up to 1, got {load_factor!r}")
    if not all(0 < extent <= _MOST for extent in size):
        raise _unreadable(f"{where}: num_embeddings and embedding_dim must be 1 to {_MOST}, got {size}")
    if entry.get("shards") == []:
        raise _unreadable(f"{where}: there are no shards")
    return ShardingOption(
        name=_get(entry, "name", str, where),
        tensor=torch.empty(size, dtype=getattr(torch, dtype), device="meta"),
        module=(_get(entry, "module", str, where), nn.Module()),
        input_lengths=[1.0],
        batch_size=batch_size,
        sharding_type=kind,
        partition_by=partition_by,
        compute_kernel=_get(entry, "compute_kernel", str, where),
        shards=[
            Shard(
                size=_pair(shard, "size", f"{where}: shards[{number}]"),
                offset=_pair(shard, "offset", f"{where}: shards[{number}]"),
                rank=_get(shard, "rank", int, f"{where}: shards[{number}]"),
            )
            for number, shard in enumerate(_get(entry, "shards", list, where))
        ],
        cache_params=None if load_factor is None else CacheParams(load_factor=float(load_factor)),
        is_pooled=_get(entry, "is_pooled", bool, where),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _pair(entry: Any, name: str, where: str) -> list[int]:
    pair = _get(entry, name, list, where)
    if len(pair) != 2 or not all(isinstance(item, int) and item >= 0 for item in pair):
        raise _unreadable(f"{where}: {name} must be rows and columns, got {pair!r}")
    return pair


def _get(entry: Any, name: str, kind: type, where: object) -> Any:
    """A field of an object of the file."""
    if not isinstance(entry, dict) or name not in entry:
        raise _unreadable(f"{where}: field {name!r} is missing")
    value = entry[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _unreadable(f"{where}: {name} must be of type {kind.__name__}, got {value!r}")
    return value


def _unreadable(what: str) -> PlannerError:
    return PlannerError(f"{what}. {_REMEDY}", error_type("PLAN_LOADING_FAILED"))
