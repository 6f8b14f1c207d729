"""Making text from files safe for a terminal or a page."""


def printable(text: str) -> str:
    r"""Return `text` with every nonprintable character, such as ESC or a lone surrogate, as "\x1b" or "\ud800".

    Line breaks are replaced too. This keeps a file from moving the cursor, changing colors or breaking an encoder.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
