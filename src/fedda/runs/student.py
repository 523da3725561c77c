"""Student's t distribution for whole degrees of freedom: finite sums (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""

import math


def two_sided_p(t: float, df: int) -> float:
    """The probability of a t statistic at least as far from 0.

    >>> round(two_sided_p(2.776, 4), 4), round(two_sided_p(12.706, 1), 4), two_sided_p(0.0, 7)
    (0.05, 0.05, 1.0)
    """
    angle = math.atan2(abs(t), math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    # Even: sin (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...); odd: 2/pi (angle + sin (cos + 2/3 cos^3 + ...)).
    odd = df % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - inside))


def quantile(level: float, df: int) -> float:
    """The t beyond which lie `level` of all values, on both sides together.

    >>> round(quantile(0.05, 4), 3), round(quantile(0.05, 1), 3)
    (2.776, 12.706)
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > level else (low, middle)
    return high
