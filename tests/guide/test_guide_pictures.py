"""The pictures of the docs are current. If a test fails here: python -m scripts.pictures"""

import json
import re
from pathlib import Path

import pytest
from guide_pages import GUIDE, ROOT, indented_lines

from scripts import pictures
from scripts.pictures import PAGE, PAGE_RECORD, PROGRESS, TERMINAL_PICTURES, command_line, record_of, write_page

MAX_PAGE_BYTES = 300_000


@pytest.mark.parametrize("picture", [*TERMINAL_PICTURES, PROGRESS], ids=lambda picture: picture.name)
def test_pictures_of_the_terminal_are_current(picture: pictures.TerminalPicture) -> None:
    assert picture.path.read_text(encoding="utf-8") == picture.draw()


def test_the_picture_of_the_page_is_current(tmp_path: Path) -> None:
    assert json.loads(PAGE_RECORD.read_text(encoding="utf-8")) == record_of(write_page(tmp_path))
    assert PAGE.stat().st_size < MAX_PAGE_BYTES


def test_a_record_sees_text_style_program_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    monkeypatch.setattr(pictures, "PAGE", picture)

    def record(text: str = "fox 25.5%", gap: str = "0.5em", step: str = "1.5", image: bytes = b"one") -> dict[str, str]:
        style, script = f"<style>p {{ margin: {gap} }}</style>", f"<script>x = {step}</script>"
        page.write_text(f'{style}<p title="{text}">{{"p":{text[4:8]}}}</p>{script}')
        picture.write_bytes(image)
        return record_of(page)

    first = record()
    assert record("fox 25.4%") == first
    for other in (record("dog 25.5%"), record(gap="0.6em"), record(step="1.6")):
        assert other["page"] != first["page"]
    assert record(image=b"two")["picture"] != first["picture"]


def test_the_commands_in_the_pictures_are_those_of_the_pages() -> None:
    tutorial = (GUIDE / "tutorial.md").read_text(encoding="utf-8")
    for name, arguments in [(p.name, p.arguments) for p in TERMINAL_PICTURES] + [("page", pictures.PAGE_COMMAND)]:
        assert command_line(arguments) in indented_lines(tutorial)
        assert f"](pictures/{name}." in tutorial
    machines = (GUIDE / "many-machines.md").read_text(encoding="utf-8")
    assert command_line(PROGRESS.arguments) in indented_lines(machines)
    assert f"](pictures/{PROGRESS.name}." in machines
    readme = [line.partition("#")[0].strip() for line in indented_lines((ROOT / "README.md").read_text())]
    assert f"scripts/{command_line(pictures.PAGE_COMMAND)}" in readme


@pytest.mark.parametrize("path", sorted((GUIDE / "pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_hold_no_time_no_path_and_nothing_of_the_network(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('"http://www.w3.org/2000/svg"', "")
    for given in (PROGRESS.time_left, PROGRESS.arguments[-1]):
        text = text.replace(given, "")
    assert re.search(r"\d{4}-\d\d-\d\d|\d+:\d\d|/(home|root|tmp|work)/|https?://(?!www\.textualize)", text) is None
