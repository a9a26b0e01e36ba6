"MAPF-FrozenLake as a taskset of `verifiers`: several agents cross a frozen lake, the model writes the plan, eight checks judge it."
from typing import Any

from lake_engineer.generator import LakeConfig, SizeConfig, generate
from lake_engineer.lake import CHECKS, Verdict
from lake_engineer.prompts import judge, prompt
from lake_engineer.rewards import RewardSettings, correctness, from_column, to_column
from lake_engineer.solver import solve
import httpx
import verifiers.v1 as vf

__all__ = ["LakeTaskset", "ChatHarness", "load_environment"]


class LakeData(vf.TaskData):
    "One board; `prompt` asks for a plan."
    instance: str  # as JSON, with its optima


class LakeTask(vf.Task[LakeData]):
    "Judges the last reply by the eight checks."
    def verdict(self, trace: vf.Trace) -> Verdict: return judge(trace.last_reply, from_column(self.data.instance))

    @vf.reward
    async def correctness(self, trace: vf.Trace) -> float:
        "Between 0 and 1 (paper, R_acc): 1 for an optimal plan, less for a longer one, 0 for one that fails a check."
        return correctness(self.verdict(trace), RewardSettings())

    @vf.metric
    async def checks(self, trace: vf.Trace) -> dict[str, float]:
        "Valid, optimal, and each of the eight checks; a check that could not be judged counts as failed."
        v = self.verdict(trace)
        return {"valid": float(v.valid), "optimal": float(v.optimal()), **{c: float(getattr(v, c) is True) for c in CHECKS}}

    async def validate(self, runtime: Any) -> bool:
        "Whether the solver still finds a plan of the recorded cost."
        inst = from_column(self.data.instance)
        return solve(inst).cost == inst.optimal_sum_of_costs


class LakeTasksetConfig(vf.TasksetConfig):
    sizes: list[int] = [3, 4, 5, 6]
    """Cells per side, in equal shares."""
    num_agents: int = 2
    """1 to 5."""
    hole_ratio: float = 0.2
    """Share of the cells that are holes."""
    wait_ratio: float = 0.5
    """Share of the boards that cannot be solved optimally without a wait."""
    num_tasks: int = 100
    seed: int = 0
    split: str = "train"
    """train, validation, test or benchmark; no board is in two of them."""
    style: str = "joint"
    """How the question is put, one of `lake_engineer.prompts.STYLES`."""
    thinking: bool = False
    """Ask for reasoning before the answer."""


class LakeTaskset(vf.Taskset[LakeTask, LakeTasksetConfig]):
    def load(self) -> list[LakeTask]:
        c = self.config
        config = LakeConfig(sizes={n: SizeConfig(1 / len(c.sizes), c.hole_ratio, c.wait_ratio) for n in c.sizes})
        boards = generate(config, c.num_tasks, c.num_agents, seed=c.seed, split=c.split)
        return [LakeTask(LakeData(id=b.id or None, prompt=prompt(b, c.style, c.thinking), instance=to_column(b)), c.task) for b in boards]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    "One question, one answer, in this process: nothing is installed and nothing is executed."
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        system, question = self.resolve_text_prompt(data)
        messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": question}]
        async with httpx.AsyncClient(timeout=None) as client:
            reply = await client.post(f"{endpoint.rstrip('/')}/chat/completions", json={"model": ctx.model, "messages": messages},
                                      headers={"Authorization": f"Bearer {secret}"})
        return vf.ProgramResult(exit_code=0 if reply.is_success else 1, stdout="", stderr=reply.text if reply.is_error else "")


def load_environment(**settings: Any) -> vf.Env:
    "The environment with the given taskset settings, e.g. `load_environment(sizes=[4], num_tasks=20)`; one chat turn on this machine."
    from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig
    return SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": "mapf-frozen-lake", **settings},
                                               agent={"harness": {"id": "mapf-frozen-lake"}, "runtime": {"type": "subprocess"}}))
