"""Two hosts emulated on one Linux machine: network namespaces joined by a link of limited speed.

Ranks of one namespace talk at the speed of the loopback device, which serves the namespace's own address; ranks of
different namespaces share the link. So gloo sees what it sees on two real hosts, except that both hosts share this
machine's cores.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Callable, Iterator, Sequence

from torchrec_neuroshard.measure.processes import end_with_parent

INTERFACE = "link0"  # the link's end in each namespace
_ADDRESSES = ("10.213.7.1", "10.213.7.2")  # seen by nobody outside the namespaces
_RENDEZVOUS_PORT = 29511
_PREFIX = "neuroshard"
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 15.0  # for torchrun to end its ranks
_KILOBYTE = 1024


class NetnsError(RuntimeError):
    """Hosts cannot be emulated here; the message says why and what to do."""


@dataclass(frozen=True)
class Host:
    """One emulated host.

    Attributes:
        namespace: name of its network namespace.
        address: its address on the link.
    """

    namespace: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs a program on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@contextlib.contextmanager
def joined_hosts(link_gbps: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a link; on leaving, however that comes, whatever runs on them is killed and they go.

    What an earlier process left behind, because it was killed outright, is cleared away first.

    Args:
        link_gbps: Gbit/s of the link in each direction.

    Raises:
        NetnsError: namespaces or rate limits cannot be made here.
    """
    _check_requirements()
    _remove_leftovers()
    owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
    hosts = (Host(f"{owner}-0", _ADDRESSES[0]), Host(f"{owner}-1", _ADDRESSES[1]))
    with _ending_signals_raise():
        try:
            _join(hosts, link_gbps)
            yield hosts
        finally:
            with _ending_signals_wait():
                for host in hosts:
                    _remove(host.namespace)


def run_on_two_hosts(arguments: Sequence[str], local_world_size: int, link_gbps: float) -> int:
    """Runs a Python module or script with torchrun on two emulated hosts; returns the first exit code that is not 0.

    Args:
        arguments: what follows torchrun's own options, such as ["-m", "package.module", "--option"].
        local_world_size: ranks per host.
        link_gbps: Gbit/s of the link in each direction.

    Raises:
        NetnsError: namespaces or rate limits cannot be made here.
    """
    # torchrun warns of the threads it chooses and of names that it cannot look up from a namespace, rank by rank.
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = {**quiet, **os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
    with joined_hosts(link_gbps) as hosts:
        launchers: list[subprocess.Popen[bytes]] = []
        try:
            for node, host in enumerate(hosts):
                nodes = ["--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", str(local_world_size)]
                meeting = ["--master_addr", hosts[0].address, "--master_port", str(_RENDEZVOUS_PORT)]
                command = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, *arguments]
                launchers.append(
                    subprocess.Popen(
                        host.command(command),
                        env=environment,
                        start_new_session=True,  # Ctrl-C reaches this process only, which ends both hosts in order
                        preexec_fn=end_with_parent,  # torchrun ends when this process does
                    )
                )
            return _wait(launchers)
        finally:
            with _ending_signals_wait():
                _terminate(launchers)


def _check_requirements() -> None:
    if sys.platform != "linux":
        raise NetnsError("emulated hosts need Linux network namespaces; on other systems use real hosts under torchrun")
    if os.geteuid() != 0:
        raise NetnsError("emulated hosts need root, to make network namespaces; run this command with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetnsError(f"emulated hosts need {' and '.join(missing)}; install the package iproute2")


def _join(hosts: tuple[Host, Host], link_gbps: float) -> None:
    for host in hosts:
        _run("ip", "netns", "add", host.namespace)
    ends = [["netns", host.namespace, "type", "veth"] for host in hosts]
    _run("ip", "link", "add", INTERFACE, *ends[0], "peer", "name", INTERFACE, *ends[1][:2])
    # The bucket holds 0.26 ms of traffic. Much less, and the timer's grain costs throughput; much more, and whole
    # messages pass unlimited. Segments are kept below its size, or the kernel splits them one by one.
    burst = max(16 * _KILOBYTE, int(link_gbps * 32 * _KILOBYTE))
    for host in hosts:
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        segment = str(min(65536, burst // 2))
        _run("ip", "-n", host.namespace, "link", "set", INTERFACE, "gso_max_size", segment, "up")
        limit = ["rate", f"{round(link_gbps * 1e9)}bit", "burst", str(burst), "latency", "200ms"]
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise NetnsError(
            f"emulated hosts cannot be made here: `{' '.join(command)}` said: {done.stderr.strip()} (containers need "
            "the capabilities NET_ADMIN and SYS_ADMIN, and the kernel needs veth and sch_tbf)"
        )
    return done.stdout


def _wait(launchers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until all have ended well or one has not."""
    while True:
        codes = [launcher.poll() for launcher in launchers]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def _terminate(launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks what still runs to end; what does not is killed with its namespace."""
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for launcher in launchers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(timeout=max(0.0, deadline - time.monotonic()))


def _remove(namespace: str) -> None:
    """Kills what runs in a namespace and deletes it, if it exists."""
    if namespace not in namespaces():
        return
    for _ in range(100):
        pids = _run("ip", "netns", "pids", namespace).split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.05)
    _run("ip", "netns", "del", namespace)


def namespaces() -> list[str]:
    """Names of this machine's network namespaces."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove_leftovers() -> None:
    """Removes the namespaces of processes that are gone."""
    for name in namespaces():
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+)-[01]", name)
        if owner and _start_time(int(owner[1])) != int(owner[2]):
            _remove(name)


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its id, this names a process for good."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


@contextlib.contextmanager
def _ending_signals_raise() -> Iterator[None]:
    """Lets signals that would end the process unwind it instead, so that it cleans up."""

    def leave(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handlers(leave):
        yield


@contextlib.contextmanager
def _ending_signals_wait() -> Iterator[None]:
    """Ignores signals that would cut the clean-up short."""
    with _handlers(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Sets the handler of the ending signals, except of those that are ignored (nohup) and outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDING_SIGNALS}
    taken = [number for number, previous in before.items() if previous is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
