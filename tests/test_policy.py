"Policies and the trainer from a million parameters to the paper's code path: adapters, chat templates, refusals, launched processes."
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trl import GRPOTrainer

from lake_engineer import trainer
from lake_engineer.endpoint import serve
from lake_engineer.evaluation import evaluate
from lake_engineer.generator import LakeConfig, generate
from lake_engineer.loop import run_arm
from lake_engineer.policy import LocalPolicy, Manner, PolicyError, add_adapter, load_policy, save_policy, tiny_model, tiny_tokenizer, weights_mark
from lake_engineer.prompts import prompt
from lake_engineer.scaling import rehearsal, rehearsal_base
from lake_engineer.settings import SettingsError, load_profile
from lake_engineer.trainer import SharedPromptGRPO, TimedGRPO, TrainerError, base_policy, check_ready, grpo_config, read_jsonl, tokenized, train_round, trainer_for

torch.set_num_threads(1)
BOARDS = generate(LakeConfig.uniform((3, 4)), 8, seed=0)
ASKED = [prompt(b) for b in BOARDS]
LORA = load_profile("small").lora


def logits(policy: LocalPolicy) -> torch.Tensor:
    with torch.no_grad(): return policy.model(input_ids=torch.tensor(policy.encode(ASKED[:1]))).logits


def tiny(seed: int = 0, width: int = 128) -> LocalPolicy:
    return LocalPolicy(tiny_model(seed, width=width), tiny_tokenizer(), "tiny")


def adapted(folder: Path, seed: int = 0) -> LocalPolicy:
    "A tiny base in `folder`, with an adapter that does something."
    save_policy(tiny(), folder)
    policy = add_adapter(load_policy(folder), LORA)
    for name, p in policy.model.named_parameters():
        if "lora_B" in name: p.data.normal_(generator=torch.Generator().manual_seed(seed))
    return policy


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rehearsal_base(tmp_path_factory.mktemp("chat") / "base")


def weights(policy: LocalPolicy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters() if p.requires_grad])


