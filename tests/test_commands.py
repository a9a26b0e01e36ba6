"What a user types in a shell: papermill by itself, the strict runner, and what they say to wrong input."
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lake_engineer.batch import checked

ROOT = Path(__file__).resolve().parent.parent
RUN_ARM = "nbs/experiments/run_arm.ipynb"


def batch(*args, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "lake_engineer.batch", *map(str, args)], cwd=cwd, capture_output=True, text=True)


def test_papermill_by_itself(tmp_path):
    papermill = Path(sys.executable).parent / "papermill"
    parameters = dict(profile="smoke", engineer="random-proposal", seed=3, out=tmp_path / "runs")
    flags = [x for k, v in parameters.items() for x in ("-p", k, str(v))]
    done = subprocess.run([papermill, RUN_ARM, tmp_path / "out.ipynb", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "runs/smoke/random-proposal/seed3"
    assert [(run / f"round{i}" / "done").exists() for i in range(3)] == [True] * 3
    info = json.loads((run / "run.json").read_text())
    assert (info["engineer"], info["seed"], info["profile"]["name"]) == ("random-proposal", 3, "smoke")


def test_the_strict_runner_gives_the_same_bytes_and_redoes_nothing(tmp_path):
    args = [RUN_ARM, "-p", "profile", "smoke", "-p", "out", tmp_path / "runs", "--out", tmp_path / "nb", "--each", "engineer", "fixed-random", "learnability"]
    assert batch(*args).returncode == 0
    runs = tmp_path / "runs/smoke"
    wanted = [runs / arm / f"seed0/round{i}" / name for arm in ("fixed-random", "learnability") for i in range(3) for name in ("validation.jsonl", "config.json")]
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in wanted}
    assert batch(*args).returncode == 0
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in wanted} == before
    assert (runs / "fixed-random/seed0/round1/config.json").read_bytes() == (runs / "fixed-random/seed0/round0/config.json").read_bytes()
    for name in ("validation.jsonl", "config.json", "training.jsonl"):  # round 0 is shared
        assert len({(runs / arm / "seed0/round0" / name).read_bytes() for arm in ("fixed-random", "learnability")}) == 1


def test_guard_and_options_reach_the_arm(tmp_path):
    values = dict(profile="smoke", engineer="promotion", guard="True", options='{"window": 1}', out=tmp_path / "runs")
    done = batch(RUN_ARM, *(x for k, v in values.items() for x in ("-p", k, v)), "--out", tmp_path / "nb", "--quiet")
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "runs/smoke/promotion-window=1-guard/seed0"
    info = json.loads((run / "run.json").read_text())
    assert (info["guard"], info["options"], info["engineer"]) == (True, dict(window=1), "promotion")
    assert ["undone" in json.loads((run / f"round{i}/guard.json").read_text()) for i in (1, 2)] == [True, True]


def config(**changes):
    return json.dumps({str(s): dict(data_ratio=0.5, hole_ratio=0.2, wait_ratio=0.5) | changes for s in (3, 4)})


def run_here(notebook, values):
    "The notebook's cells with these parameters, in this process, which has what a kernel would have to import each time."
    first, *others = ["".join(c["source"]) for c in json.loads((ROOT / notebook).read_text())["cells"] if c["cell_type"] == "code"]
    scope = {}
    exec(first, scope)
    scope.update(checked(ROOT / notebook, values))
    for cell in others: exec(cell, scope)


@pytest.mark.parametrize("parameters, words", [
    (dict(profile="huge"), "there is no profile 'huge'"),
    (dict(engineer="oracle"), "there is no engineer 'oracle'"),
    (dict(context="V9"), "V9"),
    (dict(seed="-1"), "seed must be a whole number from 0"),
    (dict(config=config(hole_ratio=1.2)), "hole_ratio"),
    (dict(config=config(wait_ratio="much")), "wait_ratio"),
    (dict(config=config().replace('"3"', '"2"')), "size"),
    (dict(config="nowhere.json"), "no file 'nowhere.json'"),
    (dict(config="x" * 5000), "no file 'xxx"),
    (dict(options="n=3"), "options must be a JSON object"),
    (dict(engineer="llm", options='{"gain": "much"}'), "option gain of engineer 'llm' cannot be 'much'"),
])
def test_wrong_input_is_one_sentence(tmp_path, parameters, words):
    with pytest.raises(ValueError, match=re.escape(words)) as e: run_here(RUN_ARM, dict(profile="smoke", out=str(tmp_path / "runs")) | parameters)
    assert "\n" not in str(e.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("parameters, words", [
    (dict(engineer="oracle"), "there is no engineer 'oracle'"),
    (dict(seed="three"), "parameter seed must be an int"),
    (dict(sed="3"), "no parameter sed; it takes profile, engineer"),
    (dict(guard="maybe"), "parameter guard must be a bool"),
])
def test_in_a_shell_it_is_one_line_and_leaves_no_run(tmp_path, parameters, words):
    flags = [x for k, v in (dict(profile="smoke") | parameters).items() for x in ("-p", k, v)]
    done = batch(RUN_ARM, *flags, "-p", "out", tmp_path / "runs", "--out", tmp_path / "nb", "--quiet")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1 and words in errors[0], done.stderr[-2000:]
    assert not (tmp_path / "runs").exists()


def test_two_processes_on_one_run_wait_for_each_other(tmp_path):
    command = [sys.executable, "-c", "import sys; from lake_engineer.loop import run_arm; print(run_arm('smoke', 'learnability', seed=5, out=sys.argv[1]).rounds)", tmp_path / "runs"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == ["[0, 1, 2]"] * 2
    log = tmp_path / "runs/smoke/learnability/seed5/round2/training.jsonl"
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]
