"The solver against a brute-force joint search that shares no code with it."
import heapq
import itertools
import random

import pytest

from lake_engineer.lake import Instance, Lake, check
from lake_engineer.solver import annotate, needs_wait, solve

STEPS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def joint_search(size, holes, starts, goals, per_agent, wait):
    "Least sum of costs (per_agent) or makespan, by Dijkstra over positions and who has stopped for good; None if there is no plan."
    def options(cell, goal, stopped):
        if stopped: return [(cell, True)]
        out = []
        for dr, dc in STEPS if wait else STEPS[1:]:
            n = cell[0] + dr, cell[1] + dc
            if 0 <= n[0] < size and 0 <= n[1] < size and n not in holes:
                out.append((n, False))
                if n == goal: out.append((n, True))
        return out

    first = [(tuple(starts), tuple(flags)) for flags in itertools.product(*[(False, True) if s == g else (False,) for s, g in zip(starts, goals)])]
    queue = [(0, state) for state in first]
    best = dict.fromkeys(first, 0)
    while queue:
        cost, (cells, stopped) = heapq.heappop(queue)
        if best[cells, stopped] < cost: continue
        if all(stopped): return cost
        price = sum(not s for s in stopped) if per_agent else 1
        for move in itertools.product(*(options(c, g, s) for c, g, s in zip(cells, goals, stopped))):
            after = tuple(m[0] for m in move)
            if len(set(after)) < len(after): continue
            if any(after[i] == cells[j] and after[j] == cells[i] for i, j in itertools.combinations(range(len(after)), 2)): continue
            state = after, tuple(m[1] for m in move)
            if cost + price < best.get(state, 1 << 30):
                best[state] = cost + price
                heapq.heappush(queue, (cost + price, state))
    return None


def random_board(rng, size, agents, most_holes):
    cells = [(r, c) for r in range(size) for c in range(size)]
    rng.shuffle(cells)
    holes = cells[:rng.randint(0, most_holes)]
    free = cells[len(holes):]
    return Instance(Lake(size, frozenset(holes)), tuple(rng.sample(free, agents)), tuple(rng.sample(free, agents)))


BOARDS = [(3, 2, 5, 220), (4, 2, 9, 110), (3, 3, 4, 25)]  # size, agents, most holes, how many


@pytest.mark.parametrize("size, agents, most_holes, count", BOARDS)
def test_costs_solvability_and_waits_are_those_of_brute_force(size, agents, most_holes, count):
    rng, unsolvable, waiting = random.Random(size * 10 + agents), 0, 0
    for _ in range(count):
        board = random_board(rng, size, agents, most_holes)
        args = size, board.lake.holes, board.starts, board.goals
        for objective, per_agent in (("sum_of_costs", True), ("makespan", False)):
            truth, found = joint_search(*args, per_agent, True), solve(board, objective)
            assert found.status == ("unsolvable" if truth is None else "solved") and found.cost == truth, (objective, board)
            if truth is None:
                unsolvable += 1
                continue
            verdict = check(board, found.plan)
            assert verdict.valid and verdict.cost(objective) == truth
            without = joint_search(*args, per_agent, False)
            assert needs_wait(board, objective) == (without is None or without > truth), (objective, board)
            waiting += without is None or without > truth
        known = annotate(board)
        if found.status == "solved": assert (known.optimal_makespan, known.needs_wait_makespan) == (found.cost, needs_wait(board, "makespan"))
    assert unsolvable > 0 and waiting > 0, "the boards must test both"


def test_holes_in_the_corners_need_a_wait():
    board = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)])
    assert (solve(board).cost, solve(board, "makespan").cost, needs_wait(board)) == (9, 5, True)


@pytest.mark.parametrize("holes, starts, goals", [
    ({(0, 1), (1, 0)}, [(0, 0)], [(2, 2)]),  # cut off
    ({(1, c) for c in range(3)} | {(2, c) for c in range(3)}, [(0, 0), (0, 2)], [(0, 2), (0, 0)]),  # a corridor without a bay
    ({(1, c) for c in range(3)} | {(2, 0), (2, 1)}, [(0, 0), (0, 1), (0, 2)], [(0, 1), (0, 0), (0, 2)]),  # a dead end
])
def test_boards_without_a_solution_are_proven_so(holes, starts, goals):
    assert {solve(Instance(Lake(3, holes), starts, goals), o).status for o in ("sum_of_costs", "makespan")} == {"unsolvable"}


def test_a_rotation_needs_no_wait_and_the_order_of_agents_does_not_matter():
    ring = [(0, 0), (0, 1), (1, 1), (1, 0)]
    for order in itertools.permutations(range(4)):
        board = Instance(Lake(2), [ring[i] for i in order], [ring[(i + 1) % 4] for i in order])
        assert (solve(board).cost, needs_wait(board)) == (4, False)
