"""Counts and sizes as people read them."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """
    >>> size_text(0), size_text(2304), size_text(368_640), size_text(5 << 30)
    ('0 B', '2.2 KiB', '0.4 MiB', '5.0 GiB')
    """
    if size_bytes < 1 << 10:
        return f"{size_bytes} B"
    if size_bytes < 1 << 16:
        return f"{size_bytes / (1 << 10):.1f} KiB"
    if size_bytes >= 1 << 40:
        return f"{size_bytes / (1 << 40):.1f} TiB"
    return f"{size_bytes / (1 << 30):.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / (1 << 20):.1f} MiB"


def short(count: int) -> str:
    """A count in at most four characters.

    >>> short(9999), short(12_345), short(7_654_321), short(2_000_000_000)
    ('9999', '12k', '8M', '2G')
    """
    if count < 10_000:
        return str(count)
    if count < 999_500:
        return f"{count / 1000:.0f}k"
    return f"{count / 1e6:.0f}M" if count < 999_500_000 else f"{count / 1e9:.0f}G"
