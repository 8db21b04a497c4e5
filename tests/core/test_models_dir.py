"""Which models a models folder holds."""

import os
from pathlib import Path

import pytest

from llamastead.shared.gguf import shard_files
from llamastead.supervisor.registry.files import FoundModel, adapter_files, scan_models_dir
from llamastead.supervisor.registry.model import RegistryError, Severity


def scan(folder, *names):
    """Make empty files below `folder`, scan it, return {name: FoundModel} and the problems."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    models, problems = scan_models_dir(folder)
    assert len({model.name for model in models}) == len(models)
    return {model.name: model for model in models}, problems


def test_files_are_named_after_themselves(tmp_path):
    """Scan a flat folder with models and with what only looks like one."""
    models, problems = scan(
        tmp_path,
        *("a.gguf", "b c.Q4_K_M.gguf", "foo.gguf.gguf", ".hidden.gguf"),
        *("UPPER.GGUF", "notes.txt", "x-mmproj.gguf", "mtp-a.gguf", "dspark-a.gguf", "dflash-a.gguf"),
    )
    assert sorted(models) == [".hidden", "a", "b c.Q4_K_M", "foo"]
    assert models["a"] == FoundModel("a", tmp_path / "a.gguf")
    assert problems == []


def test_a_folder_is_one_model_with_its_projector_and_draft(tmp_path):
    """Scan sub-folders with a model and its parts, deeper ones, and ones without a model."""
    models, problems = scan(
        tmp_path,
        *("m/x.gguf", "m/mmproj-f16.gguf", "m/mtp-x.gguf"),
        *("outer/inner/y.gguf", "empty/readme", "only/mmproj-f16.gguf"),
    )
    folder = tmp_path / "m"
    expected = FoundModel("m", folder / "x.gguf", folder / "mmproj-f16.gguf", folder / "mtp-x.gguf")
    assert (models, problems) == ({"m": expected}, [])


def test_c99_the_file_named_like_its_folder_wins_and_drafts_never_do(tmp_path):
    """Scan folders with a draft beside the model, with two models, and with a projector alone."""
    models, problems = scan(
        tmp_path,
        *("Foo/Foo.gguf", "Foo/Foo-draft.gguf", "Bar/Bar.gguf", "Bar/Baz.gguf"),
        *("Sub/big-Q4.gguf", "Sub/big-draft.gguf", "two/q4.gguf", "two/q8.gguf", "lone/mmproj.gguf"),
    )
    assert {name: str(model.path.relative_to(tmp_path)) for name, model in models.items()} == {
        "Foo": "Foo/Foo.gguf",
        "Bar": "Bar/Bar.gguf",
        "Sub": "Sub/big-Q4.gguf",
        "two/q4": "two/q4.gguf",
        "two/q8": "two/q8.gguf",
    }
    assert [(problem.severity, problem.where) for problem in problems] == [
        (Severity.NOTE, str(tmp_path / "two"))
    ]


def test_c100_a_split_model_is_its_first_shard_by_the_name_of_the_link(tmp_path):
    """Scan shards in the root, in a folder as links to blobs, and in a folder that lacks the first."""
    store = tmp_path / "store"
    store.mkdir()
    folder = tmp_path / "models"
    (folder / "split").mkdir(parents=True)
    for number in (1, 2, 3):
        (store / f"blob{number}").write_bytes(b"x" * number)
        (folder / "split" / f"m-0000{number}-of-00003.gguf").symlink_to(store / f"blob{number}")
    models, problems = scan(
        folder, "r-00001-of-00002.gguf", "r-00002-of-00002.gguf", "late/m-00002-of-00002.gguf"
    )
    first = folder / "split" / "m-00001-of-00003.gguf"
    assert {name: model.path for name, model in models.items()} == {
        "split": first,
        "r-00001-of-00002": folder / "r-00001-of-00002.gguf",
    }
    assert [file.name[2:7] for file in shard_files(first)] == ["00001", "00002", "00003"]
    assert [str(problem) for problem in problems] == [
        f"{folder / 'late'}: the first shard of its model is missing"
    ]


def test_c106_a_projector_is_looked_for_beside_the_link_and_then_beside_its_target(tmp_path):
    """Link models out of a store that holds a projector, one of two models, one beside the link (C106)."""
    store = tmp_path / "store"
    for name in ("x/model.gguf", "x/mmproj.gguf", "y/one.gguf", "y/two.gguf", "y/mmproj.gguf"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).touch()
    folder = tmp_path / "models"
    for link, target in (
        ("root.gguf", "x/model.gguf"),
        ("inside/model.gguf", "x/model.gguf"),
        ("beside/model.gguf", "x/model.gguf"),
        ("unsure.gguf", "y/one.gguf"),
    ):
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(store / target)
    models, _ = scan(folder, "beside/mmproj-f16.gguf")
    assert {name: model.mmproj for name, model in models.items()} == {
        "root": store / "x" / "mmproj.gguf",
        "inside": store / "x" / "mmproj.gguf",
        "beside": folder / "beside" / "mmproj-f16.gguf",
        "unsure": None,
    }


def test_dead_and_circular_links_do_no_harm(tmp_path):
    """Scan a folder with a dead link, a loop, and a link to a folder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.gguf").touch()
    (tmp_path / "dead.gguf").symlink_to("/nowhere")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "circle").symlink_to(".")
    (tmp_path / "linked").symlink_to("real")
    models, _ = scan(tmp_path)
    assert {name: model.path for name, model in models.items()} == {
        "linked": tmp_path / "linked" / "x.gguf",
        "real": tmp_path / "real" / "x.gguf",
    }


