# SPDX-License-Identifier: Apache-2.0
"""Sessions made up from the published statistics (Lachesis sections 3.3 to 3.5, appendix A). Equal seeds give equal sessions."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.simulate.hbf.replay_trace import Program, Request
from vllm_lifetime.simulate.hbf.workload_files import Benchmark, Domain, StructuralFile, TemporalFile

__all__ = ["TRACES", "Session", "make_structural", "make_temporal", "score_workers"]

TRACES = ("multi_agent", "multi_agent_no_reviewer", "tau3", "bfcl")
"""Names of the traces that can be made up."""

MAX_FAN_OUT = 6
"""Most workers that a lead runs at a time."""


@dataclass(slots=True)
class Session:
    """A session by its first program, and the benchmark or domain that it is one of."""

    workload: str
    root: Program


def _lognormal(random: np.random.Generator, mean: float, sigma: float) -> float:
    return mean * math.exp(sigma * float(random.standard_normal()) - sigma * sigma / 2)


def _scale_of_rounds(mean: float, sigma: float) -> float:
    """Mean of the log-normal that, rounded and never below 1, has this mean. By fixed-point iteration over its quantiles."""
    normal = NormalDist()
    quantiles = np.exp(sigma * np.array([normal.inv_cdf((i + 0.5) / 1000) for i in range(1000)]) - sigma * sigma / 2)
    scale = mean
    for _ in range(20):
        scale *= mean / float(np.maximum(1, np.round(scale * quantiles)).mean())
    return scale


def _tokens(value: float) -> int:
    return max(1, round(value))


# ------------------------------------------------------------------------------------------------ structural


def make_structural(file: StructuralFile, seed: int, *, has_reviewer: bool, ttft_s: float, tpot_s: float) -> list[Session]:
    """The multi-agent trace: as many sessions of each benchmark as were published.

    `ttft_s`: time to first token of every request; `tpot_s`: reference time per output token, for the workers' true lifetimes.
    """
    random = np.random.default_rng([seed, 1])
    sessions = []
    for name, benchmark in file.benchmarks.items():
        shape = _Shape(file, benchmark, ttft_s, has_reviewer)
        sessions += [Session(name, shape.session(random)) for _ in range(benchmark.sessions)]
    score_workers(sessions, file.general.predictor_rank_correlation.value, tpot_s, random)
    return sessions


class _Shape:
    """Means of one benchmark's sessions, from its totals."""

    def __init__(self, file: StructuralFile, benchmark: Benchmark, ttft_s: float, has_reviewer: bool) -> None:
        self.general = general = file.general
        self.benchmark = benchmark
        self.ttft_s = ttft_s
        self.has_reviewer = has_reviewer
        tokens = benchmark.tokens_written / benchmark.sessions
        requests = benchmark.requests / benchmark.sessions
        rounds = benchmark.rounds_per_worker
        self.rounds_scale = _scale_of_rounds(rounds, benchmark.rounds_sigma)
        # Groups of 1 + Poisson workers: the last one of a session is cut, by this much on average.
        fan_out = general.fan_out.value
        cut = ((fan_out * fan_out + fan_out - 1) / fan_out - 1) / 2
        # Requests: each worker's rounds and its review, one of the lead for each group of workers, and the lead's last.
        self.workers = max(1.0, (requests - 1 - cut / fan_out) / (rounds + 1 + 1 / fan_out))
        lead_requests = (self.workers + cut) / fan_out + 1
        self.lead_prefill = max(1.0, general.lead_share.value * tokens / lead_requests - general.lead_output.value)
        reviewer = general.reviewer_share.value * tokens / self.workers
        self.worker = (1 - general.lead_share.value - general.reviewer_share.value) * tokens / self.workers
        self.review_share = max(0.0, reviewer - general.reviewer_output.value) / self.worker
        observations = rounds - 1 + general.first_prompt_rounds.value
        self.observation = max(1.0, (self.worker - rounds * general.output_per_round.value) / observations)
        self.tool_s = general.tool_time_scale.value * benchmark.tool_s

    def session(self, random: np.random.Generator) -> Program:
        """A lead that delegates to groups of workers, one group at a time, and then answers."""
        general = self.general
        lead = Program(SegmentClass.LEAD)
        left = 1 + int(random.poisson(self.workers - 1))
        while left:
            group = min(left, MAX_FAN_OUT, 1 + int(random.poisson(general.fan_out.value - 1)))
            left -= group
            request = self._lead_request(random)
            request.children = [self._worker(random) for _ in range(group)]
            lead.requests.append(request)
        lead.requests.append(self._lead_request(random))
        lead.requests[0].ttft_s = self.ttft_s
        return lead

    def _lead_request(self, random: np.random.Generator) -> Request:
        prefill = _tokens(_lognormal(random, self.lead_prefill, 0.8))
        return Request(prefill, _tokens(_lognormal(random, self.general.lead_output.value, 0.5)), ttft_s=self.ttft_s)

    def _worker(self, random: np.random.Generator) -> Program:
        general = self.general
        worker = Program(SegmentClass.WORKER, shared_tokens=round(general.shared_prefix.value), expected_tokens=self.worker)
        rounds = max(1, round(_lognormal(random, self.rounds_scale, self.benchmark.rounds_sigma)))
        size = _lognormal(random, 1.0, general.worker_size_sigma.value)
        for number in range(rounds):
            mean = self.observation * size * (1.0 if number else general.first_prompt_rounds.value)
            worker.requests.append(
                Request(
                    _tokens(_lognormal(random, mean, general.observation_sigma.value)),
                    _tokens(_lognormal(random, general.output_per_round.value, general.output_sigma.value)),
                    wait_s=float(random.exponential(self.tool_s)) if number else 0.0,
                    ttft_s=self.ttft_s,
                )
            )
        if self.has_reviewer:
            review = Program(SegmentClass.REVIEWER, shared_tokens=round(general.shared_prefix.value))
            prefill = _tokens(self.review_share * worker.tokens)
            decode = _tokens(_lognormal(random, general.reviewer_output.value, 0.5))
            review.requests.append(Request(prefill, decode, ttft_s=self.ttft_s))
            worker.successor = review
        return worker


