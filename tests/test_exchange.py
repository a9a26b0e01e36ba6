"Boards for others: what is written can be read, what cannot be read is named."
import json
import os
import subprocess
import sys

from hypothesis import given, settings, strategies as st
import pytest

from boards import arrangements
from lake_engineer.exchange import SCHEMA, card, features, from_dataset, from_row, guess_columns, read_benchmark, save_dataset, to_dataset, to_row, trl_task
from lake_engineer.lake import Instance, Lake, LakeError

CORNERS = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)], "corners", optimal_makespan=5, optimal_sum_of_costs=9,
                   needs_wait=True, needs_wait_makespan=True, sampler="uniform")
PLAIN = Instance(Lake(3), [(0, 0)], [(2, 2)], "plain")

@st.composite
def instances(draw):
    flag, count = st.none() | st.booleans(), st.none() | st.integers(0, 99)
    return Instance(*draw(arrangements()), draw(st.text(max_size=5)), draw(count), draw(count), draw(flag), draw(flag),
                    draw(st.sampled_from(["", "uniform", "constructive"])))


@settings(deadline=None)
@given(instances())
def test_a_row_holds_the_whole_instance(inst):
    row = to_row(inst)
    assert list(row) == list(SCHEMA) and from_row(row) == inst and from_row(json.loads(json.dumps(row))) == inst

def test_through_datasets_and_through_a_folder(tmp_path):
    from datasets import load_dataset
    assert from_dataset(to_dataset([CORNERS, PLAIN])) == [CORNERS, PLAIN]
    folder = save_dataset({"train": [CORNERS] * 3, "benchmark": [PLAIN]}, tmp_path / "d", "Boards")
    back = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {s: from_dataset(d) for s, d in back.items()} == {"train": [CORNERS] * 3, "benchmark": [PLAIN]}
    assert all(d.features == features() for d in back.values())

def test_the_card_says_what_is_there():
    text = card({"train": [CORNERS] * 2, "test": [PLAIN]}, "Boards", about="From nowhere.")
    assert all(f"| `{c}` |" in text for c in SCHEMA) and "From nowhere." in text
    assert "| train | 0 | 2 | 2 |" in text and "| test | 1 | 0 | 1 |" in text and 'split="train"' in text

def test_the_same_boards_give_the_same_bytes(tmp_path):
    a, b = (save_dataset({"train": [CORNERS, PLAIN]}, tmp_path / d, "Boards") for d in "ab")
    assert [(p.relative_to(a), p.read_bytes()) for p in sorted(a.rglob("*.*"))] == [(p.relative_to(b), p.read_bytes()) for p in sorted(b.rglob("*.*"))]

@pytest.mark.parametrize("splits, message", [({}, "at least one split"), ({"train": []}, "at least one instance"), ({"../x": [PLAIN]}, "letters, digits")])
def test_a_bad_split_writes_nothing(tmp_path, splits, message):
    with pytest.raises(LakeError, match=message): save_dataset(splits, tmp_path / "d", "Boards")
    assert os.listdir(tmp_path) == []

ROW = dict(size=4, holes=[[0, 0], [0, 3], [3, 0], [3, 3]], starts=[[0, 1], [1, 0]], goals=[[3, 2], [2, 3]])

@pytest.mark.parametrize("change", [
    dict(holes="[[0, 0], [0, 3], [3, 0], [3, 3]]"), dict(holes="(0,0) (0, 3) (3,0) (3,3)"), dict(holes=[(3, 3), (3, 0), (0, 3), (0, 0)]),
    dict(starts={"agent_10": [1, 0], "agent_2": [0, 1]}), dict(goals=[{"row": 3, "col": 2}, {"r": 2, "c": 3}]), dict(goals=["(3, 2)", "2,3"])])
def test_cells_in_many_dresses(change):
    got, = read_benchmark([ROW | change])
    assert (got.lake, got.starts, got.goals) == (CORNERS.lake, CORNERS.starts, CORNERS.goals)

def test_maps_and_agent_lists_and_files(tmp_path):
    agents = [{"start": [0, 1], "goal": [3, 2]}, {"start": [1, 0], "goal": [2, 3]}]
    for grid in (["H..H", "....", "....", "H..H"], "@..@\n....\n....\n@..@", [[1, 0, 0, 1], [0] * 4, [0] * 4, [1, 0, 0, 1]]):
        (tmp_path / "b.json").write_text(json.dumps({"instances": [{"grid": grid, "agents": agents, "uid": 3}]}))
        got, = read_benchmark(tmp_path / "b.json")
        assert (got.lake, got.starts, got.goals, got.id) == (CORNERS.lake, CORNERS.starts, CORNERS.goals, "3")
    (tmp_path / "b.jsonl").write_text(json.dumps(to_row(CORNERS)) + "\n" + json.dumps(to_row(PLAIN)) + "\n")
    assert [x.to_text() for x in read_benchmark(tmp_path / "b.jsonl")] == [CORNERS.to_text(), PLAIN.to_text()]
    assert read_benchmark(to_dataset([CORNERS]))[0].optimal_sum_of_costs == 9

