"The environments: one world behind two interfaces, judged by `check`."
import copy
import os
import pickle
import subprocess
import sys
import warnings

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from boards import arrangements
from lake_engineer.lake import Instance, Lake, LakeError, Plan, check

gym = pytest.importorskip("gymnasium")
pytest.importorskip("pettingzoo")
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import parallel_api_test, parallel_seed_test
from lake_engineer.env import ACTIONS, ENV_ID, OBSERVATIONS, MAPFFrozenLake, MAPFFrozenLakeParallel, World, own_planes, planes, step, verdict

INST = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)], "corners", optimal_makespan=5, optimal_sum_of_costs=9)
DRAWN = dict(size=4, num_agents=2, hole_ratio=0.2, wait_ratio=0.5)

@st.composite
def instances(draw):
    return Instance(*draw(arrangements(5)), optimal_makespan=0, optimal_sum_of_costs=0)

def play(inst, moves):
    "The walk up to its end by the rules of `check` alone: per step the plan so far and whether the episode ends there."
    paths = [[s] for s in inst.starts]
    for joint in moves:
        for p, a in zip(paths, joint):
            dr, dc = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1), "WAIT": (0, 0)}[ACTIONS[a]]
            p.append((p[-1][0] + dr, p[-1][1] + dc))
        plan = Plan(paths)
        v = check(inst, plan)
        over = v.valid or v.first_fault.check != "goals"
        yield plan, v, over
        if over: return


@settings(max_examples=200, deadline=None)
@given(instances(), st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=15))
def test_random_plans_through_all_three(inst, moves):
    env, par = MAPFFrozenLake(inst, max_steps=99), MAPFFrozenLakeParallel(inst, max_steps=99)
    env.reset(seed=0), par.reset(seed=0)
    for joint, (plan, v, over) in zip(moves, play(inst, moves)):
        obs, reward, terminated, truncated, info = env.step(np.array(joint[:inst.num_agents]))
        many, rewards, ends, cuts, infos = par.step({a: joint[i] for i, a in enumerate(par.agents)})
        assert (env.plan, info["verdict"], info["is_success"]) == (plan, v, v.valid)
        assert (reward, terminated, truncated) == (float(v.valid), over, False)
        assert all((rewards[a], ends[a], cuts[a], infos[a]["verdict"]) == (reward, terminated, truncated, v) for a in par.possible_agents)
        assert obs in env.observation_space and all(o in par.observation_space(a) for a, o in many.items())
        assert par.agents == ([] if over else par.possible_agents)
        for i, a in enumerate(par.possible_agents):  # the two views show the same world
            k = inst.num_agents
            assert (many[a][0] == obs[0]).all() and (many[a][1] == obs[1 + i]).all() and (many[a][2] == obs[1 + k + i]).all()
            rest = [j for j in range(k) if j != i]
            assert (many[a][3] == obs[[1 + j for j in rest]].any(0)).all() and (many[a][4] == obs[[1 + k + j for j in rest]].any(0)).all()

@settings(deadline=None)
@given(instances(), st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=15))
def test_the_first_fault_of_the_whole_plan_is_the_one_that_ends_the_episode(inst, moves):
    paths = [[s] for s in inst.starts]
    for joint in moves:
        for p, a in zip(paths, joint): p.append(tuple(np.add(p[-1], [(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)][a]).tolist()))
    *_, (plan, v, over) = play(inst, moves)
    whole = check(inst, Plan(paths)).first_fault
    if v.first_fault and v.first_fault.check != "goals": assert whole == v.first_fault

def test_following_and_rotation_are_legal_and_swapping_is_not():
    ring = [(0, 0), (0, 1), (1, 1), (1, 0)]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):  # whatever the order of agents
        inst = Instance(Lake(2), [ring[i] for i in order], [ring[(i + 1) % 4] for i in order])
        world = World(inst)
        step(world, [ACTIONS.index(("RIGHT", "DOWN", "LEFT", "UP")[i]) for i in order])
        assert world.solved and verdict(world).valid
    pair = Instance(Lake(3), [(0, 0), (0, 1)], [(0, 1), (0, 0)])
    world = World(pair)
    step(world, [ACTIONS.index("RIGHT"), ACTIONS.index("LEFT")])
    assert world.faulty and verdict(world).first_fault.kind == "edge"

