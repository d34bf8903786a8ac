"""What a user is told in one line, instead of a traceback."""


class Mistake(Exception):
    """Something that the user can put right: a wrong path, arguments that do not go together. Exit status 2."""

    status = 2


class Broken(Mistake):
    """A file that cannot be read, or is not what it should be. Exit status 1."""

    status = 1


def said(error: BaseException | Warning | str, speaker: str = "") -> str:
    """The text of an error in one line, without who spoke."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{speaker}: ") if speaker else text
