"The loop beyond its chapter: the guard at work, kills, the policy as its own engineer, committed runs."
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lake_engineer import engineer, loop, trainer
from lake_engineer.context import VARIANTS, Context
from lake_engineer.engineer import ENGINEERS, Draft
from lake_engineer.evaluation import read_records
from lake_engineer.generator import LakeConfig
from lake_engineer.loop import Run, RunError, cases, context_for, evidence, guarded, paired_change, round_seed, run_arm, write_evidence
from lake_engineer.policy import LocalPolicy, load_policy, save_policy
from lake_engineer.settings import at_root, load_profile

SEED = 7
COMMITTED = [Run(p) for p in sorted(at_root("results/runs/tiny").glob("*/seed0")) if p.parent.name not in ("base", "round0")]


def names(run: Run, number: int) -> list[str]:
    return sorted(p.name for p in run.round_dir(number).iterdir())


@pytest.fixture(scope="module")
def sabotage() -> Iterator[None]:
    "Training whose round 1 ruins the policy."
    honest = trainer.train_round
    def train_round(policy, instances, profile, out, seed, **kw):
        if out.exists() or seed != round_seed(SEED, 1): return honest(policy, instances, profile, out, seed, **kw)
        torch.manual_seed(0)
        for p in policy.model.parameters(): p.data += torch.randn_like(p)
        out.with_name("checkpoint.jsonl").write_text(json.dumps(dict(step=1, seconds_step=0.5)) + "\n")
        save_policy(policy, out)
        return policy
    with pytest.MonkeyPatch.context() as m:
        m.setattr(trainer, "train_round", train_round)
        yield


def arm(out: Path) -> Run:
    return run_arm("smoke", "learnability", seed=SEED, out=out, guard=True)


