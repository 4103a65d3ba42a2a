"""Planner errors: what this version cannot do, what does not fit, and how an error crosses ranks."""

from __future__ import annotations

from torchrec.distributed.planner.types import PlannerError

from torchrec_neuroshard.adapters.compat import error_type
from torchrec_neuroshard.problem import InfeasibleError

_GIB = 1024**3


class UnsupportedArgumentError(PlannerError, ValueError):
    """An argument that NeuroShardPlanner takes for the sake of TorchRec's signature but cannot honour."""

    def __init__(self, message: str) -> None:
        super().__init__(message, error_type("INPUT_VALIDATION"))


def unsupported(table: str, what: str, remedy: str) -> PlannerError:
    """A request outside this version's scope.

    Args:
        table: the table, with its module's path.
        what: what is asked for and not supported.
        remedy: what to do instead.
    """
    return PlannerError(
        f"Table {table!r}: {what}. NeuroShardPlanner plans the tables of (Fused)EmbeddingBagCollection, "
        "FeatureProcessedEmbeddingBagCollection and (Fused)EmbeddingCollection, of every sharding type, with the fused "
        f"kernels (data_parallel with the dense one). {remedy}",
        error_type("STRICT_CONSTRAINTS"),
    )


def insufficient_storage(error: InfeasibleError, world_size: int, batch_size: int) -> PlannerError:
    """The planner error for tables that do not fit, with the numbers a user needs to act."""
    subject = f"table {error.table!r}" if error.table else "the tables together"
    return PlannerError(
        "Unable to find a plan for this model because of insufficient storage: "
        f"{error}.\n  Needed by {subject}: {_memory(error.needed)}; available: {_memory(error.available)}.\n"
        "Possible solutions:\n"
        f"  1) Increase the number of ranks ({world_size}) or use ranks with more memory\n"
        "  2) Reduce the model size, or the optimizer's state (row-wise Adagrad instead of Adam)\n"
        f"  3) Reduce the local batch size ({batch_size})\n"
        "  4) Relax constraints: allow column_wise or row_wise, lower min_partition, or column_split='any'\n"
        "  5) Reserve less (storage_reservation=FixedPercentageStorageReservation(...))",
        error_type("INSUFFICIENT_STORAGE"),
    )


def as_planner_error(error: BaseException) -> PlannerError:
    """The error itself when it is a PlannerError, else one that names it."""
    if isinstance(error, PlannerError):
        return error
    return PlannerError(f"Planning failed with {type(error).__name__}: {error}", error_type("OTHER"))


def to_plain(error: BaseException) -> dict[str, str]:
    """An error as plain data, for a broadcast; :func:`from_plain` reads it back."""
    planner_error = as_planner_error(error)
    return {"error_type": planner_error.error_type.name, "message": str(planner_error)}


def from_plain(plain: dict[str, str]) -> PlannerError:
    """Reads what :func:`to_plain` wrote."""
    return PlannerError(plain["message"], error_type(plain["error_type"]))


def _memory(pair: tuple[float, float]) -> str:
    hbm, ddr = pair
    return f"{_amount(hbm)} HBM, {_amount(ddr)} DDR"


def _amount(size: float) -> str:
    return f"{size / _GIB:.3f} GiB ({size:.0f} B)" if size < float("inf") else "unlimited"
