"""The host link of a GPU, from measured groups whose rows lie in the host's memory.

What such a group takes longer than in the device's memory follows from two rates (see
:mod:`torchrec_neuroshard.costs.host_memory`): at which multiprocessors read host memory, and write it. Both are chosen
so that predicted times are nearest to measured ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.additive import GroupCosts
from torchrec_neuroshard.costs.hardware import HardwareSpec, hardware_spec
from torchrec_neuroshard.costs.host_memory import HostTraffic, host_traffic
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.training.dataset import group_data, in_host_memory, spec_works
from torchrec_neuroshard.training.evaluate import predict_groups

Records = Sequence[dict[str, Any]]

MINIMUM_RECORDS = 20
_RATES_GBPS = (0.5, 500.0)


@dataclass(frozen=True)
class HostLink:
    """What measured groups tell of a host link.

    Attributes:
        read_gbps: GB/s at which multiprocessors read host memory.
        write_gbps: GB/s at which they write it.
        records: groups it was fitted to.
        median_ape: median absolute percentage error on them of forward plus backward, as a share.
        preset_median_ape: the same with the data sheet's rates.
    """

    read_gbps: float
    write_gbps: float
    records: int
    median_ape: float
    preset_median_ape: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def fit_host_link(records: Records, groups: GroupCosts, preset: HardwareSpec) -> HostLink | None:
    """Fits the two rates by least absolute errors of the logarithm; None with too few records or impossible rates.

    Args:
        records: of groups whose rows lie in the host's memory.
        groups: what the same groups cost in the device's memory.
        preset: the GPU's other figures, and the rates to start from.
    """
    from scipy.optimize import minimize

    if len(records) < MINIMUM_RECORDS or preset.host_read_gbps <= 0:
        return None
    data = group_data(records)
    in_device_memory = predict_groups(groups, data)
    traffic = [_traffic(record) for record in records]

    def predicted(rates: NDArray[np.float64]) -> NDArray[np.float64]:
        spec = replace(preset, host_read_gbps=float(rates[0]), host_write_gbps=float(rates[1]))
        return in_device_memory + np.asarray([each.milliseconds(spec) for each in traffic])

    def misfit(log_rates: NDArray[np.float64]) -> float:
        rates = np.clip(np.exp(log_rates), *_RATES_GBPS)
        return float(np.abs(np.log(predicted(rates) / data.measured_ms)).mean())

    start = np.asarray([preset.host_read_gbps, preset.host_write_gbps])
    found = np.exp(minimize(misfit, np.log(start), method="Nelder-Mead").x)
    if (found <= _RATES_GBPS[0]).any() or (found >= _RATES_GBPS[1]).any():
        return None  # no host link is like that: the groups tell nothing of it

    def median_ape(rates: NDArray[np.float64]) -> float:
        totals = predicted(rates).sum(axis=1) / data.measured_ms.sum(axis=1)
        return float(np.median(np.abs(totals - 1.0)))

    return HostLink(float(found[0]), float(found[1]), len(records), median_ape(found), median_ape(start))


def host_memory_times(model: CostModel, records: Records) -> NDArray[np.float64]:
    """[records, 2] further forward and backward ms of those groups whose rows lie in the host's memory; else 0."""
    result = np.zeros((len(records), 2))
    spec = model.as_measured(hardware_spec(model.hardware, "cuda"))
    for row, record in zip(result, records):
        if in_host_memory(record):
            if spec.host_read_gbps <= 0:
                raise RecordError(
                    f"record {record['id']!r} has its rows in the host's memory, of which cost model {model.name} of a "
                    "CPU says nothing; evaluate a GPU's model on it"
                )
            row[:] = _traffic(record).milliseconds(spec)
    return result


def _traffic(record: dict[str, Any]) -> HostTraffic:
    spec = GroupSpec.from_json(record["spec"])
    return host_traffic(spec_works(spec), spec.compute_kernel, spec.load_factor)
