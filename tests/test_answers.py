"""What is read out of an answer, and what counts as the same: made-up texts, expected values by hand."""

import random
import subprocess
import sys
import time
from fractions import Fraction

import pytest
from helpers_e2e import ROOT

from fbt_jax.evaluation.answers import as_number, boxed, maths_answer, number_answer, same_answer


@pytest.mark.parametrize(
    ('text', 'number'),
    [
        ('She pays 3 * 4 = 12 dollars.\n#### 12', '12'),
        ('#### $1,234.00', '1234'),
        ('#### 1,234,567', '1234567'),
        ('#### 72,', '72'),
        ('#### -5', '-5'),
        ('#### -$5.50', '-5.5'),
        ('#### $-5', '-5'),
        ('#### \u22125', '-5'),
        ('#### \u20135', '-5'),
        ('#### 12 apples', '12'),
        ('#### 50%', '50'),
        ('#### \n\nnothing 7', None),
        ('#### I do not know', None),
        ('#### Step 1: add\n 3 + 4 = 7\n#### 7', '7'),
        ('#### Solution\nIt is 72.\n#### 72\nof 80', '72'),
        ('#### **Solution**\nIt is 72, of 80.\nThe answer is 72, of 80.', '72'),
        ('#### 9\n#### 10', '9'),
        ('#### 3 + 4 = 7', '7'),
        ('####7', '7'),
        ('#### $x = 5$, not 6', '5'),
        ('Answer: Janet makes 9*2 = 18 dollars, of 20.', '18'),
        ('The answer is 3 + 4 = 7.', '7'),
        ('The answer is 5 - 10 = -5', '-5'),
        (r'The answer is $3 \times 4 = 2 \cdot 6 = 12$, not 13', '12'),
        ('The answer is 10, where 4 = 2 + 2', '10'),
        ('The answer is 3 =', '3'),
        ('The answer is 72.\n48/2 = 24, 24 + 48 = 72', '72'),
        ('The answer is 18 = 9 * 2.', '18'),
        ('#### 18 = 9*2', '18'),
        ('The answer is 10 (= 5 + 5)', '10'),
        ('The answer is 3, 4 + 5 = 9', '3'),
        ('The answer is 5 = five of 20', '5'),
        ('The answer is (3 + 4) * $2 = $14 a day', '14'),
        ('#### Answer 72 (not 80)', '72'),
        ('#### about 72, of 80', '72'),
        ('#### x = 72. Check: 70', '72'),
        ('The answer is $29.00.', '29'),
        ('So the answer is 18.', '18'),
        ('The answer is: 18 eggs, out of 20.', '18'),
        ('The answer is 3, no. The answer is 4. 5 is wrong', '4'),
        ('Answer: 7', '7'),
        (r'It is \boxed{42}.', '42'),
        (r'So \boxed{\$1,200}', '1200'),
        (r'\boxed{\frac{1}{2}}', '0.5'),
        (r'\boxed{\dfrac{2}{3}}', '2/3'),
        (r'\boxed{10{,}080}', '10080'),
        ('16 - 3 = 13', '13'),
        ('20-8', '8'),
        ('pages 3\u20135', '5'),
        ('(2)-8', '8'),
        ('it fell to -8', '-8'),
        ('1/2', '0.5'),
        ('3 1/2 litres', '3.5'),
        ('about .25 of it', '0.25'),
        ('**13**', '13'),
        ('costs 5kg', '5'),
        ('H2O and x3', None),
        ('', None),
        ('no number here.', None),
        ('1/0', None),
        ('We have 9.\n\nQuestion: Bob has 5 hats. How many?\nAnswer: 5\n#### 5', '9'),
        ('#### 9\n\nQuestion: and 5?\n#### 5', '9'),
        ('It is 9.\nProblem:\nFind 4.', '9'),
        ('It is 3.14.', '3.14'),
        ('pages 3,4', '4'),
        ('12,34', '34'),
        ('12 345,', '12345'),
        ('It costs 10 000 dollars', '10000'),
        ('1 2 3 100 200', '200'),
        ('1e5', '100000'),
        ('#### 2.5E-1', '0.25'),
        (r'\boxed{12\text{ cm}^2}', '12'),
        (r'\boxed{12\text{ cm}^{2}}', '12'),
        ('12 cm^2', '12'),
        (r'The answer is $\$5$.', '5'),
        ('**Answer**: 7, of 9', '7'),
        ('The answer is **5**, of 9', '5'),
        ('The answer is\n\n\\[5\\]\n\nof 9', '5'),
        ('#### ' + '9' * 5000, None),
        ('18 and ' + '9' * 5000, None),
        ('0.' + '0' * 4100 + '1', None),
        ('1/' + '9' * 5000, None),
        ('1e' + '9' * 5000, None),
        ('1e99999', None),
        (r'\boxed{' + '9' * 5000 + '}', None),
        (r'\frac{1}{' + '9' * 5000 + '}', None),
        ('#### 1e-300', '0.' + '0' * 299 + '1'),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert number_answer(text) == number


def test_whatever_number_is_written_is_read() -> None:
    """In the notations of Python's own formatter."""
    rng = random.Random(0)
    for _ in range(500):
        value = rng.randint(-(10**9), 10**9)
        cents = Fraction(value, 100)
        for text, expected in ((f'{value}', value), (f'{value:,}', value), (f'${value / 100:,.2f}', cents)):
            found = number_answer(f'So we get 17 and then #### {text}.')
            assert found is not None
            assert Fraction(found) == expected
            assert as_number(text + '.') == expected


@pytest.mark.parametrize(
    ('text', 'answer'),
    [
        (r'so $\boxed{\frac{1}{2}}$.', r'\frac{1}{2}'),
        (r'\boxed{1} then \boxed{\left\{ x^{2} \right\}}', r'\left\{ x^{2} \right\}'),
        (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
        (r'\fbox{3}', '3'),
        (r'\boxed {3}', '3'),
        (r'\boxed{3} and \boxed{\frac{1}{', '3'),  # cut off
        (r'\boxed{\frac{1}{', None),
        (r'\boxed{}', None),
        ('Final Answer: The final answer is $[2,5)$. I hope it is correct.', '[2,5)'),
        ('The final answer is 3.5. I hope', '3.5'),
        ('The answer is x + 1.', 'x + 1'),
        (r'The answer is $\$5$.', r'\$5'),
        ('The answer is **5**.', '5'),
        ('**The answer is 5.**', '5'),
        ('**Answer**: 7', '7'),
        ('**Answer:** 7', '7'),
        ('The answer is\n\\[\n5\n\\]', '5'),
        (r'The answer is \(x\).', 'x'),
        ('I do not know.', None),
        ('', None),
        ('\\boxed{7}\n\nProblem:\nWhat is $1+1$?\n\nSolution: \\boxed{2}', '7'),
    ],
)
def test_the_expression_of_an_answer(text: str, answer: str | None) -> None:
    assert maths_answer(text) == answer


def test_boxes_within_boxes() -> None:
    for depth in range(1, 6):
        inner = '{' * depth + 'x' + '}' * depth
        assert boxed(rf'\boxed{{a{inner}b}} {{') == f'a{inner}b'
    assert boxed(r'\boxed{a}}') == 'a'
    assert boxed('boxed{a}') is None
    assert boxed(r'\boxed{\boxed{1}2}') == '1'


@pytest.mark.parametrize('text', [r'\boxed{' * 8000, r'\boxed{1' * 8000 + '}', '\n' * 80_000, '1' * 80_000])
def test_what_runs_on_and_on_is_read_in_time(text: str) -> None:
    start = time.process_time()
    number_answer(text)
    maths_answer(text)
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('1,234.00', Fraction(1234)),
        (r'\frac{1}{2}', Fraction(1, 2)),
        (r'\frac12', Fraction(1, 2)),
        (r'11\frac{1}{2}', Fraction(23, 2)),
        (r'1\frac{1}{2}', Fraction(3, 2)),
        (r'5\text{ cm}', Fraction(5)),
        (r'90^\circ', Fraction(90)),
        (r'50\%', Fraction(50)),
        (r'\$3.50', Fraction(7, 2)),
        ('-3', Fraction(-3)),
        ('5x', None),
        ('2,3', None),
        ('x', None),
        ('', None),
    ],
)
def test_what_is_a_number(text: str, value: Fraction | None) -> None:
    assert as_number(text) == value


@pytest.mark.parametrize(
    ('answer', 'expected', 'same'),
    [
        ('1234', '1,234', True),
        ('0.5', r'\frac{1}{2}', True),
        ('0.333', r'\frac{1}{3}', False),
        ('12 apples', '12', True),
        (r'5\text{ cm}', '5', True),
        ('50', r'50\%', True),
        ('x^2-1', '(x-1)(x+1)', True),
        ('x^2+1', '(x-1)(x+1)', False),
        ('5x', '5', False),
        ('[2, 5)', '[2,5)', True),
        ('(2, 5)', '[2,5)', False),
        (r'\left(3, \frac{\pi}{2}\right)', r'(3,\pi/2)', True),
        (r'\text{Evelyn}', 'Evelyn', True),
        ('p - q', 'p-q', True),
        ('p - q', 'q-p', False),
        (r'11\frac{1}{2}', '11.5', True),
        (r'12\text{ cm}^2', '12', True),
        ('4210_{7}', '4210_{5}', False),
        ('4210_7', '4210_{7}', True),
        ('4210', '4210_{7}', False),
        ('4210_7', '4210', False),
        (r'4210_{\text{7}}', '4210_{7}', True),
        ('9' * 5000, '9' * 5001, False),
        ('9' * 5000, 'x', False),
        ('x', '0.' + '0' * 4100 + '1', False),
    ],
)
def test_what_counts_as_the_same(answer: str, expected: str, same: bool) -> None:
    pytest.importorskip('math_verify', reason="math-verify is not here: pip install -e '.[tasks]'")
    assert same_answer(answer, expected) is same


def test_numbers_take_no_extra_and_without_it_it_is_named() -> None:
    code = (
        "import sys; sys.modules['math_verify'] = None; from fbt_jax.evaluation.answers import same_answer; "
        "print(same_answer('1,000', '1000.0'), same_answer('2', '3')); same_answer('x', 'y')"
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == 'True False\n'
    assert "math-verify is an extra: pip install 'fbt-jax[tasks]'" in done.stderr.splitlines()[-1]