def score_workers(sessions: list[Session], rank_correlation: float, tpot_s: float, random: np.random.Generator) -> None:
    """Give every worker a predicted score whose Kendall correlation with its true lifetime is about `rank_correlation`.

    `rho * z(ln lifetime) + sqrt(1 - rho^2) * noise`, with rho = sin(pi/2 * tau), which holds for normal pairs.
    """
    workers = [
        child
        for session in sessions
        for request in session.root.requests
        for child in request.children
        if child.segment_class is SegmentClass.WORKER
    ]
    if not workers:
        return
    logs = np.log([max(1e-3, worker.lifetime_s(tpot_s)) for worker in workers])
    normal = (logs - logs.mean()) / max(1e-9, float(logs.std()))
    rho = math.sin(math.pi / 2 * rank_correlation)
    scores = rho * normal + math.sqrt(1 - rho * rho) * random.standard_normal(len(workers))
    for worker, score in zip(workers, scores, strict=True):
        worker.score = float(score)


# ------------------------------------------------------------------------------------------------ temporal


def make_temporal(file: TemporalFile, trace: str, seed: int, *, ttft_s: float) -> list[Session]:
    """A single-agent trace: as many sessions of each of its domains as were published. Raises ValueError: no such trace."""
    domains = {name: domain for name, domain in file.domains.items() if domain.trace == trace}
    if not domains:
        known = ", ".join(dict.fromkeys(domain.trace for domain in file.domains.values()))
        raise ValueError(f"unknown trace {trace!r}; the temporal regime has {known}")
    random = np.random.default_rng([seed, 2])
    return [
        Session(name, _dialogue(file, domain, ttft_s, random)) for name, domain in domains.items() for _ in range(domain.sessions)
    ]


def _dialogue(file: TemporalFile, domain: Domain, ttft_s: float, random: np.random.Generator) -> Program:
    """A session whose turns are programs of their own: what a turn adds dies with it, and is prefilled stripped at the next."""
    general = file.general
    tokens_per_turn = domain.laden.mean + domain.stripped.mean
    turns = domain.tokens_written / domain.sessions / tokens_per_turn
    requests = domain.requests / domain.sessions / turns
    session = Program(SegmentClass.REASONING_STRIPPED, shared_tokens=domain.shared_prefix)
    for number in range(1 + int(random.poisson(max(0.0, turns - 1)))):
        laden = _from_median(random, domain.laden.median, domain.laden.mean)
        output = general.output_share.value * min(laden, general.output_limit.value * domain.laden.median)
        rounds = 1 + int(random.poisson(max(0.0, requests - 1)))
        turn = Program(SegmentClass.REASONING_LADEN, shared_tokens=domain.shared_prefix, reads_parent=True)
        for round_number in range(rounds):
            turn.requests.append(
                Request(
                    _tokens((laden - output) / rounds),
                    _tokens(output / rounds),
                    wait_s=float(random.exponential(general.tool_time.value)) if round_number else 0.0,
                    ttft_s=ttft_s,
                )
            )
        delay_s = _from_sigma(random, general.user_delay_median.value, general.user_delay_sigma.value) if number else 0.0
        stripped = _tokens(_from_median(random, domain.stripped.median, domain.stripped.mean))
        session.requests.append(Request(stripped, 0, wait_s=delay_s, children=[turn], answers_user=True))
    return session


def _from_median(random: np.random.Generator, median: float, mean: float) -> float:
    return _from_sigma(random, median, math.sqrt(2 * math.log(max(1.0, mean / median))))


def _from_sigma(random: np.random.Generator, median: float, sigma: float) -> float:
    return median * math.exp(sigma * float(random.standard_normal()))
