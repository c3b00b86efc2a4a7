# SPDX-License-Identifier: Apache-2.0
"""Whether made-up sessions look like the published ones (Lachesis section 3, appendix A): a table of targets and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.simulate.hbf.replay_trace import Program, Request
from vllm_lifetime.simulate.hbf.workload_files import StructuralFile, TemporalFile
from vllm_lifetime.simulate.hbf.workloads import Session

__all__ = ["Finding", "check_structural", "check_temporal", "kendall_tau", "separability"]


@dataclass(frozen=True)
class Finding:
    """One line: passes if `low <= value <= high`."""

    id: str
    what: str
    low: float
    high: float
    value: float

    @property
    def passes(self) -> bool:
        """Whether the value is within the target."""
        return self.low <= self.value <= self.high


def separability(longer: ArrayLike, shorter: ArrayLike) -> float:
    """Probability that one of `longer` is longer than one of `shorter`; equal ones count half. O(n log n)."""
    sorted_shorter = np.sort(np.asarray(shorter, np.float64))
    values = np.asarray(longer, np.float64)
    below = np.searchsorted(sorted_shorter, values, "left") + np.searchsorted(sorted_shorter, values, "right")
    return float(below.mean() / 2 / len(sorted_shorter))


def kendall_tau(a: ArrayLike, b: ArrayLike) -> float:
    """Kendall's rank correlation: concordant minus discordant pairs over all pairs. O(n^2) time, O(n) memory."""
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    total = 0.0
    for i in range(1, len(first)):
        total += float((np.sign(first[:i] - first[i]) * np.sign(second[:i] - second[i])).sum())
    return 2 * total / max(1, len(first) * (len(first) - 1))


def _spread(values: ArrayLike) -> float:
    low, high = np.percentile(np.asarray(values, np.float64), [10, 90])
    return float(high / max(1e-9, float(low)))


def _children(root: Program) -> list[Program]:
    return [child for request in root.requests for child in request.children]


def _near(id: str, what: str, target: float, tolerance: float, value: float) -> Finding:
    return Finding(id, what, target * (1 - tolerance), target * (1 + tolerance), value)


