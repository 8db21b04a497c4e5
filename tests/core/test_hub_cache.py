"""The Hugging Face cache as a source of models: names, choices, precedence, and no network."""

import os
import socket
from pathlib import Path

import pytest
from help_text import TABLE
from hub_folder import COMMIT, fill

from llamastead.shared.hub_cache import HubCache, choose, hub_cache_folder, split_name, tag_of
from llamastead.shared.words import Source
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import Severity, Sources
from llamastead.supervisor.registry.render import wire_args


@pytest.fixture
def load(tmp_path):
    """Return a function: preset text, options for all → Registry of the cache in `tmp_path/hub`."""

    def load_from(text="", *arguments):
        preset = tmp_path / "m.ini"
        preset.write_text(text)
        return load_registry(Sources(None, preset, arguments, tmp_path / "hub"), TABLE)

    return load_from


@pytest.mark.parametrize(
    ("file", "tag"),
    [
        ("big-Q4_K_M.gguf", "Q4_K_M"),
        ("big.q5_k_m.gguf", "Q5_K_M"),
        ("big-BF16-00001-of-00003.gguf", "BF16"),
        ("ggml-model.gguf", "MODEL"),
        ("big-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("UD-Q4_K_M/big-UD-Q4_K_M-00001-of-00003.gguf", "UD-Q4_K_M"),
        ("UD-Q2_K/model-00001-of-00002.gguf", "UD-Q2_K"),
        ("big.i1-IQ2_XS.gguf", "I1-IQ2_XS"),
        ("model.gguf", ""),
        ("some_model_q4_0.gguf", ""),
        ("v1.5/model.gguf", ""),
    ],
)
def test_a_file_name_tells_its_tag(file, tag):
    """Compare the tags of names as repositories have them."""
    assert tag_of(file) == tag


@pytest.mark.parametrize(
    ("quant", "first", "mmproj"),
    [
        ("", "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        ("q8_0", "m-Q8_0.gguf", "mmproj-Q8_0.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf", "mmproj-Q8_0.gguf"),
        ("Q4_K_XL", "m-Q4_K_XL.gguf", "mmproj-Q8_0.gguf"),
        ("IQ1_S", "deep/er/m-IQ1_S-00001-of-00002.gguf", "deep/mmproj-F32.gguf"),
        ("UD-Q8_0", "", ""),
    ],
)
def test_a_quantisation_means_one_file_and_the_projector_nearest_to_it(quant, first, mmproj):
    """Choose among files that share endings, with projectors beside and above."""
    files = [
        *("m-Q4_K_M.gguf", "m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf", "mtp-m-Q4_K_M.gguf"),
        *("mmproj-F16.gguf", "mmproj-Q8_0.gguf", "deep/mmproj-F32.gguf", "other/mmproj-Q1_0.gguf"),
        *(f"deep/er/m-IQ1_S-0000{number}-of-00002.gguf" for number in (1, 2)),
        *("m-Q4_K_M.imatrix.gguf", "README.md"),
    ]
    choice = choose(files, quant)
    assert (choice.shards[0], choice.mmproj) == (first, mmproj) if first else choice is None


def test_the_root_is_the_first_that_is_set(tmp_path):
    """Take the variables away one after the other."""
    variables = ["LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"]
    environ = {name: str(tmp_path / name) for name in variables}
    below = ["", "", "", "hub", "huggingface/hub", ".cache/huggingface/hub"]
    for name, folder in zip(variables, below, strict=True):
        assert hub_cache_folder(environ) == tmp_path / name / folder
        environ[name] = ""
    assert hub_cache_folder(environ) is None
    assert split_name("o/r:Q8_0") == ("o/r", "Q8_0")
    assert split_name("o/r") == ("o/r", "")


def test_only_repositories_with_a_revision_are_listed(tmp_path, load):
    """Fill a cache with folders that are none, with other references, and with no revision."""
    root = tmp_path / "hub"
    fill(root, "o/main", "m-Q8_0.gguf")
    fill(root, "o/branch", "m-Q8_0.gguf", ref="v1")
    fill(root, "o/bad", "m-Q8_0.gguf", commit="x" * 40)
    fill(root, "o/gone", commit="f" * 40)
    fill(root, "o/dash/dash", "m-Q8_0.gguf")
    fill(root, "noslash", "m-Q8_0.gguf")
    fill(root, "o/.dot", "m-Q8_0.gguf")
    (root / "models--o--norefs" / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "version.txt").write_text("1")
    assert list(load().entries) == ["o/branch:Q8_0", "o/main:Q8_0"]
    assert HubCache(tmp_path / "none").repositories == {}


def test_a_file_of_the_cache_whose_name_is_no_text_is_left_out(tmp_path, load):
    """Put one beside a model: only the model is listed."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-Q4_K_M.gguf")
    (snapshot / os.fsdecode(b"bad\xff-Q8_0.gguf")).touch()
    assert list(load().entries) == ["o/r:Q4_K_M"]


def test_a_cached_model_is_shown_by_its_repository_and_started_by_its_path(tmp_path, load):
    """Compare what is listed of a cached model with what an instance gets."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-Q4_K_M.gguf", "mmproj-F16.gguf")
    entry = load("[*]\nc = 5\n").entries["o/r:Q4_K_M"]
    assert (entry.source, entry.mmproj) == (Source.CACHE, snapshot / "mmproj-F16.gguf")
    words = wire_args(entry, TABLE, "/bin/ls")
    assert words[words.index("--hf-repo") + 1] == "o/r:Q4_K_M"
    assert dict(entry.start_options) == {
        "ctx-size": "5",
        "model": str(snapshot / "m-Q4_K_M.gguf"),
        "mmproj": str(snapshot / "mmproj-F16.gguf"),
    }
    assert "mmproj" not in load("[*]\nmmproj-auto = off\n").entries["o/r:Q4_K_M"].start_options


def test_a_draft_is_used_where_speculation_asks_for_it(tmp_path, load):
    """Load a repository with a draft beside its model, with and without a kind of speculation."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-Q8_0.gguf", "mtp-m-Q8_0.gguf")
    assert "model-draft" not in load().entries["o/r:Q8_0"].start_options
    asked = load("[*]\nspec-type = draft-mtp\n").entries["o/r:Q8_0"]
    assert asked.start_options["model-draft"] == str(snapshot / "mtp-m-Q8_0.gguf")


def test_c100_shards_are_counted_by_their_link_names_and_a_missing_one_is_told(tmp_path, load):
    """Load a cached model whose biggest shard is the second, then one without its second shard (C100)."""
    snapshot = fill(tmp_path / "hub", "o/r", *(f"m-Q8_0-0000{number}-of-00003.gguf" for number in (2, 1, 3)))
    (snapshot / "m-Q8_0-00002-of-00003.gguf").resolve().write_bytes(b"x" * 999)
    registry = load()
    entry = registry.entries["o/r:Q8_0"]
    assert entry.path == snapshot / "m-Q8_0-00001-of-00003.gguf"
    assert [file.name[7:12] for file in entry.files] == ["00001", "00002", "00003"]
    assert registry.problems == ()
    (snapshot / "m-Q8_0-00002-of-00003.gguf").unlink()
    assert [problem.message for problem in load().problems] == [
        f"o/r:Q8_0: {snapshot}/m-Q8_0-00002-of-00003.gguf doesn't exist"
    ]
    assert HubCache(tmp_path / "hub").find("o/r").missing == ("m-Q8_0-00002-of-00003.gguf",)


def test_c102_folders_of_quantisations_are_searched_and_broken_links_told_once(tmp_path, load):
    """Load nested quant folders with the projector one level up and two links to nothing (C102)."""
    shards = [f"UD-Q4_K_M/m-UD-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    snapshot = fill(tmp_path / "hub", "org/name", *shards, "mmproj-F16.gguf")
    for name in ("b-Q8_0.gguf", "a-Q2_K.gguf"):
        (snapshot / name).symlink_to("../../blobs/gone")
    registry = load()
    (entry,) = registry.entries.values()
    assert (entry.name, entry.path) == ("org/name:UD-Q4_K_M", snapshot / shards[0])
    assert (entry.mmproj, len(entry.files)) == (snapshot / "mmproj-F16.gguf", 4)
    assert [problem.message for problem in registry.problems] == [
        "links to nothing are skipped: a-Q2_K.gguf, b-Q8_0.gguf",
        "org/name:UD-Q4_K_M: llama-server calls it org/name:Q4_K_M; both names are taken",
    ]


def test_c103_names_keep_the_prefix_they_were_asked_by(tmp_path, load):
    """List two quantisations that differ by a prefix, then the prefixed one alone (C103)."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-UD-Q4_K_XL.gguf", "m-Q4_K_XL.gguf")
    registry = load()
    assert {name: entry.path.name for name, entry in registry.entries.items()} == {
        "o/r:Q4_K_XL": "m-Q4_K_XL.gguf",
        "o/r:UD-Q4_K_XL": "m-UD-Q4_K_XL.gguf",
    }
    assert (registry.aliases, registry.problems) == ({}, ())
    (snapshot / "m-Q4_K_XL.gguf").unlink()
    registry = load()
    assert [(problem.severity, problem.message) for problem in registry.problems] == [
        (Severity.NOTE, "o/r:UD-Q4_K_XL: llama-server calls it o/r:Q4_K_XL; both names are taken")
    ]
    assert list(registry.entries) == ["o/r:UD-Q4_K_XL"]
    # llama-server's shorter name goes on working, unless somebody else has it.
    assert registry.resolve("o/r:Q4_K_XL") is registry.entries["o/r:UD-Q4_K_XL"]
    other = load("[x]\nmodel = /x\nalias = o/r:Q4_K_XL\n")
    assert other.resolve("o/r:Q4_K_XL").name == "x"