def test_an_adapter_comes_back_with_its_base(tmp_path: Path) -> None:
    policy = adapted(tmp_path / "base")
    save_policy(policy, tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter")
    assert torch.equal(logits(again), logits(policy)) and not torch.equal(logits(again), logits(tiny()))
    assert [p.name for p in (tmp_path / "adapter").glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert again.manner.base_mark == weights_mark(tiny().model) and any(p.requires_grad for p in again.model.parameters())
    with pytest.raises(PolicyError, match="has an adapter of rank 32, and cannot be trained with lora.rank = 0"): add_adapter(again, LORA.model_copy(update=dict(rank=0)))


@pytest.mark.parametrize("other", [dict(seed=1), dict(width=64)], ids=["weights", "shape"])
def test_an_adapter_of_another_base_is_refused(tmp_path: Path, other: dict) -> None:
    save_policy(adapted(tmp_path / "base"), tmp_path / "adapter")
    save_policy(tiny(**other), tmp_path / "base")
    for _ in ("with its mark", "without"):
        with pytest.raises(PolicyError, match="was trained on another base than"): load_policy(tmp_path / "adapter")
        (tmp_path / "adapter/policy.json").unlink(missing_ok=True)
        if "seed" in other: break  # same shapes: only the mark can tell


def damage(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    data, tensors = file.read_bytes(), load_file(file)
    if how == "cut off": file.write_bytes(data[:-100])
    if how == "noise": file.write_bytes(b"\xff" * 100)
    if how == "lacks one":
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        save_file(tensors, file, metadata={"format": "pt"})
    if how == "pickled":
        torch.save(tiny(1).model.state_dict(), folder / "pytorch_model.bin")
        file.unlink()
    if how == "empty": file.unlink()
    if how == "own code":
        config = json.loads((folder / "config.json").read_text()) | dict(model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"})
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


REFUSALS = {"cut off": "its weights are damaged", "noise": "its weights are damaged", "lacks one": "lack 1 of the model's tensors, such as model.layers.1.mlp.up_proj.weight",
            "pickled": r"only pickled weights \(pytorch_model.bin\).*allow_pickle=True", "empty": "holds no weights", "own code": "runs only if you pass trust_remote_code=True"}


@pytest.mark.parametrize("how", REFUSALS)
def test_what_cannot_be_trusted_is_refused_in_a_sentence(tmp_path: Path, how: str) -> None:
    damage(save_policy(tiny(), tmp_path / "p"), how)
    with pytest.raises(PolicyError, match=REFUSALS[how]) as e: load_policy(tmp_path / "p")
    assert "\n" not in str(e.value) and not (tmp_path / "p/ran").exists()
    if how == "pickled": assert torch.equal(logits(load_policy(tmp_path / "p", allow_pickle=True)), logits(tiny(1)))


def test_a_missing_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PolicyError, match="no policy at 'no/such-model': it is not on this machine, or not whole, and cannot be fetched now"): load_policy("no/such-model")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A model in two shards, as large ones come."
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model(layers=2, width=64).save_pretrained(folder, max_shard_size="300KB")
    tiny_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    return folder


def snapshot(source: Path, hub: Path, lacks: tuple[str, ...]) -> str:
    "A model in the hub's cache as a download leaves it; some of its files were still on their way."
    root, commit = hub / "models--me--model", "a" * 40
    for folder in ("refs", "blobs", f"snapshots/{commit}"): (root / folder).mkdir(parents=True)
    (root / "refs/main").write_text(commit)
    for k, p in enumerate(sorted(source.iterdir())):
        blob = root / "blobs" / f"{k:040x}"
        if p.name in lacks: blob.with_suffix(".incomplete").write_bytes(p.read_bytes()[:p.stat().st_size // 2])
        else:
            shutil.copy(p, blob)
            (root / "snapshots" / commit / p.name).symlink_to(blob)
    return "me/model"


SECOND, INDEX, TOKENIZER = "model-00002-of-00002.safetensors", "model.safetensors.index.json", ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("lacks, words", [((), ""), ((SECOND,), f"its file {SECOND} is missing"), ((INDEX,), "its file model.safetensors is missing"), (TOKENIZER, "its tokenizer is missing"),
                                          (("config.json",), "it is not on this machine, or not whole, and cannot be fetched now")])
def test_a_download_that_broke_off_is_one_sentence(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...], words: str) -> None:
    for name, value in (("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", True)): monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    name = snapshot(sharded, tmp_path, lacks)
    if not lacks:
        assert load_policy(name).name == "model"
        return
    with pytest.raises(PolicyError, match=f"^no policy at 'me/model': {words}; .*again") as e: load_policy(name)
    assert "\n" not in str(e.value) and len(str(e.value)) < 200


@pytest.mark.parametrize("file, words", [(SECOND, "its weights are damaged"), (INDEX, "one of its JSON files is damaged"), ("config.json", "one of its JSON files is damaged"),
                                         ("tokenizer.json", "one of its JSON files is damaged")])
def test_a_folder_that_was_copied_in_part_is_one_sentence(sharded: Path, tmp_path: Path, file: str, words: str) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "p"))
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:len(data) // 2])
    with pytest.raises(PolicyError, match=f"no policy at '{folder}': {words}"): load_policy(folder)
    (folder / file).unlink()
    with pytest.raises(PolicyError, match=f"no policy at '{folder}': its (file {file}|file model.safetensors|config.json|tokenizer) is missing"): load_policy(folder)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    save_policy(tiny(), tmp_path / "p")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(PolicyError, match="cannot be saved to .*File too large"): save_policy(tiny(1), tmp_path / "p")
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["p"] and torch.equal(logits(load_policy(tmp_path / "p")), logits(tiny()))


def test_a_long_list_is_answered_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sample = [], trainer.sample
    def spy(model, ids, *args): sizes.append(len(ids)); return sample(model, ids, *args)
    monkeypatch.setattr("lake_engineer.policy.sample", spy)
    whole, parts = tiny(), LocalPolicy(tiny_model(), tiny_tokenizer(), "tiny", manner=Manner(batch_size=3))
    assert parts.complete(ASKED, max_tokens=8) == whole.complete(ASKED, max_tokens=8) and sizes == [3, 3, 2, 8]
    assert parts.complete(ASKED, 2, 1.0, 8, 5) == parts.complete(ASKED, 2, 1.0, 8, 5) != parts.complete(ASKED, 2, 1.0, 8, 6)


def test_no_word_becomes_padding(tmp_path: Path) -> None:
    "Evaluation, training and an address say which word is missing, and leave nothing."
    boards, policy = generate(LakeConfig.uniform((11,)), 8, seed=0), tiny()
    calls = [lambda: evaluate(policy, boards, out=tmp_path / "r.jsonl"), lambda: train_round(policy, boards, load_profile("smoke"), tmp_path / "round", 0)]
    for call in calls:
        with pytest.raises(PolicyError, match=r"policy 'tiny' has no word '\(\d+,10\)|policy 'tiny' has no word '\(10,\d+\)") as e: call()
        assert "compact prompts of boards up to size 10" in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "round").exists() and not (tmp_path / "r.jsonl").exists()
    with serve(policy) as url, pytest.raises(PolicyError, match=r"the server refused \(400: policy 'tiny' has no word"):
        load_policy("openai:tiny", base_url=url, replies=None).complete([prompt(boards[0])])


def test_thinking_belongs_to_a_policy(chat: Path, tmp_path: Path) -> None:
    base = load_policy(chat)
    assert base.tokenizer.decode(base.encode(["Go."])[0]) == "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    save_policy(load_policy(chat, thinking=True), tmp_path / "thinker")
    thinker = load_policy(tmp_path / "thinker")
    assert thinker.thinking and thinker.tokenizer.decode(thinker.encode(["Go."])[0]).endswith("assistant\n") and len(base.eos_ids) == 2


@pytest.mark.parametrize("thinking", [False, True])
def test_the_policy_is_asked_in_training_as_in_evaluation(chat: Path, tmp_path: Path, thinking: bool) -> None:
    profile = rehearsal("paper", chat, launch__config="", thinking=thinking, train__gradient_checkpointing=False)
    seen: list[list[int]] = []
    class Watched(GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            out = super()._tokenize_prompts(prompts)
            seen.extend(out[0])
            return out
    train_round(load_policy(profile), BOARDS[:2], profile, tmp_path / "round", 0, trainer_class=Watched)
    policy = load_policy(tmp_path / "round")
    assert policy.thinking is thinking
    assert set(map(tuple, seen)) == set(map(tuple, policy.encode([prompt(b, profile.style, thinking) for b in BOARDS[:2]])))


def test_the_warm_start_teaches_the_answer_behind_the_tokens_it_is_asked_with(chat: Path) -> None:
    policy = load_policy(chat)
    data = trainer.examples(BOARDS[:1], [trainer.solve(BOARDS[0]).plan], 2, style="joint")
    for row, example in zip(tokenized(policy, data), data):
        n = row["completion_mask"].index(1)
        assert row["input_ids"][:n] == policy.encode([example["prompt"]])[0] and row["input_ids"][-1] == policy.tokenizer.eos_token_id
        assert policy.decode(row["input_ids"][n:]) == example["completion"].strip()


def test_settings_reach_trl(tmp_path: Path) -> None:
    p = load_profile("small", train__mask_truncated=True, train__epsilon=0.1, train__epsilon_high=0.3, train__beta=0.02, train__loss_type="dapo", train__num_iterations=2,
                     train__temperature=0.7, evaluate__max_tokens=77, train__report_to="tensorboard")
    c = grpo_config(p, tmp_path, 3, 128)
    assert (c.mask_truncated_completions, c.epsilon, c.epsilon_high, c.beta, c.loss_type, c.num_iterations, c.temperature, c.max_completion_length) == (True, 0.1, 0.3, 0.02, "dapo", 2, 0.7, 77)
    assert (c.per_device_train_batch_size, c.gradient_accumulation_steps, c.steps_per_generation, c.generation_batch_size, c.report_to) == (128, 4, 4, 512, ["tensorboard"])
    colocate, server = (trainer._generation(load_profile("paper", generation__backend=b), 900) for b in ("vllm", "vllm-server"))
    assert colocate == dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=9092)
    assert server == dict(use_vllm=True, vllm_mode="server", vllm_server_host="127.0.0.1", vllm_server_port=8000)


def test_what_does_not_go_together_is_said_before_any_work(tmp_path: Path) -> None:
    for changes, words in [(dict(train__micro_batch=3), "must divide the 64 answers"), (dict(thinking=True), "no words for thinking"), (dict(lora__rank=-1), "lora.rank"),
                           (dict(lora__target_modules="q_proj lm_head"), "other than lm_head"), (dict(launch__by_hand=True), "needs an accelerate configuration")]:
        with pytest.raises(SettingsError, match=words): load_profile("smoke", **changes)
    five = tmp_path / "five.yaml"
    five.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 5\n")
    with pytest.raises(TrainerError, match="the 64 answers of a step .* cannot be shared out to 5 processes"): run_arm(load_profile("smoke", launch__config=str(five)), "fixed-random", out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    for n, name in [(1, "one_gpu"), (8, "eight_gpus"), (4, "four_gpus"), (16, "two_nodes"), (2, "two_cpus")]:
        assert trainer.processes(load_profile("paper", launch__config=f"configs/accelerate/{name}.yaml")) == n
    with pytest.raises(TrainerError, match="reports to trackio, which is not installed"): check_ready(load_profile("smoke", train__report_to="trackio"))


def test_the_shared_prompt_stands_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer_for(load_profile("small")) is SharedPromptGRPO
    assert {trainer_for(load_profile("small", **c)) for c in (dict(generation__backend="vllm"), dict(train__gradient_checkpointing=True))} == {TimedGRPO}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert trainer_for(load_profile("small")) is TimedGRPO


@pytest.mark.parametrize("changes", [{}, dict(train__mask_truncated=True, evaluate__max_tokens=6, reward__l1=3, reward__l2=6)], ids=["lora", "lora, truncated answers masked"])
def test_shared_and_stock_agree_with_adapters_chat_and_accumulation(chat: Path, tmp_path: Path, changes: dict) -> None:
    "The same samples and advantages give the same loss and gradient."
    profile = rehearsal("paper", chat, launch__config="", lora__rank=4, train__gradient_checkpointing=False, train__loss_type="grpo", train__prompts_per_step=4,
                        instances_per_round=4, train__micro_batch=4, **changes)
    found = []
    class Both(SharedPromptGRPO):
        def _compute_loss(self, model, inputs):
            inputs["advantages"] = torch.tensor([1.0, -1.0, 0.0, 0.5])
            grads = []
            for kind in (SharedPromptGRPO, GRPOTrainer):
                self.__class__ = kind
                loss = kind._compute_loss(self, model, inputs)
                grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True) if g is not None]))
            self.__class__ = Both
            found.append((grads[0] - grads[1]).abs().max() / grads[1].abs().max().clamp(min=1e-12))
            return super()._compute_loss(model, inputs)
    train_round(load_policy(profile), BOARDS[:4], profile, tmp_path / "round", 0, trainer_class=Both)
    assert len(found) == 2 * 2 and max(found) < 1e-3


