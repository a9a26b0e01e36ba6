"Measuring: the frozen sets, records that survive, intervals that mean what they say, path finders that frame the numbers, and what results/benchmark holds."
import gzip
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm

from lake_engineer.evaluation import (COLUMNS, OPTIONAL, PLANNERS, PlannerPolicy, board_features, board_of, cause_table, compare, diagnose, evaluate, feature_table,
                                      pass_at_k, power, paired_difference, rates, read_records, record, sampled_rates, seed_difference, to_frame, wilson, write_records)
from lake_engineer.generator import (HOLE_RATIOS, STORED, WAIT_SUBSETS, ConfigError, LakeConfig, benchmark, canonical, frozen_folder, frozen_text, generate, heldout,
                                     make_frozen, read_frozen, split_of)
from lake_engineer.lake import CHECKS, Instance, Lake, LakeError, check
from lake_engineer.policy import Completion
from lake_engineer.prompts import MAX_STEPS, format_answer, judge, prompt
from lake_engineer.report import benchmark_part, benchmark_policies, benchmark_records, benchmark_table, browse, cell_rates
from lake_engineer.solver import annotate, cbs, solve

ROOT = Path(__file__).resolve().parent.parent
VALIDATION = ROOT / "results/runs/tiny/base/validation.jsonl"

# --- the frozen sets -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sets():
    return {split: read_frozen(frozen_folder(), split) for split in STORED}


def boards_of(cells):
    return [x for cell in cells.values() for xs in cell.values() for x in xs]


def test_the_stored_sets_are_small_complete_and_as_their_checksums_say(sets):
    folder = frozen_folder()
    assert sum(p.stat().st_size for p in folder.iterdir()) < 2 * 2**20
    assert {s: len(boards_of(cells)) for s, cells in sets.items()} == {"validation": 1020, "test": 800, "benchmark": 3150}
    assert {s: {k: sum(map(len, cell.values())) for k, cell in cells.items()} for s, cells in sets.items()} == STORED
    assert len(STORED["benchmark"]) == 21 and {len(xs) for cell in sets["benchmark"].values() for xs in cell.values()} == {50}
    for split in STORED:  # what a user types: gzip -dk *.gz && sha256sum -c SHA256SUMS
        text = gzip.decompress((folder / f"{split}.jsonl.gz").read_bytes())
        assert f"  {split}.jsonl\n" in (folder / "SHA256SUMS").read_text()
        done = subprocess.run(["sha256sum"], input=text, capture_output=True).stdout.decode().split()[0]
        assert done in (folder / "SHA256SUMS").read_text()


def test_wait_and_hole_ratios_are_those_of_the_paper(sets):
    for (agents, size), cell in sets["benchmark"].items():
        for name, xs in cell.items(): assert abs(sum(x.needs_wait for x in xs) - WAIT_SUBSETS[name] * 50) <= 0.5
        holes = Counter(len(x.lake.holes) / size**2 for xs in cell.values() for x in xs)
        assert all(any(abs(h - ratio) <= 1 / size**2 for ratio in HOLE_RATIOS) for h in holes), (agents, size, holes)


def test_no_board_is_in_two_sets_or_in_training_up_to_symmetry(sets):
    keys = {split: [canonical(x) for x in boards_of(cells)] for split, cells in sets.items()}
    assert sum(map(len, keys.values())) == len({k for ks in keys.values() for k in ks}) == 4970
    for split, cells in sets.items(): assert {split_of(x) for x in boards_of(cells)} == {split}
    frozen = {k for ks in keys.values() for k in ks}
    for agents, sizes in ((2, range(3, 9)), (3, (4, 6))):
        trained = generate(LakeConfig.uniform(sizes, 0.3, 0.5), 300, agents, seed=7)
        assert not frozen & {canonical(x) for x in trained} and {split_of(x) for x in trained} == {"train"}


