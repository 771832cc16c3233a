"""Prometheus' format, and percentiles equal to numpy's."""

import random
import re

import numpy as np

from llmcli.engine.texts import Usage
from llmcli.serve.link import EngineState
from llmcli.serve.service import Metrics


def engine() -> EngineState:
    usage = Usage(4, steps=3, row_steps=9, prompt_tokens_computed=50, prompt_tokens_shared=16)
    return EngineState(usage, num_waiting=2, num_pages=8, free_pages=5)


def values(text: str) -> dict[str, float]:
    """Every value by its name and labels; each line must have the format."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if comment := re.fullmatch(r"# (HELP|TYPE) (llmcli_\w+) (.+)", line):
            if comment[1] == "TYPE":
                assert comment[2] not in kinds
                kinds[comment[2]] = comment[3]
            continue
        sample = re.fullmatch(r'(llmcli_\w+)(\{\w+="[^"\\]*"(?:,\w+="[^"\\]*")*\})? (\S+)', line)
        assert sample, line
        name = re.sub(r"_(sum|count)$", "", sample[1])
        assert kinds[name if kinds.get(name) == "summary" else sample[1]] in ("counter", "gauge", "summary")
        assert f"{sample[1]}{sample[2] or ''}" not in found
        found[f"{sample[1]}{sample[2] or ''}"] = float(sample[3])
    return found


def test_counts() -> None:
    metrics = Metrics(new_tokens=70)
    metrics.requests.update([("/v1/completions", 200)] * 3 + [("other", 404)])
    found = values(metrics.text(engine(), 6))
    assert found['llmcli_requests_total{path="/v1/completions",status="200"}'] == 3
    assert found['llmcli_requests_total{path="other",status="404"}'] == 1
    expected = {"texts": 6, "texts_waiting": 2, "rows": 4, "pages": 8, "pages_free": 5, "new_tokens_total": 70}
    assert {name: found[f"llmcli_{name}"] for name in expected} == expected
    assert found["llmcli_request_seconds_count"] == 0


def test_percentiles_are_those_of_the_latest() -> None:
    rng = random.Random(1)
    for count in (1, 2, 7, 100, 5000):
        metrics = Metrics()
        seconds = [rng.expovariate(1) for _ in range(count)]
        for one in seconds:
            metrics.first_token_seconds.observe(one)
        found = values(metrics.text(engine(), 6))
        for quantile in (0.5, 0.9, 0.99):
            expected = np.quantile(seconds[-2048:], quantile, method="inverted_cdf")
            assert found[f'llmcli_first_token_seconds{{quantile="{quantile}"}}'] == expected
        assert found["llmcli_first_token_seconds_count"] == count
        assert abs(found["llmcli_first_token_seconds_sum"] - sum(seconds)) < 1e-9 * count
