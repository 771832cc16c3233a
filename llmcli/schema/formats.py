"""The values of JSON Schema's `format` that a text is held to, most of them by patterns of our own.

Of names in other scripts those in ASCII are written: they are valid, too.
"""

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_FRACTION = r"(?:\.[0-9]+)?"


def _leap_seconds() -> str:
    """Those are at 23:59:60 in UTC; offsets are whole hours, or end in 30 or 45 minutes."""
    ways = [rf"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"]
    for sign in (1, -1):
        for offset in range(15, 24 * 60, 15):
            if offset % 60 != 15:
                hour, minute = divmod((23 * 60 + 59 + sign * offset) % (24 * 60), 60)
                mark = "+" if sign > 0 else "-"
                ways.append(rf"{hour:02}:{minute:02}:60{_FRACTION}[{mark}]{offset // 60:02}:{offset % 60:02}")
    return "|".join(ways)


_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    rf"|{_leap_seconds()})"
)

# A label has no hyphens in places 3 and 4: it would be one of IDNA's, whose rules no pattern tells. A name has up to
# three labels of 63 letters or ten of 24, which leaves it below 254.
_L, _M = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(most: int) -> str:
    return f"{_L}(?:{_L}|{_M}{_L}|{_M}{_L}{_M}{{0,{most - 4}}}{_L}|{_M}-{_L}(?:{_M}{{0,{most - 5}}}{_L})?)?"


_HOST = rf"(?:{_label(63)}(?:\.{_label(63)}){{0,2}}|{_label(24)}(?:\.{_label(24)}){{0,9}})"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_H}:{_H}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{6}}{_LAST}",
        f"::(?:{_H}:){{5}}{_LAST}",
        *(f"(?:(?:{_H}:){{0,{before}}}{_H})?::(?:{_H}:){{{4 - before}}}{_LAST}" for before in range(5)),
        f"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
        f"(?:(?:{_H}:){{0,6}}{_H})?::",
    ]
)
_IPV6 = f"(?:{_IPV6})"

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
_LOCAL = rf'(?:{_ATOM}(?:\.{_ATOM})*|"(?:[ !#-\[\]-~]|\\[ -~])*")'
_EMAIL = rf"^{_LOCAL}@(?:{_HOST}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])$"

_CODED = "%[0-9A-Fa-f]{2}"
_SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@\-]|{_CODED})"
_FIRST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@\-]|{_CODED})"  # a colon would end a scheme
_AUTHORITY = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:\-]|{_CODED})*@)?(?:[A-Za-z0-9._~!$&'()*+,;=\-]|{_CODED})*(?::[0-9]*)?"
_REST = (
    rf"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
    rf"|{_FIRST}+(?:/{_SEGMENT}*)*)?(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?$"
)
_URI_REFERENCE = rf"^(?:[A-Za-z][A-Za-z0-9+.\-]*:)?{_REST}"
_VARIABLE = rf"(?:\w|{_CODED})(?:\.?(?:\w|{_CODED}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = rf"^(?:[!#$&(-;=?-Z\[\]_a-z~]|{_CODED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

# llguidance's own let every year have a 29 February, a minute 61 seconds, and a label begin with xn--.
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^{_IPV6}$",
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "iri": f"^[A-Za-z][A-Za-z0-9+.\\-]*:{_REST}",
    "uri-template": _URI_TEMPLATE,
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
FORMATS = (*PATTERNS, "duration", "uuid", "uri")
REFUSED_FORMATS = ("regex",)
# Of OpenAPI and its like; they say how a program keeps a value.
ANNOTATIONS = ("int32", "int64", "float", "double", "password", "binary", "byte")
