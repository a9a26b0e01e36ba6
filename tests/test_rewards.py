"""The reward against the paper's formulas worked out by hand, its state, its place in TRL's trainer, and its cost."""
import json
import subprocess
import sys
import timeit
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake_engineer.lake import CHECKS, Instance, Lake, LakeError, Plan, Verdict, check
from lake_engineer.prompts import format_answer, judge, parse, prompt
from lake_engineer.rewards import (RewardFunction, RewardSettings, completion_text, correctness, from_column, length_reward, resume_callback, score,
                                   to_column, to_rows, weights)

CORNERS = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)], id="corners",
                   optimal_makespan=5, optimal_sum_of_costs=9, needs_wait=True)
BEST = "(1,1) (1,0) (1,2) (1,1) (2,2) (1,2) (3,2) (1,3) (3,2) (2,3) end"
SLOW = "(0,1) (1,0) " + BEST  # both wait once more: 11 instead of 9
CRASH = "(1,1) (1,1) end"
PAPER = RewardSettings()


def examples(n): return settings(max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def verdict(cost, best, **kw):
    return Verdict(**(dict.fromkeys(CHECKS, True) | kw), makespan=cost, sum_of_costs=cost, optimal_makespan=best, optimal_sum_of_costs=best)


# ---------------------------------------------------------------- the three formulas

def test_paper_constants():
    assert PAPER == RewardSettings("sum_of_costs", 1500, 4096, 0.3, 0.7, 2.0, (0.5, 0.5), (0.8, 0.2), 0.5, 0.9, 0.9, 0.0)


@pytest.mark.parametrize("cost, best, want", [
    (9, 9, 1.0), (10, 9, 1 - 0.7 / 18), (18, 9, 0.65), (27, 9, 0.3), (28, 9, 0.3), (10**6, 9, 0.3), (3, 1, 0.3), (2, 1, 0.65), (0, 0, 1.0), (1, 0, 0.3),
])
def test_correctness(cost, best, want): assert correctness(verdict(cost, best), PAPER) == pytest.approx(want, abs=1e-12)


def test_floor_begins_beyond_c_max():
    other = replace(PAPER, floor=0.1, slope=0.5, c_max_factor=1)
    assert [correctness(verdict(c, 10), other) for c in (15, 20, 21)] == [0.75, 0.5, 0.1]


def test_any_failed_check_earns_nothing():
    for name in CHECKS:
        for value in (False, None): assert correctness(verdict(9, 9, **{name: value}), PAPER) == 0.0


def test_valid_beats_invalid_and_shorter_beats_longer():
    "A valid plan that is not optimal is no failure (it was scored like one elsewhere)."
    values = [correctness(verdict(c, 9), PAPER) for c in range(9, 40)]
    assert values == sorted(values, reverse=True) and min(values) == 0.3 and len({round(v, 9) for v in values}) == 19
    assert correctness(judge(SLOW, CORNERS), PAPER) == pytest.approx(1 - 0.7 * 2 / 18)


def test_objective_decides():
    "The optimal plan of one objective need not be that of the other."
    v = Verdict(**dict.fromkeys(CHECKS, True), makespan=6, sum_of_costs=9, optimal_makespan=5, optimal_sum_of_costs=9)
    assert correctness(v, PAPER) == 1.0
    assert correctness(v, replace(PAPER, objective="makespan")) == pytest.approx(1 - 0.7 / 10)
    assert score(v, 1, 0, PAPER).optimal and not score(v, 1, 0, replace(PAPER, objective="makespan")).optimal


def test_wrong_optima_are_loud():
    with pytest.raises(LakeError, match="no optimal_sum_of_costs"): correctness(verdict(9, None), PAPER)
    with pytest.raises(LakeError, match="sum_of_costs 8, below the instance's optimum 9"): correctness(verdict(8, 9), PAPER)
    assert correctness(verdict(9, None, goals=False), PAPER) == 0.0


@pytest.mark.parametrize("tokens, want", [(0, 0), (1500, 0), (1501, -1 / 2596), (2798, -0.5),
                                          (4095, -2595 / 2596), (4096, -1), (10**9, -1)])
def test_length(tokens, want): assert length_reward(tokens, PAPER) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("share, want", [
    (0, (0.5, 0.5)), (0.499, (0.5, 0.5)), (0.5, (0.5, 0.5)), (0.6, (0.575, 0.425)), (0.7, (0.65, 0.35)), (0.9, (0.8, 0.2)), (1, (0.8, 0.2)),
])
def test_weights(share, want): assert weights(share, PAPER) == pytest.approx(want, abs=1e-12)


@examples(500)
@given(st.integers(0, 60), st.integers(0, 20), st.integers(0, 9000), st.floats(0, 1), st.booleans())
def test_reward_is_its_definition(more, best, tokens, share, valid):
    s = score(verdict(best + more, best, no_hole=valid), tokens, share, PAPER)
    c, c_max = more, 2 * best
    acc = 0 if not valid else 1 if c == 0 else 1 - 0.7 * c / c_max if c <= c_max else 0.3
    length = 0 if tokens <= 1500 else -1 if tokens >= 4096 else -(tokens - 1500) / 2596
    w = 0.5 if share < 0.5 else 0.8 if share > 0.9 else 0.5 + 0.3 * (share - 0.5) / 0.4
    assert s.reward == pytest.approx(w * acc + (1 - w) * length, abs=1e-9)
    assert (s.valid, s.optimal, s.tokens) == (valid, valid and more == 0, tokens) and -0.5 <= s.reward <= 0.8


@pytest.mark.parametrize("kw, words", [
    (dict(objective="time"), "sum_of_costs, makespan"), (dict(l1=0), "0 < l1 < l2"), (dict(l1=4096), "0 < l1 < l2"), (dict(floor=1.1), "floor must be in"),
    (dict(slope=float("nan")), "slope must be in"), (dict(decay=-0.1), "decay must be in"), (dict(initial_share=2), "initial_share must be in"),
    (dict(weights_low=(0.5,)), "weights_low must be two numbers"), (dict(weights_high=(1, -1)), "weights_high must be two numbers"),
    (dict(share_low=0.9), "increasing"), (dict(c_max_factor=0), "c_max_factor must be above 0"),
])
def test_settings_are_checked(kw, words):
    with pytest.raises(LakeError, match=words): RewardSettings(**kw)


# ---------------------------------------------------------------- batches

def test_parts_and_order():
    fn = RewardFunction()
    texts = [BEST, "I give up.", SLOW, CRASH, "<think>", '<answer>{"0": []}</answer>', BEST[:-4]]
    scores = fn.score(texts, [CORNERS] * 7, [10] * 7)
    assert [s.valid for s in scores] == [True, False, True, False, False, False, False]
    assert [s.optimal for s in scores] == [True] + [False] * 6
    assert [s.cause for s in scores] == ["", "parsable", "", "no_conflict", "parsable", "agent_count", "parsable"]
    assert [s.reason for s in scores] == ["", "no_answer", "", "", "unclosed_thinking", "missing_agent", "truncated"]
    assert fn.last is scores


@examples(200)
@given(st.lists(st.one_of(st.sampled_from([BEST, SLOW, CRASH]), st.text(max_size=30)), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_failed_parses_shift_nothing(texts, random):
    "What an answer earns depends on nothing but itself, wherever in the batch it stands."
    alone = [RewardFunction().score([t], [CORNERS], [10])[0] for t in texts]
    assert RewardFunction().score(texts, [CORNERS] * len(texts), [10] * len(texts)) == alone
    order = random.sample(range(len(texts)), len(texts))
    assert RewardFunction().score([texts[i] for i in order], [CORNERS] * len(texts), [10] * len(texts)) == [alone[i] for i in order]


def test_lengths_that_do_not_match_are_refused():
    with pytest.raises(LakeError, match="2 completions, 1 instances and 2 token counts"): RewardFunction().score([BEST, BEST], [CORNERS], [1, 1])
    with pytest.raises(LakeError, match="column 'instance'"): RewardFunction()([""], [BEST], completion_ids=[[1]])
    with pytest.raises(LakeError, match="completion_ids are missing"): RewardFunction()([""], [BEST], instance=[to_column(CORNERS)])
    assert RewardFunction().score([], [], []) == []


def test_running_share():
    fn = RewardFunction(RewardSettings(l1=10, l2=20, decay=0.75, initial_share=0.2))
    first = fn.score([BEST] * 4, [CORNERS] * 4, [10, 11, 5, 10**6])
    assert fn.share == pytest.approx(0.75 * 0.2 + 0.25 * 0.5)
    assert [s.reward for s in first] == pytest.approx([0.5, 0.5 - 0.05, 0.5, 0.0])  # weighed by the share before the batch
    saved = json.loads(json.dumps(fn.state_dict()))
    again = RewardFunction(fn.settings)
    again.load_state_dict(saved)
    for tokens in ([1] * 8, [1] * 8, [12] * 8, [1] * 8):
        assert again.score([BEST] * 8, [CORNERS] * 8, tokens) == fn.score([BEST] * 8, [CORNERS] * 8, tokens)
    assert again.share == fn.share
    fn.score([], [], [])
    assert again.share == fn.share


def test_columns():
    assert from_column(to_column(CORNERS)) == CORNERS == from_column(CORNERS.to_dict()) == from_column(CORNERS)
    assert from_column(CORNERS.to_dict() | {"needs_wait_makespan": None, "sampler": None}) == CORNERS  # what datasets adds to ragged rows
    twin = replace(CORNERS, optimal_sum_of_costs=10)  # the same id, another board: the cache must not confuse them
    assert from_column(to_column(twin)) == twin and from_column(to_column(CORNERS)) == CORNERS
    for bad, words in ((7, "JSON text"), ("{", "no JSON"), ("{}", "lacks"), ({"size": 3}, "lacks")):
        with pytest.raises(LakeError, match=words): from_column(bad)
    row, = to_rows([CORNERS], "joint", thinking=True, as_chat=True)
    assert row == dict(prompt=[dict(role="user", content=prompt(CORNERS, "joint", True))], instance=to_column(CORNERS))


def test_completions_as_text_or_chat():
    parts = [dict(type="text", text=BEST[:10]), dict(type="text", text=BEST[10:])]
    for c in (BEST, [dict(role="assistant", content=BEST)], [dict(role="user", content="x"), dict(role="assistant", content=parts)]):
        assert completion_text(c) == BEST
    assert completion_text([dict(role="assistant", content=None)]) == ""
    for bad in (None, [], [3], {}, 7):
        with pytest.raises(LakeError, match="text or chat messages"): completion_text(bad)


# ---------------------------------------------------------------- in the trainer

def tiny_trainer(out, steps, reward, seed=0):
    "A GRPO trainer over a model of random weights that knows the words of compact answers."
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    words = ["<pad>", "<eos>", "size", "holes", "agents", "to", "plan", "end", *map(str, range(2, 10)), 
             *(f"({r},{c})" for r in range(4) for c in range(4))]
    base = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                                         pad_token_id=0, eos_token_id=1, bos_token_id=None))
    args = GRPOConfig(output_dir=str(out), max_steps=steps, per_device_train_batch_size=8, num_generations=4, max_completion_length=12, use_cpu=True,
                      bf16=False, gradient_checkpointing=False, report_to="none", save_steps=2, logging_steps=1, seed=seed, disable_tqdm=True)
    rows = to_rows([CORNERS, Instance(Lake(2), [(0, 0)], [(0, 1)], optimal_sum_of_costs=1, optimal_makespan=1)] * 8)
    return GRPOTrainer(model, reward, args, train_dataset=Dataset.from_list(rows), processing_class=tok, callbacks=[resume_callback(reward)])


def test_trl_trains_and_resumes(tmp_path):
    "Two steps, a checkpoint, two more; and the same two after resuming, share included."
    settings = RewardSettings(l1=6, l2=12)
    whole = RewardFunction(settings)
    trainer = tiny_trainer(tmp_path, 4, whole)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    parts = [f"lake/{name}" for name in ("valid", "optimal", "correctness", "length", "short_share", *(f"cause/{c}" for c in CHECKS))]
    assert len(logs) == 4 and {"rewards/lake/mean", *parts} <= set(logs[0])
    assert sum(logs[0][f"lake/cause/{c}"] for c in CHECKS) == pytest.approx(1 - logs[0]["lake/valid"])
    assert logs[-1]["reward"] == pytest.approx(np.mean([s.reward for s in whole.last]), abs=1e-6) and len(whole.last) == 8
    assert len(trainer._logs["extra"]["cause"]) and 0 < whole.share < 1
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["LakeReward"]["attributes"]["share"] == pytest.approx(logs[1]["lake/short_share"])
    assert logs[1]["lake/short_share"] > 0

    resumed = RewardFunction(settings)
    again = tiny_trainer(tmp_path, 4, resumed)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    tail = [entry for entry in again.state.log_history if "reward" in entry][-2:]
    assert resumed.share == whole.share
    assert [e["reward"] for e in tail] == [e["reward"] for e in logs[-2:]]

    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state | {"stateful_callbacks": {}}))
    with pytest.raises(LakeError, match="no running share"):
        tiny_trainer(tmp_path, 4, RewardFunction(settings)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


TWO = """
import sys, torch.distributed as dist
from lake_engineer.lake import Instance, Lake
from lake_engineer.rewards import RewardFunction, RewardSettings
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
fn = RewardFunction(RewardSettings(l1=10, l2=20))
fn.score(["end"] * (2 + rank), [Instance(Lake(2), [(0, 0)], [(0, 0)], optimal_sum_of_costs=0)] * (2 + rank), [5 + 10 * rank] * (2 + rank))
print(fn.share)
dist.destroy_process_group()
"""


def test_two_processes_keep_one_share(tmp_path):
    "One process has 2 short answers, the other 3 long ones: both see 2 of 5."
    runs = [subprocess.Popen([sys.executable, "-c", TWO, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    shares = [float(r.communicate(timeout=100)[0].strip().splitlines()[-1]) for r in runs]
    assert shares == pytest.approx([0.1 * 2 / 5] * 2)


# ---------------------------------------------------------------- cost

def test_import_is_light():
    heavy = ("torch", "transformers", "trl", "datasets", "pandas", "matplotlib", "numba")
    code = f"import sys, lake_engineer.rewards; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_batch_costs_little():
    "Parse, checks, reward and log of 512 answers take less than twenty times what a bare regular expression needs to find their cells."
    import re
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(512):
        words = BEST.split()
        if rng.random() < 0.5: words[rng.integers(10)] = f"({rng.integers(5)},{rng.integers(4)})"
        texts.append(" ".join(words if rng.random() < 0.95 else words[:-1]))
    fn, column, ids, cell = RewardFunction(RewardSettings(l1=30, l2=60)), [to_column(CORNERS)] * 512, [[0] * 21] * 512, re.compile(r"\((\d+),(\d+)\)")
    def ours(): return fn([None] * 512, texts, completion_ids=ids, instance=column, log_metric=lambda *_: None, log_extra=lambda *_: None)
    def baseline(): return [[(int(r), int(c)) for r, c in cell.findall(t)] for t in texts]
    ours()
    def best(f): return min(timeit.repeat(f, number=3, repeat=7, timer=process_time))
    assert 0.3 < np.mean([s.valid for s in fn.last]) < 0.7
    assert best(ours) < 20 * best(baseline)


def test_answers_of_all_styles_earn_the_same():
    plan = parse(BEST, CORNERS)
    for style in ("compact", "joint", "paths", "actions"):
        assert correctness(judge(format_answer(plan, CORNERS, style), CORNERS), PAPER) == 1.0
    assert correctness(check(CORNERS, Plan(plan.paths)), PAPER) == 1.0
