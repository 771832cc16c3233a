"""Loosens the wording of a plot: synonyms, contractions, who is named how, sentences joined or parted.

It works on the template text once, when the plots are loaded, so telling a story costs nothing more. A word on the
left side of `text/synonyms.txt` may be replaced by any on the right; each row holds only what fits wherever it is used.
"""

from __future__ import annotations

import re

from .grammar import capitalise
from .phrases import read_text

_PLAIN_VERBS = (
    r"\w+ed went ran took put held sat stood came got gave told made tried thought found felt saw heard began wrote "
    "fell drew hid rang rode kept let lay knew bent dug set threw left ate woke swung crept spoke"
)
_PLAIN_VERB = rf"(?:{'|'.join(_PLAIN_VERBS.split())})\b(?! not)"
_STARTS = re.compile(
    r'(^|(?<=[.!?] )|(?<=[.!?]" ))(\{He\}|\{hero\}) (?=\[?(?:' + _PLAIN_VERB + r"|was\b|had\b|did\b|could\b|would\b))"
)

# After a question or a cry this goes on with the sentence: `"Who is it?" {hero} asked`.
_SPEECH = re.compile(r"\[?(?:\{@(?:said|asked|cried)|(?:asked|said|cried|called|whispered|shouted|thought)\b)")

# A speaker is named with `said` or another word for it, wherever the plots say plainly `said`.
_SAID = re.compile(r"\bsaid\b(?= \{)|(?<=[,!?]\" \{\w\} )said\b(?=[.,])")
_TAGS = re.compile(r"(\{@(?:said|asked|cried)\}) \{(hero|pal|friend|elder)\}(?=[.,])")
_LATE_TAGS = re.compile(r"(\{(?:hero|pal|friend|elder|he)\} \{@(?:said|asked|cried)\})(?=[.,])")
# A name in narration may become the kind instead, except a name that is introduced or called.
_WHO = re.compile(r"(?<![\[|])\{(hero|friend)\}(?!,? \{a_|, and| the \{|[|\]])")
_NAMING = ("called ", "named ", "name was ", "it was ", "It was ", "is ", "word for ", "[", "|")
_ENDS = (". ", "! ", "? ", '." ', '!" ', '?" ', ".|] ", ".] ")
_ENDS += tuple(f"{{@{pool}}} " for pool in ("night", "worry", "sad", "glad", "out", "in", "try"))
_ENDS += ("{out2} ", "{try2} ", "{worry2} ")
# How it was said; where the sentence ends there, the speaker may also do something.
_MANNER, _LAST_MANNER = "[||| {@softly}]", "[|||| {@softly}| {@doing}]"


def _compile_synonyms() -> tuple[re.Pattern[str], list[str]]:
    patterns, choices = [], []
    rows = [line.rpartition(": ") for line in read_text("synonyms.txt").splitlines()]
    # Longer phrases first, so that `at first` is not read as something shorter.
    for left, _, right in sorted(rows, key=lambda row: -len(row[0])):
        patterns.append(f"((?:{left})(?![\\w'-]))")
        choices.append(right)
    return re.compile(r"\{[^}]*\}|(?<![\w'-])(?:" + "|".join(patterns) + ")", re.IGNORECASE), choices


_PATTERN, _CHOICES = _compile_synonyms()


# The second of two plain sentences may be joined to the first if it begins with one of these.
_JOINT = re.compile(
    r"(?<=[\w}\]])\. (?:(?P<he>\{He\}) (?=(?P<verb>" + _PLAIN_VERB + r")?)|(?P<link>But|And|So|Then) (?=[\[{a-z])"
    r"|(?P<other>\{hero\}|\{friend\}|\{elder\}|\{Pal\}|\{The_thing\}|\{His\}|\{The_helper\}|It|There|They|The|Nobody|Everybody"
    r"|Somebody|No one|One|Not|A|Behind|In|On|At) (?!is\b))"
)
_LINKS = {"But": ", but", "And": ", and", "So": ", so", "Then": ", and then"}
_SUBJECTS = ("{He}", "{hero}", "The {kind}")  # the same one must do both
_LONGEST_COMMENT = 9
_LONGEST = 22  # words of two sentences that are joined
_CHOICE = re.compile(r"\[([^\[\]|]*)[^\[\]]*\]")
_STARTS_ALONE = (
    "{@said",
    "{@asked",
    "{@cried",
    "said",
    "When",
    "If",
    "But when",
    "What",
    "How",
    "{@out",
    "{@night",
    "{@in",
)


def _is_open(text: str, at: int) -> bool:
    """Tell whether a position lies inside a bracket or inside speech."""
    return text.count("[", 0, at) > text.count("]", 0, at) or text.count('"', 0, at) % 2 == 1


def _one_wording(text: str) -> str:
    """A template with the first of each choice."""
    while _CHOICE.search(text):
        text = _CHOICE.sub(r"\1", text)
    return text


def _small(word: str) -> str:
    """A word or slot as it stands inside a sentence."""
    if word.startswith("{"):
        return "{" + word[1].lower() + word[2:]
    return word.lower()


