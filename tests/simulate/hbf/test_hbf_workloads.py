# SPDX-License-Identifier: Apache-2.0
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.simulate.hbf.calibration import check_structural, check_temporal, kendall_tau, separability
from vllm_lifetime.simulate.hbf.hardware import load_device, load_model, model_names
from vllm_lifetime.simulate.hbf.quantities import DataFileError
from vllm_lifetime.simulate.hbf.replay_trace import build_trace
from vllm_lifetime.simulate.hbf.workload_files import load_structural, load_temporal
from vllm_lifetime.simulate.hbf.workloads import make_structural, make_temporal

numbers = st.lists(st.integers(0, 5), min_size=2, max_size=12)


@given(numbers, st.randoms())
def test_kendall_tau_counts_pairs(a, random):
    b = list(a)
    random.shuffle(b)
    pairs = [((a[i] > a[j]) - (a[i] < a[j])) * ((b[i] > b[j]) - (b[i] < b[j])) for i, j in combinations(range(len(a)), 2)]
    assert kendall_tau(a, b) == pytest.approx(sum(pairs) / len(pairs))


@given(numbers, numbers)
def test_separability_counts_pairs(a, b):
    wins = sum((x > y) + (x == y) / 2 for x in a for y in b)
    assert separability(a, b) == pytest.approx(wins / len(a) / len(b))


def test_structural_sessions_keep_the_published_totals():
    file = load_structural()
    sessions = make_structural(file, 0, has_reviewer=True, ttft_s=1.0, tpot_s=0.2)
    assert len(sessions) == 623
    findings = {finding.id: finding for finding in check_structural(file, sessions, 0.2)}
    tokens = np.mean([findings[f"{name}.tokens"].value / (findings[f"{name}.tokens"].low / 0.95) for name in file.benchmarks])
    assert tokens == pytest.approx(1.0, abs=0.05)
    for id in ("predictor.tau", "lead_share", "reviewer_share"):
        assert findings[id].passes, findings[id]


def test_without_reviewers_nothing_else_changes_but_the_number_of_requests():
    file = load_structural()
    sessions = make_structural(file, 0, has_reviewer=False, ttft_s=1.0, tpot_s=0.2)
    assert all(child.successor is None for session in sessions for request in session.root.requests for child in request.children)


@pytest.mark.parametrize("trace", ["tau3", "bfcl"])
def test_temporal_sessions_keep_the_published_shares(trace):
    file = load_temporal()
    sessions = make_temporal(file, trace, 0, ttft_s=1.0)
    findings = check_temporal(file, trace, sessions, 0.2)
    assert {finding.id.partition(".")[0] for finding in findings} == {
        name for name, domain in file.domains.items() if domain.trace == trace
    }
    built = build_trace([session.root for session in sessions], 0.2)
    assert len(built.session_program) == len(sessions)


def test_an_unknown_trace_is_named():
    with pytest.raises(ValueError, match=r"unknown trace 'webshop'; the temporal regime has tau3, bfcl"):
        make_temporal(load_temporal(), "webshop", 0, ttft_s=1.0)


def test_equal_seeds_give_equal_sessions():
    traces = [
        build_trace([session.root for session in make_temporal(load_temporal(), "bfcl", seed, ttft_s=1.0)], 0.2)
        for seed in (1, 1, 2)
    ]
    assert (traces[0].rows == traces[1].rows).all()
    assert len(traces[0].rows) != len(traces[2].rows)


# ------------------------------------------------------------------------------------------------ data files


def test_capacities_are_those_of_the_paper_s_configurations():
    device = load_device()
    hbm = [device.hbm_kv_bytes(configuration) / 1e9 for configuration in device.configurations.values()]
    assert hbm == pytest.approx([34, 70, 106, 142, 286])
    for name, flash in (
        ("llama-4-maverick", [3459, 2947, 2435, 1923, 3971]),
        ("qwen3-235b-a22b", [3511, 2999, 2487, 1975, 4023]),
    ):
        model = load_model(name)
        found = [device.flash_kv_bytes(configuration, model) / 1e9 for configuration in device.configurations.values()]
        assert found == pytest.approx(flash, abs=0.5)


def test_lifetime_is_the_budget_over_the_write_rate():
    device = load_device()
    years = device.lifetime_years(device.configuration("1/7"), 2.34e9)
    assert years == pytest.approx(7 * 512e9 * 1e5 / (1.02 * 2.34e9 * 3.156e7))
    assert device.lifetime_years(device.configuration("1/7"), 0.0) == float("inf")


MODEL = """
name = "small"
label = "Small"
kv_per_token = { value = 1000, unit = "B", status = "assumed", source = "made up" }
weights_held = { value = 1, unit = "GB", status = "assumed", source = "made up" }
weights_read = { value = 1, unit = "GB", status = "assumed", source = "made up" }
full_attention_share = { value = 1, unit = "ratio", status = "assumed", source = "made up" }
attention_chunk = { value = 8192, unit = "tokens", status = "assumed", source = "made up" }
"""


def test_a_model_of_ones_own_is_one_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(MODEL)
    assert load_model(str(path)).weights_read.value == 1e9
    assert {"llama-4-maverick", "qwen3-235b-a22b"} <= set(model_names())


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('label = "Small"', 'label = "Small"\nkv_heads = 8', "there is no field 'kv_heads'"),
        ('label = "Small"', "", "the field 'label' is missing"),
        ('unit = "ratio"', 'unit = "percent"', "full_attention_share: the unit must be ratio, not 'percent'"),
        ("value = 1000", "value = 0", "kv_per_token: the value must be above 0"),
        ("value = 1000", "value = -1", "kv_per_token.value"),
        ('"made up"', '""', "source"),
        ('"assumed"', '"sure"', "status"),
        ("name", "name name", "is no TOML"),
    ],
)
def test_a_mistake_in_a_data_file_is_said_in_a_sentence(tmp_path, old, new, sentence):
    path = tmp_path / "small.toml"
    path.write_text(MODEL.replace(old, new, 1))
    with pytest.raises(DataFileError, match=sentence):
        load_model(str(path))


def test_names_that_are_not_there_are_refused_with_those_that_are(tmp_path):
    with pytest.raises(DataFileError, match=r"unknown model 'gpt'; there are .*qwen3-235b-a22b"):
        load_model("gpt")
    with pytest.raises(DataFileError, match="cannot read"):
        load_model(str(tmp_path / "none.toml"))
    with pytest.raises(DataFileError, match=r"no configuration '5/3'; it has 1/7, 2/6"):
        load_device().configuration("5/3")
