"""A Hugging Face cache on disk, as downloads leave it."""

import os

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(root, repository, *files, commit=COMMIT, ref="main"):
    """Put files into the cache as downloads lie there: names in a snapshot linked to nameless blobs."""
    folder = root / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(f"{commit}\n")
    (folder / "blobs").mkdir(exist_ok=True)
    for name in files:
        blob = folder / "blobs" / f"{len(list((folder / 'blobs').iterdir())):064x}"
        blob.write_bytes(name.encode())
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder / "snapshots" / commit
