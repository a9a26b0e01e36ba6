"The solver against a brute-force joint search that shares no code with it, against another library where installed, and the faults users met elsewhere."
import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from lake_engineer.lake import Instance, Lake, LakeError, check
from lake_engineer.solver import annotate, annotate_many, cbs, needs_wait, solve, solve_many

STEPS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def moves_of(size, holes):
    "Free cell -> cells it can be left for, itself first."
    free = {(r, c) for r in range(size) for c in range(size)} - set(holes)
    return {(r, c): [(r + dr, c + dc) for dr, dc in STEPS if (r + dr, c + dc) in free] for r, c in free}


def joint_steps(moves, goals, wait, cells, stopped, done=(), ends=()):
    "All legal joint steps from (cells, stopped): agents one by one, nobody on another's new cell, nobody swapping."
    i = len(done)
    if i == len(cells):
        yield done, ends
        return
    for to in [cells[i]] if stopped[i] else moves[cells[i]][0 if wait else 1:]:
        if to in done or any(done[j] == cells[i] and cells[j] == to for j in range(i)): continue
        if stopped[i] or to != cells[i] or wait: yield from joint_steps(moves, goals, wait, cells, stopped, done + (to,), ends + (stopped[i],))
        if not stopped[i] and to == goals[i] and to != cells[i]: yield from joint_steps(moves, goals, wait, cells, stopped, done + (to,), ends + (True,))


def joint_search(moves, starts, goals, per_agent, wait, most=10**6):
    "Least sum of costs (per_agent) or makespan up to `most` by Dijkstra over cells and who has stopped for good; None if there is no such plan."
    first = [(tuple(starts), flags) for flags in itertools.product(*[(False, True) if s == g else (False,) for s, g in zip(starts, goals)])]
    best, levels, cost = dict.fromkeys(first, 0), {0: first}, 0
    while levels and cost <= most:
        for state in levels.pop(cost, []):
            if best[state] < cost: continue
            if all(state[1]): return cost
            then = cost + (state[1].count(False) if per_agent else 1)
            for after in joint_steps(moves, goals, wait, *state):
                if then < best.get(after, 10**6):
                    best[after] = then
                    levels.setdefault(then, []).append(after)
        cost += 1
    return None


def random_board(rng, size, agents, most_holes, fewest_holes=0):
    cells = [(r, c) for r in range(size) for c in range(size)]
    rng.shuffle(cells)
    holes = cells[:rng.randint(fewest_holes, most_holes)]
    free = cells[len(holes):]
    return Instance(Lake(size, frozenset(holes)), tuple(rng.sample(free, agents)), tuple(rng.sample(free, agents)))


BOARDS = [(3, 2, 0, 6, 950), (4, 2, 0, 11, 500), (5, 2, 0, 17, 150), (3, 3, 0, 5, 300), (4, 3, 0, 10, 70), (5, 3, 12, 17, 40), (3, 4, 0, 4, 50), (4, 4, 7, 9, 30),
          (5, 4, 15, 18, 30)]  # size, agents, fewest and most holes (brute force needs few cells), how many
seen = {"boards": 0, "unsolvable": 0, "waiting": 0}


@pytest.mark.parametrize("size, agents, fewest_holes, most_holes, count", BOARDS)
def test_costs_solvability_and_waits_are_those_of_brute_force(size, agents, fewest_holes, most_holes, count):
    rng = random.Random(size * 10 + agents)
    for _ in range(count):
        board = random_board(rng, size, agents, most_holes, fewest_holes)
        moves, known = moves_of(size, board.lake.holes), annotate(board)
        for objective, per_agent in (("sum_of_costs", True), ("makespan", False)):
            found = solve(board, objective)
            truth = joint_search(moves, board.starts, board.goals, per_agent, True)
            assert found.status == ("unsolvable" if truth is None else "solved") and found.cost == truth == known.optimum(objective), (objective, board)
            if truth is None: break
            verdict = check(board, found.plan)
            assert verdict.valid and verdict.cost(objective) == truth, (objective, board)
            waits = joint_search(moves, board.starts, board.goals, per_agent, False, truth) is None
            assert needs_wait(board, objective) == waits == (known.needs_wait if per_agent else known.needs_wait_makespan), (objective, board)
            seen["waiting"] += waits
        seen["boards"] += 1
        seen["unsolvable"] += truth is None


def test_the_boards_of_the_oracle_were_many_and_mixed():
    if seen["boards"] < sum(b[-1] for b in BOARDS): pytest.skip("counts the boards of all the tests before")
    assert seen["boards"] >= 2000 and seen["unsolvable"] >= seen["boards"] / 3 and seen["waiting"] >= 200, seen


