"Policies behind an address: servers that fail, stall, limit and babble; caps, keys, and replies that are asked for once."
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("openai", reason="needs the extra: pip install 'lake_engineer[openai]'")

from lake_engineer.endpoint import Cap, Endpoint, EndpointPolicy, Manners, Prices, Reply, count_tokens, estimate, most, read_reply, serve
from lake_engineer.engineer import make_engineer
from lake_engineer.lake import Instance, Lake
from lake_engineer.policy import Completion, PolicyError, load_policy
from lake_engineer.prompts import ParseError, Reason, parse

SECRET = "sk-test-0123456789abcdef"
QUICK = Manners(backoff=0.01, timeout=5.0, retries=3)


def chat(content: str | None = "end", finish: str = "stop", **message) -> dict:
    "A good reply."
    return dict(id="x", object="chat.completion", created=0, model="m-2026", choices=[dict(index=0, finish_reason=finish, message=dict(role="assistant", content=content, **message))],
                usage=dict(prompt_tokens=10, completion_tokens=3, total_tokens=13))


@dataclass
class Answer:
    "What the server does with one request."
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    sleep: float = 0.0
    missing: int = 0  # bytes promised but not sent
    until: threading.Event | None = None  # not before this is set


def ok(*args, **kw) -> Answer: return Answer(json.dumps(chat(*args, **kw)).encode())
def error(status: int, message: str = "no", **headers: str) -> Answer:
    return Answer(json.dumps(dict(error=dict(message=message, type="t", code=headers.pop("code", None)))).encode(), status, headers)


class Server:
    "Plays a script: a list of answers, the last one for ever, or a function of the request."
    def __init__(self) -> None:
        self.script: list[Answer] | Callable[[dict], Answer] = [ok()]
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.times: list[float] = []
        self.now = self.most = 0
        lock, me = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_) -> None: pass
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    me.now += 1
                    me.most = max(me.most, me.now)
                    me.asked.append(request), me.headers.append(dict(self.headers)), me.times.append(time.monotonic())
                    a = me.script(request) if callable(me.script) else me.script[min(len(me.asked), len(me.script)) - 1]
                time.sleep(a.sleep)
                if a.until: a.until.wait(30)
                with lock: me.now -= 1
                try:
                    self.send_response(a.status)
                    for k, v in {"Content-Type": "application/json", "Content-Length": str(len(a.body) + a.missing), **a.headers}.items(): self.send_header(k.replace("_", "-"), v)
                    self.end_headers()
                    self.wfile.write(a.body)
                except OSError: pass  # the client has hung up

        class Http(ThreadingHTTPServer): request_queue_size = 128
        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    s = Server()
    monkeypatch.setenv("OPENAI_BASE_URL", s.url)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    yield s
    s.close()


def policy(folder: Path | None, **kw) -> EndpointPolicy: return EndpointPolicy("m", **dict(replies=folder, manners=QUICK) | kw)


# --- what is sent, and what comes back ----------------------------------------------------------------------------------


def test_a_request_says_what_was_asked(server: Server, tmp_path: Path) -> None:
    p = policy(tmp_path, extra=dict(reasoning_effort="low", seed=None))
    assert p.complete(["one", "two"], n=2, temperature=0.7, max_tokens=99) == [[Completion("end", 3, True)] * 2] * 2
    sent = server.asked[0]
    assert {k: sent[k] for k in ("model", "temperature", "max_tokens", "reasoning_effort")} == dict(model="m", temperature=0.7, max_tokens=99, reasoning_effort="low")
    assert "seed" not in sent and Counter(a["messages"][0]["content"] for a in server.asked) == dict(one=2, two=2)
    assert all(len(a["messages"]) == 1 and a["messages"][0]["role"] == "user" for a in server.asked)
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert (p.endpoint.usage.requests, p.endpoint.usage.prompt_tokens, p.endpoint.usage.tokens) == (4, 40, 12)


