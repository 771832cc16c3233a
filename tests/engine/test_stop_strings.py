"""Stop strings against a search in the whole text, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from llmcli.engine.stop_strings import StopStrings

letters = st.text(alphabet="ab\n", max_size=12)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


@given(pieces=st.lists(letters, max_size=8), stop_strings=stops)
def test_shown_text_is_all_before_the_first_match(pieces: list[str], stop_strings: list[str]) -> None:
    matcher = StopStrings(stop_strings)
    text, is_stopped = "", False
    for piece in pieces:
        shown, is_stopped = matcher.push(piece)
        text += shown
        assert not any(stop in text for stop in stop_strings), "a stop string was shown"
        if is_stopped:
            break
    else:
        text += matcher.flush()
    whole = "".join(pieces)
    starts = [whole.find(stop) for stop in stop_strings if stop in whole]
    assert is_stopped == bool(starts)
    if starts:
        # The first match to be complete counts; one that begins earlier may complete later.
        assert any(whole[len(text) :].startswith(stop) for stop in stop_strings)
    else:
        assert text == whole


@given(text=letters, stop_strings=stops)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stop_strings: list[str]) -> None:
    matcher = StopStrings(stop_strings)
    shown, is_stopped = matcher.push(text)
    if not is_stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).push("abc") == ("abc", False)
