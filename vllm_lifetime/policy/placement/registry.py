# SPDX-License-Identifier: Apache-2.0
"""The placement policies by name. The live engine and the simulator read the same table.

| name | long-lived classes | workers | freed at the boundary | what it is |
|---|---|---|---|---|
| `hbm_first` | HBM until full | HBM until full | no | an engine without us (Lachesis section 5.2) |
| `lachesis_no_predictive` | flash | HBM until full | yes | the deterministic path alone (section 5.4) |
| `lachesis` | flash | the first k by predicted lifetime | yes | the paper's policy (section 4) |
| `read_write_ratio` | by reads per write of the class | likewise | yes | Kyung et al., by segment |
| `output_length` | by expected output of the request | likewise | yes | Kyung et al., by request |
| `lru_migrate` | HBM, copied to flash when it is full | likewise | yes | recency: reacts, and pays with writes |
| `oracle` | flash | the first k by true lifetime | yes | `lachesis` with a perfect predictor; offline only |
"""

from vllm_lifetime.policy.placement.contract import Placement
from vllm_lifetime.policy.placement.hbm_first import HbmFirst
from vllm_lifetime.policy.placement.lachesis import Lachesis
from vllm_lifetime.policy.placement.lachesis_no_predictive import LachesisNoPredictive
from vllm_lifetime.policy.placement.lru_migrate import LruMigrate
from vllm_lifetime.policy.placement.oracle import Oracle
from vllm_lifetime.policy.placement.output_length import OutputLength
from vllm_lifetime.policy.placement.read_write_ratio import ReadWriteRatio

__all__ = ["PLACEMENTS", "parse_placement"]

PLACEMENTS: dict[str, type[Placement]] = {
    policy.name: policy for policy in (HbmFirst, LachesisNoPredictive, Lachesis, ReadWriteRatio, OutputLength, LruMigrate, Oracle)
}


def parse_placement(name: str, *, is_live: bool = True) -> type[Placement]:
    """The policy of that name; build it with the tiers that it places in.

    `is_live`: the caller serves requests and cannot know the future. Raises ValueError, saying which names there are.
    """
    names = [known for known, policy in PLACEMENTS.items() if not (is_live and policy.is_offline)]
    if name in names:
        return PLACEMENTS[name]
    if name in PLACEMENTS:
        raise ValueError(f"placement {name!r} knows the future and works in the simulator only; choose {', '.join(names)}")
    raise ValueError(f"unknown placement {name!r}; there are {', '.join(names)}")
