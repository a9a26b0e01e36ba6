"The study as a whole: the workflow that computes it, what a cluster would be asked to do, and tables that are what their records say."
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lake_engineer.faults import fingerprint, finished, stamp
from lake_engineer.loop import run_arm

ROOT = Path(__file__).resolve().parent.parent
SMALL = """tables: {main: [{engineer: fixed-random}, {engineer: learnability}], context: []}
seeds: {tiny: {main: 1, context: 0}}
transfer: {tables: [main], boards: {tiny: 1}}
"""


def snakemake(*args, config=()):
    return [sys.executable, "-m", "snakemake", "--cores", "2", *args, "--config", *config]


def environment(): return os.environ | dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", OMP_NUM_THREADS="1")


def run(command): return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())


def small(folder):
    (folder / "study.yaml").write_text(SMALL)
    return ["profile=smoke", f"study={folder}/study.yaml", f"runs={folder}/runs", f"results={folder}/drawn", f"logs={folder}/notebooks", "reports=main dynamics"]


@pytest.mark.parametrize("where", ["slurm", "kubernetes"])
def test_a_cluster_would_get_a_job_for_every_run_of_the_study(tmp_path, where):
    done = run([sys.executable, "-m", "snakemake", "--profile", f"configs/snakemake/{where}", "-n", "--config", "profile=smoke", f"runs={tmp_path}/runs"])
    assert done.returncode == 0, done.stderr[-2000:]
    from lake_engineer.study import load_study
    study = load_study()
    counts = dict(line.split()[:2] for line in (done.stdout + done.stderr).splitlines() if line.startswith(("arm ", "round0 ", "evaluate ")))
    wanted = study.wanted("smoke")
    assert counts == dict(arm=str(len(wanted)), round0=str(len({s for _, s in wanted})), evaluate=str(len(study.wanted("smoke", "main"))))


def test_what_is_committed_is_not_trained_again():
    done = run(snakemake("-n", config=["tables=main"]))
    assert done.returncode == 0, done.stderr[-2000:]
    from lake_engineer.study import load_study, study_runs
    have = {(a, s) for a, seeds in study_runs("tiny", load_study().arms()).items() for s in seeds}
    text = done.stdout + done.stderr
    assert not [f"{a} {s}" for a, s in have if f"output: {ROOT}/results/runs/tiny/{a}/seed{s}/round2/done" in text], "the workflow would train again what is committed"


def test_killed_and_interrupted_it_redoes_nothing_and_changes_nothing(tmp_path):
    "First Snakemake alone is killed, and the job that it leaves behind holds its run; then Ctrl-C reaches it and all its jobs."
    command, runs = snakemake(config=small(tmp_path)), tmp_path / "runs/smoke"
    moments = [(lambda: (runs / "round0/seed0/round0/config.json").exists(), lambda p: p.kill()),
               (lambda: any(runs.glob("*/seed0/round1/config.json")), lambda p: os.killpg(p.pid, signal.SIGINT))]
    kept = {}
    for come, stop in moments:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # a shell's background jobs ignore it
        while not come() and process.poll() is None: time.sleep(0.1)
        assert process.poll() is None, "it ended before it could be stopped"
        stop(process)
        assert process.wait() != 0 and {p: stamp(p) for p in kept} == kept
        kept = {p: stamp(p) for p in finished(tmp_path)}
    assert runs / "round0/seed0/round0/done" in kept and not (tmp_path / "drawn/figures.done").exists()
    last = run(command)
    assert last.returncode == 0, last.stderr[-3000:]
    assert {p: stamp(p) for p in kept} == kept
    whole = fingerprint(run_arm("smoke", "learnability", seed=0, out=tmp_path / "alone").path)
    assert {k: v for k, v in fingerprint(runs / "learnability/seed0").items() if "evaluation" not in k} == whole
    assert len(list(runs.glob("*/*/round2/done"))) == 2 == len(list(runs.rglob("evaluation.jsonl.gz")))
    assert (tmp_path / "drawn/tables/study_main_smoke.csv").read_text().count("\n") == 4  # head, base, two arms
    again = run(command)
    assert again.returncode == 0 and "Nothing to be done" in again.stdout + again.stderr


@pytest.mark.parametrize("given, words", [("tables=nonsense", "--config tables: there is no 'nonsense'; there are main"), ("reports=nonsense", "--config reports: there is no 'nonsense'"),
                                          ("profle=smoke", "--config takes study, profile, runs, tables, reports, results and logs, not 'profle'")])
def test_a_word_that_the_workflow_does_not_know_is_refused(given, words):
    done = run(snakemake("-n", config=[given]))
    assert done.returncode == 1 and words in done.stdout + done.stderr


def test_a_study_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "study.yaml").write_text(SMALL.replace("learnability", "magic"))
    done = run(snakemake("-n", config=["profile=smoke", f"study={tmp_path}/study.yaml"]))
    assert done.returncode == 1 and "there is no engineer 'magic'" in done.stdout + done.stderr


@pytest.mark.parametrize("report, parameter", [("main", "save=True"), ("context", "save=True"), ("dynamics", "save=True"), ("quick", "profile=tiny")])
def test_redrawn_tables_are_the_committed_ones(tmp_path, report, parameter):
    command = [sys.executable, "-m", "lake_engineer.batch", "--quiet", f"nbs/experiments/report_{report}.ipynb", "-p", *parameter.split("="), "-p", "results", str(tmp_path), "--out", str(tmp_path / "nb")]
    done = run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    drawn = sorted((tmp_path / "tables").iterdir())
    assert drawn and [p.name for p in drawn if p.read_bytes() != (ROOT / "results/tables" / p.name).read_bytes()] == []


def test_every_number_of_the_study_can_be_traced(tmp_path):
    for info in (ROOT / "results/runs/tiny").glob("*/seed*/run.json"):
        begun = json.loads(info.read_text())["begun"]
        assert begun["commit"] and begun["versions"]["torch"] and begun["time"], info
        for folder in info.parent.glob("round*"):
            assert json.loads((folder / "done").read_text())["seconds"] > 0 and (folder / "config.json").exists() and (folder / "training.jsonl").exists()