# --- faults reported elsewhere ---------------------------------------------------------------------------------------


def test_holes_in_the_corners_need_a_wait():
    board = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)])
    assert (solve(board).cost, solve(board, "makespan").cost, cbs(board).cost) == (9, 5, 9)
    assert needs_wait(board) and needs_wait(board, "makespan")


@pytest.mark.parametrize("holes, starts, goals", [
    ({(0, 1), (1, 0)}, [(0, 0)], [(2, 2)]),  # cut off
    ({(1, c) for c in range(3)} | {(2, c) for c in range(3)}, [(0, 0), (0, 2)], [(0, 2), (0, 0)]),  # a corridor without a bay
    ({(1, c) for c in range(3)} | {(2, 0), (2, 1)}, [(0, 0), (0, 1), (0, 2)], [(0, 1), (0, 0), (0, 2)]),  # a dead end
    ({(1, 0), (1, 1), (2, 0), (2, 1), (1, 2)}, [(0, 0), (0, 1), (0, 2)], [(0, 2), (0, 1), (0, 0)]),  # three in a dead end
])
def test_boards_without_a_solution_are_proven_so_soon(holes, starts, goals):
    board = Instance(Lake(3, holes), starts, goals)
    for objective in ("sum_of_costs", "makespan"):
        found = solve(board, objective)
        assert found.status == "unsolvable" and found.expansions < 20_000
    with pytest.raises(LakeError, match="no plan at all"): needs_wait(board)


def test_four_agents_that_only_together_have_no_way():
    "Every two and every three of them could; the corridor with one bay is too small for all four."
    lake = Lake(6, {(r, c) for r in range(1, 6) for c in range(6)} - {(1, 3)})
    board = Instance(lake, [(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 3), (0, 2), (0, 1), (0, 0)])
    assert solve(board).status == solve(board, "makespan").status == "unsolvable"


def test_swaps_are_conflicts_and_following_is_not():
    swap = Instance(Lake(2), [(0, 0), (0, 1)], [(0, 1), (0, 0)])
    assert (solve(swap).cost, solve(swap, "makespan").cost) == (4, 3)  # one waits or steps aside round the block
    assert check(swap, solve(swap).plan).valid
    for order in ((0, 1), (1, 0)):
        cells, goals = [(0, 1), (0, 0)], [(0, 2), (0, 1)]
        follow = Instance(Lake(3), [cells[i] for i in order], [goals[i] for i in order])
        assert (solve(follow).cost, needs_wait(follow)) == (2, False)


def test_an_agent_at_home_blocks_its_goal_or_makes_way():
    round_it = Instance(Lake(3), [(0, 1), (0, 0)], [(0, 1), (0, 2)])
    assert solve(round_it).cost == 4  # round the agent that stays
    corridor = Instance(Lake(3, {(1, 0), (1, 2), (2, 0), (2, 1), (2, 2)}), [(0, 1), (0, 0)], [(0, 1), (0, 2)])
    found = solve(corridor)
    assert (found.cost, found.plan.paths[0]) == (4, ((0, 1), (1, 1), (0, 1)))  # into the bay and back home
    assert not needs_wait(corridor)


def test_a_rotation_needs_no_wait_and_the_order_of_agents_does_not_matter():
    ring = [(0, 0), (0, 1), (1, 1), (1, 0)]
    for order in itertools.permutations(range(4)):
        board = Instance(Lake(2), [ring[i] for i in order], [ring[(i + 1) % 4] for i in order])
        assert (solve(board).cost, needs_wait(board), solve(board, "makespan").cost) == (4, False, 1)


def symmetric(board, k, mirror, order):
    n = board.lake.size
    def to(cell):
        r, c = cell if not mirror else (cell[0], n - 1 - cell[1])
        for _ in range(k): r, c = c, n - 1 - r
        return r, c
    return Instance(Lake(n, frozenset(map(to, board.lake.holes))), [to(board.starts[i]) for i in order], [to(board.goals[i]) for i in order])


def test_neither_order_nor_symmetry_changes_an_answer():
    rng = random.Random(5)
    for _ in range(60):
        board = random_board(rng, rng.choice((3, 4, 5)), 3, 4)
        want = [getattr(annotate(board), f) for f in ("optimal_sum_of_costs", "optimal_makespan", "needs_wait", "needs_wait_makespan")]
        order = rng.sample(range(3), 3)
        image = annotate(symmetric(board, rng.randrange(4), rng.random() < 0.5, order))
        assert [getattr(image, f) for f in ("optimal_sum_of_costs", "optimal_makespan", "needs_wait", "needs_wait_makespan")] == want
        renamed = Instance(board.lake, [board.starts[i] for i in order], [board.goals[i] for i in order])
        if want[0] is not None: assert solve(renamed).plan.paths == tuple(solve(board).plan.paths[i] for i in order)