def test_an_agent_that_arrived_stays_in_the_lists_and_blocks():
    inst = Instance(Lake(3), [(1, 1), (1, 0)], [(1, 1), (1, 2)])
    par = MAPFFrozenLakeParallel(inst)
    par.reset(seed=0)
    *_, infos = par.step({"agent_0": 4, "agent_1": 4})
    assert par.agents == ["agent_0", "agent_1"] and infos["agent_0"]["verdict"].first_fault.agents == (1,)
    _, rewards, ends, _, infos = par.step({"agent_0": 4, "agent_1": ACTIONS.index("RIGHT")})
    assert ends == {"agent_0": True, "agent_1": True} and infos["agent_1"]["verdict"].first_fault.kind == "vertex"

def test_truncated_at_the_limit_and_not_terminated():
    env = MAPFFrozenLake(INST, max_steps=5)
    env.reset(seed=0)
    ends = [env.step([4, 4])[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    with pytest.raises(LakeError, match="episode is over"): env.step([4, 4])
    env.reset()
    assert env.step([4, 4])[2:4] == (False, False)

@pytest.mark.parametrize("kw, message", [
    (dict(), "exactly one of instance, config and size"), (dict(instance=INST, size=3), "exactly one"), (dict(size=3, hole_ratio=0.1), "wait_ratio"),
    (dict(instance=INST, hole_ratio=0.1), "go with size"), (dict(instance=INST, num_agents=3), "num_agents is 3, but the instance has 2"),
    (dict(DRAWN, num_agents=6), "1 to 5"), (dict(instance=INST, observation="pixels"), "planes, text"), (dict(instance=INST, render_mode="gif"), "rgb_array"),
    (dict(instance=INST, max_steps=4), "cannot be solved in fewer than 5"), (dict(instance=INST, max_steps=1.5), "integer of at least 2")])
def test_wrong_arguments_get_a_sentence(kw, message):
    for cls in (MAPFFrozenLake, MAPFFrozenLakeParallel):
        with pytest.raises(LakeError, match=message): cls(**kw)

def test_wrong_actions_get_a_sentence():
    env, par = MAPFFrozenLake(INST), MAPFFrozenLakeParallel(INST)
    with pytest.raises(LakeError, match="reset it first"): env.step([4, 4])
    with pytest.raises(LakeError, match="reset first"): par.step({"agent_0": 4})
    env.reset(), par.reset()
    with pytest.raises(LakeError, match="2 agents, but 3 actions"): env.step([4, 4, 4])
    with pytest.raises(LakeError, match="action of agent 0 must be 0 to 4"): env.step([-1, 4])
    for wrong in ([0.9, 4], np.array([0.0, 4.0]), ["UP", "WAIT"]):
        with pytest.raises(LakeError, match="actions must be integers"): env.step(wrong)
    with pytest.raises(LakeError, match="one action for each of agent_0, agent_1"): par.step({"agent_0": 4, "agent_7": 4})

def test_options_put_a_board_on_the_table():
    env = MAPFFrozenLake(INST)
    other = Instance(Lake(3), [(0, 0), (0, 1)], [(2, 2), (2, 1)])
    obs, _ = env.reset(options={"instance": other})
    assert env.instance is other and obs[0, :3, :3].sum() == 0 and obs[0].sum() == 7
    with pytest.raises(LakeError, match="takes 2 on sizes up to 4"): env.reset(options={"instance": Instance(Lake(5), [(0, 0), (0, 1)], [(2, 2), (2, 1)])})
    with pytest.raises(LakeError, match="takes 2"): env.reset(options={"instance": Instance(Lake(3), [(0, 0)], [(2, 2)])})

@pytest.mark.parametrize("kw", [dict(instance=INST), DRAWN], ids=["instance", "drawn"])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_official_checkers_have_nothing_to_say(kw, observation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(ENV_ID, **kw, observation=observation, render_mode="rgb_array").unwrapped)
        parallel_api_test(MAPFFrozenLakeParallel(**kw, observation=observation), num_cycles=30)
    parallel_seed_test(lambda: MAPFFrozenLakeParallel(**kw, observation=observation), num_cycles=30)

def test_the_same_seed_gives_the_same_boards_in_every_process():
    code = ("import gymnasium as gym; from lake_engineer.env import ENV_ID\n"
            f"env = gym.make(ENV_ID, **{DRAWN!r}); env.reset(seed=7); out = [env.unwrapped.instance.to_text()]\n"
            "for _ in range(4): env.reset(); out.append(env.unwrapped.instance.to_text())\nprint(out)")
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": s}).stdout for s in "12"]
    env = MAPFFrozenLake(**DRAWN)
    here = [(env.reset(seed=7 if k == 0 else None), env.instance.to_text())[1] for k in range(5)]
    assert runs[0] == runs[1] == f"{here}\n" and len(set(here)) > 1
    assert (env.reset(seed=8), env.instance.to_text())[1] != here[0]

def test_boards_follow_the_ratios():
    env = MAPFFrozenLake(size=4, num_agents=2, hole_ratio=0.25, wait_ratio=0.5)
    env.reset(seed=0)
    boards = [(env.reset(), env.instance)[1] for _ in range(100)]
    assert {len(b.lake.holes) for b in boards} == {4} and all(b.optimal_sum_of_costs is not None for b in boards)
    assert 30 <= sum(b.needs_wait for b in boards) <= 70

def test_a_vector_is_its_parts():
    vec = gym.make_vec(ENV_ID, num_envs=64, **DRAWN)
    obs, _ = vec.reset(seed=[*range(64)])
    for i in (0, 1, 63): assert (MAPFFrozenLake(**DRAWN).reset(seed=i)[0] == obs[i]).all()
    obs, reward, terminated, truncated, info = vec.step(np.full((64, 2), 4))
    assert obs.shape == (64, 5, 4, 4) and not terminated.any() and all(v.first_fault.check == "goals" for v in info["verdict"])

@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("kw", [dict(instance=INST, max_steps=5), DRAWN], ids=["instance", "drawn"])
def test_our_vector_plays_what_gymnasiums_own_plays(kw, observation):
    ours, theirs = (gym.make_vec(ENV_ID, num_envs=5, vectorization_mode=mode, observation=observation, **kw) for mode in (None, "sync"))
    assert type(ours.unwrapped).__name__ == "MAPFFrozenLakeVector" and ours.observation_space == theirs.observation_space
    assert (ours.action_space, ours.single_action_space, ours.metadata["autoreset_mode"]) == (
        theirs.action_space, theirs.single_action_space, theirs.metadata["autoreset_mode"])
    rng = np.random.default_rng(1)
    pairs = [(ours.reset(seed=3), theirs.reset(seed=3))]
    for k in range(60):
        joint = rng.integers(5, size=(5, 2)) if k % 3 else np.full((5, 2), 4)  # some wait long enough to be truncated
        pairs.append((ours.step(joint), theirs.step(joint)))
        if k == 30: pairs.append((ours.reset(), theirs.reset()))
    for (obs, *rest, info), (obs2, *rest2, info2) in pairs:
        assert np.array_equal(obs, obs2) if observation == "planes" else obs == obs2
        assert obs in ours.observation_space and [x.dtype for x in rest] == [x.dtype for x in rest2]
        assert all(np.array_equal(a, b) for a, b in zip(rest, rest2)) and info.keys() == info2.keys()
        assert all(np.array_equal(info[key], info2[key]) and info[key].dtype == info2[key].dtype for key in info)
    assert any(r[1].any() for _, *r, _ in (a for a, _ in pairs) if r)  # some episodes did end

def test_vectors_refuse_what_a_single_environment_refuses():
    vec = gym.make_vec(ENV_ID, num_envs=2, instance=INST)
    with pytest.raises(LakeError, match="reset it first"): vec.step(np.full((2, 2), 4))
    with pytest.raises(ValueError, match="shorter|longer"): vec.reset(seed=[1, 2, 3])
    vec.reset()
    with pytest.raises(LakeError, match="must be 0 to 4"): vec.step(np.full((2, 2), 5))

def test_a_copy_walks_alone_and_meets_the_same_boards():
    for make in (lambda: gym.make(ENV_ID, **DRAWN), lambda: MAPFFrozenLakeParallel(**DRAWN)):
        env = make()
        env.reset(seed=1), env.reset()
        for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env)), copy.deepcopy(copy.deepcopy(env))):
            world = lambda e: e.unwrapped.episode.world
            boards = [(twin.reset(), world(twin).instance)[1] for _ in range(4)]
            after = copy.deepcopy(env)
            assert boards == [(after.reset(), world(after).instance)[1] for _ in range(4)] and len(set(boards)) > 1
    env = gym.make(ENV_ID, instance=INST)
    env.reset(), env.step([4, 4])
    twin = copy.deepcopy(env)
    twin.step([1, 4])
    assert (world(env).time, world(twin).time, world(env).cells) == (1, 2, [(0, 1), (1, 0)])

