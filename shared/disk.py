"""Files and folders that can't be used, in words for people."""

import errno


def unusable(path: object, error: OSError) -> str:
    """Return a sentence that says which file or folder (`path`) can't be used, why, and what to do."""
    remedies = {
        errno.ENOSPC: "make room on its disk",
        errno.EDQUOT: "make room on its disk",
        errno.EMFILE: "raise `ulimit -n`",
        errno.ENFILE: "raise the system's limit of open files",
    }
    remedy = remedies.get(error.errno or 0, "see to it that it can be written")
    return f"{path} can't be used ({error.strerror or error}): {remedy}"


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that no more files can be opened."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def raise_shortage(error: OSError) -> None:
    """Raise the error if it says that no more files can be opened: what lies there is not known then."""
    if is_shortage(error):
        raise error
