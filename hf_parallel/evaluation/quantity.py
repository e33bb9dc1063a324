r"""Numbers in final answers, however they are written: `\$1,000`, `2 1/2 hours`, `10 cm^2`, `**7**`, `USD 5`.

What follows a number is read piece by piece, without backtracking, as texts may be hostile.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_ANSWER = 1000
"""Maximum number of characters of a final answer. Longer ones are wrong."""
THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\[,!])(?=\d{3}(?!\d))")
"""A separator of thousands."""
_LETTER = r"[^\W\d_]"
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,3}|`+)(?=\S)(.+?)(?<=\S)\1(?![\w*])", re.DOTALL)
_WRAPPERS = re.compile(r"\\(?:text|textit|textbf|mathrm|mathbf|mathit|mbox|emph|operatorname)\s*\{([^{}]*)\}")
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*({_LETTER}[^{{}}]*)\}}\s*\{{\s*({_LETTER}[^{{}}]*)\}}")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b")
_SPACES = re.compile(r"\\[,;:! ]|~")
_SYMBOLS = {r"\cdot": "·", r"\mu": "μ", r"\Omega": "Ω", r"\%": "%", r"\$": "$", "−": "-"}
_NAME = re.compile(r"^(?:[A-Za-z]\w*\s*)?[=≈]\s*")
_CURRENCY_CODE = re.compile(r"^(?:[A-Z]{3}\s*|[A-Z]{1,3}\$\s*|Rs\.?\s*)(?=[-+\d.$])")
_VALUE = re.compile(
    r"""(?P<sign>[-+]?)\s*(?:
        \\[dt]?frac\s*\{(?P<above>-?\d+)\}\s*\{(?P<below>\d+)\}
      | (?P<left>\d+)/(?P<right>\d+)
      | (?P<whole>\d+)(?:
            \s+(?P<part>\d+)/(?P<parts>\d+)
          | \s*\\[dt]?frac\s*\{(?P<tex_part>\d+)\}\s*\{(?P<tex_parts>\d+)\}
        )
      | (?P<decimal>\d+(?:\.\d*)?|\.\d+)
    )""",
    re.VERBOSE,
)
_PIECE = re.compile(
    rf"""
    (?:{_LETTER}{{2,}}|[mshgdlLNJWVAKCF°%Ω])  # a word, or a unit of one letter
    (?:
        \s*\^\s*(?:\{{\s*-?\d{{1,2}}\s*\}}|-?\d{{1,2}})(?!\d)  # its exponent, as in cm^2
      | [23](?!\w|\.\d)  # the same, as in m2
      | \s*/\s*(?={_LETTER}|°)  # as in km/h
      | -(?={_LETTER})  # as in man-hours
    )*
  | \([^\d+*/^=\\(){{}}]*\)  # as in (USD)
  | [^\d+*/^=\\(){{}}-]  # as in a sentence
    """,
    re.VERBOSE,
)
_PER = re.compile(rf"\s*/\s*(?={_LETTER}{{2}})")
_SUPERSCRIPT = re.compile("[²³¹⁰⁴-⁹⁺⁻]")


def read_number(answer: str | None, units: bool = True) -> Fraction | None:
    r"""Return the value of an answer that is one number, or None.

    Reads decimals, `a/b`, `\frac{a}{b}` and a plus sign. Ignores currency signs, separators of thousands, `\text{}`,
    emphasis and a full stop. With `units`, it also reads mixed numbers such as `2 1/2`, and ignores units such as
    `km/h` and `cm^2`, words and a percent sign after the number, and before it a name with `=`, or the code of a
    currency.
    """
    if answer is None or len(answer) > MAX_ANSWER:
        return None
    plain = _plain(answer)
    if units:
        plain = _CURRENCY_CODE.sub("", _NAME.sub("", plain))
    plain = "".join(character for character in plain if unicodedata.category(character) != "Sc").strip()
    match = _VALUE.match(plain)
    if match is None:
        return None
    suffix = plain[match.end() :]
    if units:
        if not _is_unit(suffix):
            return None
    elif match["whole"] is not None or not re.fullmatch(r"\s*\.?\s*", suffix):
        return None
    return _value(match)


def _plain(answer: str) -> str:
    """Return an answer without Markdown and LaTeX around numbers and units."""
    text = _EMPHASIS.sub(r"\2", answer)
    text = _WRAPPERS.sub(r" \1 ", text)
    text = THOUSANDS.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _UNIT_FRACTION.sub(r" \1/\2 ", text)
    text = _DEGREE.sub("°", text)
    for written, symbol in _SYMBOLS.items():
        text = text.replace(written, symbol)
    return "".join(map(_fraction, text)).strip()


def _fraction(character: str) -> str:
    """Return `½` as ` 1/2`, and any other character unchanged."""
    if not unicodedata.decomposition(character).startswith("<fraction>"):
        return character
    return " " + unicodedata.normalize("NFKC", character).replace("\N{FRACTION SLASH}", "/")


def _is_unit(text: str) -> bool:
    """Return whether the text after a number does not change its value: words, and units with exponents."""
    if _SUPERSCRIPT.match(text):
        return False  # a power of the number
    start = _PER.match(text)
    position = 0 if start is None else start.end()
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None:
            return False
        position = piece.end()
    return True


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_VALUE`; None for a division by zero."""
    groups = match.groupdict()
    above = groups["above"] or groups["left"] or groups["part"] or groups["tex_part"]
    below = groups["below"] or groups["right"] or groups["parts"] or groups["tex_parts"]
    value = Fraction(groups["whole"] or groups["decimal"] or 0)
    if above is not None and below is not None:
        if not int(below):
            return None
        value += Fraction(int(above), int(below))
    return -value if groups["sign"] == "-" else value