def test_a_copy_goes_on_from_one_order_into_the_next(monkeypatch):
    monkeypatch.setattr("lake_engineer.env.ORDER", 3)
    env = MAPFFrozenLake(**DRAWN)
    env.reset(seed=5)
    twin = copy.deepcopy(env)
    boards = [[(e.reset(), e.instance)[1] for _ in range(8)] for e in (twin, env)]
    assert boards[0] == boards[1] and len(set(boards[0])) > 3

def test_every_way_to_look():
    env = gym.make(ENV_ID, instance=INST, render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    env.step([1, 4])
    second = env.render()
    env.step([0, 0])  # agent 1 into a hole
    assert first.shape == second.shape == env.render().shape and (first != second).any() and first.dtype == np.uint8
    text = gym.make(ENV_ID, instance=INST, render_mode="ansi", observation="text")
    obs, _ = text.reset(seed=0)
    assert "agent 1: (1,0) -> (2,3)" in obs and " 1 " in text.render() and "invalid" not in text.render()
    obs, *_ = text.step([3, 0])
    assert "fault: into a hole, agent 1, time 1" in obs and "invalid: into a hole, agent 1, time 1" in text.render()

def test_human_mode_draws_by_itself(capsys):
    env = MAPFFrozenLake(INST, render_mode="human")
    env.reset(seed=0)
    assert "corners" in capsys.readouterr().out
    env.step([1, 4])
    assert "\x1b[" in capsys.readouterr().out

def test_planes_of_small_boards_are_padded_with_water():
    world = World(Instance(Lake(2), [(0, 0)], [(1, 1)]))
    assert planes(world, 4)[0].sum() == 12 and own_planes(world, 4)[0, 0].sum() == 12
    step(world, [ACTIONS.index("UP")])  # off the board: on no plane, certainly not on the opposite side
    assert planes(world, 4)[1].sum() == 0 and own_planes(world, 4)[0, 1].sum() == 0

def test_without_gymnasium_only_the_environment_is_missing():
    code = ("import sys; sys.modules['gymnasium'] = None\nimport lake_engineer, lake_engineer.lake, lake_engineer.render\n"
            "try: import lake_engineer.env\nexcept ImportError as e: print(e)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "lake_engineer.env needs the package gymnasium; install it with: pip install 'lake_engineer[env]'"

@pytest.mark.parametrize("imports", ["import lake_engineer, gymnasium", "import gymnasium, lake_engineer", "import lake_engineer.lake\nimport gymnasium.vector, gymnasium",
                                     "import gymnasium, lake_engineer.env", "import lake_engineer.env, gymnasium"])
def test_importing_the_package_registers_whichever_comes_first(imports):
    code = f"{imports}\nenv = gymnasium.make('lake_engineer/MAPFFrozenLake-v0', size=3, hole_ratio=0.1, wait_ratio=0.0)\nprint(env.reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("(5, 3, 3)", "")

def test_the_package_does_not_import_gymnasium_and_leaves_no_finder_behind():
    code = ("import sys; before = len(sys.meta_path); import lake_engineer, lake_engineer.lake; print('gymnasium' in sys.modules, len(sys.meta_path) - before)\n"
            "import gymnasium; print(len(sys.meta_path) - before)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "1", "0"]

def test_importing_the_environment_is_light():
    code = "import sys, lake_engineer.env; print([m for m in ('torch', 'matplotlib', 'pandas', 'datasets', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"

def test_the_record_of_the_benchmark_says_that_an_agent_step_costs_no_more_than_one_of_pogema():
    import pandas as pd
    from lake_engineer.settings import at_root
    bench = pd.read_csv(at_root("results/bench/env.csv")).set_index(["agents", "envs"])
    ours, peer = (bench[bench.environment == e].microseconds_per_agent_step for e in ("MAPFFrozenLake", "POGEMA"))
    assert {1, 64} == set(peer.index.get_level_values("envs")) == set(ours.index.get_level_values("envs"))
    assert all(t <= peer[at] for at, t in ours.items())