def test_a_mirrored_test_board_is_still_known_as_one(sets):
    for x in boards_of(sets["test"])[::40]:
        n = x.lake.size
        flip = [Instance(Lake(n, {(c, n - 1 - r) for r, c in x.lake.holes}), *([(c, n - 1 - r) for r, c in cells[::-1]] for cells in (x.starts, x.goals)))]
        assert split_of(flip[0]) == "test" and canonical(flip[0]) == canonical(x)


def test_costs_are_proven(sets):
    "`make benchmark` does this for every board; here for one in forty."
    second = 0
    for x in boards_of(sets["benchmark"])[::40] + boards_of(sets["test"])[::40]:
        for objective in ("sum_of_costs", "makespan"): assert check(x, solve(x, objective).plan).optimal(objective)
        assert annotate(x) == x
        other = cbs(x, 20)
        if other.status == "solved":
            assert other.cost == x.optimal_sum_of_costs
            second += 1
    assert second > 40


def test_generating_gives_what_is_stored(sets):
    for split, agents, size in (("test", 2, 3), ("validation", 2, 4), ("benchmark", 3, 3)):
        assert frozen_text([make_frozen(split, size, agents, STORED[split][agents, size])]) == frozen_text([sets[split][agents, size]])


def test_heldout_and_benchmark_are_the_stored_sets_and_other_totals_are_made():
    assert heldout("validation", range(3, 9), 2, 1020) == boards_of(read_frozen(frozen_folder(), "validation"))
    assert [x.id for x in heldout("validation", range(3, 9), 2, 1020)] == read_records(VALIDATION).id.tolist()
    assert len(heldout("test")) == 800
    assert [x.num_agents for x in benchmark(5, 10, "wr075")] == [5] * 50
    other = heldout("validation", (3, 4), 2, 24)
    assert len(other) == 24 and {split_of(x) for x in other} == {"validation"}


def test_a_stored_set_that_was_changed_is_refused(tmp_path):
    for name in ("test.jsonl.gz", "SHA256SUMS"): (tmp_path / name).write_bytes((frozen_folder() / name).read_bytes())
    data = (tmp_path / "test.jsonl.gz").read_bytes()
    for broken, words in ((data[:-100], "cannot be read"), (b"", "not the file"), (gzip.compress(gzip.decompress(data).replace(b"true", b"false", 1)), "not the file")):
        (tmp_path / "test.jsonl.gz").write_bytes(broken)
        with pytest.raises(ConfigError, match=words) as e: read_frozen(tmp_path, "test")
        assert "\n" not in str(e.value)


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def boards():
    return heldout("validation", (3, 4, 5), 2, 60)


def test_committed_records_are_read_and_written_again_to_the_byte(tmp_path):
    frame = read_records(VALIDATION)
    assert write_records(frame, tmp_path / "v.jsonl").read_bytes() == VALIDATION.read_bytes()
    again = read_records(write_records(frame, tmp_path / "v.jsonl.gz"))
    pd.testing.assert_frame_equal(frame, again)
    assert set(frame) == set(COLUMNS) - set(OPTIONAL)


def test_the_schema_names_every_column_with_its_type(boards, tmp_path):
    frame = evaluate(PlannerPolicy("random-walk"), boards, samples=2, temperature=1.0, columns=dict(policy="walk", seed=3), timed=True)
    kinds = {"str": "text", "int64": "integer", "Int64": "integer", "bool": "boolean", "boolean": "boolean", "float64": "number"}
    assert {c: kinds[str(t)] for c, t in frame.dtypes.items()} == {c: COLUMNS[c][0] for c in frame}
    assert set(COLUMNS) - set(frame) == {"notes"} and (frame.seconds >= 0).all()
    assert list(frame["sample"]) == [0, 1] * 60


