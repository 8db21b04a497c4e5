"""Files from the hub's stand-in: resumed, checked, refused; and what the cache looks like afterwards."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import full, small_disk
from hub import Hub, hub
from huggingface_hub.utils import close_session

from llamastead.measure_worker import fetching, placing
from llamastead.measure_worker import hub as hub_api
from llamastead.measure_worker.fetching import Fetch
from llamastead.measure_worker.hub import plan
from llamastead.measure_worker.main import hub_token
from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import HubCache
from llamastead.shared.hub_plan import Places, Plan

WEIGHTS = bytes(range(256)) * 1200  # 300 KiB
TOKEN = "hf_" + "s3cret" * 5


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process would ask, with one repository of two quantisations and a projector."""
    with hub() as made:
        monkeypatch.setenv("MODEL_ENDPOINT", made.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(fetching, "FIRST_PAUSE_S", 0.01)
        files = {f"m-{tag}.gguf": tag.encode() + WEIGHTS for tag in ("Q4_K_M", "Q8_0")}
        made.add("org/m", files | {"mmproj-m-F16.gguf": WEIGHTS[:5000], "config.json": b"{}"})
        yield made


def fetch_all(root: Path, made: Plan) -> list[bool]:
    places = Places(root, made.repo)
    return [Fetch(places, made.commit, file, lambda _: None, lambda: False).run() for file in made.files]


def get(root: Path, made: Plan, index: int = 0) -> bool:
    return Fetch(Places(root, made.repo), made.commit, made.files[index], lambda _: None, lambda: False).run()


def test_plan_names_all_files_of_the_usual_quant(stand: Hub) -> None:
    """Plan without a quantisation, with one in small letters, and for a file's name."""
    made = plan("org/m", "", "", "")
    assert (made.name, [f.path for f in made.files]) == (
        "org/m:Q4_K_M",
        ["m-Q4_K_M.gguf", "mmproj-m-F16.gguf"],
    )
    assert made.total == sum(len(stand.repos["org/m"][f.path].content) for f in made.files)
    assert [f.blob for f in made.files] == [stand.repos["org/m"][f.path].etag for f in made.files]
    assert plan("org/m", "q8_0", "", "").name == "org/m:Q8_0"
    assert plan("org/m", "", "m-Q8_0.gguf", "").files[0].path == "m-Q8_0.gguf"
    assert Plan.from_json(made.to_json()) == made


def test_a_preset_file_goes_before_a_model_where_it_is_asked_for(stand: Hub, tmp_path: Path) -> None:
    """Plan a repository of presets alone, one with a model beside them, and one without any."""
    stand.add("org/presets", {"preset.ini": b"[one]\nhf-repo = org/m\n", "README.md": b"x"})
    made = plan("org/presets", "", "", "", presets=True)
    assert (made.name, [f.path for f in made.files]) == ("org/presets", ["preset.ini"])
    assert fetch_all(tmp_path, made) == [True]
    placing.place(tmp_path, made)
    found = HubCache(tmp_path).repositories["org/presets"]
    assert (found.snapshot / "preset.ini").read_bytes().startswith(b"[one]")
    assert plan("org/presets", "", "", made.commit, presets=True) == made
    with pytest.raises(ApiError, match="has no GGUF models"):
        plan("org/presets", "", "", "")
    assert plan("org/m", "", "", "", presets=True).name == "org/m:Q4_K_M"
    stand.add("org/both", {"preset.ini": b"[one]\n", "both-Q4_K_M.gguf": WEIGHTS})
    assert [f.path for f in plan("org/both", "", "", "", presets=True).files] == ["preset.ini"]
    assert [f.path for f in plan("org/both", "", "", "").files] == ["both-Q4_K_M.gguf"]


def test_all_files_come_and_only_then_the_snapshot_names_them(stand: Hub, tmp_path: Path) -> None:
    """Bring both files: nothing is listed until they are placed; then the cache knows the model."""
    made = plan("org/m", "", "", "")
    assert fetch_all(tmp_path, made) == [True, True]
    assert HubCache(tmp_path).find("org/m") is None
    placing.place(tmp_path, made)
    found = HubCache(tmp_path).find("org/m:Q4_K_M")
    assert found is not None
    assert (found.missing, found.path.read_bytes()) == ((), b"Q4_K_M" + WEIGHTS)
    assert not list(tmp_path.rglob("*.incomplete"))
    assert all(r.authorization == "" for r in stand.requests)


def test_cut_connections_are_resumed_where_they_stopped(stand: Hub, tmp_path: Path) -> None:
    """C112: drop the connection twice; each further request asks for the rest, and the content is right."""
    fault = stand.fault("/cdn/", cut=100_000, times=1)
    later = stand.fault("/cdn/", cut=200_000, times=1)
    made = plan("org/m", "", "", "")
    assert get(tmp_path, made)
    assert (fault.hits, later.hits) == (1, 1)
    ranges = [r.range for r in stand.requests if r.path.startswith("/cdn/")]
    assert ranges == ["", "bytes=100000-", "bytes=200000-"]


def test_wrong_content_is_never_visible(stand: Hub, tmp_path: Path) -> None:
    """C112: other bytes of the right length; then an answer that ends early: both are refused and named."""
    made = plan("org/m", "", "", "")
    wrong = stand.fault("m-Q4_K_M", wrong=True, times=1)
    with pytest.raises(ApiError, match=r"m-Q4_K_M.gguf.*wrong checksum"):
        get(tmp_path, made)
    assert wrong.hits == 1
    assert not list((tmp_path / "models--org--m" / "blobs").iterdir())
    short = stand.fault("m-Q4_K_M", short=1000)
    with pytest.raises(ApiError, match=r"m-Q4_K_M.gguf.*another file than it announced"):
        get(tmp_path, made)
    assert short.hits == 2
    stand.faults.clear()
    assert get(tmp_path, made)


def test_a_server_without_ranges_begins_anew(stand: Hub, tmp_path: Path) -> None:
    """C112: a partial file is there and the server answers 200: it is written from the start again."""
    made = plan("org/m", "", "", "")
    partial = Places(tmp_path, "org/m").partial(made.files[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"Q4_K_M"[:3])
    ignores = stand.fault("/cdn/", whole=True)
    assert get(tmp_path, made)
    assert ignores.hits == 1


def test_work_left_for_later_keeps_what_came(stand: Hub, tmp_path: Path) -> None:
    """Pause after the first piece; the next run asks for the rest only."""
    made = plan("org/m", "", "", "")
    places = Places(tmp_path, "org/m")
    assert not Fetch(places, made.commit, made.files[0], lambda _: None, lambda: True).run()
    have = places.have(made.files[0])
    assert 0 < have <= made.files[0].size
    assert get(tmp_path, made)


@pytest.mark.parametrize("again", [False, True])
def test_a_file_called_off_while_it_is_checked_is_left_alone(stand: Hub, tmp_path: Path, again: bool) -> None:
    """Remove the partial file when all of it is there, and have another begun: it is not taken for ours."""
    made = plan("org/m", "", "", "")
    places, file = Places(tmp_path, "org/m"), made.files[0]
    partial = places.partial(file)
    called_off = []

    def beat(have: int) -> None:
        if have == file.size and partial.exists() and not called_off:
            called_off.append(partial.rename(tmp_path / "gone"))
            if again:
                partial.write_bytes(b"begun")

    assert not Fetch(places, made.commit, file, beat, lambda: False).run()
    assert called_off
    assert partial.exists() == again
    assert not places.blob(file).exists()


@pytest.mark.parametrize(
    ("token", "repo", "quant", "status", "words"),
    [
        ("", "org/none", "", 404, "'org/none' is not on the hub; if it is private, set HF_TOKEN"),
        ("", "org/m", "IQ1_S", 404, "has no 'IQ1_S': it has Q4_K_M, Q8_0"),
        ("", "org/closed", "", 401, "'org/closed' is gated: log in, accept its terms"),
        (TOKEN, "org/closed", "", 403, "'org/closed' is gated"),
        (TOKEN, "org/none", "", 404, "'org/none' is not on the hub"),
        ("hf_nobodys", "org/m", "", 401, "HF_TOKEN of the worker is not valid"),
    ],
)
def test_refusals_are_short_and_asked_for_once(
    stand: Hub, monkeypatch: pytest.MonkeyPatch, token: str, repo: str, quant: str, status: int, words: str
) -> None:
    """C120: gated with and without a token, unknown, another quant: one line, the status, no second try."""
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    stand.token(TOKEN)
    stand.add("org/closed", {"c-Q4_K_M.gguf": WEIGHTS})
    stand.gated.add("org/closed")
    with pytest.raises(ApiError) as refused:
        plan(repo, quant, "", "")
    assert refused.value.status == status
    assert words in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 160
    assert "s3cret" not in refused.value.to_json()
    assert len(stand.requests) <= 2


def test_token_opens_a_gated_repository_and_goes_to_the_hub_alone(
    stand: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """C157: with a token that has access the file comes; its storage never sees the token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    stand.token(TOKEN, "org/closed")
    stand.add("org/closed", {"c-Q4_K_M.gguf": WEIGHTS})
    stand.gated.add("org/closed")
    made = plan("org/closed", "", "", "")
    assert get(tmp_path, made)
    assert TOKEN not in made.to_json()
    seen = {r.path.startswith("/cdn/"): r.authorization for r in stand.requests}
    assert seen == {False: f"Bearer {TOKEN}", True: ""}


def test_rate_limit_is_told_and_not_fought(stand: Hub, tmp_path: Path) -> None:
    """C120: 429 for an hour on the API and on the file: one request each, and the seconds are passed on."""
    made = plan("org/m", "", "", "")
    limit = stand.fault("/resolve/", status=429, headers={"Retry-After": "3600"})
    with pytest.raises(ApiError, match="limits requests") as refused:
        get(tmp_path, made)
    assert (refused.value.status, refused.value.retry_after, limit.hits) == (429, 3600, 1)
    limit = stand.fault("/api/", status=429, headers={"Retry-After": "3600"})
    with pytest.raises(ApiError, match="limits requests"):
        plan("org/m", "", "", "")
    assert limit.hits == 1


def test_passing_trouble_is_tried_a_few_times(stand: Hub, tmp_path: Path) -> None:
    """C121: the file's request fails twice with 503 and then works; one that always fails is named."""
    made = plan("org/m", "", "", "")
    twice = stand.fault("m-Q4_K_M", status=503, times=2)
    assert get(tmp_path, made)
    assert twice.hits == 2
    always = stand.fault("mmproj", status=503)
    with pytest.raises(ApiError, match=r"'org/m' \(mmproj-m-F16.gguf\): the hub answers 503"):
        get(tmp_path, made, 1)
    assert always.hits == fetching.TRIES


def test_a_connection_that_falls_silent_is_made_anew(
    stand: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The storage sends a part and then nothing, without closing: the rest comes by another connection; one
    that never gets on is given up after a few tries, with the file's name, and what came is kept.
    """
    made = plan("org/m", "", "", "")
    monkeypatch.setattr(hub_api, "READ_TIMEOUT_S", 3.0)  # so that a busy machine is not taken for silence
    silent = stand.fault("/cdn/", hold=100_000, times=1)
    assert get(tmp_path, made)
    assert silent.held.is_set()
    assert [r.range for r in stand.requests if r.path.startswith("/cdn/")] == ["", "bytes=100000-"]
    monkeypatch.setattr(hub_api, "READ_TIMEOUT_S", 0.6)
    never = stand.fault("mmproj", hold=1000)
    with pytest.raises(ApiError, match=r"'org/m' \(mmproj-m-F16.gguf\): no answer from the hub") as refused:
        get(tmp_path, made, 1)
    assert (refused.value.status, refused.value.fields["reason"]) == (503, "unreachable")
    assert never.hits == fetching.TRIES
    assert Places(tmp_path, "org/m").have(made.files[1]) == 1000


def test_a_proxy_of_the_environment_is_used(
    stand: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Name a hub that only the proxy knows: list and file come through it."""
    close_session()
    monkeypatch.setenv("MODEL_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", stand.url)
    monkeypatch.setenv("no_proxy", "localhost")
    try:
        assert get(tmp_path, plan("org/m", "", "", ""))
    finally:
        close_session()
    assert any(r.host == "hub.invalid" for r in stand.requests)


def test_an_unknown_certificate_is_told_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ask a hub with a certificate of its own: refused with the variable that helps; with it, it is asked."""
    with hub(certificate(tmp_path)) as made:
        made.add("org/m", {"m-Q4_K_M.gguf": WEIGHTS})
        monkeypatch.setenv("MODEL_ENDPOINT", made.url)
        close_session()
        with pytest.raises(ApiError, match="set SSL_CERT_FILE"):
            plan("org/m", "", "", "")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        close_session()
        assert plan("org/m", "", "", "").name == "org/m:Q4_K_M"
        close_session()


def certificate(folder: Path) -> Path:
    """Write a certificate of loopback with its key and return the file."""
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    alike = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*words, *alike, *files], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return both


@pytest.mark.parametrize(
    ("words", "token"),
    [
        (("--hf-token", TOKEN), TOKEN),
        (("-c", "8", "-hft", TOKEN), TOKEN),
        ((f"--hf-token={TOKEN}",), TOKEN),
        (("-c", "8"), ""),
    ],
)
def test_the_token_of_the_command_line_is_the_workers(words: tuple[str, ...], token: str) -> None:
    """Name it long, short, with an equals sign, and not at all."""
    assert hub_token(words) == token


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """C117: a hub that is not there is one short 503."""
    monkeypatch.setenv("MODEL_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ApiError, match=r"no answer from the hub .*https_proxy") as refused:
        plan("org/m", "", "", "")
    assert refused.value.status == 503


def test_what_is_cached_keeps_its_commit_and_its_place(stand: Hub, tmp_path: Path) -> None:
    """Place one quant, let the repository move on, and bring the other: both stay listed."""
    made = plan("org/m", "Q4_K_M", "", "")
    fetch_all(tmp_path, made)
    placing.place(tmp_path, made)
    stand.add("org/m", {"m-Q4_K_M.gguf": b"newer" + WEIGHTS})
    other = plan("org/m", "Q8_0", "", made.commit)
    assert other.commit == made.commit
    fetch_all(tmp_path, other)
    placing.place(tmp_path, other)
    cache = HubCache(tmp_path)
    assert [bool(cache.find(f"org/m:{tag}")) for tag in ("Q4_K_M", "Q8_0")] == [True, True]


def test_removing_takes_what_nothing_else_uses(stand: Hub, tmp_path: Path) -> None:
    """C49: remove one of two quants that share a projector, then the other: first the projector stays."""
    for tag in ("Q4_K_M", "Q8_0"):
        made = plan("org/m", tag, "", "")
        fetch_all(tmp_path, made)
        placing.place(tmp_path, made)
    beside = tmp_path / "models--org--other" / "snapshots"
    beside.mkdir(parents=True)
    assert placing.remove(tmp_path, "org/m", "Q4_K_M") == len(b"Q4_K_M" + WEIGHTS)
    cache = HubCache(tmp_path)
    left = cache.find("org/m:Q8_0")
    assert left is not None
    assert left.mmproj is not None
    assert left.mmproj.is_file()
    assert cache.find("org/m:Q4_K_M") is None or cache.find("org/m:Q4_K_M") == left
    placing.remove(tmp_path, "org/m", "Q8_0")
    assert not (tmp_path / "models--org--m").exists()
    assert beside.is_dir()


def test_a_removal_that_dies_leaves_no_file_without_a_name(
    stand: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die in the middle of removing a model: the bytes that are still there have names, and what it takes to
    bring it again and remove it is there.
    """

    def dies(_: str) -> None:
        raise SystemExit

    made = plan("org/m", "Q4_K_M", "", "")
    fetch_all(tmp_path, made)
    placing.place(tmp_path, made)
    monkeypatch.setattr(placing, "fault_point", dies)
    with pytest.raises(SystemExit):
        placing.remove(tmp_path, "org/m", "Q4_K_M")
    folder = tmp_path / "models--org--m"
    names = {path.resolve() for path in (folder / "snapshots").rglob("*.gguf")}
    assert set((folder / "blobs").resolve().iterdir()) <= names
    monkeypatch.undo()
    monkeypatch.setenv("MODEL_ENDPOINT", stand.url)
    fetch_all(tmp_path, made)
    placing.place(tmp_path, made)
    assert HubCache(tmp_path).find("org/m:Q4_K_M") is not None
    placing.remove(tmp_path, "org/m", "Q4_K_M")
    assert not folder.exists()


@pytest.mark.parametrize("path", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", ""])
def test_names_that_lead_elsewhere_are_refused(path: str) -> None:
    """A plan in Redis with such a file, repository, commit or hash is not read."""
    good = {"path": "x.gguf", "size": 1, "blob": "a" * 64}

    def text(repo: str = "org/m", commit: str = "b" * 40, **file: str) -> str:
        import json

        return json.dumps({"repo": repo, "commit": commit, "tag": "", "files": [good | file]})

    assert Plan.from_json(text()).files[0].path == "x.gguf"
    for bad in (text(path=path), text(repo="../.."), text(commit="main"), text(blob="../../x")):
        with pytest.raises(ValueError, match="not a"):
            Plan.from_json(bad)


def test_disk_without_room_is_told_in_numbers(stand: Hub, tmp_path: Path) -> None:
    """C114: the disk fills while a file comes: the error has both numbers, and what came is kept."""
    if not os.access("/dev/full", os.W_OK):
        raise AssertionError("no /dev/full here")
    made = plan("org/m", "", "", "")
    places = Places(tmp_path, "org/m")
    places.partial(made.files[0]).parent.mkdir(parents=True)
    places.partial(made.files[0]).symlink_to("/dev/full")
    with pytest.raises(ApiError, match=r"needs 0\.3 MiB, but .* are free in") as refused:
        get(tmp_path, made)
    assert refused.value.status == 507
    assert {"needed", "free"} <= refused.value.fields.keys()


def test_a_full_disk_leaves_no_half_written_name(stand: Hub, tmp_path: Path) -> None:
    """Put a model into place on a full disk, which fails, and again with room: in between the cache names
    nothing and has no file too many; afterwards the model is there.
    """
    with small_disk(tmp_path / "small", "4m") as disk:
        cache = disk / "cache"
        made = plan("org/m", "Q4_K_M", "", "")
        fetch_all(cache, made)
        with full(disk):
            with pytest.raises(OSError, match="No space left"):
                placing.place(cache, made)
            assert HubCache(cache).repositories == {}
            assert list((cache / "models--org--m" / "refs").iterdir()) == []
        placing.place(cache, made)
        assert HubCache(cache).find("org/m:Q4_K_M") is not None
