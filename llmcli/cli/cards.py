"""Usual cards by name, for `plan --card`: memory and bandwidth as their makers' data sheets have them."""

import re

from llmcli.errors import UsageError

# GiB, GB/s
CARDS = {
    "RTX 3060": (12, 360),
    "RTX 3060 Ti": (8, 448),
    "RTX 3070": (8, 448),
    "RTX 3070 Ti": (8, 608),
    "RTX 3080": (10, 760),
    "RTX 3080 Ti": (12, 912),
    "RTX 3090": (24, 936),
    "RTX 3090 Ti": (24, 1008),
    "RTX 4060": (8, 272),
    "RTX 4060 Ti": (8, 288),
    "RTX 4060 Ti 16GB": (16, 288),
    "RTX 4070": (12, 504),
    "RTX 4070 SUPER": (12, 504),
    "RTX 4070 Ti": (12, 504),
    "RTX 4070 Ti SUPER": (16, 672),
    "RTX 4080": (16, 716.8),
    "RTX 4080 SUPER": (16, 736),
    "RTX 4090": (24, 1008),
    "RTX 5060": (8, 448),
    "RTX 5060 Ti": (8, 448),
    "RTX 5060 Ti 16GB": (16, 448),
    "RTX 5070": (12, 672),
    "RTX 5070 Ti": (16, 896),
    "RTX 5080": (16, 960),
    "RTX 5090": (32, 1792),
    "RTX A4000": (16, 448),
    "RTX A5000": (24, 768),
    "RTX A6000": (48, 768),
    "RTX 6000 Ada": (48, 960),
    "RTX PRO 6000": (96, 1792),
    "A10": (24, 600),
    "A30": (24, 933),
    "A40": (48, 696),
    "A100 40GB": (40, 1555),
    "A100 80GB": (80, 2039),
    "L4": (24, 300),
    "L40": (48, 864),
    "L40S": (48, 864),
    "H100": (80, 3350),
    "H100 PCIe": (80, 2000),
    "H200": (140, 4800),
}
_MAKER = re.compile(r"nvidia|geforce|[^a-z0-9]")


def find_card(name: str) -> str:
    """The card of that name in `CARDS`; capitals, spaces, dashes and `RTX` do not matter. Raises: UsageError"""
    asked, known = _key(name), {_key(card): card for card in CARDS}
    if found := known.get(asked) or known.get(f"rtx{asked}"):
        return found
    near = [card for key, card in known.items() if asked and asked in key]
    meant = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(CARDS)};"
    raise UsageError(f"--card is {name!r:.80}; {meant} describe another card by --memory and --bandwidth")


def _key(name: str) -> str:
    return _MAKER.sub("", name.lower())
