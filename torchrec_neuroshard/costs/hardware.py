"""Named hardware: data-sheet constants and the analytic priors made of them.

A machine that was measured has fitted constants in its shipped model; these presets serve machines that
nobody measured. Every bandwidth is a public figure, named in ``source``; the efficiencies that turn a peak
into an attainable rate are stated once, below.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

import torch

from torchrec_neuroshard import cuda
from torchrec_neuroshard.costs.collective_prior import CollectivePrior
from torchrec_neuroshard.costs.prior import GroupPrior

# Attainable shares of peak memory bandwidth for row gathers and for read-modify-write updates, and the rate
# of cache hits relative to memory. Rough on purpose: the prior ranks plans, it does not promise times.
GATHER_EFFICIENCY = 0.65
_UPDATE_EFFICIENCY = 0.45
_CACHE_SPEEDUP = 2.5


@dataclass(frozen=True)
class HardwareSpec:
    """Public figures of one kind of device.

    Attributes:
        device: "cuda" or "cpu".
        memory_gib: memory of one device (for "cpu": not a property of the kind, 0).
        memory_gbps: peak memory bandwidth in GB/s (of one core for "cpu").
        launch_ms: fixed cost of launching one pass of a TBE.
        lookup_ns: per-lookup overhead outside memory traffic; on NVIDIA devices set by one published figure (dim 16
            of torchrec PR 2365), scaled with the generation. Other published figures are held out: see the tests.
        intra_host_gbps: GB/s of one rank to the others of its host, one direction.
        inter_host_gbps: GB/s of one rank to other hosts.
        pattern: regular expression that recognises the device's name.
        source: where the figures come from.
        links: what the two link speeds are, for people.
        host_read_gbps: GB/s at which the multiprocessors of a GPU read host memory; 0 where there is no link.
        host_write_gbps: GB/s at which they write it.
    """

    device: str
    memory_gib: float
    memory_gbps: float
    launch_ms: float
    lookup_ns: float
    intra_host_gbps: float
    inter_host_gbps: float
    pattern: str
    source: str
    links: str
    host_read_gbps: float = 0.0
    host_write_gbps: float = 0.0

    @property
    def has_data_sheet(self) -> bool:
        """Whether the figures are those of one product; generic ones are nobody's."""
        return self.pattern != _NO_PRODUCT

    def group_prior(self) -> GroupPrior:
        """The analytic prior of a fused group on this hardware (unmeasured: see :data:`HARDWARE`)."""
        gather = 1e3 / (self.memory_gbps * 1e9 * GATHER_EFFICIENCY)  # ms per byte
        update = 1e3 / (self.memory_gbps * 1e9 * _UPDATE_EFFICIENCY)
        cached = gather / _CACHE_SPEEDUP
        lookup = self.lookup_ns * 1e-6
        return GroupPrior.from_terms(
            (self.launch_ms, 2.5 * self.launch_ms),
            {
                "features": (self.launch_ms * 0.01, self.launch_ms * 0.01),
                "bags": (0.5 * lookup, 0.5 * lookup),
                "lookups": (lookup, 3.0 * lookup),  # backward sorts the ids
                "bytes_level_0": (cached, 0.0),
                "bytes_level_1": (cached, 0.0),
                "bytes_level_2": (cached, 0.0),
                "bytes_level_3": (cached, 0.0),
                "bytes_level_4": (cached if self.device == "cuda" else gather, 0.0),
                "bytes_level_5": (gather, 0.0),
                "bytes_memory": (gather, 0.0),
                "output_bytes": (gather, gather),
                "unique_bytes": (0.0, 2.0 * update),  # read and write of each touched row
                "stateful_unique_rows": (0.0, 32.0 * update),  # one sector of optimizer state
                "weighted_lookups": (4.0 * gather, 4.0 * gather),
                "dense_bytes": (0.0, 2.0 * gather + 2.0 * update),  # gradient zeroed and read, weights read and written
            },
        )

    def collective_prior(self) -> CollectivePrior:
        """The analytic prior of collectives between such devices."""
        return CollectivePrior(
            latency_ms=0.03 if self.device == "cuda" else 0.2,
            peer_ms=0.002 if self.device == "cuda" else 0.05,
            intra_host_ms_per_byte=1e3 / (self.intra_host_gbps * 1e9),
            inter_host_ms_per_byte=1e3 / (self.inter_host_gbps * 1e9),
            total_ms_per_byte=0.0,
        )


