"The context beyond its chapter: purity, stores, and evidence that makes no sense."
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from lake_engineer.context import MODULES, VARIANTS, Case, Context, ContextError, modules, percent, read_cases, write_cases
from lake_engineer.engineer import sample_contexts
from lake_engineer.evaluation import FailureBreakdown, SizeBreakdown
from lake_engineer.generator import LakeConfig
from lake_engineer.lake import CHECKS

SETS = [*VARIANTS, "F+G+H0+S+Tfull", "S", "Tfull+F"]


@pytest.mark.parametrize("context", sample_contexts(4, seed=5))
def test_survives_a_store(context: Context) -> None:
    again = Context.from_dict(json.loads(json.dumps(context.to_dict())))
    assert again.to_dict() == context.to_dict()
    assert [again.render(v) for v in SETS] == [context.render(v) for v in SETS]


def test_same_words_in_another_process() -> None:
    code = "from lake_engineer.engineer import sample_contexts as s; import hashlib; " \
           "print(hashlib.sha256(''.join(c.render('F+G+H0+S+Tfull') for c in s(6)).encode()).hexdigest())"
    said = {subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout for seed in "12"}
    assert len(said) == 1 and len(said.pop().strip()) == 64


def test_every_failure_is_told_once() -> None:
    causes = {c: i + 1 for i, c in enumerate(CHECKS)}
    n = 5 + sum(causes.values())
    context = Context(LakeConfig.uniform((4,)), FailureBreakdown({4: SizeBreakdown(n, 5, 4, causes)}))
    line = context.render("V1").splitlines()[-1]
    told = [int(part.split()[0]) for part in line.split("Failed: ")[1].rstrip(".").split(", ")]
    assert sorted(told) == sorted(causes.values()) and sum(told) == n - 5


def test_variants_nest_as_in_the_paper() -> None:
    context = sample_contexts(2)[1]
    text = {v: context.render(v) for v in VARIANTS}
    for small, large in (("V1", "V2"), ("V2", "V3"), ("V2", "V4"), ("V4", "V5"), ("V4", "V6")): assert text[large].startswith(text[small])
    assert "Round 0" in text["V3"] and all("Round 0" not in text[v] for v in VARIANTS if v != "V3")
    assert len(set(text.values())) == 6


def test_any_set_of_modules_renders() -> None:
    context = sample_contexts(2)[1]
    for pair in combinations(("F", "G", "H", "S", "T"), 2):
        assert context.render("+".join(pair)) == "\n\n".join(f"## {MODULES[m][0]}\n{MODULES[m][1](context)}" for m in pair)


@pytest.mark.parametrize("bad", ["", "V0", "v6", "F+", "F++G", "T+Tfull", "F+F", "G,H"])
def test_unknown_sets_are_refused_in_one_sentence(bad: str) -> None:
    with pytest.raises(ContextError) as e: modules(bad)
    assert "\n" not in str(e.value) and str(e.value).endswith((".", "'+'."))


def test_senseless_counts_are_called_unknown() -> None:
    counts = {3: SizeBreakdown(0, 0, 0, {}), 4: SizeBreakdown(10, math.nan, 0, {})}  # type: ignore[arg-type]
    text = Context(LakeConfig.uniform((3, 4, 5)), FailureBreakdown(counts)).render("F+H0")
    assert text.count("(unknown)") == 3 and "Size 5: data_ratio 0.33" in text and "then result unknown." in text
    assert percent(1, 0) == percent(math.nan, 5) == "unknown" and percent(1, 3) == "33%"


def test_an_undone_round_is_told_and_not_counted() -> None:
    c = sample_contexts(2)[1]
    undone = replace(c, config=c.history[0][0], breakdown=c.history[0][1], rolled_back=[1])
    assert undone.kept == c.history[:1] and c.kept == c.history
    assert "It was undone because of this fall." in undone.render("H") and "undone" not in c.render("H0")
    assert Context.from_dict(json.loads(json.dumps(undone.to_dict()))) == undone
    old = {k: v for k, v in c.to_dict().items() if k != "rolled_back"}  # as written before there was a guard
    assert Context.from_dict(old).to_dict() == c.to_dict()


def test_damaged_cases_are_named_by_line(tmp_path: Path) -> None:
    c = sample_contexts(1)[0]
    path = write_cases([Case("a", c, c.config, c.breakdown)] * 2, tmp_path / "cases.jsonl")
    assert [x.gain for x in read_cases(path)] == [0, 0]
    good = path.read_text().splitlines()
    for bad in ("{", "[]", "null", good[1].replace('"outcome"', '"outcom"'), good[1].replace('"data_ratio": 0.', '"data_ratio": 7.', 1)):
        path.write_text(good[0] + "\n" + bad + "\n")
        with pytest.raises(ContextError, match="cases.jsonl is damaged at line 2") as e: read_cases(path)
        assert "\n" not in str(e.value)


def test_rounds_that_do_not_fit_are_refused() -> None:
    a = sample_contexts(1)[0]
    for round in (0, -1, 3):
        with pytest.raises(ContextError, match="round must lie between 1 and 2"): Context(a.config, a.breakdown, round=round)
    assert Context(a.config, a.breakdown, round=2).first == 1  # a history may begin late
