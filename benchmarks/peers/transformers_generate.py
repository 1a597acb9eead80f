"""Peer: `generate` of transformers, all requests of a job as one static batch."""

import time

import protocol
import torch
import transformers_model
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Notes when each step's tokens came out; the first call hands in the prompt."""

    def __init__(self):
        self.times = []
        self._start = time.perf_counter()
        self._prompt = True

    def put(self, value):
        if not self._prompt:
            self.times.append(time.perf_counter() - self._start)
        self._prompt = False

    def end(self):
        pass


def main() -> None:
    order = protocol.start()
    model = transformers_model.load(order)
    protocol.say({"ready": {"engine": "transformers generate", **transformers_model.versions()}})
    for job in order["jobs"]:
        requests = job["requests"]
        longest = max(len(r["tokens"]) for r in requests)
        most = max(r["output_tokens"] for r in requests)
        rows = [[0] * (longest - len(r["tokens"])) + r["tokens"] for r in requests]
        mask = [[0] * (longest - len(r["tokens"])) + [1] * len(r["tokens"]) for r in requests]
        clock = Clock()
        with torch.inference_mode():
            out = model.generate(
                torch.tensor(rows, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=GenerationConfig(
                    max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0
                ),
                streamer=clock,
            )
        answers = out[:, longest:].tolist()
        lengths = [r["output_tokens"] for r in requests]
        protocol.job_done(
            job["name"],
            [clock.times[:n] for n in lengths],
            [ids[:n] for ids, n in zip(answers, lengths, strict=True)],
        )


if __name__ == "__main__":
    main()