_NVIDIA = (
    "NVIDIA data sheets (memory); all-to-all bus bandwidth: nccl issue 2169, nccl-tests issues 149 and 267; host link, "
    "read and written by multiprocessors: nvbandwidth issues 24 (H100, PCIe 5), 42 and 53 (A100, PCIe 4), "
    "ZaidQureshi/bam issue 54 (V100, PCIe 3)"
)
_NO_PRODUCT = r"$^"
_NVLINK_4 = "published: NVLink 4 (335 GB/s, all-to-all on 4 H100, nccl issue 2169), 400G NIC (48 GB/s, nccl-tests 267)"
_NVLINK_3 = (
    "published: NVLink 3 (200 GB/s, all-to-all on 8 A100, nccl-tests 149), 200G NIC (half of a 400G NIC's 48 GB/s)"
)
_NVLINK_2 = "data sheets: NVLink 2 (80 % of 150 GB/s), 100G NIC"
_UNKNOWN_LINKS = "a guess: links of an unknown machine"
_PCIE_5, _PCIE_4, _PCIE_3 = (35.2, 52.8), (25.1, 25.0), (12.0, 12.0)  # GB/s read from and written to host memory

HARDWARE: dict[str, HardwareSpec] = {
    "h200": HardwareSpec("cuda", 141, 4800, 0.02, 0.01, 335, 48, r"(?<!g)h200", _NVIDIA, _NVLINK_4, *_PCIE_5),
    "h100_sxm": HardwareSpec(
        "cuda", 80, 3350, 0.02, 0.01, 335, 48, r"(?<!g)h100(?!.*pcie|.*nvl)", _NVIDIA, _NVLINK_4, *_PCIE_5
    ),
    "a100_sxm_80gb": HardwareSpec("cuda", 80, 2039, 0.025, 0.015, 200, 24, r"a100.*80", _NVIDIA, _NVLINK_3, *_PCIE_4),
    "a100_sxm_40gb": HardwareSpec("cuda", 40, 1555, 0.025, 0.015, 200, 24, r"a100", _NVIDIA, _NVLINK_3, *_PCIE_4),
    "v100": HardwareSpec("cuda", 32, 900, 0.03, 0.03, 120, 12, r"v100", _NVIDIA, _NVLINK_2, *_PCIE_3),
    "generic_gpu": HardwareSpec(
        "cuda",
        32,
        900,
        0.03,
        0.025,
        100,
        12,
        _NO_PRODUCT,
        "a conservative GPU, no single source",
        _UNKNOWN_LINKS,
        *_PCIE_3,
    ),
    "generic_cpu": HardwareSpec(
        "cpu",
        0,
        10,
        0.15,
        25.0,
        1.5,
        1.2,
        _NO_PRODUCT,
        "one server core reading DDR4 or DDR5 at random; gloo over loopback",
        "a guess: gloo over loopback",
    ),
}


def hardware_spec(name: str, device: str) -> HardwareSpec:
    """The preset of this name, or of the GPU that records call so, such as "nvidia_h200"; else the generic one."""
    return HARDWARE.get(name) or HARDWARE["generic_cpu" if device == "cpu" else gpu_preset(name)]


def detect_hardware(device: str) -> str:
    """Name of the preset in :data:`HARDWARE` that this machine's device matches best.

    Args:
        device: "cpu" or "cuda".
    """
    if device != "cuda" or not torch.cuda.is_available():
        return "generic_cpu" if device != "cuda" else "generic_gpu"
    return gpu_preset(cuda.device_name())


def gpu_preset(name: str) -> str:
    """Name of the preset that a GPU's own name, such as "NVIDIA H200", matches; else "generic_gpu"."""
    for key, spec in HARDWARE.items():
        if spec.device == "cuda" and re.search(spec.pattern, name.lower()):
            return key
    return "generic_gpu"


def machine_name(device: str) -> str:
    """Name of this machine's device as records and shipped models carry it, for example "amd_epyc_l2_1m_l3_32m".

    Virtual machines hide which processor they run on ("Intel(R) Xeon(R) Processor" was seen with 300 and with 480 MiB
    of L3, "AMD EPYC" with 512 KiB and with 1 MiB of L2), and lookups take twice as long on one as on the other. So a
    CPU's name has the sizes of its last two caches.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda" and torch.cuda.is_available():
        return _as_name(cuda.device_name())
    return processor_name(cpu_model(), cpu_caches())


def processor_name(model: str, caches: Mapping[str, str]) -> str:
    """Name of a processor from its own name and the sizes of its caches, as :func:`cpu_caches` gives them."""
    name = _as_name(re.sub(r"\(R\)|\(TM\)|\bProcessor\b|\bCPU\b|@.*", " ", model))
    sizes = [(level, int(caches[level][:-1])) for level in ("L2", "L3") if caches.get(level, "").endswith("K")]
    return "_".join([name, *(f"{level.lower()}_{_size(kib)}" for level, kib in sizes)])


def _size(kib: int) -> str:
    return f"{kib >> 10}m" if kib >= 1024 else f"{kib}k"


def _as_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def cpu_caches() -> dict[str, str]:
    """Sizes of the first core's caches as Linux tells them, for example {"L1": "48K", "L1i": "64K", ...}."""
    caches: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = (index / "level").read_text().strip()
            caches[f"L{level}{'i' if kind == 'Instruction' else ''}"] = (index / "size").read_text().strip()
        except OSError:
            continue
    return caches


def cpu_model() -> str:
    """The processor's own name, for example "AMD EPYC"."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()