def test_what_is_no_text_is_left_out_and_told_of(tmp_path):
    """Scan a folder with names that are no UTF-8: models, their folders, their parts, and notes."""
    for name in (b"bad\xff.gguf", b"bad\xfe/x.gguf", b"m/mmproj-\xff.gguf", b"notes\xff.txt"):
        file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        file.parent.mkdir(exist_ok=True)
        file.touch()
    models, problems = scan(tmp_path, "a.gguf", "m/x.gguf")
    assert models == {
        "a": FoundModel("a", tmp_path / "a.gguf"),
        "m": FoundModel("m", tmp_path / "m" / "x.gguf"),
    }
    told = {str(problem).removeprefix(f"{tmp_path}/") for problem in problems}
    assert told == {
        f"{name}: not listed: its name is not UTF-8"
        for name in ("bad\\xff.gguf", "bad\\xfe", "m/mmproj-\\xff.gguf")
    }
    with pytest.raises(RegistryError, match=r"bad\\xfe: its name is not UTF-8"):
        scan_models_dir(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xfe")))


def test_a_link_is_not_given_a_projector_whose_name_is_no_text(tmp_path):
    """Link to a model whose own folder has a projector with a name that is no UTF-8."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "x.gguf").touch()
    (store / os.fsdecode(b"mmproj-\xff.gguf")).touch()
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").symlink_to(store / "x.gguf")
    models, problems = scan(folder)
    assert (models, problems) == ({"a": FoundModel("a", folder / "a.gguf")}, [])


def test_a_file_is_its_only_shard():
    """Ask for the shards of a plain file."""
    assert shard_files(Path("/m/a-1-of-2.gguf")) == [Path("/m/a-1-of-2.gguf")]


def test_a_missing_folder_is_an_error_with_its_name(tmp_path):
    """Scan a folder that isn't there."""
    with pytest.raises(RegistryError, match=f"{tmp_path}/no can't be read: No such file"):
        scan_models_dir(tmp_path / "no")


def test_adapters_are_named_with_a_scale_or_without() -> None:
    """Name several in each way that engines take; a name without its scale is still a file."""
    options = {"lora": "/a.gguf,/b:1.gguf", "lora-scaled": "/c.gguf:0.5,/d:2.gguf:1,/e.gguf"}
    found = [str(file) for file in adapter_files(options)]
    assert found == ["/a.gguf", "/b:1.gguf", "/c.gguf", "/d:2.gguf", "/e.gguf"]
    assert adapter_files({}) == ()