def test_a_killed_round_with_an_adapter_resumes_to_the_same_weights(tmp_path: Path) -> None:
    profile = load_profile("smoke", lora__rank=4, train__save_steps=1, train__prompts_per_step=2, train__micro_batch=8, train__beta=0.01)
    whole = train_round(load_policy(profile), BOARDS, profile, tmp_path / "whole", 5)
    class Killed(SharedPromptGRPO):
        def training_step(self, *args):
            if self.state.global_step == 2: raise KeyboardInterrupt
            return super().training_step(*args)
    with pytest.raises(KeyboardInterrupt): train_round(load_policy(profile), BOARDS, profile, tmp_path / "cut", 5, trainer_class=Killed)
    assert not (tmp_path / "cut").exists()
    again = train_round(load_policy(profile), BOARDS, profile, tmp_path / "cut", 5)
    assert torch.equal(weights(again), weights(whole)) and list(again.model.peft_config) == ["default"]
    assert (tmp_path / "cut/adapter_model.safetensors").read_bytes() == (tmp_path / "whole/adapter_model.safetensors").read_bytes()
    assert [r["step"] for r in read_jsonl(tmp_path / "cut.jsonl")] == [1, 2, 3, 4]
    assert torch.equal(logits(load_policy(tmp_path / "cut")), logits(whole))


