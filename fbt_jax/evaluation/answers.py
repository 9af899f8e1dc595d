"""What a text answers to a question of mathematics, and whether that is the expected answer.

Texts are cut where they run on into a next question, as those of models without tuning do. Numbers are compared
exactly, as fractions; all else is left to `math-verify` (an extra): expressions, intervals, tuples, sets.
"""

import re
from fractions import Fraction
from typing import Any

from fbt_jax.errors import UserError

_NEXT = re.compile(r'\n\s*(?:Question|Problem|Q)\s*:')
_DIGITS = r'\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+'
# A sign belongs to the number only where nothing is subtracted: not in 20-8.
_NUMBER = re.compile(
    r'(?<![\w.])(?P<sign>(?<![)\]}])-)?(?:\$(?P<minus>-)?)?(?:(?P<whole>\d+) +(?=\d+/\d))?'
    rf'(?P<value>{_DIGITS})(?:/(?P<below>\d+))?'
)
_FRACTION = re.compile(r'(?P<whole>\d*)\\[dt]?frac\s*(?:{\s*(-?[\d.,]+)\s*}|(\d))\s*(?:{\s*([\d.,]+)\s*}|(\d))')
_UNIT = re.compile(r'\\(?:text|mathrm|mbox)\s*{[^{}]*}|\^\s*{?\s*\\circ\s*}?|\\?%')
_PHRASE = re.compile(r'answer(?: is|:)\s*:?', re.IGNORECASE)


def number_answer(text: str) -> str | None:
    """The number that `text` answers, in digits: after `####`, in a box, after 'the answer is', else the last one.

    None where there is no number at that place.
    """
    text = _NEXT.split(text, maxsplit=1)[0]
    if '####' in text:
        return _first(text.split('####', 1)[1].split('\n', 1)[0])
    box = boxed(text)
    if box is not None:
        return _last(box)
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
    told = text[phrases[-1].end() :].split('\n', 1)[0].split('. ', 1)[0].strip()
    inner = re.match(r'\$(.+?)\$', told)
    return (inner.group(1) if inner else told.removesuffix('.')).strip() or None


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed, braces within it balanced."""
    for start in reversed([match.end() for match in re.finditer(r'\\(?:boxed|fbox)\s*{', text)]):
        depth, place = 1, start
        while place < len(text) and depth:
            escaped = text[place - 1] == '\\'
            depth += 0 if escaped else (text[place] == '{') - (text[place] == '}')
            place += 1
        if not depth:
            return text[start : place - 1]
    return None


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
    text = text.replace('\u2212', '-').replace('\\$', '$').replace('{,}', ',').replace('\\!', '')
    text = text.replace('\\left', '').replace('\\right', '')
    text = re.sub(r'\\[,;: ]|~', '', text)

    def fraction(match: re.Match[str]) -> str:
        whole, *parts = match.groups()
        above, below = (part.replace(',', '') for part in parts if part is not None)
        return f'{whole} {above}/{below}' if whole else f'{above}/{below}'

    return _FRACTION.sub(fraction, text)


def _value(match: re.Match[str]) -> Fraction | None:
    below = int(match['below'] or 1)
    if below == 0:
        return None
    value = int(match['whole'] or 0) + Fraction(match['value'].replace(',', '')) / below
    return -value if match['sign'] or match['minus'] else value


def _numbers(text: str) -> list[str]:
    found = []
    for match in _NUMBER.finditer(_plain(text)):
        value = _value(match)
        if value is not None:
            found.append(_digits(value))
    return found


def _digits(value: Fraction) -> str:
    """Exact: decimals where they end, else a fraction."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    if value.denominator == 1 or below != 1:
        return str(value)
    places = next(n for n in range(1, 4000) if 10**n % value.denominator == 0)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, '0')
    return f'{"-" if value < 0 else ""}{digits[:-places]}.{digits[-places:]}'


def _first(text: str) -> str | None:
    return next(iter(_numbers(text)), None)


def _last(text: str) -> str | None:
    return next(iter(reversed(_numbers(text))), None)
