"""Text from files, made safe for a terminal or a page."""

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return `text` with every character that does not print, such as ESC or a lone surrogate, as "\x1b" or "\ud800".

    Line breaks count as such characters. A file cannot move the cursor, change colors or stop an encoder this way.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
