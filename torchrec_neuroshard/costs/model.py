"""A cost model: fused groups and collectives of one kind of machine, with its card."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from torchrec_neuroshard.costs.additive import GroupCosts
from torchrec_neuroshard.costs.collective_model import COLLECTIVE_FEATURE_SET, CollectiveModel, CollectiveNet
from torchrec_neuroshard.costs.collective_prior import CollectivePriors
from torchrec_neuroshard.costs.features import FEATURE_SET, FEATURES, WORK_TERMS
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import GroupNet
from torchrec_neuroshard.costs.hardware import HARDWARE, HardwareSpec, gpu_preset
from torchrec_neuroshard.costs.prior import GroupPrior
from torchrec_neuroshard.costs.uncertainty import Uncertainty

SCHEMA_VERSION = 2
WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "card.json"
PRETRAINED = Path(__file__).parent.parent / "pretrained"


class CostModelError(ValueError):
    """A cost model that cannot be loaded; the message names the file and the remedy."""


@dataclass
class CostModel:
    """Predicts what fused groups and collectives cost.

    Attributes:
        name: shipped name, or the folder it was loaded from.
        provenance: "measured" (fitted to records of real kernels), "scaled" (a measured model, with another GPU's
            data-sheet bandwidth) or "analytic" (data-sheet constants).
        hardware: what it describes.
        groups: cost of fused groups.
        collectives: cost of collectives.
        card: what was measured, with which versions, and the held-out error; empty for analytic models.
        ensemble: the networks whose mean ``groups`` was taught, slower and more accurate; None for analytic models.
        uncertainty: what their disagreement means; None likewise.
    """

    name: str
    provenance: str
    hardware: str
    groups: GroupCosts
    collectives: CollectiveModel
    card: dict[str, Any] = field(default_factory=dict)
    ensemble: GroupCostModel | None = None
    uncertainty: Uncertainty | None = None

    @property
    def collectives_source(self) -> str:
        """Where the times of collectives come from, for people: "measured", or whose figures they are."""
        return str(self.card.get("collectives_source") or self.card.get("collectives_provenance", "measured"))

    def as_measured(self, spec: HardwareSpec) -> HardwareSpec:
        """The figures of a kind of machine, with the host link as this model's records have it, if they do."""
        link = self.card.get("host_link")
        if link is None or self.provenance != "measured":
            return spec
        return replace(spec, host_read_gbps=link["read_gbps"], host_write_gbps=link["write_gbps"])

    def scaled_to(self, hardware: str) -> CostModel:
        """This GPU's model for another GPU, by the ratio of their memory bandwidths.

        All work of the prior is priced by that ratio, launches as they were measured; the networks correct it as they
        do on the measured GPU. Collectives are priced by the published figures of the other GPU's links.

        Args:
            hardware: a preset in ``costs.hardware``.

        Raises:
            CostModelError: the model is not one of a GPU with a data sheet, or there is no such preset.
        """
        source, target = (
            HARDWARE.get(gpu_preset(str(self.card.get("hardware", {}).get("gpu", "")))),
            HARDWARE.get(hardware),
        )
        if source is None or target is None or not (source.has_data_sheet and target.has_data_sheet):
            raise CostModelError(f"{self.name} cannot be scaled to {hardware}: both must be GPUs with a data sheet")
        ratio = source.memory_gbps / target.memory_gbps
        analytic = CostModel.analytic(hardware)
        card = {
            **{key: value for key, value in self.card.items() if key != "host_link"},
            "scaled_from": {"name": self.name, "hardware": self.hardware, "work_ms": ratio},
            "collectives_provenance": "analytic",
            "collectives_source": analytic.collectives_source,
        }
        return replace(
            self,
            name=f"{self.name} scaled to {hardware}",
            provenance="scaled",
            hardware=hardware,
            groups=_with_scaled_work(self.groups, ratio),
            collectives=analytic.collectives,
            card=card,
            ensemble=None if self.ensemble is None else _with_scaled_work(self.ensemble, ratio),
        )

    def by_ensemble(self) -> CostModel:
        """The same model with groups predicted by the ensemble, where there is one."""
        return self if self.ensemble is None else replace(self, groups=self.ensemble)

    @classmethod
    def analytic(cls, hardware: str) -> CostModel:
        """The analytic prior alone, from the data-sheet constants of a preset in ``costs.hardware``.

        Raises:
            CostModelError: there is no such preset.
        """
        if hardware not in HARDWARE:
            raise CostModelError(f"no hardware preset {hardware!r}; known: {', '.join(sorted(HARDWARE))}")
        spec = HARDWARE[hardware]
        return cls(
            f"analytic/{hardware}",
            "analytic",
            hardware,
            GroupCostModel(spec.group_prior()),
            CollectiveModel(CollectivePriors.uniform(spec.collective_prior(), spec.device)),
            {"source": spec.source, "collectives_provenance": "analytic", "collectives_source": spec.links},
        )

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> CostModel:
        """Loads a shipped model by name, or a folder with ``weights.safetensors`` and ``card.json``.

        Raises:
            CostModelError: no such model, or a file is corrupt or of another version.
        """
        folder = PRETRAINED / str(name_or_path)
        if not (folder / CARD_FILE).is_file():
            folder = Path(name_or_path)
        if not folder.is_dir():
            raise CostModelError(
                f"no cost model {str(name_or_path)!r}: neither a folder nor one of the shipped models "
                f"({', '.join(shipped_models()) or 'none'})"
            )
        card = _read_card(folder / CARD_FILE)
        tensors = _read_weights(folder / WEIGHTS_FILE)
        try:
            prior = GroupPrior.from_json(card["group_prior"])
            names = [f"group.{index}." for index in range(int(card["group_nets"]))]
            ensemble = GroupCostModel(prior, tuple(_group_net(tensors, name) for name in names))
            groups = GroupCostModel(prior, (_group_net(tensors, "group.mean."),)) if len(names) > 1 else ensemble
            collective_net = _collective_net(tensors) if card["collective_nets"] else None
            collectives = CollectiveModel(CollectivePriors.from_json(card["collective_priors"]), collective_net)
            return cls(
                str(card["name"]),
                "measured",
                str(card["hardware"]["name"]),
                groups,
                collectives,
                card,
                ensemble,
                Uncertainty.from_json(card["uncertainty"]) if card["uncertainty"] is not None else None,
            )
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CostModelError(
                f"{folder}: weights and card do not fit each other ({error}); train the model again"
            ) from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes weights and card; each file is replaced in one step."""
        if not isinstance(self.groups, GroupCostModel):
            kind = type(self.groups).__name__
            raise CostModelError(f"{self.name}: only neural models of fused groups can be saved, not {kind}")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        ensemble = self.ensemble or self.groups
        nets = {str(index): net for index, net in enumerate(ensemble.nets)}
        if len(ensemble.nets) > 1:
            nets["mean"] = self.groups.nets[0]
        for name, net in nets.items():
            tensors.update({f"group.{name}.{key}": value for key, value in net.state_dict().items()})
        if self.collectives.net is not None:
            tensors.update({f"collective.{key}": value for key, value in self.collectives.net.state_dict().items()})
        card = {
            **self.card,
            "schema": SCHEMA_VERSION,
            "name": self.name,
            "feature_set": FEATURE_SET,
            "collective_feature_set": COLLECTIVE_FEATURE_SET,
            "features": list(FEATURES),
            "work_terms": list(WORK_TERMS),
            "group_nets": len(ensemble.nets),
            "uncertainty": self.uncertainty.to_json() if self.uncertainty is not None else None,
            "collective_nets": self.collectives.net.nets if self.collectives.net is not None else 0,
            "group_prior": self.groups.prior.to_json(),
            "collective_priors": self.collectives.prior.to_json(),
        }
        _replace(folder / WEIGHTS_FILE, save_tensors({k: v.contiguous() for k, v in tensors.items()}))
        _replace(folder / CARD_FILE, (json.dumps(card, indent=1) + "\n").encode())


def shipped_models() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    return tuple(sorted(str(card.parent.relative_to(PRETRAINED)) for card in PRETRAINED.glob(f"**/{CARD_FILE}")))


def _with_scaled_work(groups: GroupCosts, factor: float) -> GroupCostModel:
    assert isinstance(groups, GroupCostModel)
    return GroupCostModel(groups.prior.with_scaled_work(factor), groups.nets)


def _group_net(tensors: Mapping[str, torch.Tensor], prefix: str) -> GroupNet:
    net = GroupNet()
    net.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return net


def _collective_net(tensors: Mapping[str, torch.Tensor]) -> CollectiveNet:
    prefix = "collective."
    state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    nets, _, hidden = state["embed_first.weight"].shape
    net = CollectiveNet(nets, hidden)
    net.load_state_dict(state)
    return net


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text())
    except OSError as error:
        raise CostModelError(f"{path}: cannot be read ({error.strerror}); a model is a folder with a card") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CostModelError(f"{path}: corrupt ({error}); restore the file or train the model again") from error
    if not isinstance(card, dict) or card.get("schema") != SCHEMA_VERSION:
        found = card.get("schema") if isinstance(card, dict) else type(card).__name__
        raise CostModelError(
            f"{path}: schema {found!r}, but this version reads {SCHEMA_VERSION}; "
            "train the model again with this version"
        )
    for key, computed in (("feature_set", FEATURE_SET), ("collective_feature_set", COLLECTIVE_FEATURE_SET)):
        if card.get(key) != computed:
            raise CostModelError(
                f"{path}: made for {key.replace('_', ' ')} {card.get(key)!r}, but this version computes {computed!r}; "
                "train the model again with this version"
            )
    return card


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = load_tensors(path.read_bytes())
    except OSError as error:
        raise CostModelError(f"{path}: cannot be read ({error.strerror}); restore the file") from error
    except Exception as error:  # safetensors raises its own untyped errors
        raise CostModelError(f"{path}: corrupt ({error}); restore the file or train the model again") from error
    for name, tensor in tensors.items():
        if not np.isfinite(tensor.numpy()).all():
            raise CostModelError(f"{path}: tensor {name} is not finite; restore the file or train the model again")
    return dict(tensors)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