def test_a_section_of_a_cached_name_merges_with_it(tmp_path, load):
    """Give sections named by repository and tag, in the tag's own spelling and in llama-server's."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-Q8_0.gguf", "m-UD-Q2_K.gguf")
    registry = load("[o/r:q8_0]\nc = 3\n[o/r:q2_k]\nc = 4\n", "-t", "2")
    assert registry.entries["o/r:Q8_0"].source is Source.PRESET
    assert registry.entries["o/r:Q8_0"].options == {"hf-repo": "o/r:Q8_0", "ctx-size": "3", "threads": "2"}
    assert registry.entries["o/r:Q2_K"].path == snapshot / "m-UD-Q2_K.gguf"
    assert sorted(registry.entries) == ["o/r:Q2_K", "o/r:Q8_0", "o/r:UD-Q2_K"]


def test_presets_that_name_a_repository_or_a_file_in_it_are_resolved(tmp_path, load):
    """Name a repository with and without a tag, a file, and a repository that is not cached."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "sub/odd.gguf")
    text = "[a]\nhf = o/r\n[b]\nhf = o/r:q8_0\n[c]\nhf = o/r\nhff = sub/odd.gguf\n[d]\nhf = o/none\n"
    entries = load(text).entries
    assert entries["a"].path == snapshot / "m-Q4_K_M.gguf"
    assert entries["b"].path == snapshot / "m-Q8_0.gguf"
    assert entries["c"].path == snapshot / "sub" / "odd.gguf"
    assert (entries["d"].path, dict(entries["d"].start_options)) == (None, {"hf-repo": "o/none"})


