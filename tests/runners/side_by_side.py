"""Many rows side by side, each compared with the row alone: steps that are queued ahead change nothing."""

from collections.abc import Sequence
from itertools import cycle, pairwise

import numpy as np
from row_steps import PROMPT, WARM, forget_prompts, run_prompt, same, single_steps, start

from llmcli.runners.base import Choose, Runner, Span, Step
from llmcli.sampling.params import Sampler

Told = tuple[list[int], bytes]  # a row's tokens, and the logits that the last one was chosen from


def texts(count: int) -> list[tuple[list[int], Sampler]]:
    """Prompts and samplers, no two alike."""
    return [
        ([*PROMPT[row % 90 : row % 90 + 9 + row % 41], row % 100], Sampler(WARM, seed=3, sample_index=row))
        for row in range(count)
    ]


def token_of(step: Step, place: int) -> int:
    """The last token that a span of a step has chosen."""
    chosen = step.choices()[place]
    assert isinstance(chosen, tuple), chosen
    return chosen[-1].token_id


def tell(runner: Runner, prompt: Sequence[int], sampler: Sampler, count: int) -> Told:
    """A text of a number of tokens in a row of its own, no step queued ahead."""
    row = runner.open(prompt, sampler)
    begin = runner.num_tokens(row)
    while (end := runner.span_end(row, len(prompt))) < len(prompt):
        runner.queue([Span(row, tuple(prompt[begin:end]), "none")])
        begin = end
    step = runner.queue([Span(row, tuple(prompt[begin:]))])
    token_ids, logits = [token_of(step, 0)], step.logits(0, len(prompt) - 1 - begin)
    while len(token_ids) < count:
        step = runner.queue([Span(row)])
        token_ids.append(token_of(step, 0))
        logits = step.logits(0)
    runner.close(row)
    return token_ids, logits.tobytes()


def check_rows_together(runner: Runner, num_rows: int, count: int) -> None:
    """A number of rows in every step, against each of them alone: the same tokens, and logits with the same bits."""
    alone = [tell(runner, prompt, sampler, count + 1) for prompt, sampler in texts(num_rows)]
    rows, together = [], []
    for prompt, sampler in texts(num_rows):
        rows.append(runner.open(prompt, sampler))
        begin = runner.num_tokens(rows[-1])
        together.append([token_of(runner.queue([Span(rows[-1], tuple(prompt[begin:]))]), 0)])
    for _ in range(count):
        step = runner.queue([Span(row) for row in rows])
        for place, token_ids in enumerate(together):
            token_ids.append(token_of(step, place))
    logits = [step.logits(place).tobytes() for place in range(num_rows)]
    for row in rows:
        runner.close(row)
    assert together == [token_ids for token_ids, _ in alone]
    assert logits == [bits for _, bits in alone]


def check_one_arithmetic(runner: Runner, counts: Sequence[int]) -> None:
    """A row's logits have the same bits among any of these numbers of rows, next to prompts, and as drafts; and after
    any cuts of its prompt. The runner has two rows more, of 160 tokens.
    """
    most = max(counts)
    prompts = [[row, *PROMPT[row % 90 : row % 90 + 2 + row % 5]] for row in range(most)]
    rows = [start(runner, prompt) for prompt in prompts]

    def logits_of(places: Sequence[int], *others: Span) -> list[bytes]:
        step = runner.queue([*(Span(rows[place], (PROMPT[place],)) for place in places), *others])
        found = [step.logits(index).tobytes() for index in range(len(places))]
        step.choices()
        for place in places:
            runner.keep(rows[place], len(prompts[place]))
        return found

    expected = logits_of(range(most))
    assert len(set(expected)) == most
    for count in counts:
        for places in (range(count), range(most - count, most)):
            assert logits_of(places) == [expected[place] for place in places], count
    for length in (5, 40, 70):
        prompt = PROMPT[most % 100 :][:length]
        other = runner.open(prompt)
        runner.keep(other, 0)
        assert logits_of([0, most - 1], Span(other, tuple(prompt), "none")) == [expected[0], expected[-1]], length
        runner.close(other)
    for row in rows:
        runner.close(row)
    check_drafts(runner)
    for length in (40, 150):
        results = set()
        for cut in (16, 10**9):
            row = runner.open(PROMPT[:length])
            runner.keep(row, 0)
            after = run_prompt(runner, row, PROMPT[:length], cut, "none").tobytes()
            results.add(after + single_steps(runner, row, [1]).tobytes())
            runner.close(row)
        assert len(results) == 1, length


def check_drafts(runner: Runner) -> None:
    """Tokens that are drafts among drafts of another row have the logits of single steps, bit for bit."""
    alone, *others = (start(runner, PROMPT[:7]) for _ in range(3))
    text, logits = [], []
    for _ in range(4):
        step = runner.queue([Span(alone)])
        logits.append(step.logits(0))
        text.append(token_of(step, 0))
    step = runner.queue([Span(row, drafts=tuple(text[:count])) for row, count in zip(others, (3, 1), strict=True)])
    assert same(step.logits(0), np.concatenate(logits))
    assert same(step.logits(1), np.concatenate(logits[:2]))
    step.choices()
    for row in (alone, *others):
        runner.close(row)


