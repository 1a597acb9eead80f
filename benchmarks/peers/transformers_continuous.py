"""Peer: continuous batching of transformers (`generate_batch`'s manager, driven as it drives it)."""

import time

import protocol
import torch
import transformers_model
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE = 256  # its default


def main() -> None:
    order = protocol.start()
    model = transformers_model.load(order)
    protocol.say({"ready": {"engine": "transformers continuous batching", **transformers_model.versions()}})
    for job in order["jobs"]:
        requests = job["requests"]
        pages = sum(-(-(len(r["tokens"]) + r["output_tokens"]) // PAGE) for r in requests)
        generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # room for all at once, no hashing of prompts that nobody shares, no look for flash attention on a CPU
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages + 8,
            max_batch_tokens=2048,
            allow_block_sharing=bool(job.get("shared_prefix")),
            auto_switch_to_flash=model.device.type == "cuda",
        )
        results = {}
        manager_of = model.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=batching,
            warmup=model.device.type == "cuda",
        )
        with torch.inference_mode(), manager_of as manager:
            start = time.perf_counter()
            for number, request in enumerate(requests):
                manager.add_request(
                    request["tokens"],
                    request_id=str(number),
                    max_new_tokens=request["output_tokens"],
                    record_timestamps=True,
                    eos_token_id=-1,
                )
            while len(results) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise SystemExit(f"request {result.request_id}: {result.error}")
                    results[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise SystemExit("its generation thread ended before the requests did")
        in_order = [results[str(number)] for number in range(len(requests))]
        protocol.job_done(
            job["name"],
            [[t - start for t in result.timestamps] for result in in_order],
            [result.generated_tokens for result in in_order],
        )


if __name__ == "__main__":
    main()
