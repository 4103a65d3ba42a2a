"""A measured cost model's constants as TorchRec's own planner takes them: a ``HardwarePerfConfig``."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Mapping

from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.problem import FUSED

if TYPE_CHECKING:
    from torchrec.distributed.planner.estimator.types import HardwarePerfConfig

_HOME = "torchrec.distributed.planner.estimator"


def torchrec_hardware_config(model: CostModel) -> HardwarePerfConfig:
    """TorchRec's cost formula for the fused kernel, with coefficients fitted to what a cost model was trained on.

    For those who keep TorchRec's planner, and want it to know their hardware:

        config = torchrec_hardware_config(CostModel.load("cpu"))
        estimator = EmbeddingPerfEstimatorFactory.create_with_config(config, topology=topology)
        EmbeddingEnumerator(topology, batch_size, estimator=[estimator, EmbeddingStorageEstimator(topology)])

    The formula knows neither launches nor fusion nor reuse of rows; how far it is off stands on the model's card
    ("torchrec_coefficients"). :class:`~torchrec_neuroshard.NeuroShardPerfEstimator` has none of these limits.

    Args:
        model: a measured model; its card holds the coefficients.

    Raises:
        UnsupportedArgumentError: the model has no such coefficients, or the installed TorchRec no such configuration.
    """
    fitted = model.card.get("torchrec_coefficients")
    if fitted is None:
        raise UnsupportedArgumentError(
            f"cost model {model.name} has no coefficients of TorchRec's formula; train it again with this version "
            "(torchrec-neuroshard pretrain), or take a measured one"
        )
    if importlib.util.find_spec(_HOME) is None or not importlib.util.find_spec(f"{_HOME}.types"):
        raise UnsupportedArgumentError("this TorchRec has no HardwarePerfConfig; upgrade TorchRec")
    return _config(str(model.hardware), fitted, str(model.card["hardware"]["device"]))


def _config(name: str, fitted: Mapping[str, Any], device: str) -> HardwarePerfConfig:
    from torchrec.distributed.planner.estimator.types import (
        EstimatorPerfCoefficients,
        HardwarePerfConfig,
        PerfCoefficient,
        PerfCoefficientConfig,
    )

    def of(sharding: str) -> EstimatorPerfCoefficients:
        passes = {half: PerfCoefficient(**fitted[sharding][half]) for half in ("fwd", "bwd")}
        return EstimatorPerfCoefficients(**passes)

    config = HardwarePerfConfig()
    config.name = name
    config._coefficients = PerfCoefficientConfig(
        table_wise=of("table_wise"),
        data_parallel=of("row_wise"),
        column_wise=of("table_wise"),
        row_wise=of("row_wise"),
        table_row_wise=of("row_wise"),
    )
    # By kernel: the config's own hbm_mem_bw is not asked, only the topology's, which the coefficients do not go with.
    bandwidth = float(fitted["mem_bw_bytes_per_ms"])
    # TorchRec's own planner takes half of it for the dense kernel.
    config.kernel_device_bandwidths = {(device, FUSED): bandwidth, (device, "dense"): bandwidth / 2}
    return config
