# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.prediction.samples import MAX_PREFIX, list_agents, make_samples, split_by_task
from vllm_lifetime.traces.workflows import AgentWorkflow


def test_end_is_a_target_and_what_follows_it_is_not() -> None:
    samples = make_samples([AgentWorkflow("t", ("a", "b"))], ["a", "b"], horizon=3)
    assert samples.prefixes == [(0,), (0, 1)]
    # After (a): b, END, padding. After (a, b): END, padding, padding.
    assert samples.counts.tolist() == [[[0, 1, 0], [0, 0, 1], [0, 0, 0]], [[0, 0, 1], [0, 0, 0], [0, 0, 0]]]


def test_equal_prefixes_are_one_row_that_counts() -> None:
    samples = make_samples([AgentWorkflow("t", ("a", "a"))] * 3 + [AgentWorkflow("u", ("a", "b"))], ["a", "b"], horizon=1)
    assert samples.prefixes == [(0,), (0, 0), (0, 1)]
    assert samples.counts[:, 0].tolist() == [[3, 1, 0], [0, 0, 3], [0, 0, 1]]


def test_with_hidden_states_each_invocation_is_its_own_row() -> None:
    hidden = [np.arange(4, dtype=np.float32).reshape(2, 2), np.full((1, 2), 9, dtype=np.float32)]
    samples = make_samples([AgentWorkflow("t", ("a", "a")), AgentWorkflow("u", ("a",))], ["a"], 1, hidden)
    assert samples.prefixes == [(0,), (0, 0), (0,)]
    assert samples.hidden is not None and samples.hidden.tolist() == [[0, 1], [2, 3], [9, 9]]


def test_agents_that_are_not_listed_are_neither_rows_nor_targets() -> None:
    samples = make_samples([AgentWorkflow("t", ("a", "new", "b"))], ["a", "b"], horizon=2)
    assert samples.prefixes == [(0,), (0, 1)]
    assert samples.counts[0].tolist() == [[0, 0, 0], [0, 1, 0]]


def test_the_transition_matrix_is_normalised_by_row_and_leaves_out_end() -> None:
    samples = make_samples([AgentWorkflow("t", ("a", "b")), AgentWorkflow("u", ("a", "a"))], ["a", "b"], horizon=3)
    np.testing.assert_allclose(samples.transition_matrix(), [[1 / 2, 1 / 2], [0, 0]])


def test_padded_prefixes_end_with_the_present_agent() -> None:
    samples = make_samples([AgentWorkflow("t", ("a", "b", "a"))], ["a", "b"], horizon=1)
    assert samples.padded_prefixes().tolist() == [[2, 2, 0], [2, 0, 1], [0, 1, 0]]


def test_a_very_long_prefix_is_cut() -> None:
    samples = make_samples([AgentWorkflow("t", ("a",) * (MAX_PREFIX + 9))], ["a"], horizon=1)
    assert max(map(len, samples.prefixes)) == MAX_PREFIX


WORKFLOWS = st.lists(
    st.builds(
        AgentWorkflow,
        st.sampled_from([str(i) for i in range(12)]),
        st.lists(st.sampled_from("abcd"), min_size=1, max_size=9).map(tuple),
    ),
    min_size=1,
    max_size=30,
)


@given(WORKFLOWS, st.integers(1, 4))
def test_every_invocation_is_counted_once_at_each_step_that_it_has(workflows: list[AgentWorkflow], horizon: int) -> None:
    samples = make_samples(workflows, list_agents(workflows), horizon)
    for step in range(horizon):
        # Step k of a window is an agent or END for all invocations but the last k - 1.
        assert samples.counts[:, step].sum() == sum(max(0, len(workflow.agents) - step) for workflow in workflows)
    assert samples.counts[:, 0, -1].sum() == len(workflows)


@given(WORKFLOWS, st.integers(0, 99))
def test_a_split_keeps_the_workflows_of_a_task_together(workflows: list[AgentWorkflow], seed: int) -> None:
    tasks = {workflow.task for workflow in workflows}
    if len(tasks) < 3:
        with pytest.raises(ValueError, match="too few"):
            split_by_task(workflows, seed)
        return
    split = split_by_task(workflows, seed)
    assert sorted(i for part in split for i in part) == list(range(len(workflows)))
    sides = [{workflows[i].task for i in part} for part in split]
    assert all(sides) and sum(map(len, sides)) == len(tasks)