def test_samples_and_seeds_differ_and_repeat() -> None:
    seeds = lambda seed: [a.request["seed"] for a in policy(None).asks(["x"], n=50, seed=seed)]
    assert seeds(3) == seeds(3) and len({s for k in range(20) for s in seeds(k)}) == 1000


def test_another_field_for_the_length(server: Server) -> None:
    policy(None, length_field="max_completion_tokens").complete(["x"], max_tokens=7)
    assert server.asked[0]["max_completion_tokens"] == 7 and "max_tokens" not in server.asked[0]


@pytest.mark.parametrize("finish, finished", [("stop", True), ("length", False), ("content_filter", False)])
def test_why_an_answer_ended(server: Server, finish: str, finished: bool) -> None:
    server.script = [ok("(0,1)", finish)]
    assert policy(None).complete(["x"])[0][0].finished is finished


BOARD = Instance(Lake(2, frozenset()), ((0, 0),), ((0, 1),))
RIGHT, DRAFT = "<answer>\n(0,1) end\n</answer>", "<answer>\n(1,0) end\n</answer>"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_only_what_follows_the_reasoning_is_parsed(server: Server, name: str) -> None:
    server.script = [ok(RIGHT, **{name: f"Perhaps {DRAFT}? </think> No."})]
    text = policy(None).complete(["x"])[0][0].text
    assert "Perhaps" in text and parse(text, BOARD).paths == (((0, 0), (0, 1)),)


@pytest.mark.parametrize("content, finish, reason", [("", "length", Reason.unclosed_thinking), (None, "length", Reason.unclosed_thinking), ("", "stop", Reason.no_answer)])
def test_reasoning_without_an_answer_earns_nothing(server: Server, content: str | None, finish: str, reason: Reason) -> None:
    server.script = [ok(content, finish, reasoning_content=f"</think>{RIGHT}")]
    with pytest.raises(ParseError) as e: parse(policy(None).complete(["x"])[0][0].text, BOARD)
    assert e.value.code == reason


def test_any_text_survives(server: Server, tmp_path: Path) -> None:
    text = "\ud800 \x00 \N{SNOWMAN} </answer>" + "x" * 10_000
    server.script = [ok(text)]
    assert policy(tmp_path).complete(["x"]) == policy(tmp_path, replay=True).complete(["x"]) == [[Completion(text, 3, True)]]


# --- servers in a bad mood ----------------------------------------------------------------------------------------------

