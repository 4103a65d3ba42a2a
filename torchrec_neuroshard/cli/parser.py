"""What the commands accept. Free of torch, so that ``--help`` and mistakes answer at once."""

from __future__ import annotations

import argparse
from pathlib import Path

PLANNERS = ("neuroshard", "torchrec", "torchrec-restricted")
_LARGEST = 1e9  # GiB or seconds, far above any machine or patience


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``command`` names the module of :mod:`torchrec_neuroshard.cli` to run."""
    parser = argparse.ArgumentParser(
        prog="torchrec-neuroshard", description="Plans how to shard embedding tables over ranks, from measured costs."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_measure(commands)
    _add_pretrain(commands)
    _add_calibrate(commands)
    _add_evaluate(commands)
    commands.add_parser("doctor", help="check the installation: versions, FBGEMM, hardware, shipped cost models")
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="plan the tables of a workload file")
    plan.add_argument("workload", type=Path, metavar="WORKLOAD.json", help="tables and batch size")
    plan.add_argument("--world-size", type=_positive_int, required=True, metavar="N", help="number of ranks")
    plan.add_argument(
        "--local-world-size",
        type=_positive_int,
        metavar="L",
        help="ranks per host (default: the largest divisor of N up to 8)",
    )
    plan.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the ranks run on (default: cuda)")
    plan.add_argument(
        "--hbm-gb", type=_positive_float, metavar="G", help="GiB of HBM per rank (default: the hardware's)"
    )
    plan.add_argument(
        "--ddr-gb", type=_positive_float, metavar="G", help="GiB of host memory per rank (default: TorchRec's)"
    )
    plan.add_argument(
        "--batch-size",
        type=_positive_int,
        metavar="B",
        help="samples per iteration over all ranks (default: the workload file's)",
    )
    plan.add_argument("--hardware", metavar="NAME", help="preset or measured machine (default: this one's)")
    plan.add_argument("--planner", choices=PLANNERS, default="neuroshard", help="(default: neuroshard)")
    plan.add_argument(
        "--cost-model",
        default="auto",
        metavar="NAME_OR_PATH",
        help="auto (default), a shipped model, analytic/PRESET, a folder, or torchrec: its planner's own estimates",
    )
    plan.add_argument("--timeout", type=_positive_float, metavar="S", help="seconds of planning, about")
    plan.add_argument(
        "--bound",
        action="store_true",
        help="with --cost-model torchrec, whose costs add up: prove how far from the best plan this one is at most",
    )
    plan.add_argument("--seed", type=_seed, default=0, metavar="K", help="seed of the search (default: 0)")
    plan.add_argument(
        "--column-split",
        choices=("auto", "any", "never"),
        default="auto",
        help="which column splits are allowed (default: auto, which spares row-wise optimizers)",
    )
    plan.add_argument(
        "--pipeline",
        choices=("none", "sparse_dist", "prefetch"),
        default="sparse_dist",
        help="the training loop's pipeline (default: sparse_dist)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def _add_measure(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    measure = commands.add_parser("measure", help="time fused groups, collectives or bandwidths on this machine")
    measure.add_argument("what", choices=("compute", "collectives", "bandwidth"))
    measure.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=".jsonl file to append to; a rerun resumes it"
    )
    measure.add_argument("--minutes", type=_positive_float, default=10.0, metavar="M", help="time budget (default: 10)")
    measure.add_argument("--seed", type=_seed, default=0, metavar="S", help="seed of the sample (default: 0)")
    measure.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    measure.add_argument(
        "--active",
        metavar="NAME_OR_PATH",
        help="cost model whose nets choose two of three groups: those on which they disagree (compute only)",
    )
    measure.add_argument(
        "--held-out",
        action="store_true",
        help="only groups of held-out base tables, for a test of a trained model (compute only)",
    )
    measure.add_argument(
        "--repeat",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="only the groups of these records, once more (compute only)",
    )
    measure.add_argument(
        "--mebibytes",
        type=_positive_int,
        default=1024,
        metavar="M",
        help="size of a bandwidth's copies (default: 1024)",
    )
    measure.add_argument("--limit", type=_positive_int, metavar="N", help="stop after this many new records")
    measure.add_argument(
        "--world-size", type=_positive_int, default=2, metavar="N", help="ranks of a collective (default: 2)"
    )
    measure.add_argument(
        "--hosts",
        type=_positive_int,
        default=1,
        metavar="H",
        help="2: share the ranks of a collective between two hosts, emulated in network namespaces (needs root)",
    )
    measure.add_argument(
        "--link-gbps", type=_positive_float, metavar="G", help="Gbit/s between the two hosts, in each direction"
    )


def _add_pretrain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pretrain = commands.add_parser("pretrain", help="train a cost model on measured records")
    pretrain.add_argument(
        "--records", type=Path, nargs="+", required=True, metavar="FILE", help="of one machine: .jsonl, or .gz or .xz"
    )
    pretrain.add_argument(
        "--other-machines", type=Path, nargs="+", default=[], metavar="FILE", help="group records to learn from beside"
    )
    pretrain.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the model and its card")
    pretrain.add_argument("--name", default="", help="name on the card (default: the machine's)")
    pretrain.add_argument("--nets", type=_positive_int, default=6, metavar="N", help="ensemble size (default: 6)")
    pretrain.add_argument("--epochs", type=_positive_int, default=100, metavar="E", help="passes (default: 100)")
    pretrain.add_argument("--seed", type=_seed, default=0, metavar="K", help="seed of the training (default: 0)")


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = commands.add_parser(
        "calibrate", help="measure this machine and make a cost model of it, from a shipped one if any fits"
    )
    calibrate.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for records, model and card; a rerun resumes"
    )
    calibrate.add_argument("--minutes", type=_positive_float, default=10.0, metavar="M", help="(default: 10)")
    calibrate.add_argument(
        "--base",
        metavar="NAME_OR_PATH",
        help="cost model to start from (default: the shipped one that fits best; none where none is of such a device)",
    )
    calibrate.add_argument(
        "--world-size",
        type=_positive_int,
        metavar="N",
        help="ranks of this host whose collectives are measured too, for a third of the time (default: one per GPU; on "
        "a CPU 1, which measures none)",
    )
    calibrate.add_argument(
        "--records", type=Path, nargs="+", default=[], metavar="FILE", help="further records of this machine"
    )
    calibrate.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    calibrate.add_argument("--name", default="", help="name on the card (default: the machine's)")
    calibrate.add_argument("--seed", type=_seed, default=0, metavar="K", help="seed of sample and training")


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser("evaluate", help="compare a cost model with measured records")
    evaluate.add_argument(
        "--cost-model", required=True, metavar="NAME_OR_PATH", help="a shipped model, analytic/PRESET or a folder"
    )
    evaluate.add_argument(
        "--records", type=Path, nargs="+", required=True, metavar="FILE", help=".jsonl files, plain or .gz or .xz"
    )
    evaluate.add_argument(
        "--held-out",
        action="store_true",
        help="only what training does not see: groups of held-out base tables, collectives set aside for tests",
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    evaluate.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot (needs matplotlib)")


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < _LARGEST:
        raise argparse.ArgumentTypeError(f"must be a positive number below {_LARGEST:g}, got {text!r}")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, got {text}")
    return value