def test_old_rows_without_new_columns_and_new_rows_go_together(boards):
    x = boards[0]
    answer = Completion(f"<answer>nothing</answer> {format_answer(solve(x).plan, x, 'actions')}", 9, True)
    policy = type("P", (), dict(name="p", complete=lambda self, prompts, *a: [[answer] for _ in prompts]))()
    new = evaluate(policy, [x], style="joint", columns=dict(seed=1))
    assert new.notes[0] == "written as actions; 2 answer blocks that differ, the last counts" and new.valid[0]
    old = record(x, answer, judge(answer.text, x))
    assert "notes" not in old and to_frame([old, old | dict(notes="x")]).notes.tolist() == ["", "x"]


def test_the_same_evaluation_gives_the_same_bytes_and_times_stay_out(boards, tmp_path):
    for name in ("a", "b"): evaluate(PlannerPolicy("random-walk"), boards, seed=4, out=tmp_path / name / "r.jsonl")
    assert (tmp_path / "a/r.jsonl").read_bytes() == (tmp_path / "b/r.jsonl").read_bytes()
    for name in ("c", "d"): evaluate(PlannerPolicy("random-walk"), boards, seed=4, out=tmp_path / name / "r.jsonl.gz", timed=True)
    c, d = (read_records(tmp_path / name / "r.jsonl.gz").drop(columns="seconds") for name in ("c", "d"))
    pd.testing.assert_frame_equal(c, d)


def test_records_of_other_boards_are_not_taken_for_these(boards, tmp_path):
    evaluate(PlannerPolicy("alone"), boards, out=tmp_path / "r.jsonl")
    for other in (boards[1:], boards[::-1], heldout("test", (3,), 2, 60)):
        with pytest.raises(LakeError, match="other boards"): evaluate(PlannerPolicy("alone"), other, out=tmp_path / "r.jsonl")
    with pytest.raises(LakeError, match="other boards"): evaluate(PlannerPolicy("alone"), boards, samples=2, out=tmp_path / "r.jsonl")


KILLED = """
import sys, time
from pathlib import Path
from lake_engineer.evaluation import PlannerPolicy, evaluate
from lake_engineer.generator import heldout
class Slow(PlannerPolicy):
    def complete(self, *a): time.sleep(0.3); print("asked", flush=True); return super().complete(*a)
evaluate(Slow("random-walk"), heldout("validation", (3, 4, 5), 2, 60), batch_size=10, out=Path(sys.argv[1]))
"""


def test_a_killed_evaluation_goes_on_and_ends_the_same(boards, tmp_path):
    out = tmp_path / "r.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, out], stdout=subprocess.PIPE, text=True)
    for _ in range(3): process.stdout.readline()
    process.kill()
    process.wait()
    assert not out.exists()
    part = tmp_path / "r.jsonl.part"
    lines = [line for line in part.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]  # the first says what was asked
    kept = sum(len(json.loads(line)) for line in lines)
    assert 20 <= kept < 60
    with part.open("a") as f: f.write('{"0": [{"id"')  # as if the power had failed while a batch was written
    again = subprocess.run([sys.executable, "-c", KILLED, out], capture_output=True, text=True, check=True).stdout.count("asked")
    assert again == 6 - kept // 10
    assert out.read_bytes() == write_records(evaluate(PlannerPolicy("random-walk"), boards, batch_size=10), tmp_path / "whole.jsonl").read_bytes()


# --- statistics ------------------------------------------------------------------------------------------------------


def test_wilson_is_the_closed_form_and_keeps_its_promise():
    z, n = norm.ppf(0.975), 150
    def by_hand(k):
        centre, half = (k + z**2 / 2) / (n + z**2), z / (n + z**2) * math.sqrt(k * (n - k) / n + z**2 / 4)
        return centre - half, centre + half
    spans = np.array([wilson(k, n) for k in range(n + 1)])
    assert np.allclose(spans, np.clip([by_hand(k) for k in range(n + 1)], 0, 1), atol=1e-9)
    for p in (0.02, 0.1, 0.3, 0.5):  # every outcome weighted by its chance: no simulation
        assert binom.pmf(np.arange(n + 1), n, p)[(spans[:, 0] <= p) & (p <= spans[:, 1])].sum() > 0.92


