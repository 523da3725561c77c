"""Numbers as text: `78.1 %`, `12.3 MB`, `3 min 20 s`."""


def plain(value: float | None, digits: int = 4) -> str:
    """A measured number with `digits` significant digits.

    >>> plain(0.123456), plain(2.5e-9), plain(1e30), plain(None)
    ('0.1235', '2.5e-9', '1e30', '–')
    """
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    front, exponent = text.split("e")
    return f"{front}e{int(exponent)}"


def spread(mean: float | None, std: float | None, percent: bool) -> str:
    """A mean with its standard deviation, if there is one.

    >>> spread(0.78125, 0.0123, percent=True), spread(0.123456, 0.0123, percent=False)
    ('78.1 ± 1.2 %', '0.1235 ± 0.012')
    """
    if mean is None:
        return "–"
    if percent:
        return f"{100 * mean:.1f} %" if std is None else f"{100 * mean:.1f} ± {100 * std:.1f} %"
    return plain(mean) if std is None else f"{plain(mean)} ± {plain(std, 2)}"


def count(value: float | None) -> str:
    """A count; millions and billions in short form.

    >>> count(1234), count(2_500_000)
    ('1,234', '2.5 million')
    """
    if value is None:
        return "–"
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    """A number of bytes in decimal units.

    >>> size(12_345_678), size(12)
    ('12.3 MB', '12 B')
    """
    if value is None:
        return "–"
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value < 1000 * unit else f"{value / unit:,.0f} {name}"
    return f"{value:.0f} B"


def duration(value: float | None) -> str:
    """Seconds, minutes or hours.

    >>> duration(0.001), duration(0.046), duration(1.25), duration(200), duration(7500)
    ('< 0.01 s', '0.046 s', '1.2 s', '3 min 20 s', '2 h 5 min')
    """
    if value is None:
        return "–"
    if value < 0.01:
        return "< 0.01 s"
    if value < 60:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
