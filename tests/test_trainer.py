"A round of training survives being killed, and ends with the same weights."
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lake_engineer.generator import LakeConfig, generate
from lake_engineer.policy import load_policy
from lake_engineer.settings import load_profile
from lake_engineer.trainer import train_round
smoke = load_profile("smoke", train__save_steps=2, train__lr_schedule="linear")  # as in tiny: the schedule has to resume too
boards = generate(LakeConfig.uniform((3, 4)), 64, seed=0)
policy = train_round(load_policy(smoke), boards, smoke, Path(sys.argv[1]), seed=5)
assert policy.name == load_policy(Path(sys.argv[1])).name, "a validation begun before a kill would not be taken up after it"
"""


def launch(out):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "checkpoint"
    assert launch(out).wait() == 0
    return out


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_round_resumes_to_the_same_weights(uninterrupted, tmp_path, seed):
    out = tmp_path / "checkpoint"
    log = out.with_name("checkpoint.jsonl")
    steps = random.Random(seed).randrange(1, 8)
    process = launch(out)
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= steps): time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert launch(out).wait() == 0
    assert (out / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()
    rows = [len(Path(p).read_text().splitlines()) for p in (log, uninterrupted.with_name("checkpoint.jsonl"))]
    assert rows[0] == rows[1] == 8
