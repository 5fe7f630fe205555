import random
import re
from fractions import Fraction

from k2jax.data import mathematics


def test_the_same_for_a_seed_and_of_the_size_asked_for():
    a, b, other = (mathematics.documents(50_000, seed) for seed in (0, 0, 1))
    assert a == b != other
    assert 50_000 <= sum(len(text.encode()) for text in a) < 60_000
    assert len(set(a)) == len(a)


def test_every_printed_product_and_sum_is_right():
    text = "\n".join(mathematics.documents(300_000))
    found = 0
    for a, sign, b, c in re.findall(r"(?<![\d*/+^x-] )(?<![\d.-])(-?\d+) ([x*+]) (-?\d+) = (-?\d+)(?![\d./]| [*+x])", text):
        found += 1
        assert (int(a) + int(b) if sign == "+" else int(a) * int(b)) == int(c), (a, sign, b, c)
    assert found > 500


def test_every_topic_solves_its_exercise():
    rng = random.Random(0)
    for topic in mathematics.TOPICS:
        assert len({topic(rng) for _ in range(50)}) > 40, topic.__name__


def test_fractions():
    rng = random.Random(2)
    for _ in range(300):
        text = mathematics._fractions(rng)
        a, sign, b = re.match(r"Calculate (\S+) (.) (\S+)\. ", text).groups()
        x, y, answer = Fraction(a), Fraction(b), Fraction(re.search(r"answer is ([-\d/]+)", text)[1])
        assert answer == {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign], text


def test_linear_and_quadratic_equations_hold():
    rng = random.Random(1)
    for _ in range(300):
        text = mathematics._linear(rng)
        name = re.search(r"for (\w)\.", text)[1]
        x = re.search(rf": {name} = (-?\d+)\. Check", text)[1]
        equation = re.match(r"Solve (.*?) = (.*?) for", text)
        left, right = (re.sub(rf"(-?\d+){name}", rf"(\1)*({x})", side) for side in equation.groups())
        assert eval(left) == eval(right), text
        text = mathematics._quadratic(rng)
        left = re.match(r"Solve (.*?) = 0", text)[1].replace("^", "**")
        for root in re.findall(r"(?<=x = )-?\d+", text.split("that is")[1].split(".")[0]):
            assert eval(re.sub(r"(\d+)x", r"\1*(x)", left), {"x": int(root)}) == 0, text
