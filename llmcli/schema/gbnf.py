"""Grammars in llama.cpp's GBNF, in Lark's syntax. llguidance converts them; what it converts wrongly is refused."""

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from llmcli.errors import UsageError

_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.M)
# Strings, bracket expressions and comments.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.S)
_CODE = re.compile(r"\\(?:\\|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
# In what llguidance writes: a word of the lexer, its name, white space, quoted parts, and what is repeated.
_WORD = re.compile(r"^([A-Z][A-Z0-9_]*):((?:.*\n?)(?:[ \t]+\|.*\n?)*)", re.M)
_NAME = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
_SPACE = re.compile(r"\(?/\[(?: |\\[tnr])+\]/[*+]?\)?")
_QUOTED_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')
_REPEATED = re.compile(r"/(\[(?:[^\]\\]|\\.)*\])/([*+])")
_SET_OPERATION = re.compile(r"&&|--|~~")  # in Rust's regular expressions, not in GBNF


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF."""
    return _RULE.search(text) is not None


def gbnf_as_lark(name: str, text: str) -> str:
    """The same grammar in Lark's syntax. Raises: UsageError with the line"""
    bare = _QUOTED.sub(lambda match: "_" + "\n" * match[0].count("\n") + "_" * (len(match[0]) - 1), text)
    for found in _QUOTED.finditer(text):
        if found[0].startswith("[") and _SET_OPERATION.search(found[0]):
            raise _refused(name, text, found.start(), f"{found[0]:.40} is read in another way; write && -- ~~ apart")
    if (dot := bare.find(".")) >= 0:
        raise _refused(name, bare, dot, "the dot for any character is not supported; name the characters in brackets")
    spelt = _QUOTED.sub(lambda match: _CODE.sub(_character, match[0]), text)
    try:
        lark = gbnf_to_lark(spelt)
    except GbnfToLarkError as error:
        message = str(error).partition(" at line ")[0]
        raise _refused(name, spelt, error.pos.pos, f"{message[:1].lower()}{message[1:]}") from error
    except RecursionError:
        raise UsageError(f"{name}: parentheses are nested too deeply") from None
    except Exception as error:  # it raises nothing more exact for names of rules
        unknown = re.search(r"'([\w-]+)'", str(error))
        place = re.search(rf"(?<![\w-]){re.escape(unknown[1])}(?![\w-])", bare) if unknown else None
        raise _refused(name, text, place.start() if place else 0, str(error) or "it is not a grammar") from error
    return _with_free_space(lark.removeprefix("%llguidance {}\n"))


def _with_free_space(lark: str) -> str:
    """The same grammar with its white space in rules: words are as long as they can be, and would take line ends away.

    So are the rules that have such white space in them; what repeats there is a word.
    """
    words = {found[1]: found[2] for found in _WORD.finditer(lark)}
    free = {name for name, content in words.items() if _SPACE.fullmatch(content.strip())}
    num_before = -1
    while num_before < len(free):
        num_before = len(free)
        free |= {name for name, content in words.items() if free & set(_NAME.findall(_QUOTED_LARK.sub("", content)))}

    def as_rule(found: re.Match[str]) -> str:
        name, content = found[1], found[2]
        if name in free and not _SPACE.fullmatch(content.strip()):
            content = _REPEATED.sub(lambda part: f"/{part[1]}+/" + ("?" if part[2] == "*" else ""), content)
        return f"{name}:{content}"

    lark = _WORD.sub(as_rule, lark)
    return _lower(lark, free)


def _lower(lark: str, names: set[str]) -> str:
    """The grammar with these names as names of rules."""
    parts, last = list[str](), 0
    for quoted in [*_QUOTED_LARK.finditer(lark), None]:
        bare = lark[last : quoted.start() if quoted else len(lark)]
        parts.append(_NAME.sub(lambda name: f"free_{name[0].lower()}" if name[0] in names else name[0], bare))
        parts.append(quoted[0] if quoted else "")
        last = quoted.end() if quoted else last
    return "".join(parts)


def _character(code: re.Match[str]) -> str:
    """The character itself, which llguidance reads where it drops zeros of a code."""
    digits = code[1] or code[2] or code[3]
    if digits is None or int(digits, 16) < 0x80 or int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
        return code[0]
    return chr(int(digits, 16))


def _refused(name: str, text: str, place: int, what: str) -> UsageError:
    line = text.rstrip().count("\n", 0, place) + 1  # a place may be behind the last line
    return UsageError(f"{name}, line {line}: {what}")
