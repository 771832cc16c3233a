"""The official JSON Schema suite of draft 2020-12: nothing invalid fits an accepted schema.

Its files are in a folder `shared` next to the project. By default each fourth group is tried; `--schemas` of 2,225
and more tries all.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest
from held_walks import shared

from llmcli.errors import UsageError
from llmcli.schema.grammar import json_schema_grammar

NUM_TESTS = 2225
MOST_REFUSED = 263
# Valid values that are not written, as docs/guide/schema.md says, by file.
NOT_WRITTEN = {
    "const.json": 4, "enum.json": 4, "type.json": 1,  # 1.0 for 1
    "optional/bignum.json": 2, "optional/float-overflow.json": 1,  # beyond 2**53
    "contains.json": 5, "minContains.json": 1,  # the first items are those that fit
    "oneOf.json": 1,  # the opposite of an integer is no number
    "unevaluatedProperties.json": 1,  # a value that fits two schemas of anyOf
    "format.json": 18, "vocabulary.json": 1,  # formats and keywords are held, not annotations
    "optional/ecmascript-regex.json": 2, "optional/format/json-pointer.json": 1,  # control characters
    "optional/format/hostname.json": 15, "optional/format/idn-hostname.json": 23, "optional/format/idn-email.json": 8,
    "optional/format/iri.json": 9, "optional/format/iri-reference.json": 5, "optional/format/uri-template.json": 2,
}  # fmt: skip


def written_forms(value: Any) -> Iterator[Any]:
    """The value with its keys in other orders: some of them."""
    if isinstance(value, dict):
        members = [[(key, one) for one in itertools.islice(written_forms(inner), 6)] for key, inner in value.items()]
        for chosen in itertools.islice(itertools.product(*members), 24):
            yield from (dict(order) for order in itertools.islice(itertools.permutations(chosen), 24))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*([*itertools.islice(written_forms(inner), 6)] for inner in value)))
    else:
        yield value


def is_written(begin: llguidance.LLMatcher, value: Any) -> bool:
    for form in itertools.islice(written_forms(value), 24):
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(form, ensure_ascii=False, separators=separators).encode()
            matcher = begin.deep_copy()
            if matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting():
                return True
    return False


def find_groups() -> list[tuple[str, dict[str, Any]]]:
    folder = shared("suites/json-schema/draft2020-12")
    return [
        (path.relative_to(folder).as_posix(), group)
        for path in sorted(Path(folder).rglob("*.json"))
        for group in json.loads(path.read_text(encoding="utf-8"))
    ]


def test_the_suite(num_schemas: int) -> None:
    groups = find_groups()
    if not groups:
        pytest.skip("the suite is not in a folder `shared` next to the project")
    is_whole = num_schemas >= NUM_TESTS
    assert sum(len(group["tests"]) for _, group in groups) == NUM_TESTS
    messages: list[str] = []
    num_refused, not_written = 0, dict.fromkeys(NOT_WRITTEN, 0)
    for name, group in groups if is_whole else groups[::4]:
        try:
            grammar = json_schema_grammar("--schema", json.dumps(group["schema"]))
        except UsageError as error:
            messages.append(str(error))
            num_refused += len(group["tests"])
            continue
        begin = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)
        for test in group["tests"]:
            found = is_written(begin, test["data"])
            assert test["valid"] or not found, (name, group["description"], test["description"])
            if test["valid"] and not found:
                assert name in NOT_WRITTEN, (name, group["description"], test["description"])
                not_written[name] += 1
    print(f"the suite: {num_refused} tests are refused, {sum(not_written.values())} valid values are not written")
    assert num_refused <= MOST_REFUSED
    assert not [said for said in messages if "$defs/0" in said or "$defs/root" in said]
    assert all(count <= NOT_WRITTEN[name] for name, count in not_written.items()), not_written