def test_column_first():
    flipped = {k: v if k == "size" else [c[::-1] for c in v] for k, v in ROW.items()}
    got, = read_benchmark([flipped], xy=True)
    assert (got.lake, got.starts, got.goals) == (CORNERS.lake, CORNERS.starts, CORNERS.goals)

def test_an_optimum_of_unknown_objective_is_not_guessed():
    assert read_benchmark([ROW | {"optimal_cost": 9}])[0].optimal_sum_of_costs is None
    assert read_benchmark([ROW | {"optimal_cost": 9}], {"optimal_sum_of_costs": "optimal_cost"})[0].optimal_sum_of_costs == 9

@pytest.mark.parametrize("row, columns, message", [
    ({k: v for k, v in ROW.items() if k != "goals"}, None, r"no column for goals \(tried goals, .*the columns are size, holes, starts\. Name it with columns=\{'goals'"),
    (dict(starts=[], goals=[]), None, "no column for size .* nor one for map"), (ROW, {"goals": "ends"}, "maps goals to 'ends', but the columns are size"),
    (ROW, {"ends": "goals"}, "columns may map id, size"), (ROW | {"starts": [[0, 1, 2]]}, None, r"row 0, starts\[0\] must be a cell"),
    (ROW | {"starts": [[0, 0], [1, 0]]}, None, r"row 0: starts\[0\] = \(0, 0\) is a hole"), (ROW | {"size": "big"}, None, "row 0 cannot be read"),
    (dict(map=["..", "."], starts=[], goals=[]), None, "row 0, map must be square: row 1"), (dict(map=["..", ".x"], starts=[], goals=[]), None, "'x' at row 1, column 1")])
def test_what_cannot_be_read_is_named(row, columns, message):
    with pytest.raises(LakeError, match=message): read_benchmark([row], columns)

def test_guesses_ignore_case_and_yield_to_the_mapping():
    assert guess_columns(["Size", "HOLES", "a"], {"size": "a"}) == {"size": "a", "holes": "HOLES"}

def test_trl_gets_prompts_and_rewards_of_the_same_boards():
    data, (reward,) = trl_task([CORNERS, PLAIN], style="compact", as_chat=False)
    good, bad = "(1,1) (1,0) (1,2) (1,1) (2,2) (1,2) (3,2) (1,3) (3,2) (2,3) end", "end"
    reward(prompts=list(data["prompt"]), completions=[good, bad], completion_ids=[[1] * 11, [1]], instance=list(data["instance"]))
    assert [(s.valid, s.optimal) for s in reward.last] == [(True, True), (False, False)]
    assert isinstance(trl_task([CORNERS])[0][0]["prompt"], list)

def test_importing_it_is_light():
    code = "import sys, lake_engineer.exchange; print([m for m in ('torch', 'datasets', 'trl', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name, keep, message", [
    ("b.json", -30, r"b.json is damaged \(.*\); if a download or a copy broke off, start it again"), ("b.jsonl", -30, r"b.jsonl, line 2, is damaged \(.*\); if a download"),
    ("b.json", 0, "b.json is damaged"), ("none.json", None, "none.json cannot be read: No such file"), ("b.parquet", b"PAR1\xff\xfe", "b.parquet is no text; JSON and JSON Lines"),
    ("b.json", b"3", "must hold one list of instances, not 0"), ("b.json", b"[[1, 2]]", r"row 0 of the benchmark is no object with columns, but \[1, 2\]")])
def test_a_benchmark_that_came_in_part_is_one_sentence(tmp_path, name, keep, message):
    "`keep`: how much of the file is there, or what is in its place."
    whole = json.dumps([ROW, ROW]) if name.endswith(".json") else f"{json.dumps(ROW)}\n" * 2
    if keep is not None: (tmp_path / name).write_bytes(keep if isinstance(keep, bytes) else whole.encode()[:keep])
    with pytest.raises(LakeError, match=message) as e: read_benchmark(tmp_path / name)
    assert "\n" not in str(e.value)
