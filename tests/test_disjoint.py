"The stored sets and what is trained on share no board, checked without the library's own symmetries: text in, text out."
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from lake_engineer.generator import LakeConfig, generate, split_of
from lake_engineer.lake import Instance
from lake_engineer.settings import at_root

Key = tuple[int, tuple[tuple[int, int], ...], tuple[tuple[tuple[int, int], tuple[int, int]], ...]]
TURNS: list[Callable[[int, int, int], tuple[int, int]]] = [  # (row, column, last row) to where a cell goes: turns of 0, 90, 180, 270 degrees, and each mirrored
    lambda r, c, m: (r, c), lambda r, c, m: (c, m - r), lambda r, c, m: (m - r, m - c), lambda r, c, m: (m - c, r),
    lambda r, c, m: (r, m - c), lambda r, c, m: (c, r), lambda r, c, m: (m - r, c), lambda r, c, m: (m - c, m - r)]
SETS = dict(validation=1020, test=800, benchmark=3150)


def moved(board: dict, turn: Callable[[int, int, int], tuple[int, int]]) -> Key:
    "A board after a turn: its size, its holes, and the agents, whose order does not matter."
    go = lambda cell: turn(*cell, board["size"] - 1)
    return board["size"], tuple(sorted(map(go, board["holes"]))), tuple(sorted((go(a), go(b)) for a, b in zip(board["starts"], board["goals"])))


def keys(boards: Iterable[dict]) -> list[Key]:
    "One key per board, the smallest of its eight images."
    return [min(moved(b, turn) for turn in TURNS) for b in boards]


def stored(name: str) -> list[dict]:
    with gzip.open(at_root(f"results/benchmark/instances/{name}.jsonl.gz"), "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def sets() -> dict[str, list[dict]]:
    trained = generate(LakeConfig.uniform(range(3, 9)), 600, seed=11)
    return {name: stored(name) for name in SETS} | {"train": [b.to_dict() for b in trained]}


def test_the_turns_are_the_eight_symmetries() -> None:
    cells = [(r, c) for r in range(3) for c in range(3)]
    images = [tuple(turn(r, c, 2) for r, c in cells) for turn in TURNS]
    assert len(set(images)) == 8 and all(set(image) == set(cells) for image in images)
    beside = lambda a, b: abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1
    assert all(beside(image[i], image[j]) == beside(cells[i], cells[j]) for image in images for i in range(9) for j in range(9))


def test_no_two_sets_share_a_board_up_to_rotation_and_reflection(sets: dict[str, list[dict]]) -> None:
    assert {name: len(sets[name]) for name in SETS} == SETS
    orbits = {name: set(keys(boards)) for name, boards in sets.items()}
    shared = {(a, b): len(orbits[a] & orbits[b]) for a in orbits for b in orbits if a < b}
    assert len(shared) == 6 and not any(shared.values()), shared


def test_a_turned_copy_is_found(sets: dict[str, list[dict]]) -> None:
    board = next(b for b in sets["benchmark"] if len({moved(b, turn) for turn in TURNS}) == 8)
    size, holes, agents = moved(board, TURNS[5])
    copy = dict(size=size, holes=holes, starts=[a for a, _ in agents][::-1], goals=[b for _, b in agents][::-1])
    assert keys([copy]) == keys([board]) and keys([copy | dict(goals=copy["starts"])]) != keys([board])


def test_every_image_of_a_board_belongs_to_its_set(sets: dict[str, list[dict]]) -> None:
    checked: Counter = Counter()
    for name, boards in sets.items():
        for board in boards[::max(len(boards) // 40, 1)]:
            for turn in TURNS:
                size, holes, agents = moved(board, turn)
                image = dict(size=size, holes=holes, starts=[a for a, _ in agents], goals=[b for _, b in agents])
                checked[name, split_of(Instance.from_dict(image))] += 1
    assert {name for name, _ in checked} == {*SETS, "train"} and all(name == split for name, split in checked), checked
    assert min(checked.values()) >= 300
