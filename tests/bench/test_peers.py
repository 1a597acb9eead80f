"""Turns of engines: fresh processes that may fail, hang or chatter; and one real round on a tiny model."""

import json

import pytest
from typer.testing import CliRunner

from backend.bench import peers, run
from backend.bench.cli import app
from backend.bench.peers import Peer, PeerFailed, take_turn
from tests.waiting import eventually

ORDER = {"threads": 1, "jobs": [{"name": "1", "requests": []}]}
CEILINGS = {"read": {"value": 1e10}, "matmul": {"value": 1e11}, "copy": {"value": 1e10}}
TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 500,
}  # fmt: skip
HEAD = f"import sys, os, time; sys.path.insert(0, {str(peers.SCRIPTS)!r}); import protocol\n"


def peer(tmp_path, body: str) -> Peer:
    script = tmp_path / "peer.py"
    script.write_text(HEAD + body)
    return Peer("the peer", str(script))


def test_a_turn_brings_back_every_job_whatever_libraries_print(tmp_path):
    body = """
order = protocol.start()
print("a library says hello"); os.system("echo so does its child")
protocol.say({"ready": {"threads": os.environ["OMP_NUM_THREADS"]}})
for job in order["jobs"]:
    protocol.job_done(job["name"], [[1.0, 2.0]], [[7, 8]], note="fine")
"""
    said = []
    turn = take_turn(peer(tmp_path, body), ORDER, timeout_s=60, said=said.append)
    assert turn.ready == {"threads": "1"}
    assert turn.jobs["1"]["requests"] == [{"times": [1.0, 2.0], "tokens": [7, 8]}]
    assert len(said) == 2


def test_a_peer_that_fails_is_told_by_its_last_words(tmp_path):
    with pytest.raises(PeerFailed, match=r"the peer: .*no such thing as a free lunch"):
        take_turn(
            peer(tmp_path, "protocol.start(); raise SystemExit('no such thing as a free lunch')"), ORDER, timeout_s=60
        )


def test_a_peer_that_dies_before_reading_its_order_is_told_too(tmp_path):
    with pytest.raises(PeerFailed, match="not installed"):
        take_turn(peer(tmp_path, "raise SystemExit('not installed')"), ORDER | {"pad": "x" * 10**6}, timeout_s=60)


def test_a_peer_that_leaves_a_job_out_has_failed(tmp_path):
    with pytest.raises(PeerFailed, match="status 0"):
        take_turn(peer(tmp_path, "protocol.start(); protocol.say({'ready': {}})"), ORDER, timeout_s=60)


def test_a_peer_that_hangs_is_ended_with_its_children(tmp_path):
    body = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
