"The `verifiers` taskset, played through the real framework by a scripted model behind a real socket."
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import asyncio
import json
import sys
import threading

import pytest

vf = pytest.importorskip("verifiers.v1", reason="needs the extra: pip install 'lake_engineer[verifiers]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "environments" / "mapf_frozen_lake"))

from lake_engineer.prompts import format_answer
from lake_engineer.rewards import from_column
from lake_engineer.solver import solve
from mapf_frozen_lake import LakeTaskset, LakeTasksetConfig, load_environment

SETTINGS = dict(sizes=[3, 4], num_agents=2, hole_ratio=0.1, wait_ratio=0.5, num_tasks=4, seed=3)

@pytest.fixture
def model():
    "An OpenAI-compatible server that looks its answers up in a dictionary from prompt to answer."
    script: dict[str, str] = {}
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = script[asked["messages"][-1]["content"]]
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                               "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}],
                               "usage": {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield script, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


async def rollouts(env, tasks, url):
    ctx = vf.ModelContext("scripted", vf.EvalClientConfig(base_url=url, api_key_var="SCRIPTED_KEY"))
    async with env.serving(): return [await env.run_episode(t, ctx) for t in tasks]

def test_a_scripted_model_gets_what_it_deserves(model, monkeypatch):
    script, url = model
    monkeypatch.setenv("SCRIPTED_KEY", "none")
    env = load_environment(**SETTINGS)
    tasks = list(env.taskset)
    for k, t in enumerate(tasks):
        inst = from_column(t.data.instance)
        script[t.data.prompt] = format_answer(solve(inst).plan, inst, "joint") if k % 2 == 0 else "I would rather not."
    traces = [e.traces[0] for e in asyncio.run(rollouts(env, tasks, url))]
    assert [t.errors for t in traces] == [[]] * 4
    assert [t.reward for t in traces] == [1.0, 0.0, 1.0, 0.0]
    assert [(t.metrics["valid"], t.metrics["optimal"], t.metrics["parsable"]) for t in traces] == [(1.0, 1.0, 1.0), (0.0, 0.0, 0.0)] * 2
    assert [t.num_output_tokens for t in traces] == [7] * 4

def test_the_same_settings_give_the_same_tasks_and_the_solver_agrees():
    load = lambda **kw: list(LakeTaskset(LakeTasksetConfig(id="mapf-frozen-lake", **SETTINGS | kw)))
    assert [t.key for t in load()] == [t.key for t in load()] != [t.key for t in load(seed=4)]
    assert all(asyncio.run(t.validate(None)) for t in load())