def test_the_small_profile_takes_its_first_steps_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "at_root", lambda path: tmp_path / path)
    profile = load_profile("small", sizes="3", threads=1, warm_start__steps=1, warm_start__boards=2, warm_start__batch_size=2, lora__target_modules="q_proj v_proj",
                           train__prompts_per_step=1, train__group_size=2, train__micro_batch=1, evaluate__max_tokens=6, reward__l1=3, reward__l2=6)
    base = base_policy(profile)
    assert base.has_adapter and base.is_chat and len(list((tmp_path / "cache/warm").glob("smollm2-*"))) == 1
    before = weights(base).clone()
    after = train_round(base, BOARDS[:2], profile, tmp_path / "round", 0)
    assert len(read_jsonl(tmp_path / "round.jsonl")) == 2 and before.shape == weights(after).shape
    assert json.loads((tmp_path / "round/adapter_config.json").read_text())["base_model_name_or_path"] == "smollm2"


def test_the_path_of_the_paper_is_rehearsed(chat: Path, tmp_path: Path) -> None:
    "Every stage of the paper profile: two launched processes, checkpoint, validation."
    profile = rehearsal("paper", chat, rounds=1)
    assert profile.launch.config and (profile.thinking, profile.train.gradient_checkpointing, profile.train.epochs, profile.reward.l1, profile.reward.l2) == (True, True, 2, 1500, 4096)
    run = run_arm(profile, "checkpoint", out=tmp_path)
    rows = read_jsonl(run.round_dir(0) / "training.jsonl")
    assert [r["step"] for r in rows] == [1, 2] and {"seconds_generate", "reward", "truncated_share"} <= rows[0].keys()
    policy = run.checkpoint(0)
    assert run.is_done(0) and len(run.validation(0)) == 4 and policy.thinking and policy.manner == replace(Manner(), thinking=True, batch_size=4)


def test_a_job_by_hand_is_written_and_shown(chat: Path, tmp_path: Path) -> None:
    profile = rehearsal("paper", chat, launch__config="configs/accelerate/two_cpus.yaml", launch__by_hand=True)
    with pytest.raises(TrainerError, match="run it on every node, then start this again: .*two_cpus.yaml -m lake_engineer.trainer"): train_round(load_policy(profile), BOARDS[:2], profile, tmp_path / "round", 0)
    trainer.run_job(tmp_path / "round.job")
    assert train_round(load_policy(profile), BOARDS[:2], profile, tmp_path / "round", 0).source == str(tmp_path / "round")
