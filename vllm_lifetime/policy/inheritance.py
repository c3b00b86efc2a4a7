# SPDX-License-Identifier: Apache-2.0
"""Access inheritance: agent j reads what agent i has read before it (PBKV section 5, limitations).

Whether agents hand their context on is the harness's convention: in a group chat each agent reads the conversation that the one
before it has written, in a tool-using team each has its own. A rule says so, or it is learned: of what only i had read in a
workflow when j was invoked right after it, how much j read. A node that i has read then counts for j, too, with that weight.

Pure; scheduler process. Memory is bounded by `MAX_PAIRS`.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Literal

from vllm_lifetime.policy.scoring import AccessSet

__all__ = ["EVERYONE", "MAX_PAIRS", "Inheritance", "InheritanceRules"]

EVERYONE: Literal["all"] = "all"
"""In a rule: whatever any agent of the workflow has read."""

InheritanceRules = Mapping[str, "Collection[str] | Literal['all']"]
"""By agent j, the agents i whose cache it inherits. An agent that is named here learns nothing."""

MAX_PAIRS = 1024
"""Pairs (i, j) of which is remembered what they did; the one not seen for longest goes."""

PRIOR_TRIALS = 1.0
"""As many invocations without inheritance are taken as seen before the first one."""

MIN_CHANGE = 0.01
"""A weight is used as it was until it has changed by more than this."""

MAX_TRIALS = 64.0
"""With more than so many, older ones count half: conventions change with the harness."""


class Inheritance:
    """See the module. `learns` False: rules alone, and no rule means no inheritance."""

    def __init__(self, rules: InheritanceRules | None = None, *, learns: bool = True) -> None:
        self._rules: dict[str, frozenset[str] | None] = {
            heir: None if givers == EVERYONE else frozenset(givers) for heir, givers in (rules or {}).items()
        }
        self.learns = learns
        # By (i, j): [sum of the shares that j read of what only i had read, times that there was anything, the weight in use].
        self._seen: OrderedDict[tuple[str, str], list[float]] = OrderedDict()
        self._access_sets: dict[frozenset[str], AccessSet] = {}
        """Those asked for since a weight has changed."""

    def __len__(self) -> int:
        """Pairs remembered."""
        return len(self._seen)

    def observe(self, giver: str, heir: str, share: float) -> None:
        """`heir`, invoked right after `giver`, has read `share`, in [0, 1], of what until then only `giver` had read. O(1)."""
        if not self.learns or giver == heir or heir in self._rules:
            return
        pair = (giver, heir)
        counts = self._seen.get(pair)
        if counts is None:
            if len(self._seen) >= MAX_PAIRS:
                self._seen.popitem(last=False)
                self._access_sets.clear()
            counts = self._seen[pair] = [0.0, 0.0, 0.0]
        self._seen.move_to_end(pair)
        counts[0] += share
        counts[1] += 1.0
        if counts[1] > MAX_TRIALS:
            counts[0] /= 2.0
            counts[1] /= 2.0
        weight = counts[0] / (counts[1] + PRIOR_TRIALS)
        if abs(weight - counts[2]) > MIN_CHANGE:
            counts[2] = weight
            self._access_sets.clear()

    def weight(self, giver: str, heir: str) -> float:
        """How surely `heir` reads what `giver` has read, in [0, 1]. O(1)."""
        if giver == heir:
            return 1.0
        if heir in self._rules:
            givers = self._rules[heir]
            return 1.0 if givers is None or giver in givers else 0.0
        counts = self._seen.get((giver, heir))
        return 0.0 if counts is None else counts[2]

    def access_set(self, agents: frozenset[str]) -> AccessSet:
        """A_w(c) of a node that `agents` have read: they, and those that inherit it. O(1); O(pairs) if a weight has changed."""
        access_set = self._access_sets.get(agents)
        if access_set is None:
            weights = dict.fromkeys(agents, 1.0)
            for heir in {*self._rules, *(heir for giver, heir in self._seen if giver in agents)} - agents:
                weight = max((self.weight(giver, heir) for giver in agents), default=0.0)
                if weight > 0.0:
                    weights[heir] = weight
            if len(self._access_sets) >= MAX_PAIRS:
                self._access_sets.clear()
            access_set = self._access_sets[agents] = weights
        return access_set