PASSING = dict(fails=error(500), overloaded=error(503), limits=error(429), garbage=Answer(b"<html>busy</html>", headers={"Content-Type": "text/html"}), half=Answer(b'{"choices": [{"mess'),
               cut_off=Answer(b'{"choices"', missing=100), empty=Answer(json.dumps(chat() | {"choices": []}).encode()), nothing=Answer(b""), null=Answer(b"null"),
               uncounted=Answer(json.dumps({k: v for k, v in chat().items() if k != "usage"}).encode()), deep=Answer(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"))


@pytest.mark.parametrize("what", PASSING)
def test_a_mood_that_passes_is_waited_for(server: Server, what: str) -> None:
    server.script = [PASSING[what], PASSING[what], ok()]
    p = policy(None)
    assert p.complete(["x"]) == [[Completion("end", 3, True)]]
    assert p.endpoint.usage.requests == len(server.asked) == 3 and p.endpoint.usage.replies == 1


@pytest.mark.parametrize("what, said", [("fails", "refused (500: "), ("garbage", "cannot be used"), ("half", "cannot be used"), ("empty", "it holds no choices"),
                                        ("cut_off", "the connection broke"), ("uncounted", "no chat completion with a count of tokens")])
def test_a_mood_that_stays_is_one_sentence(server: Server, what: str, said: str, tmp_path: Path) -> None:
    server.script = [PASSING[what]]
    with pytest.raises(PolicyError) as e: policy(tmp_path).complete(["x"])
    assert said in str(e.value) and "tried 4 times" in str(e.value) and "\n" not in str(e.value) and server.url in str(e.value)
    assert len(server.asked) == 4 and not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("answer, said", [(error(401, f"Incorrect key {SECRET}"), "not accepted (401); check OPENAI_API_KEY"), (error(403, "not for you"), "403: not for you"),
                                          (error(404, "The model `m` does not exist"), "404: The model `m` does not exist"), (error(400, f"bad {SECRET}"), "400: bad [key]"),
                                          (error(429, "You exceeded your quota", code="insufficient_quota"), "exceeded your quota")])
def test_what_stays_wrong_is_not_tried_again(server: Server, answer: Answer, said: str) -> None:
    server.script = [answer]
    with pytest.raises(PolicyError) as e: policy(None).complete(["x"])
    assert said in str(e.value) and SECRET not in str(e.value) and len(server.asked) == 1


def test_a_server_that_stalls_is_left(server: Server) -> None:
    waited = threading.Event()
    server.script = [Answer(ok("late").body, until=waited), ok()]
    said = policy(None, manners=Manners(timeout=0.5, backoff=0.01)).complete(["x"])[0][0]  # while the first request has no answer yet
    waited.set()
    assert said.text == "end" and len(server.asked) >= 2


def test_nobody_there_is_said_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(PolicyError, match="nobody answers there"): policy(None, base_url="http://127.0.0.1:9/v1", manners=Manners(backoff=5)).complete(["x"])
    assert time.monotonic() - began < 4


def test_retry_after_holds_everybody_back(server: Server) -> None:
    server.script = [error(429, Retry_After="0.5"), ok()]
    policy(None, manners=Manners(concurrency=2, backoff=0.001)).complete([str(i) for i in range(6)])
    later = [t - server.times[0] for t in server.times]
    assert sum(t < 0.45 for t in later) <= 2 + 4 and len(server.asked) == 7
    alone = Server()
    alone.script = [error(429, Retry_After="0.5"), ok()]
    policy(None, base_url=alone.url, manners=Manners(backoff=0.001)).complete(["x"])
    assert alone.times[1] - alone.times[0] >= 0.5
    alone.close()


def test_nobody_waits_for_ever(server: Server) -> None:
    server.script = [error(429, Retry_After="3600")]
    with pytest.raises(PolicyError, match="asks to wait 3600 seconds"): policy(None).complete(["x"])


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_at_a_time_than_allowed(server: Server, limit: int) -> None:
    server.script = lambda _: Answer(ok().body, sleep=0.05)
    policy(None, manners=Manners(concurrency=limit)).complete([str(i) for i in range(4 * limit)])
    assert server.most == limit


def test_answers_keep_their_order(server: Server) -> None:
    def script(request: dict) -> Answer:
        text = request["messages"][0]["content"]
        return Answer(ok(text).body, sleep=0.01 * (9 - int(text)))
    server.script = script
    assert [a[0].text for a in policy(None).complete([str(i) for i in range(10)])] == [str(i) for i in range(10)]


# --- kept replies -------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_twice(server: Server, tmp_path: Path) -> None:
    first = policy(tmp_path).complete(["a", "b", "a"], n=2)
    assert len(server.asked) == 4 and policy(tmp_path).complete(["a", "b", "a"], n=2) == first and len(server.asked) == 4
    p = policy(tmp_path)
    p.complete(["a", "b"], n=3)
    assert len(server.asked) == 6 and p.endpoint.replayed.replies == 4
    for other in (dict(temperature=1.0), dict(max_tokens=8), dict(seed=1)):
        before = len(server.asked)
        policy(tmp_path).complete(["a"], **other)
        assert len(server.asked) == before + 1


def test_replay_needs_neither_server_nor_key(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = policy(tmp_path).complete(["a", "b"], n=2)
    server.close()
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"): monkeypatch.delenv(name)
    for replay in (True, False): assert policy(tmp_path, replay=replay).complete(["a", "b"], n=2) == first
    with pytest.raises(PolicyError, match="no reply of m is recorded for 1 of 2 asks"): policy(tmp_path, replay=True).complete(["a", "c"])
    with pytest.raises(PolicyError, match="needs a key in OPENAI_API_KEY"): policy(tmp_path).complete(["c"])


KILLED = """
import sys
from lake_engineer.endpoint import EndpointPolicy, Manners
print([a[0].text for a in EndpointPolicy("m", replies=sys.argv[1], manners=Manners(concurrency=2)).complete([str(i) for i in range(12)])])
"""


def test_a_killed_run_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    slow = lambda r: Answer(ok(r["messages"][0]["content"]).body, sleep=0.0 if len(server.asked) <= 5 else 60.0)
    server.script = slow
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ | {"OPENAI_BASE_URL": server.url}, stderr=subprocess.DEVNULL)
    while len(list(tmp_path.glob("m/*.json"))) < 5 and run.poll() is None: time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    recorded = {json.loads(p.read_text())["request"]["messages"][0]["content"] for p in tmp_path.glob("m/*.json")}
    assert len(recorded) == 5
    server.asked.clear()
    server.script = lambda r: ok(r["messages"][0]["content"])
    assert [a[0].text for a in policy(tmp_path).complete([str(i) for i in range(12)])] == [str(i) for i in range(12)]
    assert Counter(a["messages"][0]["content"] for a in server.asked) == Counter({str(i) for i in range(12)} - recorded)


def test_an_interrupt_keeps_what_came(server: Server, tmp_path: Path) -> None:
    later, main = threading.Event(), threading.main_thread().ident
    def script(request: dict) -> Answer:
        if len(server.asked) < 4: return ok()
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        return Answer(ok().body, until=later)
    server.script = script
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores interrupts
    try:
        with pytest.raises(KeyboardInterrupt): policy(tmp_path, manners=Manners(concurrency=1, timeout=30)).complete([str(i) for i in range(9)])
    finally: signal.signal(signal.SIGINT, before)
    assert len(list(tmp_path.glob("m/*.json"))) == 3
    later.set()
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("m/*.json"))) < 4 and time.monotonic() < deadline: time.sleep(0.02)
    assert len(list(tmp_path.glob("m/*.json"))) == len(server.asked) == 4  # the one under way was kept, and no other was sent


