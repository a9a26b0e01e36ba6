"""Answers of every kind: the cases models really write, every reason code, each check alone and in combination, and a fuzz run
against a simulator written apart from the library."""
import json
import pickle
import re
import sys
import timeit
import tracemalloc
from collections import Counter
from itertools import combinations
from time import process_time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake_engineer import prompts
from lake_engineer.lake import CHECKS, Fault, Instance, Lake, LakeError, Plan, check
from lake_engineer.prompts import STYLES, Answer, ParseError, Reason, chat, format_answer, judge, parse, prompt, read

CORNERS = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)], id="corners",
                   optimal_makespan=5, optimal_sum_of_costs=9, needs_wait=True)
BEST = Plan([[(0, 1), (1, 1), (1, 2), (2, 2), (3, 2)], [(1, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 3)]])


def examples(n): return settings(max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


# ---------------------------------------------------------------- a simulator of its own

def simulate(board, starts, goals, paths):
    """Play `paths` on `board` (strings, 'H' hole), tick by tick, with nothing of the library.
    Returns the checks as a dict, without `parsable`; None where it cannot be judged."""
    ok = dict.fromkeys(("agent_count", "starts", "moves", "in_bounds", "no_hole", "no_conflict", "goals"), True)
    ticks = max([len(p) for p in paths], default=0)
    before = {}
    for tick in range(ticks):
        now = {name: path[tick] if tick < len(path) else before[name] for name, path in enumerate(paths) if path}
        for name, (y, x) in now.items():
            on_board = y in range(len(board)) and x in range(len(board))
            ok["in_bounds"] &= on_board
            if on_board and board[y][x] == "H": ok["no_hole"] = False
            if name in before:
                dy, dx = y - before[name][0], x - before[name][1]
                if (dy, dx) not in {(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)}: ok["moves"] = False
        if max(Counter(now.values()).values(), default=0) > 1: ok["no_conflict"] = False
        crossed = Counter(frozenset((before[name], now[name])) for name in now if name in before and before[name] != now[name]
                          if any(before.get(o) == now[name] and now[o] == before[name] for o in now))
        if crossed: ok["no_conflict"] = False
        before = now
    if len(paths) == len(starts):
        ok["starts"] = all(list(p[:1]) == [s] for p, s in zip(paths, starts))
        ok["goals"] = all(list(p[-1:]) == [g] for p, g in zip(paths, goals))
    else: ok.update(agent_count=False, starts=None, goals=None)
    return ok


def board_of(instance): return ["".join("H" if (r, c) in instance.lake.holes else "." for c in range(instance.lake.size)) for r in range(instance.lake.size)]


def agrees(instance, plan, verdict):
    want = simulate(board_of(instance), instance.starts, instance.goals, plan.paths)
    assert {c: getattr(verdict, c) for c in want} == want, (instance, plan, verdict, want)
    assert verdict.valid == all(v is True for v in want.values())
    return tuple(c for c, v in want.items() if v is False)


# ---------------------------------------------------------------- random valid plans: walk first, call where you end the goal

def random_walk(rng, agents=None, steps=None, holes=None, size=None):
    """An instance and a valid plan for it. Both come from one random walk, so no solver is needed."""
    agents = agents or int(rng.integers(1, 6))
    size = size or int(rng.integers(3, 9))
    cells = [(r, c) for r in range(size) for c in range(size)]
    order = [cells[i] for i in rng.permutation(len(cells))]
    n_holes = int(rng.integers(0, min(len(cells) - agents - 1, len(cells) // 2))) if holes is None else holes
    blocked, starts = set(order[:n_holes]), order[n_holes:n_holes + agents]
    now, paths = list(starts), [[s] for s in starts]
    for _ in range(int(rng.integers(0, 31)) if steps is None else steps):
        nxt = list(now)
        for i in rng.permutation(agents):
            options = [(now[i][0] + dr, now[i][1] + dc) for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0), (0, 0))]
            free = [o for o in options if o in cells and o not in blocked
                    and all(nxt[j] != o and not (now[j] == o and nxt[j] == now[i]) for j in range(agents) if j != i)]
            if free: nxt[i] = free[rng.integers(len(free))]
        now = nxt
        for p, cell in zip(paths, now): p.append(cell)
    return Instance(Lake(size, blocked), starts, now), Plan(paths)


def cut(plan, rng):
    "Drop the waits at the end of some paths, which changes nothing."
    return Plan(p if rng.random() < 0.5 else q for p, q in zip(plan.paths, plan.trimmed().paths))


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("style", STYLES)
@examples(500)
@given(seeds)
def test_round_trip(style, seed):
    rng = np.random.default_rng(seed)
    instance, plan = random_walk(rng)
    plan = cut(plan, rng)
    text = format_answer(plan, instance, style)
    back = parse(text, instance)
    if style in ("paths", "actions"): assert back == plan
    assert back.trimmed() == plan.trimmed()
    assert read(text, instance).style == style
    verdict = judge(text, instance)
    assert verdict.valid and agrees(instance, back, verdict) == ()
    thought = "".join(rng.choice(list("ab <>&\n{}[]()"), 40)) + "</think>"
    assert parse(thought + text, instance) == back
    if style == "compact": return
    assert parse(f"<think>{thought}\n{text.lower()} done <answer", instance).trimmed() == plan.trimmed()
    assert parse(text.replace("\n", "\r\n").replace("<answer>", "<Answer>```\n").replace("</answer>", "\n```</ANSWER>"), instance) == back


def test_five_agents_thirty_steps():
    instance, plan = random_walk(np.random.default_rng(0), agents=5, steps=30, holes=5, size=6)
    assert plan.steps == 30 and len(plan.paths) == 5
    for style in STYLES: assert parse(format_answer(plan, instance, style), instance).trimmed() == plan.trimmed()


# ---------------------------------------------------------------- each check alone

def insert(paths, t, agent, cell):
    "At time t `agent` visits `cell` and comes back, while the others wait."
    return [[*p[:t + 1], cell if i == agent else p[t], p[t], *p[t + 1:]] for i, p in enumerate(paths)]


def spoil(name, instance, plan, rng):
    "A copy of the valid `plan` that fails the check `name` and, most often, no other. None if this board offers no way."
    paths = [list(p) for p in plan.paths]
    size, holes = instance.lake.size, instance.lake.holes
    t, i = int(rng.integers(plan.steps + 1)), int(rng.integers(len(paths)))
    (r, c), others = paths[i][t], {p[t] for j, p in enumerate(paths) if j != i}
    around = [(r, c + 1), (r + 1, c), (r, c - 1), (r - 1, c)]
    inside = [x for x in around if 0 <= x[0] < size and 0 <= x[1] < size]
    if name == "in_bounds": choice = [x for x in around if x not in inside]
    elif name == "no_hole": choice = [x for x in inside if x in holes]
    elif name == "no_conflict": choice = [x for x in inside if x in others]
    elif name == "moves": choice = [(y, x) for y in range(size) for x in range(size) if abs(y - r) + abs(x - c) > 1 and (y, x) not in holes | others]
    elif name == "agent_count": return paths[:-1] if rng.random() < 0.5 and len(paths) > 1 else None
    elif name == "starts": return [p[1:] for p in paths] if plan.steps and any(p[0] != p[1] for p in paths) else None
    else: return [p[:-1] for p in paths] if plan.steps and any(p[-1] != p[-2] for p in paths) else None
    return insert(paths, t, i, choice[rng.integers(len(choice))]) if choice else None


def test_each_check_alone():
    hits: Counter = Counter()

    @examples(400)
    @given(seeds)
    def run(seed):
        rng = np.random.default_rng(seed)
        instance, plan = random_walk(rng)
        for name in CHECKS[1:]:
            paths = spoil(name, instance, plan, rng)
            if paths is None: continue
            wrong = Plan(paths)
            assert agrees(instance, wrong, verdict := check(instance, wrong)) == (name,)
            assert verdict.first_fault.check == name
            answer = judge(format_answer(wrong, instance, "paths"), instance)
            assert [c for c in CHECKS if getattr(answer, c) is False] == [name] and answer.first_fault.check == name
            hits[name] += 1
    run()
    assert set(hits) == set(CHECKS[1:]) and min(hits.values()) >= 30, hits


def test_faults_name_time_agents_cell():
    "One board, eight wrong answers, each failing one check only, with the fault where a person would see it."
    def paths(*ps): return f"<answer>{json.dumps(dict(enumerate(ps)))}</answer>"
    a, b = [list(p) for p in BEST.paths]
    want = {
        paths(a, b)[:-20]: Fault("parsable", 0, kind="truncated"),
        paths(a): Fault("agent_count", 0, (1,), kind="missing_agent"),
        paths(a, b, []): Fault("agent_count", 0, kind="unknown_agent"),
        paths([(0, 2), (1, 2), (2, 2), (3, 2)], b): Fault("starts", 0, (0,), (0, 2)),
        paths(a, [(1, 0), (1, 0), (1, 1), (1, 3), (2, 3)]): Fault("moves", 3, (1,), (1, 3)),
        paths([(0, 1), (-1, 1), *a], b): Fault("in_bounds", 1, (0,), (-1, 1)),
        paths(a, [*b[:-1], (0, 3), (1, 3), (2, 3)]): Fault("no_hole", 5, (1,), (0, 3)),
        paths(a, b[1:]): Fault("no_conflict", 1, (0, 1), (1, 1), "vertex"),
        paths([(0, 1), (0, 1), (1, 1), (1, 0), (1, 1), *a[2:]], [(1, 0), (1, 0), (1, 0), (1, 1), (1, 0), *b[1:]]):
            Fault("no_conflict", 3, (0, 1), (1, 0), "edge"),
        paths(a, b[:-1]): Fault("goals", 4, (1,), (1, 3)),
    }
    for text, fault in want.items():
        verdict = judge(text, CORNERS)
        assert verdict.first_fault == fault, text
        assert [c for c in CHECKS if getattr(verdict, c) is False] == [fault.check]


# ---------------------------------------------------------------- checks in combination

def test_combinations_agree_with_the_simulator():
    "Careless plans on crowded boards fail many checks at once; the library and the simulator agree on each of them."
    rng, seen = np.random.default_rng(5), Counter()
    for _ in range(6000):
        instance, plan = random_walk(rng, agents=int(rng.integers(1, 5)), steps=int(rng.integers(0, 6)), size=3)
        paths = [list(p) for p in plan.paths]
        for _ in range(int(rng.integers(0, 6))):
            p = paths[rng.integers(len(paths))]
            what = rng.integers(6)
            if what == 0: p[rng.integers(len(p))] = (int(rng.integers(-1, 4)), int(rng.integers(-1, 4)))
            elif what == 1: p.insert(int(rng.integers(len(p) + 1)), (int(rng.integers(-1, 4)), int(rng.integers(-1, 4))))
            elif what == 2 and len(p) > 1: del p[rng.integers(len(p))]
            elif what == 3: p.extend(p[-1:] * 2)
            elif what == 4 and rng.random() < 0.2: paths.append(list(p))
            elif what == 5 and rng.random() < 0.2 and len(paths) > 1: del paths[-1]
        wrong = Plan(paths)
        seen[agrees(instance, wrong, check(instance, wrong))] += 1
    assert seen[()] > 500 and len(seen) > 60
    for pair in combinations(CHECKS[2:], 2): assert any(set(pair) <= set(c) for c in seen), pair


def test_following_rotation_and_parking():
    ring = [(0, 0), (0, 1), (1, 1), (1, 0)]
    turn = Instance(Lake(2), ring, ring[1:] + ring[:1])
    assert judge("(0,1) (1,1) (1,0) (0,0) end", turn).valid
    swap = Instance(Lake(2), ring[:2], ring[1::-1])
    assert judge("(0,1) (0,0) end", swap).first_fault.kind == "edge"
    parked = Instance(Lake(3), [(1, 1), (1, 0)], [(1, 1), (1, 2)])
    assert judge('<answer>{"0": [], "1": ["RIGHT", "RIGHT"]}</answer>', parked).first_fault == Fault("no_conflict", 1, (0, 1), (1, 1), "vertex")


# ---------------------------------------------------------------- answers that models really give

ACTIONS = '{"0": ["DOWN", "RIGHT", "DOWN", "DOWN"], "1": ["WAIT", "RIGHT", "RIGHT", "RIGHT", "DOWN"]}'
OTHER = '{"0": ["UP"], "1": []}'
def block(text): return f"<answer>{text}</answer>"


CASES = {  # the table of answers.md, line by line: text, outcome in strict mode, outcome in lenient mode
    "lower case": (block(ACTIONS.lower()), "ok", "ok"),
    "mixed case": (block(ACTIONS.replace("DOWN", "Down").replace("WAIT", "wAiT")), "ok", "ok"),
    "reasoning never closed": (f"<think>I try {block(ACTIONS)}", "unclosed_thinking", "unclosed_thinking"),
    "draft in the reasoning": (f"<think>{block(OTHER)}</think>{block(ACTIONS)}", "ok", "ok"),
    "closing tag only": (f"so be it</think>\n{block(ACTIONS)}", "ok", "ok"),
    "two blocks": (block(OTHER) + block(ACTIONS), "ok", "ok"),
    "cut off by the limit": (block(ACTIONS)[:70], "truncated", "truncated"),
    "cut off in the closing tag": (block(ACTIONS)[:-3], "truncated", "truncated"),
    "JSON cut off": (block(ACTIONS[:70]), "bad_json", "bad_json"),
    "code fence": (block(f"\n```json\n{ACTIONS}\n```\n"), "ok", "ok"),
    "plain fence": (block(f"```{ACTIONS}```"), "ok", "ok"),
    "agent twice as key": (block(ACTIONS[:-1] + ', "0": ["UP"]}'), "duplicate_agent", "duplicate_agent"),
    "agent twice, two names": (block(ACTIONS[:-1] + ', "agent 0": ["UP"]}'), "duplicate_agent", "duplicate_agent"),
    "agent twice as line": (block("agent 0: DOWN\nagent 1: WAIT\nagent 0: UP"), "duplicate_agent", "duplicate_agent"),
    "one agent missing": (block('{"1": ["WAIT"]}'), "missing_agent", "missing_agent"),
    "one line missing": (block("agent 0: DOWN"), "missing_agent", "missing_agent"),
    "an agent that does not exist": (block(ACTIONS[:-1] + ', "2": []}'), "unknown_agent", "unknown_agent"),
    "a key that is no agent": (block(f'{{"plan": {ACTIONS}}}'), "unknown_agent", "unknown_agent"),
    "STAY": (block(ACTIONS.replace("WAIT", "STAY")), "bad_action", "ok"),
    "arrows": (block(ACTIONS.replace("DOWN", "↓").replace("RIGHT", "→")), "bad_action", "ok"),
    "N/S/E": (block(ACTIONS.replace("DOWN", "S").replace("RIGHT", "E")), "bad_action", "ok"),
    "W": (block(ACTIONS.replace("WAIT", "W")), "bad_action", "bad_action"),
    "bold markers": (block(ACTIONS.replace("DOWN", "**DOWN**")), "ok", "ok"),
    "all of it bold": (block(f"**{ACTIONS}**"), "ok", "ok"),
    "full-width letters": (block(ACTIONS.replace("DOWN", "ＤＯＷＮ")), "ok", "ok"),
    "moves as integers": (block('{"0": [1, 2, 1, 1], "1": [4, 2, 2, 2, 1]}'), "bad_action", "bad_action"),
    "moves as strings of integers": (block('{"0": ["1"], "1": ["4"]}'), "bad_action", "bad_action"),
    "remark in an item": (block(ACTIONS.replace('"DOWN"]}', '"DOWN (reaches the goal)"]}')), "bad_action", "bad_action"),
    "commentary after": (block(ACTIONS) + " Both arrive." * 10_000, "ok", "ok"),
    "no block": ("Agent 0 goes down.", "no_answer", "no_answer"),
    "JSON without a block": (ACTIONS, "no_answer", "no_answer"),
    "five thousand brackets": (block("[" * 5000), "bad_json", "bad_json"),
    "< and & in the reasoning": (f"<think>3 < 4 && 5 <> 6 &lt; <b></think>{block(ACTIONS)}", "ok", "ok"),
    # further ones
    "reasoning opened again": (f"<think>a</think>{block(ACTIONS)}<think>wait", "unclosed_thinking", "unclosed_thinking"),
    "last block empty": (block(ACTIONS) + block(" "), "no_answer", "no_answer"),
    "last block cut off": (block(ACTIONS) + "<answer>{", "truncated", "truncated"),
    "closing tag alone": (ACTIONS + "</answer>", "no_answer", "no_answer"),
    "prose in the block": (block("I cannot solve this."), "bad_format", "bad_format"),
    "prose before the JSON": (block("Here you are: " + ACTIONS), "bad_format", "bad_format"),
    "remark after the JSON": (block(ACTIONS + " done"), "bad_json", "bad_json"),
    "lists by position": (block('[["DOWN"], ["WAIT"]]'), "bad_json", "bad_json"),
    "no list": (block('{"0": "DOWN", "1": []}'), "bad_json", "bad_json"),
    "null": (block('{"0": [null], "1": []}'), "bad_action", "bad_action"),
    "dotless i": (block(ACTIONS.replace("RIGHT", "rıght")), "bad_action", "bad_action"),
    "cells and moves mixed": (block('{"0": [[0,1], "DOWN"], "1": [[1,0]]}'), "bad_step", "bad_step"),
    "moves and cells mixed": (block('{"0": ["DOWN"], "1": [[1,0]]}'), "bad_action", "bad_action"),
    "cell of three": (block('{"0": [[0,1,2]], "1": [[1,0]]}'), "bad_step", "bad_step"),
    "cell of floats": (block('{"0": [[0.0,1.0]], "1": [[1,0]]}'), "bad_step", "bad_step"),
    "cell of booleans": (block('{"0": [[false,true]], "1": [[1,0]]}'), "bad_step", "bad_step"),
    "huge coordinate": (block('{"0": [[0,99999999999]], "1": [[1,0]]}'), "bad_step", "bad_step"),
    "compact, no end": ("(1,1) (1,0)", "truncated", "truncated"),
    "compact, half a cell": ("(1,1) (1,0) (1,", "truncated", "truncated"),
    "compact, odd number": ("(1,1) (1,0) (1,2) end", "bad_step", "bad_step"),
    "compact, a word": ("(1,1) holes end", "bad_step", "bad_step"),
    "compact, more after end": ("(1,1) (1,0) end (1,2)", "bad_step", "bad_step"),
    "compact, two ends": ("(1,1) (1,0) end end", "bad_step", "bad_step"),
    "prose that begins with end": ("End of story, it cannot be solved.", "no_answer", "no_answer"),
    "joint, a remark": (block("(1,1) (1,0) now wait end"), "bad_step", "bad_step"),
    "empty": ("", "no_answer", "no_answer"),
    "too many steps": ("(0,1) (1,0) " * 1001 + "end", "too_long", "too_long"),
    "too many moves": (block(json.dumps({"0": ["WAIT"] * 1001, "1": []})), "too_long", "too_long"),
}


def outcome(text, instance=CORNERS, **kw):
    try: parse(text, instance, **kw)
    except ParseError as e:
        assert isinstance(e.code, Reason) and str(e).endswith(".") and len(str(e)) < 300
        return e.code.value
    return "ok"


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    text, strict, lenient = CASES[name]
    assert (outcome(text), outcome(text, lenient=True)) == (strict, lenient)
    if strict == "ok":
        assert judge(text, CORNERS).optimal()
        return
    verdict = judge(text, CORNERS)
    assert not verdict.valid and verdict.first_fault.kind == strict
    assert verdict.first_fault.check == ("agent_count" if strict in ("missing_agent", "unknown_agent") else "parsable")


def test_every_reason_has_a_case(): assert {s for _, s, _ in CASES.values()} == {"ok", *Reason}


def test_lists_of_different_length():
    "The shorter one waits at its end; that is a fault only if it is not its goal or in somebody's way."
    assert judge(block(ACTIONS), CORNERS).valid
    early = judge(block(ACTIONS.replace(', "DOWN", "DOWN"]', ', "DOWN"]')), CORNERS)
    assert early.first_fault == Fault("goals", 5, (0,), (2, 2))
    in_the_way = judge(block('{"0": ["DOWN"], "1": ["WAIT", "RIGHT"]}'), CORNERS)
    assert in_the_way.no_conflict is False and in_the_way.first_fault == Fault("no_conflict", 2, (0, 1), (1, 1), "vertex")


def test_empty_list_for_an_agent_at_home():
    home = Instance(Lake(3), [(0, 0), (2, 2)], [(0, 0), (2, 1)])
    for text in ('{"0": [], "1": ["LEFT"]}', '{"0": [], "1": [[2,2], [2,1]]}', "agent 0:\nagent 1: LEFT"): assert judge(block(text), home).valid
    assert judge("end", Instance(Lake(3), [(0, 0)], [(0, 0)])).valid
    assert judge(block("end"), Instance(Lake(3), [(0, 0)], [(0, 0)])).valid


def test_two_blocks_are_noted():
    assert read(block(OTHER) + block(ACTIONS), CORNERS).notes == ("2 answer blocks that differ, the last counts",)
    assert read(block(ACTIONS) + block(f" {ACTIONS} "), CORNERS).notes == ()
    assert read(f"<think>{block(OTHER)}</think>{block(ACTIONS)}", CORNERS) == Answer(Plan([[*BEST.paths[0]], [*BEST.paths[1]]]), "actions")


def test_the_example_copied():
    "The example of the prompt is a board of its own; its plan is judged like any other."
    for style in STYLES[1:]:
        example = re.search(r"<answer>.*?</answer>", prompt(CORNERS, style).partition("Example")[2], re.S)[0]
        assert judge(example, prompts._EXAMPLE).optimal()
        assert not judge(example, CORNERS).valid and judge(example, CORNERS).parsable
    assert judge(example, Instance(prompts._EXAMPLE.lake, [(0, 1), (1, 0)], [(2, 1), (1, 2)], optimal_sum_of_costs=5)).optimal()


def test_step_that_names_too_few_agents_is_named():
    with pytest.raises(ParseError, match="step 2 names 1 of 2 agents"): parse("(1,1) (1,0) (1,2) end", CORNERS)
    with pytest.raises(ParseError, match=r"cell number 2 should be \(row,column\) but reads 'plan"): parse("(1,1) plan end", CORNERS)


def test_off_board_cells_parse():
    for text in ("(-1,1) (1,0) end", "(99,1) (1,0) end", "(007,1) (1,0) end", block('{"0": [[0,1],[-1,1]], "1": []}')):
        verdict = judge(text, CORNERS)
        assert verdict.parsable and verdict.in_bounds is False


def test_errors_of_the_caller_are_not_errors_of_the_model():
    for bad in (None, b"end", ["end"], 3):
        with pytest.raises(LakeError) as e: parse(bad, CORNERS)
        assert not isinstance(e.value, ParseError)
    error = pickle.loads(pickle.dumps(ParseError(Reason.bad_step, "x.", (1,))))
    assert (error.code, error.message, error.agents, str(error)) == (Reason.bad_step, "x.", (1,), "x.")


# ---------------------------------------------------------------- prompts

def test_compact_is_exact():
    assert prompt(CORNERS) == "size 4 holes (0,0) (0,3) (3,0) (3,3) agents (0,1) to (3,2) (1,0) to (2,3) plan"
    assert prompt(Instance(Lake(3), [(0, 0)], [(1, 1)])) == "size 3 holes agents (0,0) to (1,1) plan"
    assert format_answer(BEST, CORNERS) == "(1,1) (1,0) (1,2) (1,1) (2,2) (1,2) (3,2) (1,3) (3,2) (2,3) end"


def test_prompts_hold_the_board_twice():
    for style in STYLES[1:]:
        for thinking in (False, True):
            text = prompt(CORNERS, style, thinking)
            assert text.count("H . . H\n. . . .\n. . . .\nH . . H") == 1 and "Holes: (0,0) (0,3) (3,0) (3,3)" in text
            assert ("<think>" in text) == thinking and chat(CORNERS, style, thinking) == [{"role": "user", "content": text}]
    with pytest.raises(LakeError, match="makespan"): prompt(CORNERS, "joint", objective="time")
    with pytest.raises(LakeError, match="no thinking instruction"): prompt(CORNERS, "compact", thinking=True)


# ---------------------------------------------------------------- nothing but ParseError, and soon

HOSTILE = {
    "nuls": "\0" * 10**6,
    "surrogates": "\ud800\udfff" * 10**5, "brackets": block("[" * 10**6), "braces": block('{"0":' * 10**5),
    "pairs": block("[]" * 10**5),
    "spaces": block(" " * 10**6 + "("), "bare": "(" * 10**6, "cells": "(1,1) " * 10**5 + "end", "commas": "(1,1)" + "," * 10**6,
    "gap": "(1,1) (1,0) end" + " " * 10**6 + "x",
    "half": "(" + " " * 10**6, "opens": "<answer>" * 10**5, "thinks": "<think>" * 10**5, "lt": "<" * 10**6,
    "blocks": block("{}") * 10**4, "agents": block(json.dumps({str(i): [] for i in range(1000)})),
    "digits": block('{"0": [[' + "9" * 10**6 + ', 0]], "1": []}'),
    "lines": block("agent 0: UP\n" * 10**4), "stars": block("*" * 10**6), "fences": block("```" * 10**5), "bold": block("**a" * 10**5),
    "wide": block("\uff1c" * 10**6),
    "name": block('{"' + "0" * 10**5 + '": []}'), "escapes": block('{"\\ud800": []}'), "long line": block("agent 0: " + "UP, " * 10**5),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name):
    text = HOSTILE[name]
    tracemalloc.start()
    try:
        assert outcome(text, lenient=True) != "ok" and outcome(text) != "ok"
        assert tracemalloc.get_traced_memory()[1] < 200 * len(text) + 10**6
    finally: tracemalloc.stop()


def test_time_is_linear():
    "Eight times the text takes about eight times as long; with a quadratic parser it would be 64 times."
    for text in HOSTILE.values():
        if len(text) < 10**6: continue
        head, tail = text[:-20], text[-20:]
        small, large = head[:len(head) // 8] + tail, head + tail
        cost = [min(timeit.repeat(lambda t=t: outcome(t), number=1, repeat=3, timer=process_time)) for t in (small, large)]
        assert cost[1] < 24 * max(cost[0], 1e-3), (text[:20], cost)


def test_high_recursion_limit_is_safe():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try: assert outcome(block('{"0": ' + "[" * 10**5)) == "bad_json"
    finally: sys.setrecursionlimit(limit)


# ---------------------------------------------------------------- fuzz

POOL = ["<answer>", "</answer>", "<think>", "</think>", "(1,1)", "(0,3)", "(-1,2)", "(4,0)", "end", '"0"', '"1"', '"2"', "[", "]", "{", "}", "(", ")", ",",
        " ", "\n", "[1,1]", "UP", "down", "WAIT", "STAY", "W", "→", "**", "```", "```json\n",
        "agent 0:", "Agent 1:", ":", "1", "-1", "9" * 30, "1.5", "null", "\0", "\ud800", "Ｄ", "　", "<", "&", "\\u0041"]


def mutate(text, rng):
    "One to four random edits: cut, repeat, exchange or replace a stretch, or put something from the pool."
    for _ in range(1 + int(rng.integers(4))):
        a, b = sorted(int(x) for x in rng.integers(0, len(text) + 1, 2))
        b = min(b, a + int(rng.integers(1, (12, 80)[rng.integers(2)])))
        what = rng.integers(7)
        if what == 0: text = text[:a] + text[b:]
        elif what == 1: text = text[:b] + text[a:b] + text[b:]
        elif what == 2: text = text[:a]
        elif what == 3: text = text[:a] + text[a:b][::-1] + text[b:]
        elif what == 4: text = re.sub(r"\d", lambda m: str(rng.integers(5)) if rng.random() < 0.2 else m[0], text)
        else: text = text[:a] + POOL[rng.integers(len(POOL))] + text[a if what == 5 else b:]
    return text


def reads_the_same(text, answer, instance):
    "Do the numbers, or the words, of the last block of an accepted answer spell its plan?"
    last = re.split(r"<answer>", re.split(r"</think>", text, flags=re.I)[-1], flags=re.I)[-1].split("</answer>")[0]
    if answer.style in ("compact", "joint"):
        numbers = [int(x) for x in re.findall(r"-?[0-9]+", last)]
        return numbers == [v for t in range(1, answer.plan.steps + 1) for p in answer.plan.paths for v in p[t]]
    if answer.style == "paths": return True
    words = re.findall(r"up|down|left|right|wait", last.replace("\\u0041", "A").lower())
    return len(words) == sum(len(p) - 1 for p in answer.plan.paths)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed):
    "25,000 mutated answers a run, 100,000 in all: nothing but ParseError, and every verdict is the simulator's."
    rng, tally = np.random.default_rng([11, seed]), Counter()
    walks = [random_walk(rng, agents=int(rng.integers(1, 4)), steps=int(rng.integers(0, 8)), size=4) for _ in range(50)] + [(CORNERS, BEST)] * 10
    texts = [(instance, format_answer(plan, instance, style)) for instance, plan in walks for style in STYLES]
    for n in range(25_000):
        instance, text = texts[rng.integers(len(texts))]
        text = mutate(text, rng)
        try: answer = read(text, instance, lenient=n % 5 == 0)
        except ParseError as e:
            tally[e.code.value] += 1
            continue
        verdict = judge(text, instance, lenient=n % 5 == 0)
        failed = agrees(instance, answer.plan, verdict)
        assert n % 5 == 0 or reads_the_same(text, answer, instance), (text, answer)
        tally["invalid" if failed else "valid"] += 1
    often = ("valid", "invalid", "truncated", "bad_json", "bad_step", "bad_action", "no_answer")
    assert tally.total() == 25_000 and min(tally[k] for k in often) > 100, tally
    assert {str(r) for r in Reason} - {"too_long"} <= set(tally)


# ---------------------------------------------------------------- speed

def test_as_fast_as_a_regular_expression():
    "Within three times of a plain expression that collects cells and asks nothing."
    text, cell = format_answer(BEST, CORNERS), re.compile(r"\((\d+),(\d+)\)")
    def baseline(): return [(int(r), int(c)) for r, c in cell.findall(text)]
    def best(f): return min(timeit.repeat(f, number=3000, repeat=7, timer=process_time))
    assert best(lambda: parse(text, CORNERS)) < 3 * best(baseline)