def test_doubles_of_a_preset_are_hidden_on_demand(tmp_path, load):
    """Name a cached file in a preset with and without `dedup-cache-models`."""
    snapshot = fill(tmp_path / "hub", "o/r", "m-Q8_0.gguf", "m-Q2_K.gguf")
    (tmp_path / "link.gguf").symlink_to(snapshot / "m-Q8_0.gguf")
    text = f"[mine]\nmodel = {tmp_path}/link.gguf\n"
    assert not any(entry.hidden for entry in load(text).entries.values())
    hidden = [
        entry.name for entry in load(f"[*]\ndedup-cache-models = on\n{text}").entries.values() if entry.hidden
    ]
    assert hidden == ["o/r:Q8_0"]


def test_of_two_models_with_one_tag_the_first_is_listed_and_the_other_told(tmp_path, load):
    """Load a repository with two models of one quantisation."""
    fill(tmp_path / "hub", "o/r", "b-7B-Q8_0.gguf", "a-3B-Q8_0.gguf")
    registry = load()
    assert registry.entries["o/r:Q8_0"].path.name == "a-3B-Q8_0.gguf"
    assert [problem.message for problem in registry.problems] == [
        "o/r:Q8_0 is a-3B-Q8_0.gguf; not listed: b-7B-Q8_0.gguf"
    ]


def test_c117_listing_and_starting_cached_models_never_opens_a_socket(tmp_path, load, monkeypatch):
    """Load a registry where every socket fails and see that starts name files, not repositories (C117)."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    fill(tmp_path / "hub", "o/r", "m-Q8_0.gguf", "m-Q2_K.gguf", "mmproj-F16.gguf")
    entries = load("[mine]\nhf = o/r:q2_k\n").entries
    assert sorted(entries) == ["mine", "o/r:Q2_K", "o/r:Q8_0"]
    assert not any("hf-repo" in entry.start_options for entry in entries.values())


def test_ten_thousand_files_are_listed_without_opening_one(tmp_path, load, monkeypatch):
    """List a cache and a models folder of 10 000 files in all, counting what is opened and looked at."""
    root, folder = tmp_path / "hub", tmp_path / "models"
    snapshots = [fill(root, f"o/r{number}", "m-Q8_0.gguf") for number in range(50)]
    for number, snapshot in enumerate(snapshots):
        for quant in range(99):
            (snapshot / f"m-Q{quant}_X.gguf").symlink_to(snapshots[number].joinpath("m-Q8_0.gguf").resolve())
    folder.mkdir()
    for number in range(5000):
        (folder / f"{number}.gguf").touch()
    counts = {"open": 0, "stat": 0}
    real_open, real_stat = Path.open, os.stat

    def count_open(path, *args, **options):
        counts["open"] += path.suffix == ".gguf"
        return real_open(path, *args, **options)

    def count_stat(*args, **options):
        counts["stat"] += 1
        return real_stat(*args, **options)

    monkeypatch.setattr(Path, "open", count_open)
    monkeypatch.setattr(os, "stat", count_stat)
    registry = load_registry(Sources(folder, None, (), root), TABLE)
    assert len(registry.entries) == 10_000
    assert counts["open"] == 0
    assert counts["stat"] < 10 * 10_000
