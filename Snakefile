# The study: every arm and seed of configs/study.yaml, then the evaluation of the last checkpoints, then every table and figure.
#
#   snakemake --cores 2                              all of it on this machine, at the profile tiny
#   snakemake --cores 2 --config profile=smoke       walk the whole graph in minutes
#   snakemake --cores 2 --config tables=main         only what one table needs (several: tables="main context")
#   snakemake --profile configs/snakemake/slurm      on a cluster; kubernetes likewise (nbs/22_study.ipynb)
#
# A run counts when its last round is done; what is done is never done again, whatever the ages of files. Stopped at any moment, the same command goes on.
import os
import sys
from pathlib import Path

from lake_engineer.loop import RunError
from lake_engineer.settings import at_root, load_profile
from lake_engineer.study import load_study

STUDY = load_study(str(config.get("study", "configs/study.yaml")))
PROFILE = load_profile(str(config.get("profile", "tiny")))
RUNS = at_root(str(config.get("runs", "results/runs"))) / PROFILE.name
def words(key, default, known):  # of --config, each of which must be known
    asked = str(config.get(key, "")).split() or list(default)
    if odd := [x for x in asked if x not in known]: raise RunError(f"--config {key}: there is no {odd[0]!r}; there are {', '.join(known)}.")
    return asked

if odd := set(config) - {"study", "profile", "runs", "tables", "reports", "results", "logs"}: raise RunError(f"--config takes study, profile, runs, tables, reports, results and logs, not {min(odd)!r}.")
NOTEBOOKS = at_root("nbs/experiments")
TABLES = words("tables", STUDY.tables, list(STUDY.tables))
ARMS, LAST = STUDY.arms(), PROFILE.rounds - 1
WANTED = STUDY.wanted(PROFILE.name, *TABLES)
TRANSFER = [t for t in STUDY.transfer.tables if t in TABLES]
ASKED = STUDY.wanted(PROFILE.name, *TRANSFER) if TRANSFER else []
REPORTS = words("reports", STUDY.reports, sorted(p.stem[7:] for p in NOTEBOOKS.glob("report_*.ipynb")))
RESULTS = str(config.get("results", ""))  # folder that gets tables/ and figures/; the repository's own if empty
BATCH = f"{sys.executable} -m lake_engineer.batch --quiet"
LOGS = at_root(str(config.get("logs", "results/notebooks"))) / PROFILE.name
DONE0 = str(RUNS / "round0/seed{seed}/round0/done")
DONE, EVALUATED = (str(RUNS / "{arm}/seed{seed}" / f"round{LAST}" / name) for name in ("done", "evaluation.jsonl.gz"))
DRAWN = (at_root(RESULTS) if RESULTS else LOGS) / "figures.done"
os.environ.setdefault("OMP_NUM_THREADS", str(PROFILE.threads))

wildcard_constraints: arm=r"[^/]+", seed=r"\d+"
localrules: all, figures

def given(**values):  # parameters of a notebook, for the shell
    import shlex
    return " ".join(f"-p {k} {shlex.quote(str(v))}" for k, v in values.items())

def common(wildcards): return given(profile=PROFILE.name, seed=wildcards.seed, out=RUNS.parent)

def arm_parameters(wildcards): return common(wildcards) + " " + given(**ARMS[wildcards.arm].parameters())

rule all:
    input: local(DRAWN)

# Round 0 is shared by all arms of a seed.
rule round0:
    output: local(DONE0)
    threads: PROFILE.threads
    params: common
    shell: BATCH + f" {NOTEBOOKS}/round0.ipynb {{params}} --out {LOGS}/round0/seed{{wildcards.seed}}"

rule arm:
    input: ancient(local(DONE0))
    output: local(DONE)
    threads: PROFILE.threads
    params: arm_parameters
    shell: BATCH + f" {NOTEBOOKS}/run_arm.ipynb {{params}} --out {LOGS}/{{wildcards.arm}}/seed{{wildcards.seed}}"

rule evaluate:
    input: ancient(local(DONE))
    output: local(EVALUATED)
    threads: PROFILE.threads
    params: lambda w: given(run=RUNS / w.arm / f"seed{w.seed}", rounds=LAST, boards=STUDY.asked(PROFILE.name), threads=PROFILE.threads)
    shell: BATCH + f" {NOTEBOOKS}/evaluate_run.ipynb {{params}} --out {LOGS}/{{wildcards.arm}}/seed{{wildcards.seed}}"

# Reports only read; they are drawn again whenever something they may read is younger.
rule figures:
    input:
        [local(DONE.format(arm=a, seed=s)) for a, s in WANTED],
        [local(EVALUATED.format(arm=a, seed=s)) for a, s in ASKED],
    output: touch(local(DRAWN))
    params: " ".join(str(NOTEBOOKS / f"report_{r}.ipynb") for r in REPORTS)
    shell: "for report in {params}; do " + BATCH + " $report " + given(profile=PROFILE.name, out=RUNS.parent, results=RESULTS, save=True) + " --out " + str(LOGS) + " || exit 1; done"
