"""A plan that a ``PlanLoader`` has, in place of a search: checked against the model, the ranks and their memory.

TorchRec finds a loaded option's table by its ``storage_hash``, in which two uneven column splits with as many shards
are the same. Here tables are found by their names.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, Sequence

from torchrec.distributed.planner.types import PlanLoader, PlannerError, ShardingOption

from torchrec_neuroshard.adapters.compat import error_type
from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.names import qualified_name
from torchrec_neuroshard.adapters.plan_placement import option_placement
from torchrec_neuroshard.adapters.saved_plan import PlanFile
from torchrec_neuroshard.adapters.split_search import SplitSearch
from torchrec_neuroshard.adapters.table_constraints import DENSE, SHARDING_TYPES
from torchrec_neuroshard.costs.additive_simulator import simulate
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import (
    DATA_PARALLEL,
    PLANNED_KERNELS,
    SPREAD_TYPES,
    Placement,
    ShardingProblem,
)
from torchrec_neuroshard.search import SearchResult

logger = logging.getLogger(__name__)

_SHOWN = 5  # faults that an error lists
_REMEDY = "Drop plan_loader=, or empty what it loads from, to plan afresh."


def plan_name(loader: PlanLoader) -> str:
    """How messages call a loader's plan."""
    identify = getattr(loader, "get_plan_id", None)  # TorchRec's planner calls it, its base class lacks it
    return f"plan {identify()}" if identify is not None else f"plan of {type(loader).__name__}"


def load_plan(
    loader: PlanLoader | None,
    search: SplitSearch,
    inputs: Mapping[str, Any],
    context_hash: Callable[[], str | None],
    note: Callable[[str], None],
) -> tuple[ShardingProblem, SearchResult] | None:
    """The problem and the loader's solution of it, or None where there is none.

    Args:
        loader: the user's.
        search: what would be searched.
        inputs: what ``saved_plan.plan_inputs`` says of it.
        context_hash: TorchRec's hash of the planner's inputs, asked only where the loader has one to compare; None
            where TorchRec cannot tell, and nothing is loaded then, as in its planner.
        note: told whether a plan was loaded.

    Raises:
        PlannerError: the plan was made for something else, does not cover the model or does not fit.
    """
    if loader is None:
        return None
    name = plan_name(loader)
    if isinstance(loader, PlanFile):
        loader.check(inputs)
    expected = loader.plan_context_hash()
    current = context_hash() if expected is not None else None
    if expected is not None and current is not None and current != expected:
        raise PlannerError(
            f"The {name} was saved for other inputs: their hash is {expected}, that of this planner's (tables, "
            f"constraints, topology, batch size, storage reservation) is {current}. {_REMEDY}",
            error_type("PLANNER_INPUT_CONTEXT_MISMATCH"),
        )
    unsure = expected is not None and current is None
    options = None if unsure else loader.load()
    if options is None:
        why = "whether its inputs are these cannot be told" if unsure else "there is none yet"
        _say(note, f"The {name} was not loaded, as {why}; one was searched for.")
        return None
    problem = search.narrowest()
    placement = _placement(name, list(options.values()), search.tables, problem)
    faults = list(dict.fromkeys(check_placement(problem, placement)))
    if faults:
        raise _failed(name, faults)
    _say(note, f"The {name} was loaded, not searched for.")
    cost = simulate(problem, search.objective).cost(placement)
    return problem, SearchResult(placement, cost, seconds=0.0, log=())


def _say(note: Callable[[str], None], sentence: str) -> None:
    note(sentence)
    logger.info(sentence)


def _placement(
    name: str, options: Sequence[ShardingOption], tables: Sequence[ShardableTable], problem: ShardingProblem
) -> Placement:
    """The placement of the model's tables; options of other modules, which TorchRec's planner places, are left out."""
    found = {(option.path, option.name): option for option in options}
    known = {(entry.module_path, entry.name) for entry in tables}
    faults = [f"{qualified_name(*key)}: not in the plan" for key in sorted(known - set(found))]
    paths = {path for path, _ in known}
    unknown = sorted(key for key in set(found) - known if key[0] in paths)
    faults += [f"{qualified_name(*key)}: in the plan, not in the model" for key in unknown]
    ordered = [found[key] for key in ((entry.module_path, entry.name) for entry in tables) if key in found]
    if not faults:
        faults = [
            f"{qualified_name(option.path, option.name)}: {fault}"
            for entry, option in zip(tables, ordered)
            for fault in _faults(entry, option, problem)
        ]
    if faults:
        raise _failed(name, faults)
    return option_placement(ordered, problem.cluster)


def _faults(entry: ShardableTable, option: ShardingOption, problem: ShardingProblem) -> list[str]:
    """Why an option cannot be the table's; what is left is ``check_placement``'s to find."""
    kind, cluster = option.sharding_type, problem.cluster
    kernels = (DENSE,) if kind == DATA_PARALLEL else PLANNED_KERNELS
    if kind not in SHARDING_TYPES or option.compute_kernel not in kernels:
        return [f"{kind} with kernel {option.compute_kernel}, which NeuroShardPlanner does not plan"]
    ranks = [shard.rank for shard in option.shards]
    if any(rank is None or not 0 <= rank < cluster.world_size for rank in ranks):
        return [f"shards on ranks {ranks} of {cluster.world_size}"]
    rows, dim = entry.table.num_embeddings, entry.table.embedding_dim
    lies = [(shard.rank, tuple(shard.offset), tuple(shard.size)) for shard in option.shards]
    if kind not in SPREAD_TYPES:
        whole = all(offset[0] == 0 and size[0] == rows for _, offset, size in lies)
        return [] if whole else [f"{kind} with shards that do not have all of its {rows} rows"]
    spread = option_placement([option], cluster).spreads[0]
    assert spread is not None
    blocks = spread.blocks(rows, dim, cluster.world_size, cluster.ranks_per_host)
    expected = [(block.rank, (block.first_row, block.offset), (block.rows, block.width)) for block in blocks]
    return [] if lies == expected else [f"not cut as TorchRec's run time cuts {kind} tables of {rows} x {dim}"]


def _failed(name: str, faults: Sequence[str]) -> PlannerError:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return PlannerError(
        f"The {name} cannot be used: {'; '.join(faults[:_SHOWN])}{more}. {_REMEDY}", error_type("PLAN_LOADING_FAILED")
    )