def test_a_damaged_reply_is_named(server: Server, tmp_path: Path) -> None:
    policy(tmp_path).complete(["a"])
    [path] = tmp_path.glob("m/*.json")
    path.write_text(path.read_text()[:100])
    with pytest.raises(PolicyError, match=f"{path.name} is damaged"): policy(tmp_path).complete(["a"])


# --- keys ---------------------------------------------------------------------------------------------------------------


def test_the_key_is_nowhere(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.script = [error(500, f"key {SECRET}"), ok(f"Your key is {SECRET}.", reasoning_content=f"{SECRET}?"), ok(f"{SECRET} again")]
    p = policy(tmp_path)
    said = p.complete(["a", "b"])
    server.script = [error(400, SECRET)]
    with pytest.raises(PolicyError) as e: policy(tmp_path).complete(["c"])
    files = [f.read_text() for f in tmp_path.rglob("*") if f.is_file()]
    shown = [str(e.value), repr(said), repr(p), caplog.text, *capfd.readouterr(), *files]
    assert len(files) == 2 and "[key]" in "".join(files) and not any(SECRET in text for text in shown)


def test_records_hold_no_key(server: Server, tmp_path: Path) -> None:
    "Not even those of an evaluation that broke off."
    from lake_engineer.evaluation import evaluate
    from lake_engineer.generator import heldout
    server.script = [ok(f"{SECRET} end"), ok(f"{SECRET}"), error(400, SECRET)]
    ask = lambda: evaluate(policy(tmp_path / "replies"), heldout("validation", (3,), 2, 3), batch_size=1, out=tmp_path / "r.jsonl", columns=dict(policy="m"))
    with pytest.raises(PolicyError): ask()
    files = [f.read_text() for f in tmp_path.rglob("*") if f.is_file()]
    server.script = [ok(SECRET)]
    records = ask()
    files += [f.read_text() for f in tmp_path.rglob("*") if f.is_file()] + [records.to_csv()]
    assert len(files) == 3 + 4 + 1 and all("[key]" in text for text in files) and not any(SECRET in text for text in files)


@pytest.mark.parametrize("around, words", [("{}\n", ""), (" {}\r\n", ""), ("{}\nx", "a character that no key has"), ("\u201c{}\u201d", "a character that no key has")])
def test_a_key_that_was_pasted_badly_is_mended_or_refused_and_never_shown(server: Server, monkeypatch: pytest.MonkeyPatch, around: str, words: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", around.format(SECRET))
    if words:
        with pytest.raises(PolicyError, match=words) as e: policy(None)
        assert SECRET not in str(e.value) and not server.asked
    else:
        policy(None).complete(["x"])
        assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


def test_an_address_may_hold_a_secret(server: Server) -> None:
    server.script = [error(404)]
    with pytest.raises(PolicyError) as e: policy(None, base_url=server.url.replace("//", "//user:hunter2@") + "?token=hunter2").complete(["x"])
    assert "hunter2" not in str(e.value) and "127.0.0.1" in str(e.value)


def test_a_server_of_ones_own_needs_no_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert policy(None).complete(["x"])[0][0].text == "end"


def test_without_the_client_one_sentence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(PolicyError, match=r"pip install 'lake_engineer\[openai\]'"): policy(None).complete(["x"])


# --- caps and costs -----------------------------------------------------------------------------------------------------


def metered(request: dict) -> Answer:
    "Uses all it may: a token for each byte of the prompt, and every token of the reply."
    prompt, reply = len(request["messages"][0]["content"]), request["max_tokens"]
    body = chat() | {"usage": dict(prompt_tokens=prompt, completion_tokens=reply, total_tokens=prompt + reply)}
    return Answer(json.dumps(body).encode(), sleep=0.01)


@pytest.mark.parametrize("cap", [Cap(requests=7), Cap(tokens=2500), Cap(cost=0.02)])
def test_a_cap_is_never_exceeded(server: Server, tmp_path: Path, cap: Cap) -> None:
    server.script, prices = metered, Prices(2.0, 20.0)
    p = policy(tmp_path, cap=cap, prices=prices)
    with pytest.raises(PolicyError, match=r"the cap of .* leaves no room"): p.complete(["x" * 20 + str(i) for i in range(60)], max_tokens=100)
    used = p.endpoint.usage
    assert used.requests == len(server.asked) == len(list(tmp_path.glob("m/*.json"))) > 5
    for limit, spent in ((cap.requests, used.requests), (cap.tokens, used.prompt_tokens + used.tokens), (cap.cost, prices.cost(used.prompt_tokens, used.tokens))):
        if limit is not None: assert spent <= limit < spent + (1 if limit == 7 else 1000)
    policy(tmp_path).complete(["x" * 20 + str(i) for i in range(60)], max_tokens=100)
    assert len(server.asked) == 60


def test_a_lost_request_may_be_on_the_bill(server: Server) -> None:
    server.script = [PASSING["cut_off"], ok()]
    aside = sum(most(policy(None).asks(["x"], max_tokens=100)[0].request))
    with pytest.raises(PolicyError, match="leaves no room"): policy(None, cap=Cap(tokens=2 * aside - 1)).complete(["x"], max_tokens=100)
    server.script, server.asked[:] = [error(500), ok()], []
    assert policy(None, cap=Cap(tokens=aside)).complete(["x"], max_tokens=100)


def test_an_unknown_price_is_an_unknown_cost(server: Server) -> None:
    p = policy(None, prices=Prices(prompt=1.0))
    assert estimate(p, p.asks(["x"])).cost is None and "nobody knows" in str(estimate(p, p.asks(["x"])))
    with pytest.raises(PolicyError, match="needs both prices"): policy(None, prices=Prices(prompt=1.0), cap=Cap(cost=1))
    with pytest.raises(PolicyError, match="max_tokens"): Endpoint("m", replies=None, cap=Cap(tokens=100)).ask([dict(role="user", content="x")])


def test_an_estimate_leaves_out_what_is_recorded(server: Server, tmp_path: Path) -> None:
    p = policy(tmp_path, prices=Prices(1e6, 1e6))
    p.complete(["one word"])
    e = estimate(p, p.asks(["one word", "two more words"]))
    assert (e.asks, e.recorded, e.prompt_tokens, e.tokens, e.cost) == (2, 1, 3, 64, 67) and count_tokens("(10,2)\n") == 7


# --- the same for everybody ---------------------------------------------------------------------------------------------


class Echo:
    name = "echo"
    def complete(self, prompts, n=1, temperature=0.0, max_tokens=64, seed=0):
        return [[Completion(f"{p} {temperature} {seed}"[:max_tokens], max_tokens, len(p) < max_tokens)] * n for p in prompts]


def test_serving_a_policy_and_asking_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "settings.ini").write_text("[a]\n")
    with serve(Echo(), key=SECRET) as url:
        for name, value in dict(OPENAI_BASE_URL=url, OPENAI_API_KEY=SECRET, LAKE_ENGINEER_ROOT=str(tmp_path)).items(): monkeypatch.setenv(name, value)
        [[a], [b]] = load_policy("openai:echo").complete(["x", "y" * 9], temperature=0.5, max_tokens=8)
        assert a.text == "x 0.5 " + a.text[6:] and a.finished and not b.finished and a.tokens == 8
        with pytest.raises(PolicyError, match="404"): load_policy("openai:other").complete(["x"])
        monkeypatch.setenv("OPENAI_API_KEY", "sk-another-key")
        with pytest.raises(PolicyError, match="401"): load_policy("openai:echo").complete(["z"])
    assert len(list(tmp_path.glob("cache/replies/echo/*.json"))) == 2


def test_an_endpoint_is_no_trainee() -> None:
    with pytest.raises(AttributeError, match="can be asked, not trained"): load_policy("openai:m").model
    with pytest.raises(PolicyError, match="name of a model"): load_policy("openai:")


def test_an_engineer_keeps_its_replies_too(server: Server, tmp_path: Path) -> None:
    from lake_engineer.engineer import sample_contexts
    context = sample_contexts(1)[0]
    sizes = {str(s): dict(data_ratio=1.0, hole_ratio=0.1, wait_ratio=0.5) for s in context.config.sizes}
    server.script = [ok(json.dumps(dict(rationale="Alike.", sizes=sizes)))]
    ask = lambda: make_engineer("openai:m", replies=tmp_path).propose(context).to_dict()
    first = ask()
    asked = len(server.asked)
    server.close()
    assert ask() == first and len(list(tmp_path.glob("m/*.json"))) == asked > 0


def test_replies_of_all_shapes() -> None:
    assert read_reply(chat()) == Reply("end", "", "stop", 10, 3, "m-2026")
    for bad in (None, [], "x", {}, dict(choices=[None], usage={}), dict(choices=[dict(message=None)], usage={}), chat() | dict(usage=dict(prompt_tokens=None, completion_tokens=1)),
                chat(content=["x"]), chat() | dict(choices="x")):
        with pytest.raises(ValueError): read_reply(bad)