@pytest.mark.parametrize("n, c", [(6, 0), (6, 1), (6, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n, c):
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        draws = list(itertools.combinations(right, k))
        assert math.isclose(pass_at_k(n, c, k), sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    for p, k in ((0.2, 1), (0.2, 4), (0.7, 3)):
        found = np.mean([pass_at_k(8, int(c), k) for c in rng.binomial(8, p, 20_000)])
        assert abs(found - (1 - (1 - p) ** k)) < 0.01


def test_sampled_rates_are_over_boards_and_rates_refuse_samples(boards):
    r = evaluate(PlannerPolicy("random-walk"), boards, samples=6, max_tokens=200)
    table = sampled_rates(r, (), (1, 6))
    assert math.isclose(table["pass@1"][0], r.valid.mean()) and table["n"][0] == 60
    assert math.isclose(table["pass@6"][0], r.groupby("id").valid.any().mean())
    low, high = wilson(int(r.valid.sum()), len(r))  # as if all samples were independent
    assert table["pass@1_high"][0] - table["pass@1_low"][0] > high - low
    with pytest.raises(LakeError, match="sampled_rates"): rates(r)


def test_a_difference_turns_its_sign_and_does_not_care_for_order():
    rng = np.random.default_rng(1)
    a, b = rng.random((3, 200)) < 0.5, rng.random((3, 200)) < 0.3
    d, low, high = paired_difference(a, b)
    back = paired_difference(b, a)
    assert (d, low, high) == pytest.approx((-back[0], -back[2], -back[1]), abs=0.01)
    order, seeds = rng.permutation(200), [2, 0, 1]
    assert paired_difference(a[seeds][:, order], b[seeds][:, order]) == pytest.approx((d, low, high), abs=0.01)
    assert seed_difference(a[seeds], b[seeds]) == pytest.approx(seed_difference(a, b))


def test_pairing_narrows_and_seeds_widen_the_interval():
    rng = np.random.default_rng(2)
    hard = rng.random(1000) < 0.5
    a, b = hard ^ (rng.random(1000) < 0.05), hard ^ (rng.random(1000) < 0.05)
    d, low, high = paired_difference(a, b)
    assert high - low < 0.06 < 2 * 1.96 * math.sqrt(2 * 0.25 / 1000)  # apart, the two would be known to ±4.4 points
    lucky = np.array([hard | (rng.random(1000) < luck) for luck in (0.0, 0.1, 0.0, 0.1)])
    still = np.tile(hard, (4, 1))
    assert np.ptp(paired_difference(lucky, still)[1:]) > 2 * np.ptp(paired_difference(lucky.mean(0), hard)[1:])


def test_intervals_keep_their_promise_in_a_simulation():
    mix = (0.1, 0.3)
    quiet = power(500, 1, mix, 0.0, noise=1e-9, interval=lambda a, b: paired_difference(a[0], b[0], resamples=300), studies=150)
    assert 0.88 <= quiet["covered"] <= 1.0 and quiet["detected"] <= 0.12  # one seed is enough where training has no luck
    assert power(500, 1, mix, 0.0, noise=0.02, interval=lambda a, b: paired_difference(a[0], b[0], resamples=300), studies=150)["covered"] < 0.8
    assert power(500, 5, mix, 0.0, 0.02, studies=600)["detected"] == pytest.approx(0.05, abs=0.03)
    assert power(1020, 5, mix, 0.05, 0.02)["detected"] > 0.7 > power(1020, 3, mix, 0.05, 0.02)["detected"]


def test_arms_that_cannot_be_paired_are_refused(boards):
    a, b = (evaluate(PlannerPolicy(name), boards) for name in ("alone", "prioritised"))
    assert compare([b], [a])["difference"] == pytest.approx(b.valid.mean() - a.valid.mean())
    for one, other in (([a], [a, b]), ([a], [b[::-1]]), ([a], [b[:-1]])):
        with pytest.raises(LakeError, match="cannot be paired"): compare(one, other)


# --- path finders ----------------------------------------------------------------------------------------------------


def test_a_path_finder_knows_what_the_prompt_says_and_no_more():
    for x in [*benchmark(5, 5, "wr050")[:5], *benchmark(3, 10, "wr075")[:5], Instance(Lake(3), [(0, 0)], [(2, 2)])]:
        read = board_of(prompt(x))
        assert (read.lake, read.starts, read.goals, read.optimal_sum_of_costs) == (x.lake, x.starts, x.goals, None)
    for text in ("", "size 3", prompt(Instance(Lake(3), [(0, 0)], [(2, 2)]), "actions"), "size 3 holes agents plan"):
        with pytest.raises(LakeError, match="compact"): board_of(text)


@pytest.mark.parametrize("agents, size", [(3, 3), (4, 6), (5, 10)])
def test_what_path_finders_can_and_cannot_get_wrong(agents, size):
    some = benchmark(agents, size, "wr050")[::5]
    found = {name: evaluate(PlannerPolicy(name), some, max_tokens=400) for name in PLANNERS}
    assert found["solver"].optimal.all()
    assert set(found["alone"].cause) <= {"", "no_conflict"} and set(found["random-walk"].cause) <= {"", "no_conflict", "goals"}
    assert (found["alone"].valid == found["alone"].optimal).all()  # shortest paths that do not collide are the optimum
    for r in found.values(): assert r.no_hole.all() and r.moves.all() and r.in_bounds.all() and r.starts.all()
    for x, ok in zip(some, found["prioritised"].valid):
        plan = PLANNERS["prioritised"](x, None)
        assert check(x, plan).valid == ok
        homes = [i for i, p in enumerate(plan.paths) if p[-1] == x.goals[i]]
        if len(homes) == agents: assert ok  # everybody found a way around all others


def test_an_answer_is_cut_at_the_limit():
    x = next(x for x in benchmark(5, 10, "wr050") if x.optimal_makespan > 10)
    [[answer]] = PlannerPolicy("solver").complete([prompt(x)], max_tokens=20)
    assert (answer.tokens, answer.finished, judge(answer.text, x).first_fault.kind) == (20, False, "truncated")


# --- failures --------------------------------------------------------------------------------------------------------


def test_features_and_faults_of_a_board_that_can_be_counted_by_hand():
    x = annotate(Instance(Lake(3, {(0, 1), (0, 2), (1, 2)}), [(0, 0), (2, 2)], [(2, 2), (0, 0)], id="square"))  # two ends, and a square to pass each other
    own = PLANNERS["alone"](x, None)
    beside = {(0, 0): 1, (1, 0): 0, (1, 1): 2, (2, 0): 0, (2, 1): 0, (2, 2): 1}
    ways = {c for path in own.paths for c in path}
    f = board_features(x)
    assert f["corridor"] == 4 / 6 and f["holes_beside"] == sum(beside[c] for c in ways) / len(ways) and f["waste"] == x.optimal_sum_of_costs - 8
    told, fault = diagnose(evaluate(PlannerPolicy("alone"), [x]), [x]).iloc[0], check(x, own).first_fault
    assert (f["collisions"] > 0) == (fault is not None)
    if fault: assert (told.cause, told.kind, told.time, told.agents) == (fault.check, fault.kind, fault.time, fault.agents)


def test_tables_of_failures_add_up(boards):
    r = evaluate(PlannerPolicy("random-walk"), boards)
    table = cause_table(r, "needs_wait")
    assert np.allclose(table.loc["all"], 1 - r.groupby("needs_wait").valid.mean())
    assert np.allclose(table.loc[list(CHECKS)].sum(), table.loc["all"])
    looked = diagnose(r, boards)
    for feature in ("needs_wait", "corridor", "holes_beside", "collisions", "waste"):
        some = feature_table(looked, feature)
        assert some.n.sum() == 60 and (some.n * some.valid_rate).sum() == pytest.approx(r.valid.sum())
        assert np.allclose(some[list(CHECKS)].sum(axis=1)[some.valid_rate < 1], 1)
    assert browse(r, boards, 4, "goals", n=1).data.count("<svg") == 1


# --- what results/benchmark holds ------------------------------------------------------------------------------------

WHOLE = [name for name, about in benchmark_policies().items() if about["whole"] and about["samples"] == 1]


def test_the_local_baselines_and_the_base_are_there_and_small():
    assert {*PLANNERS, "tiny"} <= set(WHOLE)
    assert sum(p.stat().st_size for p in (ROOT / "results/benchmark").rglob("*") if p.is_file()) < 3 * 10**6


@pytest.mark.parametrize("name", WHOLE)
def test_records_cover_the_benchmark_and_give_the_table_beside_them(name):
    records = benchmark_records(name)
    assert len(records) == 3950 and records.id.is_unique and not set(records) - set(COLUMNS) - {"subset"}
    assert records[records.num_agents > 2].groupby(["num_agents", "size", "subset"]).size().eq(50).all()
    table = pd.read_csv(ROOT / f"results/benchmark/{name}/rates.csv")
    pd.testing.assert_frame_equal(table, cell_rates(records).round(4), check_dtype=False)
    assert len(table) == 29 + 4 and (table.valid_low <= table.valid_rate).all() and (table.valid_rate <= table.valid_high).all()
    sample = records.iloc[::60]
    known = {x.id: x for x in benchmark_part()}
    for r in sample.itertuples():
        verdict = judge(r.completion, known[r.id])
        assert (verdict.valid, verdict.optimal(), verdict.first_fault.check if verdict.first_fault else "") == (r.valid, r.optimal, r.cause)


def test_the_path_finders_stand_in_the_right_order():
    valid = {name: benchmark_records(name).valid.mean() for name in PLANNERS}
    assert valid["random-walk"] < valid["alone"] < valid["prioritised"] < valid["solver"] == 1
    assert benchmark_records("solver").optimal.all()


@pytest.mark.parametrize("name", ["alone", "random-walk", "prioritised"])
def test_stored_records_are_made_again_to_the_answer(name):
    kept = benchmark_records(name)
    some = [x for x in benchmark(3, 4, "wr025")[:10]]
    again = evaluate(PlannerPolicy(name), some, max_tokens=256)
    mine = kept.set_index("id").loc[again.id]
    if name != "random-walk": assert mine.completion.tolist() == again.completion.tolist()  # a walk's luck depends on its batch
    assert set(mine.cause) <= {"", "no_conflict", "goals"}


def test_the_published_numbers_are_labelled_and_as_in_the_paper():
    table = benchmark_table()
    theirs = table[table.policy.str.startswith("published")]
    assert len(theirs) == 7 * 24 and theirs.valid_low.isna().all()
    best = theirs[(theirs.policy == "published, Qwen3-4B + GRPO + Ours") & (theirs.num_agents == 3) & (theirs["size"] == 0)]
    assert best.valid_rate.item() == pytest.approx(0.5167) and best.scale.item() == "4 B parameters"


def test_plans_of_the_benchmark_fit_any_reader():
    assert max(x.optimal_makespan for x in benchmark_part()) < MAX_STEPS
    assert max(x.optimal_makespan * x.num_agents + 1 for x in benchmark_part()) <= 256


@pytest.mark.parametrize("values, words", [(dict(cells="2:11"), "no cell of 2 agents and size 11"), (dict(cells="two"), "cells must be like"), (dict(policy="no/such"), "no policy"), (dict(max_tokens="5", cells="3:6"), "max_tokens is 5")])
def test_wrong_input_to_the_evaluation_is_one_sentence(tmp_path, values, words):
    flags = [x for k, v in values.items() for x in ("-p", k, v)]
    done = subprocess.run([sys.executable, "-m", "lake_engineer.batch", "nbs/experiments/evaluate_benchmark.ipynb", *flags, "-p", "out", tmp_path / "b", "--out", tmp_path / "nb", "--quiet"],
                          cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1 and words in errors[0], done.stderr[-2000:]
