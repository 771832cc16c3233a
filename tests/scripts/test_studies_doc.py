"""The pages of the studies: up to date, true to the command's output, and fit for any number of cards."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmcli.cli.kernel_report import as_json, finding_text, study_text
from llmcli.errors import UsageError
from llmcli.kernels.compiler import KernelResources
from llmcli.lab.compare import KernelUse, Measured, find_claims
from llmcli.lab.occupancy import occupancy
from llmcli.lab.study import Study, parse_study, study_names
from llmcli.lab.trial import Times
from scripts.studies_doc import articles, pages
from scripts.studies_doc.articles import article_text, read_articles
from scripts.studies_doc.figure import figure
from scripts.studies_doc.results import FOLDER, MEASURED, read_results

STUDY = parse_study(
    """\
// toy: out[i] = x[i], twice  Source: a book
// Problem: copy
// Sizes:   n 100, 1000
// Claim:   fast < slow: it does less_work
// Claim:   slow < fast at n 100: it is a *small* one
// Note:    A note.

// rung slow: one by one, in `a_loop`.
// launch: copy<<<1, 32>>>

// rung fast: four at_once | or so.
// launch: copy<<<n, 128>>>

// rung library: somebody else's.
// launch: cublas
""",
    "toy.cu",
)
MICROSECONDS = {("slow", 100): 2.0, ("fast", 100): 4.0, ("slow", 1000): 30.0, ("fast", 1000): 10.0}
MICROSECONDS |= {("library", 100): 5.0, ("library", 1000): 6.0}


def measured(rung: str, n: int, factor: float = 1.0) -> Measured:
    resources = KernelResources(
        registers=40, shared_bytes=100, stack_bytes=8, spill_store_bytes=12, spill_load_bytes=20
    )
    use = KernelUse("copy", n, 128, 356, resources, occupancy("sm_90", block=128, registers=40, shared_bytes=356))
    seconds = factor * MICROSECONDS[rung, n] / 1e6
    uses = () if rung == "library" else (use,)
    return Measured(rung, {"n": n, "stride": 1}, 8 * n, 3 * n, uses, Times(seconds, 0.9 * seconds))


def measured_all(factor: float = 1.0) -> list[Measured]:
    return [measured(rung.name, n, factor) for n in (100, 1000) for rung in STUDY.rungs]


def write(folder: Path, card: str, told: list[Measured], study: Study = STUDY) -> None:
    path = folder / card.lower().replace(" ", "-") / "toy.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(as_json(study, card, "sm_90", told, [])))


def test_the_pages_of_studies_are_up_to_date() -> None:
    written = pages.all_pages()
    for path, text in written.items():
        assert path.is_file(), f"{path.name}: run python -m scripts.studies_doc"
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m scripts.studies_doc"
    there = {*FOLDER.glob("*.md"), *FOLDER.glob("figures/*")}
    assert there == set(written), "a page or figure of a study that is no more"
    assert {path.stem for path in MEASURED.glob("*/*.json")} <= set(study_names())


def test_what_was_measured_reads_back_as_the_command_told_it(tmp_path: Path) -> None:
    told = measured_all()
    write(tmp_path, "Card", told)
    (results,) = read_results(STUDY, tmp_path)
    assert (results.card, results.arch, results.missing) == ("Card", "sm_90", ())
    assert study_text(STUDY, results.measured) == study_text(STUDY, told)
    sentences = [finding_text(one) for one in find_claims(STUDY, told)]
    assert [finding_text(one) for one in results.findings(STUDY)] == sentences
    assert sentences[0].startswith("fast is 3.00 times as fast as slow (10.00 us, 30.00 us)")
    page = pages.study_page(STUDY, [results])
    for line in study_text(STUDY, told).splitlines():
        assert line in page
    assert "at n 1,000, stride 1: it does less_work." in page
    assert "| `fast` | four at_once \\| or so. |" in page
    assert "it is a \\*small\\* one" in page
    assert "--show fast >mine.cu" in page  # the library's has no source
    assert "| `slow` | one by one, in `a_loop`. |" in page


def test_every_card_has_its_part(tmp_path: Path) -> None:
    write(tmp_path, "Slow Card", measured_all(2.0))
    write(tmp_path, "Fast Card", measured_all())
    results = read_results(STUDY, tmp_path)
    assert [one.card for one in results] == ["Fast Card", "Slow Card"]
    page = pages.study_page(STUDY, results)
    assert re.findall("^## (.+)$", page, re.MULTILINE) == [
        *("The ladder", "Fast Card (sm_90)", "Slow Card (sm_90)", "See it yourself")
    ]
    assert "(20.00 us, 60.00 us)" in page


def test_a_study_without_data_says_so(tmp_path: Path) -> None:
    assert read_results(STUDY, tmp_path) == []
    page = pages.study_page(STUDY, [])
    assert "not measured yet" in page
    assert "figures/" not in page
    assert "llmcli kernels compare toy" in page


def test_rungs_that_came_or_went_since_are_told_or_left_out(tmp_path: Path) -> None:
    gone = [replace(one, rung="gone") for one in measured_all() if one.rung == "slow"]
    write(tmp_path, "Card", [*gone, *(one for one in measured_all() if (one.rung, one.sizes["n"]) != ("slow", 100))])
    (results,) = read_results(STUDY, tmp_path)
    assert results.missing == ("slow",)
    assert {one.rung for one in results.measured} == {"fast", "library"}
    assert results.findings(STUDY) == []
    page = pages.study_page(STUDY, [results])
    assert "Not measured yet on this card: `slow`." in page
    assert "gone" not in page


def test_a_file_of_another_study_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "Card", measured_all(), replace(STUDY, name="other"))
    with pytest.raises(ValueError, match="of the study other"):
        read_results(STUDY, tmp_path)


def test_bars_are_as_long_as_their_times(tmp_path: Path) -> None:
    write(tmp_path, "A <card>", measured_all())
    write(tmp_path, "B", measured_all(2.0))
    root = ElementTree.fromstring(figure(STUDY, read_results(STUDY, tmp_path)))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [(one.get("fill"), float(one.get("width", "0"))) for one in root.iter(f"{svg}rect")]
    words = [one.text for one in root.iter(f"{svg}text")]
    assert words[:2] == ["A <card>, microseconds", "B, microseconds"]
    (first, _), (second, _) = bars[:2]  # of the legend
    assert words[2:] == [
        *("n 100", "slow", "2.00", "4.00", "fast", "4.00", "8.00", "library", "5.00", "10.00"),
        *("n 1,000", "slow", "30.00", "60.00", "fast", "10.00", "20.00", "library", "6.00", "12.00"),
    ]
    assert [color for color, _ in bars[2:]] == [first, second] * 6
    longest = max(width for _, width in bars)
    shares = [width / longest for _, width in bars[2:]]
    assert shares == pytest.approx([0.2, 0.4, 0.4, 0.8, 0.5, 1, 0.5, 1, 1 / 6, 1 / 3, 0.1, 0.2], abs=1e-3)
    right = max(float(one.get("x", "0")) + float(one.get("width", "0")) for one in root.iter(f"{svg}rect"))
    assert right + 50 < float(root.get("width", "0"))


def test_articles_ask_for_studies_that_exist() -> None:
    found = read_articles()
    assert len(found) == 5
    named = {name for article in found for claim in article.claims for name in claim.studies}
    assert named <= set(study_names())


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study of this file in place of the others, measured on one card."""
    monkeypatch.setattr(articles, "study_names", lambda: ["toy"])
    monkeypatch.setattr(articles, "load_study", lambda name: (STUDY, None))
    monkeypatch.setattr(articles, "read_results", lambda study: read_results(study, tmp_path / "measured"))
    write(tmp_path / "measured", "NVIDIA Card", measured_all())
    return tmp_path


