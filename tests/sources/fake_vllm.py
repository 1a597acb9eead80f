"""A stand-in for the `vllm` program: its flags, its log, its processes, and what of its HTTP the launch asks for.

    python tests/sources/fake_vllm.py serve MODEL --host 127.0.0.1 --port N …

MODEL ends in: good (default) | deaf (does not end when asked) | crash (while it loads) |
old (knows no --enable-mfu-metrics)
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOG = """\
Triton is installed, but doesn't include CPU backend. Disabling Triton.
(APIServer pid=1) INFO 11-29 19:39:01 [api_utils.py:347]   \x1b[1mversion 0.32.0\x1b[0m
(APIServer pid=1) INFO 11-29 19:39:35 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-29 19:40:15 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=3) INFO 11-29 19:40:27 [cpu_model_runner.py:68] Starting to load model m...
"""
SHARDS = "\rLoading safetensors checkpoint shards:  {0}% Completed | {1}/4 [00:01<00:00,  1.95s/it]"
REST = """
(Worker pid=3) INFO 11-29 19:40:29 [default_loader.py:501] Loading weights took 1.99 seconds
(EngineCore pid=2) INFO 11-29 19:40:30 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.07 s
INFO:     Application startup complete.
"""
CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"argv": sys.argv[1:]}).encode() if self.path == "/argv" else b""
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def main() -> None:
    model = sys.argv[2]
    if model.endswith("old"):
        print("vllm: error: unrecognized arguments: --enable-mfu-metrics", file=sys.stderr)
        sys.exit(2)
    if model.endswith("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(LOG, end="", flush=True)
    # a process that has left the group, as workers of a cluster do, and does not listen
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    print(f"child {child.pid}", flush=True)
    for shard in range(5):
        print(SHARDS.format(25 * shard, shard), end="", flush=True)
        if model.endswith("crash") and shard == 2:
            print("\n(EngineCore pid=2) ERROR 11-29 19:40:28 [core.py:9] torch.OutOfMemoryError: no memory for 8 GiB")
            print(
                "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.", flush=True
            )
            sys.exit(1)
        time.sleep(0.02)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(REST, end="", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
