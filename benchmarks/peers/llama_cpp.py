"""Peer: llama.cpp's own server (package xllamacpp), asked over HTTP on this machine as it is used.

Its weights are a GGUF file, `options["gguf"]`. Prompts go in as token ids; each token is taken when its line arrives.
"""

import http.client
import json
import threading
import time

import protocol
import xllamacpp


def main() -> None:
    order = protocol.start()
    jobs, options = order["jobs"], order["options"]
    most = max(len(job["requests"]) for job in jobs)
    tokens = max(sum(len(r["tokens"]) + r["output_tokens"] + 8 for r in job["requests"]) for job in jobs)
    params = xllamacpp.CommonParams()
    params.model.path = options["gguf"]
    params.n_parallel = most
    params.kv_unified = True  # one memory for all, as much as the largest job needs
    params.n_ctx = tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = order["threads"]
    params.n_threads_http = most + 2
    params.cache_ram_mib = 0
    params.port = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    address = server.listening_address.removeprefix("http://")
    ready = {"engine": f"llama.cpp, {options['number']} weights", "version": xllamacpp.__version__}
    protocol.say({"ready": ready | {"threads": order["threads"]}})
    for job in jobs:
        protocol.job_done(job["name"], *run(address, job))


def run(address: str, job: dict) -> tuple[list, list]:
    """All at once, each over a connection of its own."""
    requests = job["requests"]
    times, tokens, errors = [[] for _ in requests], [[] for _ in requests], []
    start = time.perf_counter()

    def ask(number: int) -> None:
        request = requests[number]
        body = {
            "prompt": request["tokens"],
            "n_predict": request["output_tokens"],
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": bool(job.get("shared_prefix")),
        }
        try:
            connection = http.client.HTTPConnection(address, timeout=600)
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(response.read(300).decode(errors="replace"))
            for line in response:
                if line.startswith(b"data: {"):
                    new = json.loads(line[6:]).get("tokens", [])
                    tokens[number] += new
                    times[number] += [time.perf_counter() - start] * len(new)
            connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            errors.append(f"request {number}: {error}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, request in enumerate(requests):
        if len(tokens[number]) != request["output_tokens"]:
            errors.append(f"request {number}: {len(tokens[number])} tokens instead of {request['output_tokens']}")
    if errors:
        raise SystemExit(errors[0])
    return times, tokens


if __name__ == "__main__":
    main()
