"""What a text answers to a question of mathematics, and whether that is the expected answer.

Texts are cut where they run on into a next question, as those of models without tuning do. Numbers are compared
exactly, as fractions; all else is left to `math-verify` (an extra): expressions, intervals, tuples, sets. What has more
digits than MOST_DIGITS is no number: Python itself refuses to read or write such ones.
"""

import re
from fractions import Fraction
from typing import Any

from fbt_jax.errors import UserError

MOST_DIGITS = 300
_NEXT = re.compile(r'\n[^\S\n]*(?:Question|Problem|Q)\s*:')
_GROUPED = r'\d{1,3}(?:,\d{3})+(?!\d)|(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)'
_DIGITS = rf'(?:{_GROUPED})(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+'
# A sign belongs to the number only where nothing is subtracted: not in 20-8. What is raised is an exponent: cm^2.
_NUMBER = re.compile(
    r'(?<![\w.^])(?<!\^{)(?P<sign>(?<![)\]}])-)?(?:\$(?P<minus>-)?)?(?:(?P<whole>\d+) +(?=\d+/\d))?'
    rf'(?P<value>{_DIGITS})(?:[eE](?P<power>[+-]?\d+)(?!\w))?(?:/(?P<below>\d+))?'
)
# Operations on a number, then what they come to: of `9*2 = 18` all but the ends.
_SUM = re.compile(r'(?:[ \t)]*(?:[+*/×÷·-]|\\(?:times|cdot|div)(?![a-z]))[ \t(]*\$?-?\d[\d,.]*)+[ \t)]*=[ \t]*')
_FRACTION = re.compile(r'(?<!\d)(?P<whole>\d*)\\[dt]?frac\s*(?:{\s*(-?[\d.,]+)\s*}|(\d))\s*(?:{\s*([\d.,]+)\s*}|(\d))')
_UNIT = re.compile(r'\\(?:text|mathrm|mbox)\s*{[^{}]*}(?:\^\s*(?:\d|{\s*\d\s*}))?|\^\s*{?\s*\\circ\s*}?|\\?%')
_MARK = re.compile(r'####([^\n]*)')
_HEADING = re.compile(r'[^\w\n]*(?:step|part|case|solution|method)\b', re.IGNORECASE)
_WORD = re.compile(r'[\s*]*[^\W\d_]')
_PHRASE = re.compile(r'answer\**(?: is|:)\s*:?[\s*]*', re.IGNORECASE)
_MATHS = re.compile(r'\$\$?((?:\\.|[^$\\])+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)', re.DOTALL)
_BOX = re.compile(r'(?P<box>\\(?:boxed|fbox)\s*{)|(?<!\\)[{}]')
_IN_BASE = re.compile(r'([0-9A-Za-z.,-]+?)_\s*{?\s*(?:\\text\s*{)?\s*(\d+)[\s}]*')
_LONG = re.compile(rf'\d{{{MOST_DIGITS + 1}}}')


def number_answer(text: str) -> str | None:
    """The number that `text` answers, in digits: after `####`, in a box, after 'the answer is', else the last one.

    None where there is no number at that place. A `####` before a word may be a heading of Markdown's.
    """
    text = _NEXT.split(text, maxsplit=1)[0]
    for mark in _MARK.finditer(text):
        number = _first(mark[1])
        if not _HEADING.match(mark[1]) and (number is not None or not _WORD.match(mark[1])):
            return number
    box = boxed(text)
    if box is not None:
        value = as_number(box)
        return _last(_UNIT.sub(' ', _plain(box))) if value is None else _digits(value)
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        told = _first(text[phrases[-1].end() :].split('\n\n', 1)[0])
        if told is not None:
            return told
    return _last(text)


