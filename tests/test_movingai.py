"Moving AI files, read by the reader of another project, and published files, read by ours."
from pathlib import Path
import ast

from hypothesis import given, settings, strategies as st
from scipy.sparse import lil_array
from scipy.sparse.csgraph import dijkstra
import pytest

from boards import arrangements
from lake_engineer.lake import Instance, Lake, free_cells

gym_mapf = pytest.importorskip("gym_mapf", reason="run make setup: gym-mapf comes with the extra dev")
from gym_mapf.envs.grid import MapfGrid, ObstacleCell

MAPF = Path(gym_mapf.__file__).parent

@st.composite
def instances(draw):
    return Instance(*draw(arrangements()), "board")

def gym_mapf_readers():
    "The readers of gym-mapf. The rest of their module needs the OpenAI Gym of 2021, which can no longer be installed, so that only the two functions are loaded."
    path, names = MAPF / "envs/utils.py", {}
    functions = [f for f in ast.parse(path.read_text()).body if isinstance(f, ast.FunctionDef) and f.name in ("parse_map_file", "parse_scen_file")]
    exec(compile(ast.Module(functions, []), path, "exec"), names)
    return names["parse_map_file"], names["parse_scen_file"]

def theirs(map_path, scen_path, num_agents):
    "Holes, starts and goals as gym-mapf reads them, as (row, column); its scenarios are pairs of x and y."
    parse_map, parse_scen = gym_mapf_readers()
    grid = MapfGrid(parse_map(map_path))
    holes = {(r, c) for r in range(len(grid)) for c in range(len(grid[r])) if grid[r, c] is ObstacleCell}
    return holes, *(tuple((y, x) for x, y in cells) for cells in parse_scen(scen_path, num_agents))

@settings(deadline=None)
@given(inst=instances())
def test_a_third_party_reads_our_movingai_files(tmp_path_factory, inst):
    files = inst.to_movingai(tmp_path_factory.mktemp("ai"))
    assert theirs(*files, inst.num_agents) == (inst.lake.holes, inst.starts, inst.goals)

def test_a_third_party_sees_columns_first(tmp_path):
    lopsided = Instance(Lake(4, {(0, 3), (1, 0), (3, 1)}), [(0, 1), (2, 0)], [(1, 3), (3, 2)], "lopsided")
    m, s = lopsided.to_movingai(tmp_path)
    assert gym_mapf_readers()[1](s, 2) == (((1, 0), (0, 2)), ((3, 1), (2, 3)))  # x and y, as Moving AI has it
    swapped = Instance(Lake(4, {c[::-1] for c in lopsided.lake.holes}), [c[::-1] for c in lopsided.starts], [c[::-1] for c in lopsided.goals])
    assert theirs(m, s, 2) != (swapped.lake.holes, swapped.starts, swapped.goals)

def octile(lake, start, goal):
    "Length of the shortest way with diagonal steps that cut no corner, which is the last column of a Moving AI scenario."
    n, graph = lake.size, lil_array((lake.size ** 2, lake.size ** 2))
    for r, c in free_cells(lake):
        for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1)):
            if all(lake.is_free(x) for x in ((r + dr, c), (r, c + dc), (r + dr, c + dc))): graph[r * n + c, (r + dr) * n + c + dc] = (dr * dr + dc * dc) ** 0.5
    return dijkstra(graph.tocsr(), directed=False, indices=start[0] * n + start[1])[goal[0] * n + goal[1]]

@pytest.mark.parametrize("name", ["room-32-32-4", "maze-32-32-2"])
def test_we_read_published_movingai_files(name):
    m, s = MAPF / f"maps/{name}/{name}.map", MAPF / f"maps/{name}/{name}-even-1.scen"
    inst = Instance.from_movingai(m, s, num_agents=5)
    assert (inst.lake.holes, inst.starts, inst.goals) == theirs(m, s, 5)
    lengths = [float(line.split()[-1]) for line in s.read_text().splitlines()[1:6]]
    assert [octile(inst.lake, a, b) for a, b in zip(inst.starts, inst.goals)] == pytest.approx(lengths)
