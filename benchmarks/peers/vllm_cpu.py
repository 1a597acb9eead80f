"""Peer: vLLM for CPU, its engine driven in this process as its `LLM` drives it."""

import os
import time

import protocol


def main() -> None:
    order = protocol.start()
    threads = order["threads"]
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as our own engine: no process between us and it
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    # Left to itself it keeps one core free for its server; here there is none, and all engines get the same threads.
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    import torch
    import vllm

    longest = max(len(r["tokens"]) + r["output_tokens"] for job in order["jobs"] for r in job["requests"])
    llm = vllm.LLM(
        order["model"],
        dtype=order["dtype"],
        max_model_len=longest + 1,
        max_num_seqs=max(64, *(len(job["requests"]) for job in order["jobs"])),
        enable_prefix_caching=any(job.get("shared_prefix") for job in order["jobs"]),
        enforce_eager=bool(order["options"].get("vllm_eager")),
    )
    ready = {"engine": "vLLM for CPU", "version": vllm.__version__, "torch": str(torch.__version__)}
    protocol.say({"ready": ready | {"threads": torch.get_num_threads()}})
    for job in order["jobs"]:
        protocol.job_done(job["name"], *run(llm.llm_engine, job, vllm))


def run(engine, job: dict, vllm) -> tuple[list, list]:
    requests = job["requests"]
    times, tokens = [[] for _ in requests], [[] for _ in requests]
    start = time.perf_counter()
    for number, request in enumerate(requests):
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=request["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        prompt = vllm.inputs.TokensPrompt(prompt_token_ids=request["tokens"])
        engine.add_request(f"{job['name']}-{number}", prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            number = int(output.request_id.rpartition("-")[2])
            new = list(output.outputs[0].token_ids)
            tokens[number] += new
            times[number] += [now] * len(new)
    return times, tokens


if __name__ == "__main__":
    main()
