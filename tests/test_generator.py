"The generator keeps its word: counts to the last board, splits that share nothing, the same bytes everywhere."
import hashlib
import json
import math
import subprocess
import sys
from collections import Counter

import pytest

from lake_engineer.generator import ConfigError, LakeConfig, SizeConfig, canonical, generate, heldout, split_of
from lake_engineer.lake import distances, free_cells
from lake_engineer.solver import annotate

CONFIG = LakeConfig({3: SizeConfig(0.1, 0.2, 0.5), 5: SizeConfig(0.3, 0.4, 0.33), 8: SizeConfig(0.6, 0.3, 0.75)})


@pytest.fixture(scope="module")
def boards():
    return generate(CONFIG, 200, seed=4)


def test_ratios_are_met_to_the_last_board(boards):
    assert Counter(b.lake.size for b in boards) == {3: 20, 5: 60, 8: 120}
    for size, c in CONFIG.sizes.items():
        mine = [b for b in boards if b.lake.size == size]
        assert {len(b.lake.holes) for b in mine} == {round(c.hole_ratio * size**2)}
        assert sum(b.needs_wait for b in mine) == round(c.wait_ratio * len(mine))


def test_boards_are_connected_different_and_truly_annotated(boards):
    assert len({canonical(b) for b in boards}) == len(boards)
    for b in boards:
        assert len(distances(b.lake, b.goals[0])) == len(free_cells(b.lake))
        assert all(s != g for s, g in zip(b.starts, b.goals))
    for b in boards[::10]: assert annotate(b) == b


def test_no_board_is_in_two_splits(boards):
    sets = {"train": boards, "validation": heldout("validation", [3, 5], 2, 60), "test": heldout("test", [3, 5], 2, 40)}
    keys = {name: {canonical(b) for b in some} for name, some in sets.items()}
    assert sum(map(len, keys.values())) == len(set().union(*keys.values()))
    for name, some in sets.items(): assert {split_of(b) for b in some} == {name}


SCRIPT = """
import json, sys
from lake_engineer.generator import LakeConfig, generate, heldout
boards = generate(LakeConfig.random((3, 5, 6), 7), 60, seed=2, workers=int(sys.argv[1])) + heldout("validation", (3, 4), 2, 20)
print(json.dumps([b.to_dict() for b in boards]))
"""


def test_same_seed_same_bytes_for_any_workers_process_and_hash_seed():
    def digest(workers, hash_seed):
        env = {"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"}
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, workers], capture_output=True, check=True, env=env).stdout
        return hashlib.sha256(out).hexdigest(), len(json.loads(out))
    assert digest("1", "0") == (here := digest("2", "1")) and here[1] == 80


def one(*ratios):
    return LakeConfig({3: SizeConfig(*ratios)})


@pytest.mark.parametrize("make, words", [
    (lambda: one(1, 1.2, 0.5), "hole_ratio"), (lambda: one(1, "half", 0.5), "hole_ratio"), (lambda: one(-1, 0.2, 0.5), "data_ratio"),
    (lambda: one(1, 0.2, math.nan), "wait_ratio"), (lambda: LakeConfig({2: SizeConfig(1, 0.2, 0.5)}), "size"), (lambda: LakeConfig({}), "size"),
    (lambda: generate(LakeConfig({3: SizeConfig(1, 0.5, 0.5)}), 10, num_agents=5), "size 3"),
])
def test_wrong_configurations_are_one_sentence(make, words):
    with pytest.raises(ConfigError) as e: make()
    assert words in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("raw", ["", "no json", "[]", "{}", '{"3": {}}', '{"3": {"data_ratio": "40%", "hole_ratio": NaN, "wait_ratio": -1}, "99": {}, "x": 1}',
                                 '{"3": {"data_ratio": 0}, "5": {"data_ratio": 0}}', '{"3": {"data_ratio": 1e308, "hole_ratio": 1, "wait_ratio": "1.0"}}'])
def test_anything_is_projected_onto_a_configuration_that_can_be_generated(raw):
    config, changes = LakeConfig.project(raw, sizes=(3, 5))
    assert tuple(config.sizes) == (3, 5) and abs(sum(c.data_ratio for c in config.sizes.values()) - 1) < 1e-6
    assert changes and all(isinstance(c, str) for c in changes)
    assert len(generate(config, 10, seed=0)) == 10
