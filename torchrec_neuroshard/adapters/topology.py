"""The machines a plan is for: detected when the user gives no topology, and as the search sees them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.planner.types import Topology

from torchrec_neuroshard import cuda
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError
from torchrec_neuroshard.costs.hardware import detect_hardware, hardware_spec
from torchrec_neuroshard.problem import Cluster, Pipeline

logger = logging.getLogger(__name__)

_GIB = 1024**3
_LOCAL_SIZE_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


@dataclass(frozen=True)
class DetectedMachine:
    """What one rank sees of the machines.

    Attributes:
        world_size: ranks.
        local_world_size: ranks of this host.
        device: "cuda" or "cpu".
        hbm_bytes: HBM of this rank's device; 0 for cpu.
        ddr_bytes: host memory divided by the ranks of the host.
        hardware: name of the hardware (see ``costs.hardware``).
    """

    world_size: int
    local_world_size: int
    device: str
    hbm_bytes: int
    ddr_bytes: int
    hardware: str

    @classmethod
    def detect(cls, world_size: int | None = None, hardware: str | None = None) -> DetectedMachine:
        """Looks at torch.distributed, the launcher's environment, the device and the host's memory.

        Args:
            world_size: ranks, when they are not all ranks of the default process group.
            hardware: overrides the detected name.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if world_size is None:
            world_size = dist.get_world_size() if dist.is_initialized() else _positive_int("WORLD_SIZE") or 1
        local = next((size for name in _LOCAL_SIZE_VARIABLES if (size := _positive_int(name))), None)
        if local is None:
            local = cuda.device_count() if device == "cuda" else world_size
        local = min(local, world_size)
        hbm = cuda.memory_bytes() if device == "cuda" else 0
        ddr = psutil.virtual_memory().total // local
        return cls(world_size, local, device, int(hbm), ddr, hardware or detect_hardware(device))

    def smallest(self, others: list[DetectedMachine]) -> DetectedMachine:
        """This machine with the least memory of any rank."""
        return DetectedMachine(
            self.world_size,
            self.local_world_size,
            self.device,
            min(other.hbm_bytes for other in others),
            min(other.ddr_bytes for other in others),
            self.hardware,
        )

    def topology(self) -> Topology:
        """TorchRec's topology of these machines."""
        spec = hardware_spec(self.hardware, self.device)
        memory = "hbm_mem_bw" if self.device == "cuda" else "ddr_mem_bw"
        return compat.make_topology(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            device=self.device,
            hbm_bytes=self.hbm_bytes,
            ddr_bytes=self.ddr_bytes,
            bandwidths_gbps={
                memory: spec.memory_gbps,
                "intra_host_bw": spec.intra_host_gbps,
                "inter_host_bw": spec.inter_host_gbps,
            },
        )

    def __str__(self) -> str:
        spec = hardware_spec(self.hardware, self.device)
        hbm = f"{self.hbm_bytes / _GIB:.1f} GiB HBM and " if self.device == "cuda" else ""
        return (
            f"{self.world_size} rank(s), {self.local_world_size} per host, {self.device}, {hbm}"
            f"{self.ddr_bytes / _GIB:.1f} GiB host memory per rank, hardware {self.hardware} (memory "
            f"{spec.memory_gbps:g} GB/s, links {spec.intra_host_gbps:g} GB/s within and {spec.inter_host_gbps:g} GB/s "
            "between hosts); override with topology= and hardware="
        )


def planning_cluster(
    topology: Topology, capacity: NDArray[np.float64], hardware: str | None, pipeline: Pipeline
) -> Cluster:
    """The topology as the search sees it.

    Link speeds are the topology's where the user set any, else the hardware's (TorchRec's defaults describe
    one machine of 2019).

    Args:
        topology: TorchRec's topology.
        capacity: [ranks, 2] bytes of HBM and DDR left for shards.
        hardware: name of the hardware; None detects it.
        pipeline: how the training loop overlaps work.

    Raises:
        UnsupportedArgumentError: the topology's device is neither cuda nor cpu.
    """
    device = topology.compute_device
    if device not in ("cuda", "cpu"):
        raise UnsupportedArgumentError(
            f"topology has compute device {device!r}, but there are cost models for 'cuda' and 'cpu' only; "
            "plan for another device with TorchRec's EmbeddingShardingPlanner"
        )
    name = hardware or detect_hardware(device)
    spec = hardware_spec(name, device)
    intra, inter = compat.link_gbps(topology) or (spec.intra_host_gbps, spec.inter_host_gbps)
    return Cluster(
        world_size=topology.world_size,
        local_world_size=min(compat.intra_group_size(topology), topology.world_size),
        device=device,
        capacity=capacity,
        hardware=name,
        intra_host_gbps=intra,
        inter_host_gbps=inter,
        pipeline=pipeline,
    )


def _positive_int(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() and int(text) > 0 else None