def check_structural(file: StructuralFile, sessions: Sequence[Session], tpot_s: float) -> list[Finding]:
    """The multi-agent trace with reviewers."""
    findings = []
    all_scores: list[float] = []
    all_lifetimes: list[float] = []
    tokens = dict.fromkeys(SegmentClass, 0)
    for name, benchmark in file.benchmarks.items():
        roots = [session.root for session in sessions if session.workload == name]
        workers = [child for root in roots for child in _children(root)]
        reviewers = [worker.successor for worker in workers if worker.successor is not None]
        programs = [*roots, *workers, *reviewers]
        for program in programs:
            tokens[program.segment_class] += program.tokens
        written = sum(program.tokens for program in programs) / len(roots)
        requests = sum(len(program.requests) for program in programs) / len(roots)
        lead_s = np.array([root.lifetime_s(tpot_s) for root in roots])
        worker_s = np.array([worker.lifetime_s(tpot_s) for worker in workers])
        review_s = np.array([review.lifetime_s(tpot_s) for review in reviewers])
        waiting_s = np.array(
            [root.lifetime_s(tpot_s) - Program(root.segment_class, _alone(root)).lifetime_s(tpot_s) for root in roots]
        )
        sizes = np.array([worker.tokens for worker in workers], np.float64)
        all_scores += [worker.score for worker in workers]
        all_lifetimes += list(worker_s)
        findings += [
            _near(f"{name}.tokens", "tokens written per session", benchmark.tokens_written / benchmark.sessions, 0.05, written),
            _near(f"{name}.requests", "requests per session", benchmark.requests / benchmark.sessions, 0.05, requests),
            Finding(f"{name}.lifetime_spread", "worker lifetime, p90 / p10", 3.7, 23.6, _spread(worker_s)),
            Finding(f"{name}.volume_spread", "worker tokens, p90 / p10", 2.8, 22.5, _spread(sizes)),
            Finding(f"{name}.tau", "Kendall's tau of worker lifetime and tokens", 0.51, 0.72, kendall_tau(worker_s, sizes)),
            Finding(
                f"{name}.lead_worker", "lead / worker lifetime, medians", 4.0, 6.1, float(np.median(lead_s) / np.median(worker_s))
            ),
            Finding(f"{name}.waiting", "part of its life that the lead waits", 0.71, 0.88, float((waiting_s / lead_s).mean())),
            Finding(f"{name}.separability", "a lead outlives a worker", 0.90, 1.0, separability(lead_s, worker_s)),
        ]
        if len(review_s):
            ratio = float(np.median(lead_s) / np.median(review_s))
            findings.append(Finding(f"{name}.lead_reviewer", "lead / reviewer lifetime, medians", 4.7, 38.3, ratio))
    total = sum(tokens.values())
    order = np.argsort(all_scores)
    longest = np.argsort(all_lifetimes)
    tenth = max(1, len(order) // 10)
    hits = len(set(order[:tenth].tolist()) & set(longest[:tenth].tolist())) / tenth
    findings += [
        Finding("lead_share", "part of all tokens that leads write", 0.090, 0.096, tokens[SegmentClass.LEAD] / total),
        Finding("reviewer_share", "part of all tokens that reviewers write", 0.20, 0.25, tokens[SegmentClass.REVIEWER] / total),
        Finding("predictor.tau", "Kendall's tau of score and lifetime", 0.51, 0.55, kendall_tau(all_scores, all_lifetimes)),
        Finding("predictor.top_tenth", "shortest tenth found among the lowest tenth of scores", 0.59, 0.67, hits),
    ]
    return findings


def _alone(root: Program) -> list[Request]:
    """A lead's requests as if nobody worked for it."""
    return [replace(request, children=[]) for request in root.requests]


def check_temporal(file: TemporalFile, trace: str, sessions: Sequence[Session], tpot_s: float) -> list[Finding]:
    """A single-agent trace."""
    findings = []
    for name, domain in file.domains.items():
        if domain.trace != trace:
            continue
        roots = [session.root for session in sessions if session.workload == name]
        turns = [turn for root in roots for turn in _children(root)]
        written = sum(program.tokens for program in [*roots, *turns]) / len(roots)
        requests = sum(len(turn.requests) for turn in turns) / len(roots)
        laden_s = [turn.lifetime_s(tpot_s) for turn in turns]
        stripped_s = [
            lifetime_s for root in roots for lifetime_s in _until_end(root, tpot_s)[:-1]
        ]  # What the last turn leaves is never read again.
        laden = sum(turn.tokens for turn in turns)
        share = laden / (laden + sum(root.tokens for root in roots))
        target = domain.laden.mean / (domain.laden.mean + domain.stripped.mean)
        findings += [
            _near(f"{name}.tokens", "tokens written per session", domain.tokens_written / domain.sessions, 0.05, written),
            _near(f"{name}.requests", "requests per session", domain.requests / domain.sessions, 0.05, requests),
            Finding(f"{name}.laden_share", "part of a turn's tokens that dies with it", target - 0.03, target + 0.03, share),
            Finding(
                f"{name}.lifetime_ratio",
                "stripped / laden lifetime, medians",
                7.6,
                17.2,
                float(np.median(stripped_s) / max(1e-9, float(np.median(laden_s)))) if stripped_s else math.nan,
            ),
            Finding(
                f"{name}.separability", "a stripped segment outlives a laden one", 0.96, 0.99, separability(stripped_s, laden_s)
            ),
        ]
    return findings


def _until_end(root: Program, tpot_s: float) -> list[float]:
    """Of each turn, the time from its start to the session's end."""
    times = []
    left = 0.0
    for request in reversed(root.requests):
        left += max((child.chain_s(tpot_s) for child in request.children), default=0.0)
        times.append(left)
        left += request.wait_s
    return times[::-1]