def _join(text: str) -> str:
    """Let plain neighbouring sentences be joined now and then."""
    parts, done = [], 0
    last_joint = -1
    for match in _JOINT.finditer(text):
        start = max(text.rfind(stop, 0, match.start()) for stop in (". ", "! ", "? ", '" ')) + 1
        end = min((at for stop in ".!?" if (at := text.find(stop, match.end())) >= 0), default=len(text))
        before, after = _one_wording(text[max(start, 0) : match.start()]), _one_wording(text[match.end() : end])
        is_plain = not any(mark in before + after for mark in '":;') and ", and " not in before
        if (
            _is_open(text, match.start())
            or not is_plain
            or not before.strip()
            or start <= last_joint
            or len(before.split()) + len(after.split()) > _LONGEST
            or before.lstrip().startswith(_STARTS_ALONE)
        ):
            continue
        if link := match["link"]:
            joints = [f". {link} ", f"{_LINKS[link]} "]
        else:
            word = match["he"] or match["other"]
            joints = [f". {word} ", f", and {_small(word)} "]
            if match["verb"] and before.lstrip().startswith(_SUBJECTS) and " and " not in before and "," not in before:
                joints += [" and "]
        parts += [text[done : match.start()], "[" + "|".join(joints) + "]"]
        done = match.end()
        last_joint = match.start()
    return "".join([*parts, text[done:]])


# What only comments on what happened may be left out.
_COMMENT = re.compile(
    r"(?<=[.!?]) ((?:It was|It had|It looked|It felt|That was|And so|But it|Nobody|No one|There was no|His|\{His\}) "
    r'[^.!?"]*\.)(?= [A-Z{\[]|$)'
)
_COMMON_SLOTS = frozenset(
    ("he", "him", "his", "himself", "hero", "the_thing", "friend", "pal", "elder", "hands", "feet")
)


def _leave_out(text: str) -> str:
    """Let short comments be left out now and then, unless they say what may be asked for."""

    def replace(match: re.Match[str]) -> str:
        slots = {slot[0].lower() + slot[1:] for slot in re.findall(r"\{(\w+)\}", match[1])}
        is_short = len(_one_wording(match[1]).split()) <= _LONGEST_COMMENT
        is_open = _is_open(match.string, match.start()) or match[1].count("[") != match[1].count("]")
        if is_open or "{@" in match[1] or not is_short or slots - _COMMON_SLOTS:
            return match[0]
        return f" [{match[1]}|{match[1]}|]"

    return _COMMENT.sub(replace, text)


def _is_narration(text: str, at: int) -> bool:
    """Tell whether a position lies outside speech."""
    return text.count('"', 0, at) % 2 == 0


def loosen(text: str) -> str:
    """Turn one telling of a beat into a template with many more wordings."""

    def replace_word(match: re.Match[str]) -> str:
        word = match.group()
        if word.startswith("{"):
            return word
        right = _CHOICES[match.lastindex - 1]
        if "{" in right and not text[: match.start()].rstrip().lower().endswith(("{he}", "{hero}")):
            right = "|".join(choice for choice in right.split("|") if "{" not in choice)
        if word[0].isupper() and word[:2] != "I ":
            right = "|".join(capitalise(choice) for choice in right.split("|"))
        elif not word[0].isupper():
            right = "|".join(choice[0].lower() + choice[1:] for choice in right.split("|"))
        return f"[{right}]"

    def replace_tag(match: re.Match[str]) -> str:
        if match[1] == "{@cried}":
            return match.group()
        who = "[{hero}|{hero}|{hero}|the {kin}]" if match[2] == "hero" else f"{{{match[2]}}}"
        return f"[{match[1]} {who}|{match[1]} {who}|{who} {match[1]}]{manner_at(match)}"

    def manner_at(match: re.Match[str]) -> str:
        after = match.string[match.end() :]
        return "" if after.startswith(", who") else _LAST_MANNER if after.startswith(".") else _MANNER

    def goes_on(match: re.Match[str]) -> bool:
        """Tell whether the match follows a question or a cry and says who spoke."""
        is_behind = match.string[: match.start()].rstrip().endswith(('?"', '!"'))
        return is_behind and bool(_SPEECH.match(match.string[match.end() :].lstrip()))

    def replace_start(match: re.Match[str]) -> str:
        if not _is_narration(match.string, match.start()) or goes_on(match):
            return match.group()
        if match.group(2) == "{He}":
            return "[{He}|{He}|{He}|{He}|{hero}|The {kin}] "
        return "[{hero}|{hero}|{hero}|The {kin}] "

    def name_or_kind(match: re.Match[str]) -> str:
        if not _is_narration(match.string, match.start()) or match.string[: match.start()].endswith(_NAMING):
            return match.group()
        is_start = not match.string[: match.start()].strip() or match.string[: match.start()].endswith(_ENDS)
        is_start = is_start and not goes_on(match)
        kind = f"{'The' if is_start else 'the'} {{{'kin' if match[1] == 'hero' else 'friendkin'}}}"
        return f"[{match[0]}|{match[0]}|{kind}]" if match[1] == "hero" else f"[{match[0]}|{match[0]}|{match[0]}|{kind}]"

    text = _join(_leave_out(text))
    text = _SAID.sub("{@said}", text)
    text = _TAGS.sub(replace_tag, _LATE_TAGS.sub(lambda match: match[1] + manner_at(match), text))
    text = _STARTS.sub(replace_start, text)
    text = _WHO.sub(name_or_kind, text)
    return _PATTERN.sub(replace_word, text)