def maths_answer(text: str) -> str | None:
    """The expression that `text` answers: in its last box, else after 'the answer is'; None where there is neither."""
    text = _NEXT.split(text, maxsplit=1)[0]
    box = boxed(text)
    if box is not None:
        return box.strip() or None
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    told = text[phrases[-1].end() :]
    inner = _MATHS.match(told)
    if inner:
        return inner[inner.lastindex or 0].strip() or None
    return told.split('\n', 1)[0].split('. ', 1)[0].strip(' \t*').removesuffix('.').strip(' \t*') or None


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed, braces within it balanced."""
    open_braces: list[int | None] = []  # where the content of a box begins; None: another brace
    last = (-1, -1)
    for brace in _BOX.finditer(text):
        if brace[0] != '}':
            open_braces.append(brace.end() if brace['box'] else None)
        elif open_braces and (start := open_braces.pop()) is not None:
            last = max(last, (start, brace.start()))
    return None if last[0] < 0 else text[slice(*last)]


def as_number(text: str) -> Fraction | None:
    """The value of a text that is a number and a unit in LaTeX at most; per cent and dollars count as units."""
    plain = _UNIT.sub(' ', _plain(text)).strip().removesuffix('.')
    match = _NUMBER.fullmatch(plain)
    return None if match is None else _value(match)


def same_answer(answer: str, expected: str) -> bool:
    """Whether both are equal as numbers or, by `math-verify`, as expressions.

    From the main thread only, for it sets alarms. Raises UserError where `math-verify` is needed and not installed.
    """
    if answer.strip() == expected.strip():
        return True
    one, other = as_number(answer), as_number(expected)
    if one is not None and other is not None:
        return one == other
    if _LONG.search(answer) or _LONG.search(expected):
        return False
    in_base, other_in_base = _IN_BASE.fullmatch(answer.strip()), _IN_BASE.fullmatch(expected.strip())
    if in_base or other_in_base:  # `math-verify` leaves bases out
        return in_base is not None and other_in_base is not None and in_base.groups() == other_in_base.groups()
    tool = require_math_verify()
    return bool(tool.verify(tool.parse(f'${expected}$'), tool.parse(f'${answer}$')))


def require_math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise UserError(f"{error}; math-verify is an extra: pip install 'fbt-jax[tasks]'") from None
    return math_verify


def _plain(text: str) -> str:
    """LaTeX's ways to write a number, undone."""
    text = text.replace('\u2212', '-').replace('\u2013', '-').replace('\\$', '$').replace('{,}', ',').replace('\\!', '')
    text = text.replace('\\left', '').replace('\\right', '')
    text = re.sub(r'\\[,;: ]|~', '', text)

    def fraction(match: re.Match[str]) -> str:
        whole, *parts = match.groups()
        above, below = (part.replace(',', '') for part in parts if part is not None)
        return f'{whole} {above}/{below}' if whole else f'{above}/{below}'

    return _FRACTION.sub(fraction, text)


def _value(match: re.Match[str]) -> Fraction | None:
    """None for a division by zero and where there are too many digits."""
    whole, digits, power, below = (match[name] or '' for name in ('whole', 'value', 'power', 'below'))
    if max(map(len, (whole, digits, power, below))) > MOST_DIGITS or abs(int(power or 0)) > MOST_DIGITS:
        return None
    if below and not int(below):
        return None
    value = int(whole or 0) + Fraction(re.sub('[, ]', '', digits)) * Fraction(10) ** int(power or 0) / int(below or 1)
    return -value if match['sign'] or match['minus'] else value


def _told(match: re.Match[str] | None) -> str | None:
    """None also for what is written like a number and is none."""
    value = None if match is None else _value(match)
    return None if value is None else _digits(value)


def _digits(value: Fraction) -> str:
    """Exact: decimals where they end, else a fraction."""
    below, powers = value.denominator, {2: 0, 5: 0}
    for prime in powers:
        while below % prime == 0:
            below, powers[prime] = below // prime, powers[prime] + 1
    if value.denominator == 1 or below != 1:
        return str(value)
    places = max(powers.values())
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, '0')
    return f'{"-" if value < 0 else ""}{digits[:-places]}.{digits[-places:]}'


def _first(text: str) -> str | None:
    """The first number, or what a sum that begins with it comes to: 18 of 9*2 = 18."""
    plain = _plain(text)
    found = _NUMBER.search(plain)
    while found and (rest := _SUM.match(plain, found.end())) and (result := _NUMBER.match(plain, rest.end())):
        found = result
    return _told(found)


def _last(text: str) -> str | None:
    return _told(next(reversed([*_NUMBER.finditer(_plain(text))]), None))