def row(folder: Path, claim: str) -> str:
    path = folder / "articles.toml"
    path.write_text(f'[[articles]]\ntitle = "T"\nby = "B"\nabout = "A."\n[[articles.claims]]\nsays = "S"\n{claim}\n')
    (article,) = read_articles(path)
    return article_text(article).splitlines()[-1]


def test_a_claim_tells_what_came_out(toy: Path) -> None:
    told = row(toy, 'compare = ["toy: fast < slow", "toy: fast < slow at n 100"]\nnote = "N."')
    assert told == (
        "| S | [`llmcli kernels compare toy`](toy.md) | "
        "Card: **yes**, `fast` is 3.00 times as fast as `slow` (10.00 us, 30.00 us).<br>"
        "Card: **no**, `fast` is 0.50 times as fast as `slow` (4.00 us, 2.00 us at n 100).<br>N. |"
    )


@pytest.mark.parametrize(
    ("fact", "told"),
    [
        ("time of slow, fast at n 100", "time of `slow` 2.00 us, `fast` 4.00 us at n 100."),
        ("bandwidth of fast", "bandwidth of `fast` 0.8 GB/s."),
        ("arithmetic of slow at n 1000", "arithmetic of `slow` 0 GFLOP/s at n 1,000."),
        ("registers of slow", "registers of `slow` 40."),
        ("spills of slow", "spills of `slow` 32 bytes."),
        ("occupancy of slow", "occupancy of `slow` 75%."),
    ],
)
def test_facts_of_rungs(toy: Path, fact: str, told: str) -> None:
    assert row(toy, f'facts = ["toy: {fact}"]').endswith(f"| Card: {told} |")


def test_claims_that_nothing_shows_yet(toy: Path) -> None:
    assert row(toy, 'not_shown = "too hard."') == "| S | - | Not shown: too hard. |"
    assert row(toy, 'compare = ["other: a < b"]') == "| S | - | Not shown yet: there is no study other. |"
    (toy / "measured" / "nvidia-card" / "toy.json").unlink()
    assert row(toy, 'facts = ["toy: time of fast"]').endswith("| Not measured yet: toy. |")


@pytest.mark.parametrize(
    "claim",
    [
        'note = "neither shown nor not"',
        'not_shown = "because"\ncompare = ["toy: fast < slow"]',
        'compare = ["toy: fast > slow"]',
        'compare = ["toy: fast < nobody"]',
        'compare = ["toy: fast < slow at n 7"]',
        'facts = ["toy: colour of fast"]',
        'facts = ["toy: time of nobody"]',
    ],
)
def test_claims_that_make_no_sense_are_refused(toy: Path, claim: str) -> None:
    with pytest.raises((ValueError, UsageError)):
        row(toy, claim)