@pytest.fixture(scope="module")
def whole(sabotage: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return arm(tmp_path_factory.mktemp("whole"))


def test_a_round_that_falls_is_undone(whole: Run) -> None:
    run = whole
    table = guarded(run).set_index("round")
    assert list(table.undone) == [True, False] and table.lost[1] > 4 > table.gained[1] == 0 and table.p_fall[1] < 0.05
    assert list(table.boards_lost) == [16, 0] and list(table.answers_lost) == [128, 0] and table.seconds_lost[1] > 0 == table.seconds_lost[2]
    assert names(run, 1) == ["checkpoint", "config.json", "context.md", "done", "guard.json", "proposal.json", "rejected.jsonl", "training.jsonl", "validation.jsonl"]
    assert run.breakdown(1).to_dict() == run.breakdown(0).to_dict() and run.trained(1).valid.sum() < run.validation(1).valid.sum()
    def weights(p: LocalPolicy) -> torch.Tensor: return torch.cat([x.flatten() for x in p.model.parameters()])
    assert torch.equal(weights(run.checkpoint(1)), weights(run.checkpoint(0))) and run.starts_from(2) == 0 and run.starts_from(1) == 0
    last = context_for(run, 2)
    assert last.config == run.config(0) and last.rolled_back == (1,) and last.history[1][0] == run.config(1) and last.kept == last.history[:1]
    assert "It was undone because of this fall." in (run.round_dir(2) / "context.md").read_text()
    assert sum(c.gain < -0.1 for c in cases(run)) == 1
    assert "The guard undid it." in evidence(run, 1) and "undid" not in evidence(run, 2)


def test_rounds_undone_one_after_the_other_go_back_to_the_last_that_stayed(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.path.parents[1], tmp_path / "smoke", symlinks=True)
    run, last = Run(tmp_path / "smoke" / whole.path.parent.name / whole.path.name), whole.round_dir(1) / "rejected.jsonl"
    for path in (run.round_dir(2) / "done", run.round_dir(2) / "guard.json"): path.unlink()  # round 2 was trained and validated, and fell as far as round 1
    shutil.copy(last, run.round_dir(2) / "validation.jsonl")
    loop.guard_round(run, 2, load_profile("smoke"))
    (run.round_dir(2) / "done").write_text("{}")
    assert list(guarded(run).undone) == [True, True] and run.starts_from(2) == run.starts_from(3) == 0
    assert run.validation(2).equals(run.validation(0)) and run.trained(2).equals(read_records(last))
    assert (run.round_dir(2) / "checkpoint").resolve() == (tmp_path / "smoke" / "round0" / whole.path.name / "round0" / "checkpoint").resolve()


def test_what_an_undoing_costs_does_not_depend_on_kills(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    run = Run(tmp_path / "run")
    (run.round_dir(1) / "training.jsonl").write_text("".join(json.dumps(dict(step=i, seconds_step=1.5)) + "\n" for i in (1, 2)))
    (run.round_dir(1) / "done").write_text(json.dumps(dict(seconds=0.1)))  # of the process that came last
    assert list(guarded(run).seconds_lost) == [3.0, 0.0]


def test_without_a_guard_it_stays(sabotage: None, tmp_path: Path) -> None:
    run = run_arm("smoke", "learnability", seed=SEED, out=tmp_path)
    assert run.breakdown(1).valid_rate < run.breakdown(0).valid_rate and not run.is_undone(1) and len(guarded(run)) == 0


@pytest.mark.parametrize("step", ["validate", "verdict", "rename", "copy", "remove", "link", "done"])
def test_a_kill_while_undoing_changes_nothing(step: str, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, link = loop.write_text, Path.symlink_to
    def die(*args, **kw): raise KeyboardInterrupt
    def remove(path, *args, **kw):  # half of the checkpoint is gone
        if Path(path).parts[-2:] != ("round1", "checkpoint"): return rmtree(path, *args, **kw)
        (path / "model.safetensors").unlink()
        die()
    def validate(policy, profile, out, label): return die() if out.parent.name == "round1" else judged(policy, profile, out, label)
    judged, rmtree = loop.validate, shutil.rmtree
    def copy(path, text): return die() if (path.parent / "rejected.jsonl").exists() else write(path, text)
    def done(path, text): return die() if path.parts[-2:] == ("round1", "done") else write(path, text)
    with monkeypatch.context() as m:
        if step in ("verdict", "rename"): m.setattr(loop, dict(verdict="judge_round", rename="undo_round")[step], die)
        elif step == "remove": m.setattr(loop.shutil, "rmtree", remove)
        elif step == "validate": m.setattr(loop, "validate", validate)
        elif step == "link": m.setattr(Path, "symlink_to", lambda self, to: die() if self.parent.name == "round1" else link(self, to))
        else: m.setattr(loop, "write_text", copy if step == "copy" else done)
        with pytest.raises(KeyboardInterrupt): arm(tmp_path / "cut")
    run = arm(tmp_path / "cut")
    assert run.rounds == [0, 1, 2]
    for i in run.rounds:
        assert names(run, i) == names(whole, i)
        for name in names(run, i):
            if name not in ("done", "checkpoint", "training.jsonl"): assert (run.round_dir(i) / name).read_bytes() == (whole.round_dir(i) / name).read_bytes(), name


def test_the_engineer_gets_the_present_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(engineer.packaged_llm(), padding_side="left")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id, initializer_range=0.5))
    save_policy(LocalPolicy(model, tokenizer, "chat"), tmp_path / "chat")
    profile = load_profile("smoke", base=str(tmp_path / "chat"), evaluate__max_tokens=8, reward__l1=4, reward__l2=8)
    given, make = [], loop.make_engineer
    def spy(name, **kw):
        if "policy" in kw: given.append((name, {k: v.clone() for k, v in kw["policy"].model.state_dict().items()}))
        return make(name, **kw)
    monkeypatch.setattr(loop, "make_engineer", spy)
    for name in ("checkpoint", "base"):
        run = run_arm(profile, name, "V1", seed=1, out=tmp_path / "runs", options=dict(temperature=1.0, n=2))
        assert run.path.parent.name == f"{name}-V1-n=2-temperature=1.0" and run.info["options"] == dict(temperature=1.0, n=2)
        expected = [run.checkpoint(i) for i in (0, 1)] if name == "checkpoint" else [load_policy(tmp_path / "chat")] * 2
        for policy, (who, state) in zip(expected, given[-2:]):
            assert who == name and all(torch.equal(state[k], v) for k, v in policy.model.state_dict().items())
        proposal = json.loads((run.round_dir(1) / "proposal.json").read_text())
        assert len(json.loads(proposal["raw"])) == 2 and proposal["engineer"] == name and LakeConfig.from_json(json.dumps(proposal["config"])) == run.config(1)


def test_a_board_only_policy_is_refused_before_any_work(tmp_path: Path) -> None:
    for name in ("checkpoint", "base"):
        with pytest.raises(engineer.EngineerError, match="policy 'tiny' cannot be an engineer"): run_arm("smoke", name, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("run", COMMITTED, ids=lambda r: r.path.parent.name)
def test_committed_runs_are_read_and_say_the_same(run: Run) -> None:
    for i in run.rounds[1:]:
        assert context_for(run, i).render(run.info["context"]) + "\n" == (run.round_dir(i) / "context.md").read_text()
        assert evidence(run, i).count("<table>") == 2
    assert [c.config for c in cases(run)] == [run.config(i) for i in run.rounds[1:]]


def test_what_a_model_wrote_is_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "</pre><script>alert('x')</script><img src=x onerror=alert(1)> & \N{SNOWMAN}" * 200
    monkeypatch.setitem(ENGINEERS, "fixed-random", lambda context, rng: Draft({evil: 1}, evil, evil, 3))
    run = run_arm("smoke", "fixed-random", "S+F", seed=2, out=tmp_path)
    for page in (evidence(run, 1), evidence(run, 2), write_evidence(run, tmp_path / "page.html").read_text()):
        assert "<script" not in page and "<img" not in page and page.count("<pre") == page.count("</pre>") and "&lt;script&gt;" in page
    assert "characters more]" in evidence(run, 2) and len(evidence(run, 2)) < 60_000


def test_an_arm_with_options_has_its_own_place(tmp_path: Path) -> None:
    run = run_arm("smoke", "promotion", seed=2, out=tmp_path, options=dict(window=1))
    assert run.path.parent.name == "promotion-window=1" and run.info["options"] == dict(window=1) and "guard" not in run.info
    shutil.move(run.path.parent, tmp_path / "smoke" / "promotion-window=2")
    with pytest.raises(RunError, match="begun with another options"): run_arm("smoke", "promotion", seed=2, out=tmp_path, options=dict(window=2))
    with pytest.raises(engineer.EngineerError, match="has no option 'width'"): run_arm("smoke", "promotion", seed=2, out=tmp_path, options=dict(width=2))


def test_different_boards_are_not_paired() -> None:
    records = COMMITTED[0].validation(0)
    with pytest.raises(RunError, match="different boards"): paired_change(records, records.iloc[::-1])
    change = paired_change(records, records)
    assert (change.gained, change.lost, change.p_fall) == (0, 0, 1.0)


def test_a_context_needs_nothing_but_the_directory(tmp_path: Path) -> None:
    shutil.copytree(COMMITTED[0].path, tmp_path / "moved")
    assert isinstance(context_for(Run(tmp_path / "moved"), 1), Context)
    assert context_for(Run(tmp_path / "moved"), 2).to_dict() == context_for(COMMITTED[0], 2).to_dict()


def test_what_the_context_says_is_a_function_of_the_directory(tmp_path: Path) -> None:
    "Read from disk twice, in other processes, elsewhere, and with other hash seeds: the same bytes."
    shutil.copytree(COMMITTED[-1].path, tmp_path / "moved")
    code = "import sys; from pathlib import Path; from lake_engineer.loop import Run, context_for; c = context_for(Run(Path(sys.argv[1])), 2)\n" \
           "sys.stdout.write('|'.join(c.render(v) for v in sys.argv[2:]))"
    variants = [*VARIANTS, "H0+S+Tfull"]
    def say(path: Path, seed: str) -> str:
        return subprocess.run([sys.executable, "-c", code, str(path), *variants], cwd=tmp_path, env=os.environ | {"PYTHONHASHSEED": seed},
                              capture_output=True, text=True, check=True).stdout
    assert say(tmp_path / "moved", "1") == say(COMMITTED[-1].path, "2") == "|".join(context_for(COMMITTED[-1], 2).render(v) for v in variants)
