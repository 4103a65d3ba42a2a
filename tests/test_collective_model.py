"""The cost model of collectives: what is moved, symmetries, links, and training on records of known cost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_neuroshard.costs import collective_traffic
from torchrec_neuroshard.costs.collective_model import (
    RANK_FEATURES,
    CollectiveModel,
    CollectiveNet,
    rank_features,
)
from torchrec_neuroshard.costs.collective_prior import CollectivePrior, CollectivePriors
from torchrec_neuroshard.costs.collective_traffic import COLLECTIVES, Calls, Traffic, waits
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.model import CARD_FILE, CostModel, CostModelError
from torchrec_neuroshard.measure import specs
from torchrec_neuroshard.measure.collective_pool import _bytes_between, sample_collective
from torchrec_neuroshard.measure.specs import CollectiveSpec, spec_id
from torchrec_neuroshard.training.collective_data import (
    CollectiveData,
    collective_data,
    oversubscription,
    split_collectives,
)
from torchrec_neuroshard.training.collective_part import limits, train_collective_part
from torchrec_neuroshard.training.evaluate import collective_accuracy
from torchrec_neuroshard.training.train_collectives import (
    CollectiveConfig,
    fit_collective_priors,
    train_collective_model,
)

Record = dict[str, Any]
PRIOR = CollectivePrior(0.1, 0.05, 1e-6, 3e-6, 1e-7, 0.01, 0.02)
SHARED = CollectivePriors((PRIOR,) * 4, "gloo", shared=True, link_ms_per_byte=2e-6)
QUICK = CollectiveConfig(nets=2, hidden=16, epochs=15)
LAYOUTS = ((2, 0), (3, 0), (4, 0), (4, 2), (6, 0))  # ranks, ranks per host


def untrained_net() -> CollectiveNet:
    """A net whose residuals are not zero, so that symmetries are not there for nothing."""
    torch.manual_seed(0)
    net = CollectiveNet()
    for last in (net.head_last, net.slowest_last):
        torch.nn.init.normal_(last.weight, std=0.2)
    net.mean.copy_(torch.linspace(0.0, 8.0, RANK_FEATURES))
    net.scale.copy_(torch.linspace(1.0, 8.0, RANK_FEATURES))
    return net


def machine_ms(spec: CollectiveSpec) -> list[float]:
    """[ranks] ms of a made-up machine: 2 GB/s over all ranks, 1 GB/s for each rank, a link, and 0.05 ms a peer."""
    between = _bytes_between(spec)
    remote = np.arange(spec.world_size) // spec.ranks_per_host
    crossing = (between * (remote[:, None] != remote[None, :])).sum() / spec.hosts  # alike in each direction
    busiest = max(between.sum(axis=0).max(), between.sum(axis=1).max())
    transfer = 0.2 + 0.05 * spec.world_size + between.sum() / 2e6 + busiest / 1e6
    if spec.link_gbps is not None:
        transfer += crossing / (spec.link_gbps * 1e9 / 8 / 1e3)
    delays = np.asarray(spec.start_delays_ms or (0.0,) * spec.world_size)
    return (transfer + delays.max() - delays).tolist()  # type: ignore[no-any-return]


def record_of(spec: CollectiveSpec, noise: float = 0.0) -> Record:
    rng = np.random.default_rng(spec.seed)
    return {
        "kind": "collective",
        "id": spec_id(spec),
        "hardware": {"name": "made_up"},
        "spec": spec.to_json(),
        "backend": "gloo",
        "pinned_cores": 2,
        "rank_ms": [{"median": float(ms * np.exp(noise * rng.normal()))} for ms in machine_ms(spec)],
    }


def records_over(layouts: Iterable[tuple[int, int]], count: int = 60, noise: float = 0.0) -> list[Record]:
    return [
        record_of(sample_collective(3, index, ranks, per_host, 1.0 if per_host else None), noise)
        for ranks, per_host in layouts
        for index in range(count)
    ]


def part_of(spec: CollectiveSpec) -> CollectiveData:
    (part,) = collective_data([record_of(spec)])
    return part


def test_measured_and_predicted_kinds_are_the_same() -> None:
    assert COLLECTIVES == specs.COLLECTIVES


def test_traffic_of_an_all_to_all_is_conserved_and_split_by_host() -> None:
    traffic = Traffic.pooled(np.asarray([32.0]), np.asarray([[4.0, 8.0, 12.0, 16.0]]), 2)
    assert traffic.sent_local.sum() == traffic.received_local.sum()
    assert traffic.sent_remote.sum() == traffic.received_remote.sum()
    assert traffic.sent_local[0].tolist() == [32 * d * 4 for d in (4, 8, 12, 16)]
    assert traffic.received_local[0].tolist() == [32 * d * 4 for d in (8, 4, 16, 12)]
    assert traffic.sent_remote[0].tolist() == [2 * 32 * d * 4 for d in (4, 8, 12, 16)]
    assert traffic.reversed().sent_remote.tolist() == traffic.received_remote.tolist()


@pytest.mark.parametrize(("ranks", "per_host"), [(2, 0), (5, 0), (2, 1), (4, 2), (6, 3), (8, 2)])
def test_traffic_is_what_gloo_sends(ranks: int, per_host: int) -> None:
    for index in range(40):
        spec = sample_collective(11, index, ranks, per_host, 1.0 if per_host else None)
        between, traffic = _bytes_between(spec), part_of(spec).calls.traffic
        host = np.arange(ranks) // spec.ranks_per_host
        remote = between * (host[:, None] != host[None, :])
        assert traffic.sent.sum(axis=1) == pytest.approx(between.sum())
        np.testing.assert_allclose(traffic.sent[0], between.sum(axis=1))
        np.testing.assert_allclose(traffic.received[0], between.sum(axis=0))
        leaving = np.bincount(host, remote.sum(axis=1))
        np.testing.assert_allclose(np.bincount(host, traffic.sent_remote[0]), leaving)
        entering = np.bincount(host, remote.sum(axis=0))
        np.testing.assert_allclose(np.bincount(host, traffic.received_remote[0]), entering)
        most = np.maximum(leaving, entering) / spec.ranks_per_host
        np.testing.assert_allclose(traffic.host_remote[0], most[host])


def test_nccl_moves_ring_volumes() -> None:
    """nccl-tests, PERFORMANCE.md: (n-1)/n of the buffer for each but the all-reduce, which moves twice that."""
    kind, ones, dims = np.arange(1, 4), np.ones(3), np.asarray([[100.0] * 4, [100.0] * 4, [400.0] * 4])
    sent = Traffic.of(kind, ones, dims, np.zeros(3, dtype=bool), 4, "nccl").sent / 4
    assert sent[:, 0].tolist() == [300.0, 300.0, 600.0]
    gloo = Traffic.of(kind, ones, dims, np.zeros(3, dtype=bool), 4, "gloo").sent / 4
    assert gloo[:, 0].tolist() == [600.0, 300.0, 600.0]  # its reduce-scatter is an all-reduce of the whole input


@given(order=st.permutations(range(5)), name=st.sampled_from(COLLECTIVES), backward=st.booleans())
@settings(max_examples=30, deadline=None)
def test_permuting_ranks_permutes_predictions(order: list[int], name: str, backward: bool) -> None:
    check_permutation(name, backward, 5, np.asarray(order))


@given(
    hosts=st.permutations(range(3)),
    within=st.lists(st.permutations(range(2)), min_size=3, max_size=3),
    name=st.sampled_from(COLLECTIVES),
    backward=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_permuting_hosts_and_ranks_within_them_permutes_predictions(
    hosts: list[int], within: list[list[int]], name: str, backward: bool
) -> None:
    check_permutation(name, backward, 2, np.concatenate([2 * host + np.asarray(within[host]) for host in hosts]))


def check_permutation(name: str, backward: bool, per_host: int, order: np.ndarray[Any, Any]) -> None:
    ranks = len(order)
    rng = np.random.default_rng(ranks)
    kind = np.asarray([COLLECTIVES.index(name)])
    dims = 4.0 * rng.integers(0, 100, (1, ranks)) if name == "all_to_all" else np.full((1, ranks), 64.0)
    delays = rng.exponential(2.0, (1, ranks))
    model = CollectiveModel(SHARED, untrained_net())

    def predict(chosen: np.ndarray[Any, Any]) -> Any:
        direction = np.asarray([backward and name == "all_to_all"])
        traffic = Traffic.of(kind, np.asarray([128.0]), dims[:, chosen], direction, per_host, "gloo")
        return model.predict(Calls(kind, direction, traffic, waits(delays[:, chosen]), np.asarray([np.nan])))

    base, permuted = predict(np.arange(ranks)), predict(order)
    np.testing.assert_allclose(permuted.per_rank, base.per_rank[:, order], rtol=1e-5)
    np.testing.assert_allclose(permuted.slowest, base.slowest, rtol=1e-5)
    assert len(np.unique(base.per_rank.round(6))) == ranks  # or there would be nothing to permute


def test_the_slowest_is_no_faster_than_any_rank() -> None:
    model = CollectiveModel(SHARED, untrained_net())
    for part in collective_data(records_over(LAYOUTS, 20)):
        times = model.predict(part.calls)
        assert (times.slowest >= times.per_rank.max(axis=1)).all() and (times.per_rank > 0).all()


def test_predictors_of_each_kind_agree_with_calls() -> None:
    model = CollectiveModel(SHARED, untrained_net())
    columns = np.asarray([120.0, 0.0])
    found = {
        ("reduce_scatter", 64): model.reduce_scatter(64, columns, 4, 2),
        ("all_gather", 64): model.all_gather(64, columns, 4, 2),
        ("all_reduce", 1): model.all_reduce(columns, 4, 2),
    }
    for (name, batch), times in found.items():
        part = part_of(CollectiveSpec(name, 4, batch, (120,), local_world_size=2))
        assert times.tolist() == pytest.approx([model.predict(part.calls).slowest[0], 0.0])
    dims = np.asarray([[4.0, 8.0, 0.0, 16.0], [0.0] * 4])
    part = part_of(CollectiveSpec("all_to_all", 4, 64, (4, 8, 0, 16), "backward", local_world_size=2))
    backward = model.all_to_all(64, dims, True, 2)
    assert backward.tolist() == pytest.approx([model.predict(part.calls).slowest[0], 0.0])
    forward = model.per_rank(np.asarray([64.0] * 2), dims, np.asarray([False] * 2), 2)
    assert forward[0].max() <= model.all_to_all(64, dims, False, 2)[0]


def test_one_rank_has_no_collectives() -> None:
    model = CostModel.analytic("h100_sxm").collectives
    assert model.all_to_all(512, np.asarray([[256.0]]), False, 1).tolist() == [0.0]
    columns = np.asarray([256.0])
    for found in (model.reduce_scatter(512, columns, 1, 1), model.all_gather(512, columns, 1, 1)):
        assert found.tolist() == [0.0]
    assert model.all_reduce(columns, 1, 1).tolist() == [0.0]
    assert model.all_reduce(np.zeros(0), 4, 2).tolist() == []


def test_slow_links_between_hosts_are_priced_by_analytic_models() -> None:
    dims = np.asarray([[64.0, 64.0, 64.0, 64.0]])
    model = CostModel.analytic("h100_sxm").collectives
    fast, slow = (model.on_links(300.0, gbps).all_to_all(4096, dims, False, 2) for gbps in (50.0, 1.0))
    assert slow[0] > 10 * fast[0]
    one_host = [model.on_links(300.0, gbps).all_to_all(4096, dims, False, 4) for gbps in (50.0, 1.0)]
    assert one_host[0] == one_host[1]
    assert model.reduce_scatter(4096, np.asarray([64.0]), 4, 4) < model.on_links(300.0, 1.0).reduce_scatter(
        4096, np.asarray([64.0]), 4, 2
    )


@pytest.mark.parametrize("measured_link", [2e-6, None])
def test_a_measured_model_keeps_its_host_and_scales_with_the_link(measured_link: float | None) -> None:
    inter = 0.0 if measured_link is None else PRIOR.inter_host_ms_per_byte
    kinds = (dataclasses.replace(PRIOR, inter_host_ms_per_byte=inter),) * 4
    net = CollectiveNet()  # zero residual
    model = CollectiveModel(CollectivePriors(kinds, "gloo", shared=True, link_ms_per_byte=measured_link), net)
    columns = np.asarray([1e6])
    times = {
        (gbps, per_host): model.on_links(100.0, gbps).all_reduce(columns, 4, per_host)[0]
        for gbps in (0.001, 0.002, 1e6)
        for per_host in (2, 4)
    }
    assert len({times[gbps, 4] for gbps in (0.001, 0.002, 1e6)}) == 1
    assert times[0.001, 2] / times[0.002, 2] == pytest.approx(2.0, rel=1e-3)
    assert times[1e6, 2] < times[0.002, 2] / 100
    crossing = 2 * 3 / 4 * 4e6 / 2  # bytes of a ring of 4 ranks that cross, for each of a host's 2 ranks
    assert times[0.001, 2] >= crossing * 1e3 / 1e6  # as long as the link needs


def test_links_of_records_count_and_others_are_those_of_the_model() -> None:
    spec = CollectiveSpec("all_gather", 4, 64, (512,), local_world_size=2, link_gbps=8.0)
    slow = dataclasses.replace(spec, link_gbps=1.0)
    model = CollectiveModel(SHARED, CollectiveNet())
    fast_ms, slow_ms, own_ms = (
        model.predict(part_of(each).calls).slowest[0]
        for each in (spec, slow, dataclasses.replace(spec, link_gbps=None))
    )
    assert part_of(spec).calls.link_ms_per_byte.tolist() == [2e-6]  # 1 byte a ns for two ranks
    assert own_ms == fast_ms < slow_ms
    elsewhere = CollectiveModel(SHARED.on_link(16e-6), CollectiveNet())
    assert elsewhere.predict(part_of(dataclasses.replace(spec, link_gbps=None)).calls).slowest[0] == slow_ms


def test_prior_fit_recovers_a_machine_without_noise() -> None:
    data = collective_data(records_over(LAYOUTS, 120))
    priors = fit_collective_priors(data)
    assert priors.backend == "gloo" and priors.shared and priors.link_ms_per_byte == pytest.approx(16e-6)
    errors = collective_accuracy(CollectiveModel(priors), collective_data(records_over([(8, 0), (8, 4)], 60)))
    for kind in errors["by_kind"].values():
        assert kind["slowest"]["median_ape"] < 0.12
    again = CollectivePriors.from_json(json.loads(json.dumps(priors.to_json())))
    assert again == priors


def test_no_byte_crosses_faster_than_the_link() -> None:
    """Times that do not depend on the bytes would have the link cost nothing."""
    flat = [{**r, "rank_ms": [{"median": 5.0}] * r["spec"]["world_size"]} for r in records_over([(4, 2), (2, 1)])]
    priors = fit_collective_priors(collective_data(flat))
    assert priors.link_ms_per_byte is not None
    assert all(prior.inter_host_ms_per_byte >= priors.link_ms_per_byte for prior in priors.kinds)


def test_kinds_without_records_share_what_all_tell() -> None:
    only = [record for record in records_over(LAYOUTS) if record["spec"]["name"] in ("all_to_all", "all_gather")]
    priors = fit_collective_priors(collective_data(only))
    reduce_scatter, all_reduce = priors.kinds[1], priors.kinds[3]
    assert reduce_scatter == all_reduce and reduce_scatter not in (priors.kinds[0], priors.kinds[2])


def test_backends_are_not_mixed() -> None:
    records = [{**record, "backend": ("gloo", "nccl")[i % 2]} for i, record in enumerate(records_over([(2, 0)], 40))]
    assert [(part.backend, len(part)) for part in collective_data(records)] == [("gloo", 20), ("nccl", 20)]
    with pytest.raises(ValueError, match="one backend"):
        fit_collective_priors(collective_data(records))


def test_one_model_learns_every_kind_and_extrapolates_over_ranks() -> None:
    data = collective_data(records_over(LAYOUTS, noise=0.03))
    model = train_collective_model(data, dataclasses.replace(QUICK, epochs=40, batch_size=16), log=lambda _: None)
    unseen = collective_data(records_over([(5, 0), (8, 0), (8, 4)], noise=0.03))
    accuracy = collective_accuracy(model, unseen)
    assert set(accuracy["by_ranks"]) == {"5_ranks", "8_ranks"} and accuracy["records"] == 180
    assert set(accuracy["by_layout"]) == {"1x5", "1x8", "2x4"} and set(accuracy["by_hosts"]) == {"1_host", "2_hosts"}
    for kind in accuracy["by_kind"].values():
        assert kind["per_rank"]["median_ape"] < 0.15 and kind["slowest"]["median_ape"] < 0.15
    assert accuracy["by_kind"].keys() == {"all_to_all forward", "all_to_all backward", *COLLECTIVES[1:]}


def test_nets_learn_what_the_prior_cannot() -> None:
    """On this machine large all-gathers take four times as long."""
    records = records_over(LAYOUTS)
    for record in records:
        spec = CollectiveSpec.from_json(record["spec"])
        if spec.name == "all_gather" and spec.batch_size_per_rank * spec.dims[0] > 3e4:
            record["rank_ms"] = [{"median": 4.0 * timing["median"]} for timing in record["rank_ms"]]
    data = collective_data(records)
    model = train_collective_model(data, dataclasses.replace(QUICK, epochs=40, batch_size=16), log=lambda _: None)
    errors, alone = (collective_accuracy(each, data) for each in (model, CollectiveModel(model.prior)))
    gather = ("by_kind", "all_gather", "per_rank", "median_ape")
    assert _at(errors, gather) < 0.5 * _at(alone, gather)


def _at(content: Any, path: Iterable[str]) -> float:
    for name in path:
        content = content[name]
    return float(content)


def test_training_is_reproducible_and_depends_on_the_seed() -> None:
    data = collective_data(records_over([(2, 0), (3, 0)], 30))
    config = dataclasses.replace(QUICK, epochs=2)
    states = []
    for seed in (0, 0, 1):
        net = train_collective_model(data, dataclasses.replace(config, seed=seed), log=lambda _: None).net
        assert net is not None
        states.append(net.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_inputs_beyond_training_are_clamped_and_constant_ones_ignored() -> None:
    model = train_collective_model(collective_data(records_over([(2, 0), (3, 0)], 30)), QUICK, log=lambda _: None)
    assert model.net is not None
    calls = part_of(CollectiveSpec("all_to_all", 64, 64, (64,) * 64, local_world_size=8, link_gbps=400.0)).calls
    inputs = rank_features(calls, model.prior.parts(calls), model.prior.predict(calls))
    features = torch.as_tensor(inputs, dtype=torch.float32)
    clamped = torch.minimum(torch.maximum(features, model.net.low), model.net.high)
    assert not torch.equal(clamped, features)
    assert torch.equal(model.net(features)[0], model.net(clamped)[0])
    times = model.predict(calls)
    assert np.isfinite(times.per_rank).all()
    ratio = times.per_rank / model.prior.predict(calls)[:, None]
    low, high = model.net.residual_low.exp().item(), model.net.residual_high.exp().item()
    assert (ratio > 0.999 * low).all() and (ratio < 1.001 * high).all()


def test_rank_counts_are_held_out_where_others_suffice() -> None:
    records = records_over([(2, 0), (3, 0), (4, 0), (5, 0), (8, 0)], 20)
    split = split_collectives(records)
    assert split.ranks_held_out == {5, 8} and len(split.unseen_ranks) == 40
    assert {r["spec"]["world_size"] for r in split.train} == {2, 3, 4}
    assert {r["spec"]["world_size"] for r in split.unseen_ranks} == {5, 8}
    assert 0 < len(split.same_ranks) < 20
    for layouts in ([(2, 0), (4, 0), (8, 0)], [(8, 0)], [(2, 0), (3, 0), (4, 0)]):
        by_id = split_collectives(records_over(layouts, 40))
        assert not by_id.unseen_ranks and not by_id.ranks_held_out
        assert len(by_id.train) > 3 * len(by_id.same_ranks) > 0


def test_a_part_holds_its_model_accuracy_and_card(monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_over([(2, 0), (3, 0), (4, 2), (5, 0)], 40)
    part = train_collective_part(records, HARDWARE["generic_cpu"], log=lambda _: None)
    assert part.card["collectives_provenance"] == "measured" and part.card["collective_ranks_held_out"] == [5]
    assert part.counts["collectives"] == {"2_ranks": 40, "3_ranks": 40, "4_ranks": 40, "5_ranks": 40}
    assert part.counts["collectives_by_layout"] == {"1x2": 40, "1x3": 40, "1x5": 40, "2x2": 40}
    assert sum(part.counts["collectives_by_kind"].values()) == 160
    assert part.accuracy["collectives_unseen_ranks"]["records"] == 40
    assert part.accuracy["collectives_same_ranks"]["records"] + part.counts["collectives_train"] == 120
    assert part.card["collectives_oversubscribed"] == {"records": 120, "of": 160, "most_ranks_per_core": 2.5}
    json.dumps([part.accuracy, part.counts, part.card], allow_nan=False)
    few = train_collective_part(records[:5], HARDWARE["h200"], log=lambda _: None)
    assert few.model.prior.backend == "nccl" and "NVLink 4" in few.card["collectives_source"]
    assert few.card["collectives_provenance"] == "analytic" and not few.accuracy and few.model.net is None


def test_a_card_says_when_ranks_outnumbered_cores() -> None:
    records = records_over([(2, 0), (4, 0)], 3)
    assert oversubscription(records) == {"records": 3, "of": 6, "most_ranks_per_core": 2.0}
    assert "oversubscribed" in limits(records) and "3 of 6" in limits(records)
    assert "oversubscribed" not in limits(records[:3]) and "oversubscribed" not in limits([])
    unknown = [{k: v for k, v in record.items() if k != "pinned_cores"} for record in records]
    assert oversubscription(unknown) == {"records": 0, "of": 0, "most_ranks_per_core": 0.0}


def test_saved_models_predict_the_same_and_older_ones_are_refused(tmp_path: Path) -> None:
    collectives = train_collective_model(collective_data(records_over(LAYOUTS, 20)), QUICK, log=lambda _: None)
    model = dataclasses.replace(CostModel.analytic("generic_cpu"), collectives=collectives)
    model.card["hardware"] = {"name": "made_up"}
    model.save(tmp_path)
    loaded = CostModel.load(tmp_path).collectives
    for part in collective_data(records_over(LAYOUTS, 20)):
        one, other = collectives.predict(part.calls), loaded.predict(part.calls)
        np.testing.assert_array_equal(one.per_rank, other.per_rank)
        np.testing.assert_array_equal(one.slowest, other.slowest)
    card = json.loads((tmp_path / CARD_FILE).read_text())
    assert card["collective_nets"] == QUICK.nets
    del card["collective_feature_set"]
    (tmp_path / CARD_FILE).write_text(json.dumps(card))
    with pytest.raises(CostModelError, match="made for collective feature set None.*train the model again"):
        CostModel.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": (PRIOR,)}, "one prior for each"),
        ({"backend": "mpi"}, "backend must be one of"),
        ({"link_ms_per_byte": 0.0}, "link_ms_per_byte must be"),
    ],
)
def test_priors_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHARED, **change)
    with pytest.raises(ValueError, match="latency_ms must be a finite number"):
        dataclasses.replace(PRIOR, latency_ms=float("nan"))


def test_hosts_of_a_partly_used_cluster_are_counted() -> None:
    traffic = Traffic.pooled(np.asarray([8.0]), np.ones((1, 5)), 2)
    assert traffic.hosts == 3 and traffic.ranks == 5
    assert collective_traffic.waits(np.asarray([[1.0, 3.0]])).tolist() == [[2.0, 0.0]]
