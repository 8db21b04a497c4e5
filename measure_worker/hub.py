"""What the Hugging Face hub says, through huggingface_hub, and its refusals as one line for people.

Address, token, proxy and certificates are those of this process's environment: HF_ENDPOINT (or llama-server's
MODEL_ENDPOINT), HF_TOKEN or the file that `hf auth login` writes, http(s)_proxy, no_proxy, SSL_CERT_FILE.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status

from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import REMOTE_PRESET, choose, choose_file, is_main, tag_of
from llamastead.shared.hub_plan import HubFile, Plan

API_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 15.0  # without a byte; then the connection is made anew
TERMS = "log in, accept its terms on its page, and set HF_TOKEN for the worker"


def endpoint() -> str:
    """Return the hub's address, without a slash at its end."""
    return (os.environ.get("MODEL_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def plan(repo: str, quant: str, file: str, pinned: str, *, presets: bool = False) -> Plan:
    """Return which files `repo:quant` means (`file` goes before `quant`), at commit `pinned` if that has it.

    With `presets` a repository that holds a preset file means that file alone.

    Raises ApiError: 401 or 403 for a gated repository, 404 for what is not there, 429, 503.
    """
    with refusals(repo):
        if presets and (found := _presets(repo, pinned)):
            return found
        info = _info(repo, pinned) if pinned else None
        if info is None or _choose(info, quant, file) is None:
            info = _info(repo, None)
            assert info is not None
        choice = _choose(info, quant, file)
        siblings = {each.rfilename: each for each in info.siblings or ()}
        if choice is None:
            raise _no_such_quant(repo, quant or file, sorted(siblings))
        names = [*choice.shards, *(name for name in (choice.mmproj, choice.draft) if name)]
        if missing := [name for name in names if name not in siblings]:
            raise ApiError(404, f"'{repo}' is incomplete on the hub: {', '.join(missing)} not there")
        files = tuple(_file(siblings[name]) for name in names)
        if info.gated:
            _try_access(repo, info.sha, files[0].path)
    return Plan(repo, info.sha, choice.tag, files, f"{endpoint()}/{repo}/resolve/{info.sha}/")


@contextmanager
def open_file(repo: str, commit: str, path: str, begin: int) -> Iterator[httpx2.Response]:
    """Yield the answer that brings a file from byte `begin` on. Raises what huggingface_hub raises."""
    headers = build_hf_headers(library_name="llamastead") | {"Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    url = hf_hub_url(repo, path, revision=commit, endpoint=endpoint())
    timeout = httpx2.Timeout(API_TIMEOUT_S, read=READ_TIMEOUT_S)
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        yield answer


@contextmanager
def refusals(repo: str, path: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises into an ApiError that says in a line what to do."""
    what = f"'{repo}'" + (f" ({path})" if path else "")
    try:
        yield
    except OfflineModeIsEnabled:
        raise ApiError(
            503, f"{what} is not in the cache, and HF_HUB_OFFLINE is set", _why("offline")
        ) from None
    except GatedRepoError as error:
        status = 403 if get_token() else 401
        raise ApiError(status, f"{what} is gated: {TERMS}", _why("gated")) from error
    except RepositoryNotFoundError as error:
        hint = "" if get_token() else "; if it is private, set HF_TOKEN for the worker"
        raise ApiError(404, f"{what} is not on the hub{hint}", _why("not_found")) from error
    except (RevisionNotFoundError, RemoteEntryNotFoundError) as error:
        raise ApiError(404, f"{what} is not on the hub any more", _why("not_found")) from error
    except HfHubHTTPError as error:
        raise _refused(what, error) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        kind = type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            kind = "its certificate is not trusted: set SSL_CERT_FILE for the worker"
        elif isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            kind = "no connection: a proxy or a mirror is set by https_proxy or HF_ENDPOINT for the worker"
        raise ApiError(503, f"{what}: no answer from the hub ({kind})", _why("unreachable"), 10) from error


def _refused(what: str, error: HfHubHTTPError) -> ApiError:
    status = error.response.status_code
    if status == 429:
        text = error.response.headers.get("Retry-After", "")
        seconds = int(text) if text.isdecimal() else 60
        return ApiError(
            429, f"{what}: the hub limits requests; try again later", _why("rate_limited"), seconds
        )
    if status in (401, 403):
        hint = "HF_TOKEN of the worker is not valid" if status == 401 else "HF_TOKEN has no access to it"
        return ApiError(status, f"{what}: {hint}", _why("no_access"))
    if status >= 500:
        return ApiError(503, f"{what}: the hub answers {status}; try again later", _why("unreachable"), 10)
    return ApiError(502, f"{what}: the hub answers {status}", _why("refused"))


def _why(reason: str) -> dict[str, Any]:
    return {"reason": reason}


def _info(repo: str, revision: str | None) -> Any:
    try:
        return HfApi(endpoint=endpoint()).model_info(
            repo, revision=revision, files_metadata=True, timeout=API_TIMEOUT_S
        )
    except RevisionNotFoundError:
        if revision is None:
            raise
        return None


def _presets(repo: str, pinned: str) -> Plan | None:
    for commit in (pinned, None) if pinned else (None,):
        info = _info(repo, commit)
        for file in (info.siblings or ()) if info else ():
            if file.rfilename == REMOTE_PRESET:
                if info.gated:
                    _try_access(repo, info.sha, file.rfilename)
                return Plan(repo, info.sha, "", (_file(file),), f"{endpoint()}/{repo}/resolve/{info.sha}/")
    return None


def _choose(info: Any, quant: str, file: str) -> Any:
    names = [each.rfilename for each in info.siblings or ()]
    return choose_file(names, file) if file else choose(names, quant)


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    return HubFile(sibling.rfilename, int(sibling.size), lfs.sha256 if lfs else sibling.blob_id)


def _no_such_quant(repo: str, wanted: str, names: list[str]) -> ApiError:
    has = sorted({tag_of(name) or name for name in names if is_main(name)})
    if has:
        told = f"'{repo}' has no '{wanted}': it has {', '.join(has)}"
    else:
        told = f"'{repo}' has no GGUF models: look for another repository of the model, often ending in -GGUF"
    return ApiError(404, told, _why("not_found"))


def _try_access(repo: str, commit: str, path: str) -> None:
    """Ask for a file's head: a gated repository shows its list to everybody."""
    url = hf_hub_url(repo, path, revision=commit, endpoint=endpoint())
    headers = build_hf_headers(library_name="llamastead")
    hf_raise_for_status(
        get_session().head(url, headers=headers, timeout=API_TIMEOUT_S, follow_redirects=False)
    )
