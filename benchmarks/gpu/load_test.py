"""Runs every kernel family that ``measure`` times once, and compares it with plain torch.

    python -m benchmarks.gpu.load_test --out load_test.jsonl [--device cpu]

A wheel can import and still lack the code of a GPU; and the time of a kernel that computes something else is worth
nothing. One line per case, flushed as it is done; the exit code is 1 when any differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np
import torch

from torchrec_neuroshard.measure.batches import TbeBatch, synthesize_batch
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.measure.tbe import build_tbe, measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy

DIMS = (8, 64, 128, 256, 1024)
_MIXED_DIMS = (4, 64, 512, 1024)
_ONCE = RepetitionPolicy(warmup=1, minimum=2, maximum=2)
_ROWS, _BATCH, _LEARNING_RATE = 500, 32, 0.01
_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}


@dataclass(frozen=True)
class Verdict:
    """What one case gave.

    Attributes:
        spec: the group.
        forward_error: largest difference from torch's embedding_bag or embedding.
        updated: share of the looked-up rows that the backward changed.
        update_error: largest difference of the updated weights from plain SGD; None for other optimizers.
        passed: whether all is as it should be.
    """

    spec: GroupSpec
    forward_error: float
    updated: float
    update_error: float | None
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "case": self.spec.to_json(),
            "forward_error": self.forward_error,
            "updated": self.updated,
            "update_error": self.update_error,
            "passed": self.passed,
        }


def cases(device: str) -> Iterator[GroupSpec]:
    """Every kernel family that ``measure`` draws on a kind of device."""
    on_gpu = device == "cuda"
    optimizers = ("sgd", "rowwise_adagrad", "adagrad", *(("adam",) if on_gpu else ()))
    locations = ("device", *(("managed", "managed_caching") if on_gpu else ()))
    for dim, optimizer, data_type in itertools.product(DIMS, optimizers, ("fp32", "fp16")):
        shards = (ShardSpec(_ROWS, dim, 4.0, zipf=0.5), ShardSpec(2 * _ROWS, dim, 2.0, num_features=2, zipf=0.5))
        common = {"batch_size": _BATCH, "shards": shards, "optimizer": optimizer, "data_type": data_type}
        for location in locations:
            for weighted in (False, True):
                yield GroupSpec(**common, weighted=weighted, location=location)
            yield GroupSpec(**common, pooling="none", location=location)
        for weighted in (False, True):
            yield GroupSpec(**common, kernel="dense", weighted=weighted)
        if dim == DIMS[0]:
            mixed = tuple(ShardSpec(_ROWS, width, 4.0, zipf=0.5) for width in _MIXED_DIMS)
            for location in locations:
                yield GroupSpec(**{**common, "shards": mixed}, location=location)


def check(spec: GroupSpec, device: torch.device) -> Verdict:
    """Runs a case once."""
    tbe = build_tbe(spec, device)
    dense = spec.kernel == "dense"
    tables = _tables(spec, tbe)
    generator = torch.Generator().manual_seed(0)
    for table in tables:
        table.data.copy_(torch.randn(table.shape, generator=generator).to(table.dtype))
    before = [table.detach().float().cpu().clone() for table in tables]
    batch = synthesize_batch(spec, np.random.default_rng(1)).to(device)
    output = tbe(batch.indices, batch.offsets, batch.per_sample_weights)
    leaves = [table.clone().requires_grad_() for table in before]
    expected = reference(spec, batch, leaves)
    gradient = torch.randn(expected.shape, generator=generator)
    output.backward(gradient.to(device).to(output.dtype))
    expected.backward(gradient)
    if dense:  # its optimizer is torch's or TorchRec's, which the timing runs
        after = [table - _LEARNING_RATE * g for table, g in zip(before, _dense_gradients(spec, tbe))]
        measure_group(spec, device, _ONCE)
    else:
        if spec.location == "managed_caching":
            tbe.flush()
        after = [table.detach().float().cpu() for table in _tables(spec, tbe)]
    forward_error = float((output.detach().float().cpu() - expected.detach()).abs().max())
    touched = torch.cat([leaf.grad.abs().sum(dim=1) > 0 for leaf in leaves if leaf.grad is not None])
    changed = torch.cat([(a != b).any(dim=1) for a, b in zip(after, before)])
    updated = float((changed & touched).sum() / touched.sum())
    tolerance = _TOLERANCE[spec.data_type]
    update_error = None
    if dense or spec.optimizer == "sgd":
        wanted = [leaf.detach() - _LEARNING_RATE * leaf.grad for leaf in leaves if leaf.grad is not None]
        update_error = max(float((a - w).abs().max()) for a, w in zip(after, wanted))
    passed = forward_error < tolerance * 10 and updated > 0.95 and not bool((changed & ~touched).any())
    return Verdict(spec, forward_error, updated, update_error, passed and (update_error or 0.0) < tolerance)


def reference(spec: GroupSpec, batch: TbeBatch, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """What plain torch computes: [batch, columns], or [ids, dim] of lookups that are not pooled."""
    features = [index for index, shard in enumerate(spec.shards) for _ in range(shard.num_features)]
    indices, offsets = batch.indices.cpu(), batch.offsets.cpu()
    weights = None if batch.per_sample_weights is None else batch.per_sample_weights.cpu()
    parts = []
    for number, table in enumerate(features):
        bounds = offsets[number * spec.batch_size : (number + 1) * spec.batch_size + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        if spec.pooling == "none":
            parts.append(torch.nn.functional.embedding(indices[first:last], tables[table]))
            continue
        chosen = None if weights is None else weights[first:last]
        parts.append(
            torch.nn.functional.embedding_bag(
                indices[first:last], tables[table], bounds[:-1] - first, mode="sum", per_sample_weights=chosen
            )
        )
    return torch.cat(parts, dim=0 if spec.pooling == "none" else 1)


def _tables(spec: GroupSpec, tbe: Any) -> list[torch.Tensor]:
    """[rows, dim] weights of each table, as views."""
    if spec.kernel != "dense":
        return list(tbe.split_embedding_weights())
    return _cut(spec, tbe.weights)


def _dense_gradients(spec: GroupSpec, tbe: Any) -> list[torch.Tensor]:
    return [part.float().cpu() for part in _cut(spec, tbe.weights.grad)]


def _cut(spec: GroupSpec, flat: torch.Tensor) -> list[torch.Tensor]:
    sizes = [shard.rows * shard.dim for shard in spec.shards]
    parts = flat.detach().split(sizes)
    return [part.view(shard.rows, shard.dim) for part, shard in zip(parts, spec.shards)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all cases; 1 when any fails."""
    parser = argparse.ArgumentParser(description="Check the kernels that are measured against plain torch.")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl file, one line per case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA device here; --device cpu dry-runs the test", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    failed = count = 0
    with open(options.out, "w") as file:
        for spec in cases(options.device):
            try:
                verdict = check(spec, torch.device(options.device))
            except Exception as error:  # a kernel that is missing must not hide what the others do
                record: dict[str, Any] = {
                    "case": spec.to_json(),
                    "passed": False,
                    "error": f"{type(error).__name__}: {error}",
                }
            else:
                record = verdict.to_json()
            count += 1
            failed += not record["passed"]
            file.write(json.dumps(record) + "\n")
            file.flush()
            if not record["passed"]:
                print(f"FAILED {json.dumps(record)}", file=sys.stderr)
    print(f"load test on {options.device}: {count - failed} of {count} cases pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