protocol.start(); time.sleep(600)
"""
    with pytest.raises(PeerFailed, match="not done after"):
        take_turn(peer(tmp_path, body), ORDER, timeout_s=3)
    import psutil

    child = int((tmp_path / "child").read_text())

    def gone() -> bool:
        try:
            return psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone, "the killed child's end")


def test_a_peer_whose_environment_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("KVSCOPE_VLLM_ENV", "/nowhere")
    with pytest.raises(PeerFailed, match=r"vLLM for CPU: not installed in /nowhere: `.*install.py vllm`"):
        take_turn(peers.PEERS["vllm"], ORDER, timeout_s=60)


def test_llama_cpp_is_left_out_where_no_file_has_its_weights(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setenv("KVSCOPE_LLAMACPP_ENV", str(tmp_path))
    order = ORDER | {"name": "my-model", "dtype": "float32", "options": {}}
    with pytest.raises(PeerFailed, match="no GGUF file of my-model is known"):
        take_turn(peers.PEERS["llamacpp"], order, timeout_s=60)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--peers", "nobody"], "nobody"),
        (["--peers", ","], "none"),
        (["--workloads", "decode,dance"], "dance"),
        (["--concurrency", "1,x"], "1,x"),
        (["--concurrency", "0"], "--concurrency"),
        (["--dtype", "float99"], "float99"),
        (["--switch", "block_size"], "block_size"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_the_command_names_what_is_wrong(words, named, monkeypatch):
    monkeypatch.setattr(run, "run", lambda *a: pytest.fail("must not start"))
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 2
    assert named in done.output


@pytest.mark.slow
def test_one_round_of_all_engines_on_a_tiny_model(tiny_model, tmp_path, monkeypatch):
    """The real runners, the real engine; only the roof is given, because it is measured elsewhere."""
    monkeypatch.setattr(run, "measure_roof", lambda settings: CEILINGS)
    monkeypatch.setitem(peers.PEERS, "absent", Peer("an engine that is not here", "absent.py"))
    report_file = tmp_path / "report.json"
    words = ["--model", str(tiny_model), "--peers", "kvscope,generate,continuous,absent", "--concurrency", "1,3"]
    words += [
        "--repeats",
        "1",
        "--threads",
        "1",
        "--input-tokens",
        "12",
        "--output-tokens",
        "6",
        "--out",
        str(report_file),
    ]
    words += ["--switch", "num_blocks=64", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    report = json.loads(report_file.read_text())
    assert json.loads(done.stdout) == report
    assert set(report["engines"]) == {"kvscope", "generate", "continuous"}
    assert "absent.py" in report["left_out"]["absent"]
    assert {e["threads"] for e in report["engines"].values()} == {1}
    results = {result["workload"]: result for result in report["results"]}
    assert {name: r["at_once"] for name, r in results.items()} == {"1": 1, "3": 3, "long": 1, "shared": 6, "prefill": 1}
    for result in results.values():
        for figures in result["engines"].values():
            assert figures["prompt_tok_s" if result["kind"] == "prefill" else "output_tok_s"]["median"] > 0
            assert figures["ttft_s"]["median"] > 0
            assert figures["share_of_limit"]["median"] > 0
    for at_once in (1, 3):
        result = results[str(at_once)]
        parts = result["engines"]["kvscope"]["decode_step"]
        assert 0 < parts["forward_s"] <= parts["step_s"]
        assert result["same_answers_as"]["generate"] == {
            "kvscope": [at_once, at_once],
            "continuous": [at_once, at_once],
        }


def wanted(folder) -> run.Settings:
    """Three rounds of two engines."""
    (folder / "config.json").write_text(json.dumps(TINY))
    return run.Settings(str(folder), "tiny", "float32", 1, ["one", "two"], [1], 3, 4, 2)


@pytest.mark.parametrize(
    "turns, rounds, left_out",
    [
        ("one, interrupt", 1, {"two"}),  # of a first round, those that came to their end
        ("one, two, one, interrupt", 1, set()),  # of a later one, nothing
        ("one, two, one, two, one, interrupt", 2, set()),
    ],
)
def test_an_interrupted_run_keeps_what_was_measured(tmp_path, monkeypatch, turns, rounds, left_out):
    turns = iter(turns.split(", "))
    answer = {"times": [0.1, 0.2], "tokens": [1, 2]}

    def turn(peer: Peer, order: dict, **_) -> peers.Turn:
        if next(turns) == "interrupt":
            raise KeyboardInterrupt
        jobs = {job["name"]: {"job": job["name"], "requests": [answer], "steps": []} for job in order["jobs"]}
        return peers.Turn(ready={"engine": peer.title}, jobs=jobs)

    monkeypatch.setattr(run, "measure_roof", lambda settings: CEILINGS)
    monkeypatch.setattr(run, "take_turn", turn)
    for name in ("one", "two"):
        monkeypatch.setitem(peers.PEERS, name, Peer(name, "none.py"))
    report = run.run(wanted(tmp_path), lambda line: None)
    assert len(report["ceilings"]) == rounds and set(report["left_out"]) == left_out
    assert set(report["engines"]) == {"one", "two"} - left_out


def test_an_interrupted_run_that_measured_nothing_ends(tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure_roof", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.run(wanted(tmp_path), lambda line: None)
