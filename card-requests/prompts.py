# ruff: noqa
"""First-token times of prompts of a model, with gemm_wide or as before: prompts.py FOLDER wide|before OUT.npy"""

import sys, time
from pathlib import Path
import numpy as np
from llmcli.checkpoint.model import open_model
from llmcli.runners.base import Span
from llmcli.runners.cuda import forward, load, workspace
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler

if sys.argv[2] == "before":
    forward.is_wide = workspace.is_wide = lambda *a: False
GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)
runner = load.load(open_model(Path(sys.argv[1])), max_seq_len=8448, num_rows=1)
rng = np.random.default_rng(0)


def first_token(prompt, sampler):
    row = runner.open(prompt, sampler)
    while True:
        begin = runner.num_tokens(row)
        end = runner.span_end(row, 10**9)
        is_last = end == len(prompt)
        step = runner.queue([Span(row, tuple(prompt[begin:end]), "last" if is_last and sampler else "none")])
        if is_last:
            logits = step.logits(0, end - begin - 1)[0] if sampler is None else step.choices()
            runner.close(row)
            return logits


for count in (65, 128, 300, 1024, 2048, 8000):
    times = []
    for i in range(7):
        prompt = rng.integers(10, 100000, count).tolist()
        t = time.perf_counter()
        first_token(prompt, GREEDY)
        times.append(time.perf_counter() - t)
    best = float(np.median(times[2:]))
    print(f"{sys.argv[2]:6} {count:5} tokens {1e3 * best:7.2f} ms {count / best:8.0f} tok/s", flush=True)
np.save(
    sys.argv[3],
    np.stack([first_token(rng.integers(10, 100000, count).tolist(), None) for count in (65, 130, 300, 2100)]),
)