def test_five_agents_on_the_largest_map():
    rng = random.Random(1)
    cells = [(r, c) for r in range(16) for c in range(16)]
    for _ in range(5):
        board = Instance(Lake(16), rng.sample(cells, 5), rng.sample(cells, 5))
        for objective in ("sum_of_costs", "makespan"):
            found = solve(board, objective)
            assert found.status == "solved" and check(board, found.plan).cost(objective) == found.cost
    with pytest.raises(LakeError, match="size 2 to 16, not 17"): solve(Instance(Lake(17), [(0, 0)], [(1, 1)]))


def test_budgets_are_kept_and_only_ever_cost_an_answer():
    rng, statuses = random.Random(3), set()
    for _ in range(40):
        board = random_board(rng, 5, 4, 8)
        sure = solve(board)
        for budget in (1, 30, 400, 3000):
            some = solve(board, budget=budget)
            assert some.expansions <= budget and some.status in (sure.status, "undecided")
            assert some.cost in (sure.cost, None)
            statuses.add(some.status)
    assert statuses == {"solved", "unsolvable", "undecided"}


SCRIPT = """
import json, random
from test_solver import random_board
from lake_engineer.solver import annotate, solve
rng = random.Random(8)
boards = [random_board(rng, rng.choice((3, 4)), rng.choice((2, 3)), 4) for _ in range(COUNT)]
print(json.dumps([(annotate(b).to_dict(), (p := solve(b)).expansions, p.plan and p.plan.paths) for b in boards]))
"""


def run(count, **env):
    out = subprocess.run([sys.executable, "-c", SCRIPT.replace("COUNT", str(count))], capture_output=True, check=True, cwd="tests",
                         env={"PATH": "/usr/bin:/bin", **env}).stdout
    return json.loads(out)


def test_plans_are_the_same_in_every_process_and_without_compilation():
    first = run(12, PYTHONHASHSEED="0")
    assert first == run(12, PYTHONHASHSEED="1")
    assert first[:4] == run(4, NUMBA_DISABLE_JIT="1")


def test_many_boards_in_order_for_any_number_of_workers():
    rng = random.Random(2)
    boards = [random_board(rng, 4, 2, 6) for _ in range(150)]
    assert solve_many(boards, "makespan", workers=2) == [solve(b, "makespan") for b in boards]
    assert annotate_many(boards, workers=2) == [annotate(b) for b in boards]
    with pytest.raises(LakeError, match="workers"): solve_many(boards, workers=0)


def test_cbs_agrees():
    rng, solved = random.Random(4), 0
    for _ in range(120):
        board = random_board(rng, 4, 3, 3)
        mine, theirs = solve(board), cbs(board, budget=300)
        if theirs.status == "solved":
            solved += 1
            assert theirs.cost == mine.cost and check(board, theirs.plan).valid
        else: assert theirs.status == "undecided" or theirs.status == mine.status
    assert solved > 80


def test_another_library_finds_the_same_costs():
    envs, mapf = pytest.importorskip("w9_pathfinding.envs"), pytest.importorskip("w9_pathfinding.mapf")
    rng, compared = random.Random(6), 0
    for _ in range(5400):
        board = random_board(rng, rng.randint(3, 10), 2, 3) if rng.random() < 0.5 else random_board(rng, rng.randint(5, 10), rng.randint(3, 5), 8)
        n = board.lake.size
        grid = envs.Grid([[-1 if (r, c) in board.lake.holes else 1 for c in range(n)] for r in range(n)], edge_collision=True)  # without it swaps are allowed
        try: paths = mapf.CBS(grid).mapf([(c, r) for r, c in board.starts], [(c, r) for r, c in board.goals], max_length=300, max_time=0.5)
        except RuntimeError: continue  # out of time
        found = solve(board)
        if found.status == "undecided": continue
        if not paths: assert found.status == "unsolvable"
        else:
            ends = [max([t for t in range(1, len(p)) if p[t] != p[t - 1]], default=0) for p in paths]
            assert found.cost == sum(ends), board
        compared += 1
    assert compared >= 5000


def test_numpy_integers_are_as_good_as_ints():
    board = Instance(Lake(np.int64(3)), [(np.int32(0), 0)], [(2, np.int8(2))])
    assert solve(board, budget=np.int64(1000)).cost == 4
