"""Seeded mathematics with worked solutions: the `math` domain of the builtin corpus."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

# People, things and places of the word problems.
NAMES = ("Ada", "Bela", "Chen", "Dara", "Emil", "Fatima", "Goro", "Hana", "Ivan", "Jun", "Kofi", "Lena", "Mira", "Nils", "Olga")
NAMES += ("Pablo", "Quinn", "Rosa", "Sami", "Tara", "Umar", "Vera", "Wen", "Xenia", "Yara", "Zeno", "Amara", "Boris", "Carla")
NAMES += ("Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
THINGS = ("apples", "books", "candles", "coins", "cups", "eggs", "flowers", "keys", "lemons", "maps", "marbles", "nails")
THINGS += ("oranges", "pages", "pears", "pencils", "plates", "ropes", "seeds", "shells", "stamps", "stones", "tickets", "tiles")
PLACES = ("the market", "the harbour", "her aunt", "the school", "the library", "a neighbour", "the old mill", "the station")
PLACES += ("the workshop", "the fair")


def documents(total_bytes: int, seed: int = 0) -> list[str]:
    """Documents of three to nine exercises with solutions, the same for one seed on every machine.

    Arithmetic, algebra, number theory, fractions, sequences, counting, statistics, calculus of polynomials and word
    problems; every answer is computed, none is wrong. Stops at the first document that passes `total_bytes`.
    """
    rng, made, size = random.Random(seed), [], 0
    while size < total_bytes:
        exercises = [rng.choice(TOPICS)(rng) for _ in range(rng.randint(3, 9))]
        if rng.random() < 0.5:
            text = "\n\n".join(exercises)
        else:
            text = "\n\n".join(f"Exercise {i}. {exercise}" for i, exercise in enumerate(exercises, rng.randint(1, 40)))
        made.append(text)
        size += len(text.encode())
    return made


def _addition(rng: random.Random) -> str:
    digits = rng.randint(2, 9)
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    steps, carry = [], 0
    for place in range(digits):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x} + {y}" + (" + 1" if carry else "") + f" = {total}, write {total % 10}")
        carry = total // 10
    return f"Add {a} and {b}.\nFrom the right: {'; '.join(steps)}{', carry 1' if carry else ''}.\n{a} + {b} = {a + b}"


def _multiplication(rng: random.Random) -> str:
    a, b = rng.randrange(12, 10 ** rng.randint(2, 6)), rng.randrange(12, 10 ** rng.randint(2, 4))
    parts = [
        (int(digit) * 10**place, a * int(digit) * 10**place) for place, digit in enumerate(reversed(str(b))) if digit != "0"
    ]
    rows = "\n".join(f"{a} x {factor} = {product}" for factor, product in parts)
    return f"Compute {a} x {b}.\n{rows}\nThe sum of the rows is {a * b}, so {a} x {b} = {a * b}."


def _division(rng: random.Random) -> str:
    a, b = rng.randrange(100, 10 ** rng.randint(3, 8)), rng.randrange(2, 10 ** rng.randint(1, 3))
    q, r = divmod(a, b)
    ending = "without remainder" if r == 0 else f"with remainder {r}"
    return f"Divide {a} by {b}. {b} goes {q} times into {a}, {ending}, because {b} x {q} = {b * q} and {a} - {b * q} = {r}."


def _euclid(rng: random.Random) -> str:
    common = rng.randint(1, 30)
    a, b = common * rng.randint(20, 900), common * rng.randint(5, 300)
    lines, x, y = [], a, b
    while y:
        lines.append(f"{x} = {x // y} * {y} + {x % y}")
        x, y = y, x % y
    return (
        f"Find the greatest common divisor of {a} and {b} by Euclid's algorithm.\n"
        + "\n".join(lines)
        + f"\nThe last remainder that is not 0 is {x}, so gcd({a}, {b}) = {x} and lcm({a}, {b}) = {a * b // x}."
    )


def _factor(n: int) -> list[int]:
    found, p = [], 2
    while p * p <= n:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return [*found, n] if n > 1 else found


def _primes(rng: random.Random) -> str:
    n = rng.randint(30, 99_999)
    factors = _factor(n)
    if len(factors) == 1:
        return f"Is {n} a prime number? No prime up to {math.isqrt(n)} divides {n}, so {n} is prime."
    divisors = math.prod(factors.count(p) + 1 for p in set(factors))
    powers = " * ".join(f"{p}^{factors.count(p)}" if factors.count(p) > 1 else str(p) for p in sorted(set(factors)))
    return (
        f"Write {n} as a product of primes: {n} = {powers}. "
        f"It has {divisors} divisors and its smallest prime factor is {factors[0]}."
    )


def _linear(rng: random.Random) -> str:
    x, a, c = rng.randint(-30, 60), rng.choice([2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15]), rng.randint(-9, 9)
    b = rng.randint(-99, 99)
    if a == c:
        c += 1
    name, right = rng.choice("xyztn"), (a - c) * x + b
    return (
        f"Solve {a}{name} {_signed(b)} = {c}{name} {_signed(right)} for {name}.\n"
        f"Bring the terms in {name} to the left: {a - c}{name} = {right - b}.\n"
        f"Divide by {a - c}: {name} = {x}. Check: {a} * {x} {_signed(b)} = {a * x + b}."
    )


def _signed(n: int) -> str:
    return f"- {-n}" if n < 0 else f"+ {n}"


def _quadratic(rng: random.Random) -> str:
    p, q = rng.randint(-15, 15), rng.randint(-15, 15)
    b, c = -(p + q), p * q
    roots = f"the double root x = {p}" if p == q else f"x = {min(p, q)} and x = {max(p, q)}"
    return (
        f"Solve x^2 {_signed(b)}x {_signed(c)} = 0.\n"
        f"The discriminant is ({b})^2 - 4 * ({c}) = {b * b - 4 * c} = {abs(p - q)}^2, "
        f"so x = ({-b} ± {abs(p - q)}) / 2, that is {roots}.\n"
        f"Indeed (x {_signed(-p)})(x {_signed(-q)}) = x^2 {_signed(b)}x {_signed(c)}."
    )


def _system(rng: random.Random) -> str:
    x, y = rng.randint(-12, 12), rng.randint(-12, 12)
    a, b, c, d = (rng.choice([-5, -4, -3, -2, 2, 3, 4, 5, 7]) for _ in range(4))
    if a * d == b * c:
        d += 1 if d != -1 else 2
    if a * d == b * c:
        c += 1
    det, e, f = a * d - b * c, a * x + b * y, c * x + d * y
    return (
        f"Solve the system\n  {a}x {_signed(b)}y = {e}\n  {c}x {_signed(d)}y = {f}\n"
        f"The determinant is {a} * {d} - {b} * {c} = {det}. "
        f"By Cramer's rule x = ({e} * {d} - {b} * {f}) / {det} = {e * d - b * f} / {det} = {x}"
        f" and y = ({a} * {f} - {e} * {c}) / {det} = {a * f - e * c} / {det} = {y}."
    )


def _fractions(rng: random.Random) -> str:
    a, b = (Fraction(rng.randint(1, 20), rng.randint(2, 24)) for _ in range(2))
    sign = rng.choice("+-*/")
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]
    if sign in "+-":
        common = math.lcm(a.denominator, b.denominator)
        x, y = a.numerator * common // a.denominator, b.numerator * common // b.denominator
        how = f"Over the common denominator {common} this is {x}/{common} {sign} {y}/{common}"
    elif sign == "*":
        how = f"Multiply numerators and denominators: {a.numerator * b.numerator}/{a.denominator * b.denominator}"
    else:
        how = f"Multiply by the reciprocal {Fraction(b.denominator, b.numerator)}"
    return f"Calculate {a} {sign} {b}. {how}, so the answer is {result}, about {float(result):.4f}."


def _polynomial(coefficients: list[int]) -> str:
    terms = []
    for power in range(len(coefficients) - 1, -1, -1):
        c = coefficients[power]
        if c:
            body = {0: "", 1: "x"}.get(power, f"x^{power}")
            size = str(abs(c)) if abs(c) != 1 or power == 0 else ""
            sign = "-" if c < 0 else "+"
            terms.append(f" {sign} {size}{body}" if terms else f"{'-' if c < 0 else ''}{size}{body}")
    return "".join(terms) or "0"


def _derivative(rng: random.Random) -> str:
    p = [rng.randint(-9, 9) for _ in range(rng.randint(3, 6))] + [rng.randint(1, 9)]
    d = [k * c for k, c in enumerate(p)][1:]
    x = rng.randint(-4, 4)
    slope = sum(c * x**k for k, c in enumerate(d))
    return f"Let f(x) = {_polynomial(p)}. Then f'(x) = {_polynomial(d)}. At x = {x} the slope is f'({x}) = {slope}."


def _expansion(rng: random.Random) -> str:
    p, q = ([rng.randint(-9, 9) for _ in range(rng.randint(1, 3))] + [rng.randint(1, 6)] for _ in range(2))
    product = [0] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            product[i + j] += a * b
    x = rng.randint(-3, 3)
    values = [sum(c * x**k for k, c in enumerate(f)) for f in (p, q, product)]
    return (
        f"Expand ({_polynomial(p)})({_polynomial(q)}) = {_polynomial(product)}. "
        f"Test with x = {x}: ({values[0]}) * ({values[1]}) = {values[2]}."
    )


def _sequence(rng: random.Random) -> str:
    first, step, n = rng.randint(-40, 90), rng.choice([k for k in range(-15, 40) if k]), rng.randint(8, 60)
    shown = ", ".join(str(first + k * step) for k in range(5))
    last = first + (n - 1) * step
    return (
        f"An arithmetic sequence begins {shown}, ... The common difference is {step}. Term number {n} is "
        f"{first} + {n - 1} * {step} = {last}, and the first {n} terms add up to "
        f"{n} * ({first} + {last}) / 2 = {n * (first + last) // 2}."
    )


def _geometric(rng: random.Random) -> str:
    first, ratio, n = rng.randint(1, 12), rng.randint(2, 6), rng.randint(4, 10)
    terms = [first * ratio**k for k in range(n)]
    return (
        f"The first {n} terms of the geometric sequence with first term {first} and ratio {ratio} are "
        f"{', '.join(map(str, terms))}. "
        f"Their sum is {first} * ({ratio}^{n} - 1) / ({ratio} - 1) = {sum(terms)}."
    )


def _modular(rng: random.Random) -> str:
    base, exponent, modulus = rng.randint(2, 99), rng.randint(5, 400), rng.randint(7, 500)
    squares, value = [], base % modulus
    for k in range(exponent.bit_length()):
        squares.append(f"{base}^{2**k} = {value}")
        value = value * value % modulus
    return (
        f"Find {base}^{exponent} mod {modulus} by repeated squaring: {', '.join(squares)}. "
        f"With {exponent} = {bin(exponent)[2:]} in binary the result is {pow(base, exponent, modulus)}."
    )


def _bases(rng: random.Random) -> str:
    n, base = rng.randint(20, 99_999), rng.choice([2, 3, 5, 7, 8, 12, 16])
    digits, lines, k = [], [], n
    while k:
        digits.append("0123456789abcdef"[k % base])
        lines.append(f"{k} = {k // base} * {base} + {k % base}")
        k //= base
    return f"Write {n} in base {base}.\n" + "\n".join(lines) + f"\nRead the remainders upwards: {''.join(reversed(digits))}."


def _counting(rng: random.Random) -> str:
    n = rng.randint(4, 30)
    k, thing = rng.randint(2, min(n - 1, 6)), rng.choice(THINGS)
    return (
        f"In how many ways can {k} of {n} different {thing} be chosen? {n}! / ({k}! * {n - k}!) = {math.comb(n, k)}. "
        f"If their order counts, there are {math.perm(n, k)} ways, {math.factorial(k)} times as many."
    )


def _statistics(rng: random.Random) -> str:
    values = [rng.randint(1, 99) for _ in range(rng.randint(5, 11))]
    ordered, n = sorted(values), len(values)
    median = Fraction(ordered[(n - 1) // 2] + ordered[n // 2], 2)
    mean = Fraction(sum(values), n)
    variance = sum((v - mean) ** 2 for v in values) / n
    return (
        f"Data: {', '.join(map(str, values))}. In order: {', '.join(map(str, ordered))}. The median is {float(median):g}, "
        f"the range {ordered[-1] - ordered[0]}, the mean {sum(values)}/{n} = {float(mean):.2f} "
        f"and the variance {float(variance):.2f}."
    )


def _percent(rng: random.Random) -> str:
    price, rate, name = rng.randint(4, 900) * 5, rng.choice([5, 10, 12, 15, 20, 25, 30, 40, 60, 75]), rng.choice(NAMES)
    change = Fraction(price * rate, 100)
    up = rng.random() < 0.5
    new = price + change if up else price - change
    verb = "rises" if up else "falls"
    return (
        f"The price of {name}'s bicycle is {price} and {verb} by {rate} percent. {rate}% of {price} is {float(change):g}, "
        f"so the new price is {price} {'+' if up else '-'} {float(change):g} = {float(new):g}."
    )


def _story(rng: random.Random) -> str:
    name, other = rng.sample(NAMES, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    have, packs, each, lost = rng.randint(5, 400), rng.randint(2, 15), rng.randint(3, 40), rng.randint(1, 5)
    total = have + packs * each - lost
    half = (
        f"They share equally, so each has {total // 2}."
        if total % 2 == 0
        else f"Sharing equally leaves {total // 2} each and one over."
    )
    return (
        f"{name} has {have} {thing}. From {place} come {packs} boxes with {each} {thing} each, "
        f"and {lost} of all the {thing} get lost. How many are left? {packs} * {each} = {packs * each}, "
        f"{have} + {packs * each} = {have + packs * each}, and {have + packs * each} - {lost} = {total}. "
        f"{name} meets {other}. {half}"
    )


def _travel(rng: random.Random) -> str:
    a, b, hours = rng.randint(3, 24) * 5, rng.randint(3, 24) * 5, rng.randint(1, 9)
    first, second = rng.sample(NAMES, 2)
    return (
        f"{first} travels at {a} km/h and {second} towards {first} at {b} km/h. They start {(a + b) * hours} km apart. "
        f"Each hour the distance shrinks by {a} + {b} = {a + b} km, "
        f"so they meet after {(a + b) * hours} / {a + b} = {hours} hours; {first} has gone {a * hours} km."
    )


def _pythagoras(rng: random.Random) -> str:
    m = rng.randint(2, 20)
    n = rng.randint(1, m - 1)
    k = rng.randint(1, 4)
    a, b, c = k * (m * m - n * n), k * 2 * m * n, k * (m * m + n * n)
    return (
        f"A right triangle has legs {a} and {b}. "
        f"Its hypotenuse is sqrt({a}^2 + {b}^2) = sqrt({a * a} + {b * b}) = sqrt({c * c}) = {c}. "
        f"Its area is {a * b // 2} and its perimeter {a + b + c}."
    )


def _matrix(rng: random.Random) -> str:
    a, b = ([[rng.randint(-9, 9) for _ in range(2)] for _ in range(2)] for _ in range(2))
    product = [[sum(a[i][k] * b[k][j] for k in range(2)) for j in range(2)] for i in range(2)]
    entries = "; ".join(
        f"row {i + 1}, column {j + 1}: {a[i][0]} * {b[0][j]} {_signed(a[i][1] * b[1][j])} = {product[i][j]}"
        for i in range(2)
        for j in range(2)
    )
    determinant = product[0][0] * product[1][1] - product[0][1] * product[1][0]
    return f"Multiply A = {a} and B = {b}. {entries}. AB = {product}, with determinant {determinant}."


TOPICS: tuple[Callable[[random.Random], str], ...] = (
    *(_addition, _multiplication, _division, _euclid, _primes, _linear, _quadratic, _system, _fractions, _derivative),
    *(_expansion, _sequence, _geometric, _modular, _bases, _counting, _statistics, _percent, _story, _travel),
    *(_pythagoras, _matrix),
)