def check_comings_and_goings(runner: Runner, num_texts: int, count: int) -> None:
    """Rows join, pause and leave at random; each step is queued before the previous one is read."""
    stories = texts(num_texts)
    expected = [tell(runner, prompt, sampler, count)[0] for prompt, sampler in stories]
    rng = np.random.default_rng(6)
    waiting = list(range(num_texts))
    running: dict[int, int] = {}  # rows by text
    num_queued = [0] * num_texts
    told: list[list[int]] = [[] for _ in stories]
    unread: list[tuple[Step, list[int]]] = []

    def queue(spans: Sequence[Span], of_texts: list[int]) -> None:
        unread.append((runner.queue(spans), of_texts))
        for text in of_texts:
            num_queued[text] += 1
            if num_queued[text] == count:  # its place may be another text's before the last token has been read
                runner.close(running.pop(text))

    while waiting or running:
        if waiting and len(running) < runner.limits.num_rows and (not running or rng.random() < 0.6):
            text = waiting.pop(int(rng.integers(len(waiting))))
            prompt, sampler = stories[text]
            running[text] = runner.open(prompt, sampler)
            queue([Span(running[text], tuple(prompt[runner.num_tokens(running[text]) :]))], [text])
        turn = [text for text in running if rng.random() < 0.8]
        rng.shuffle(turn)
        if turn:
            queue([Span(running[text]) for text in turn], turn)
        while len(unread) > (1 if running else 0):
            step, of_texts = unread.pop(0)
            for place, text in enumerate(of_texts):
                told[text].append(token_of(step, place))
    assert told == expected


def check_changing_pages(runner: Runner, count: int) -> None:
    """A row whose pages are scattered and change in every step, since another row shares the one it writes into."""
    prompt, sampler = PROMPT[:41], Sampler(WARM, seed=9)
    expected = tell(runner, prompt, sampler, count)
    holders = [start(runner, PROMPT[number : number + 17], None) for number in range(20)]
    for _ in range(10):  # they leave holes
        runner.close(holders.pop(int(len(holders) / 2)))
    rng = np.random.default_rng(6)
    row = runner.open(prompt, sampler)
    steps = [runner.queue([Span(row, tuple(prompt[runner.num_tokens(row) :]))])]
    token_ids, tables = [], []
    while len(steps) < count:
        steps.append(runner.queue([Span(row)]))
        token_ids.append(token_of(steps[-2], 0))
        tables.append(list(runner._rows[row].pages))  # type: ignore[attr-defined]
        runner.close(holders.pop(int(rng.integers(len(holders)))))
        holders.append(runner.fork(row, runner.num_tokens(row)))
    token_ids.append(token_of(steps[-1], 0))
    assert (token_ids, steps[-1].logits(0).tobytes()) == expected
    assert all(table != following for table, following in pairwise(tables))
    assert any(table != sorted(table) for table in tables)
    for held in (row, *holders):
        runner.close(held)


def check_prompts_together(runner: Runner, lengths: Sequence[int], most: Sequence[int]) -> None:
    """Prompts of such lengths in the same steps until they end, against each alone: equal tokens and logits.

    In each step spans have about the next number of `most` tokens. Some prompts begin one step later, some two. Alone,
    all logits of a prompt could be read; here those after the last tokens.
    """
    prompts = [[row, *PROMPT[row : row + length - 1]] for row, length in enumerate(lengths)]
    samplers = [Sampler(WARM, seed=3, sample_index=row) for row in range(len(lengths))]
    alone = [tell(runner, prompt, sampler, 3) for prompt, sampler in zip(prompts, samplers, strict=True)]
    forget_prompts(runner)
    rows = [runner.open(prompt, sampler) for prompt, sampler in zip(prompts, samplers, strict=True)]
    assert [runner.num_tokens(row) for row in rows] == [0] * len(rows)
    token_ids: list[list[int]] = [[] for _ in rows]
    for turn, about in enumerate(cycle(most)):
        spans, places = [], []
        for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            begin = runner.num_tokens(row)
            if begin < len(prompt) and place % 3 <= turn:
                end = runner.span_end(row, about)
                is_last = end == len(prompt)
                choose: Choose = "last" if is_last else "none"
                spans.append(Span(row, tuple(prompt[begin:end]), choose, logits_from=end - begin - is_last))
                places.append(place)
        if not spans:
            break
        step = runner.queue(spans)
        for index, place in enumerate(places):
            if spans[index].choose == "last":
                token_ids[place].append(token_of(step, index))
    for _ in range(2):
        step = runner.queue([Span(row) for row in rows])
        for place, told in enumerate(token_ids):
            told.append(token_of(step, place))
    logits = [step.logits(place).tobytes() for place in range(len(rows))]
    for row in rows:
        runner.close(row)
    assert token_ids == [told for told, _ in alone]
    assert logits == [bits for _, bits in alone]
