"""Measuring models with real engines, and what is reckoned, against real loads."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from model_kinds import KINDS, write_adapter, write_kind, write_projector
from model_kinds import LAYERS as DEEP
from redis.asyncio import Redis
from tiny import LAYERS, tiny_model
from waiting import until_blocking

from bench.memory import PRESETS, compare
from llamastead.measure_worker.attempt import Attempt, Desk, run_attempt
from llamastead.measure_worker.jobs import FUNCTIONS
from llamastead.measure_worker.leftovers import clean_up, work_folder
from llamastead.measure_worker.measuring import MeasureError, measure
from llamastead.shared.devices.device import HOST, MIB
from llamastead.shared.estimate import estimate, projector_parts, read_use
from llamastead.shared.figures import Parts
from llamastead.shared.gguf import tensor_sizes
from llamastead.shared.jobs import MEASURE_MODEL
from llamastead.shared.secret import read_or_make_herd_secret, seal
from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.jobs import JobStore
from llamastead.shared.store.keys import Keys


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a model of a kind, once."""
    folder = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_kind(path, name)

    return write


def measured(argv: list[str], run_dir: Path) -> dict[str, Parts]:
    """Measure in a folder of its own, as a job does."""
    with work_folder(run_dir) as folder:
        return measure(argv, {}, folder, lambda: None)


def words(engine: Path, model: Path, *more: str) -> list[str]:
    """Return the command line of a measurement."""
    return [str(engine), "--model", str(model), "--fit", "on", "--log-verbosity", "4", *more]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("-c 512", "whole windows")])
def test_c67_measured_within_5_and_reckoned_within_15_per_cent_of_a_real_load(
    real_engine: Path, kind: Callable[[str], Path], short_tmp: Path, preset: str
) -> None:
    """Measure, reckon and load the same preset: both figures are near what the load takes."""
    row = compare(real_engine, kind("llama"), PRESETS[preset], short_tmp)
    assert (row.source, row.misses) == ("estimate", [])


@pytest.mark.parametrize("preset", ["-c 4096", "8 slots"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "llama"])
def test_each_way_of_keeping_context_is_reckoned_or_called_rough(
    real_engine: Path, kind: Callable[[str], Path], short_tmp: Path, name: str, preset: str
) -> None:
    """Windows, recurrent states, experts: within 15 % of a real load. What is not claimed says so."""
    row = compare(real_engine, kind(name), PRESETS[preset], short_tmp)
    assert (row.source, row.misses) == ("rough" if name == "latent" else "estimate", [])


def test_whole_windows_take_more_and_that_is_reckoned(
    real_engine: Path, kind: Callable[[str], Path], short_tmp: Path
) -> None:
    """Have a model with windows keep all of them: it takes more, by measure and by estimate."""
    window, whole = (
        compare(real_engine, kind("gemma3"), options, short_tmp)
        for options in ({"ctx-size": "8192"}, PRESETS["whole windows"])
    )
    assert whole.real > window.real + 10 * MIB
    assert window.misses + whole.misses == []


def test_c63_a_projector_is_measured_and_reckoned_with_its_model(
    real_engine: Path, kind: Callable[[str], Path], short_tmp: Path
) -> None:
    """Compare a preset with a projector: measured, reckoned and loaded it counts, within the bounds."""
    projector = write_projector(short_tmp / "mmproj.gguf")
    options = {"ctx-size": "2048", "mmproj": str(projector)}
    row = compare(real_engine, kind("llama"), options, short_tmp)
    alone = compare(real_engine, kind("llama"), {"ctx-size": "2048"}, short_tmp)
    assert row.misses == []
    size = projector.stat().st_size
    for more, less in ((row.real, alone.real), (row.told, alone.told), (row.estimated, alone.estimated)):
        assert size <= more - less < 1.5 * size
    told = measured(words(real_engine, kind("llama"), "--mmproj", str(projector)), short_tmp)[HOST]
    assert told.projector >= size


def test_an_adapter_is_reckoned_with_its_model_and_a_load_tells_of_it(
    real_engine: Path, kind: Callable[[str], Path], short_tmp: Path
) -> None:
    """Compare a preset with a LoRA adapter: a real load says what it takes, and so much was reckoned."""
    adapter = write_adapter(short_tmp / "adapter.gguf")
    options = {"ctx-size": "2048", "lora": str(adapter)}
    row = compare(real_engine, kind("llama"), options, short_tmp)
    alone = compare(real_engine, kind("llama"), {"ctx-size": "2048"}, short_tmp)
    assert row.misses == []
    size = adapter.stat().st_size
    assert row.real - alone.real == pytest.approx(size, rel=0.02)
    assert row.estimated - alone.estimated == size


def test_a_projector_whose_header_tells_nothing_is_reckoned_by_its_size(tmp_path: Path) -> None:
    """Reckon a projector that is no GGUF, and one whose header has no numbers: by size, generously."""
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(b"x" * MIB)
    assert projector_parts(odd).projector == 2 * MIB + 64 * MIB
    plain = tiny_model(tmp_path / "plain.gguf", 1)
    assert projector_parts(plain).projector == 2 * plain.stat().st_size + 64 * MIB


def test_c64_a_draft_is_reckoned_with_its_model(
    real_engine: Path, kind: Callable[[str], Path], model: Path, short_tmp: Path
) -> None:
    """Compare a preset with a draft model: what it takes is within the bounds, draft included."""
    options = {"ctx-size": "2048", "model-draft": str(model), "spec-type": "draft-simple"}
    row = compare(real_engine, kind("llama"), options, short_tmp)
    alone = compare(real_engine, kind("llama"), {"ctx-size": "2048"}, short_tmp)
    assert row.misses == []
    assert row.real > alone.real
    assert row.estimated > alone.estimated


def test_c64_a_draft_counts_in_a_measurement(
    real_engine: Path, kind: Callable[[str], Path], model: Path, short_tmp: Path
) -> None:
    """Measure with and without a draft model: the draft's share is there, the model's is the same."""
    alone = measured(words(real_engine, kind("llama"), "--ctx-size", "2048"), short_tmp)[HOST]
    draft = ("--ctx-size", "2048", "--model-draft", str(model), "--spec-type", "draft-simple")
    both = measured(words(real_engine, kind("llama"), *draft), short_tmp)[HOST]
    assert both.draft > 0 == alone.draft
    assert both.model == alone.model


def test_a_job_with_many_files_open_measures_as_well(stub: Path, model: Path, short_tmp: Path) -> None:
    """Have more than a thousand files open, more than `select` knows: the figures come all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        (model.parent / f"{model.name}.json").write_text(json.dumps({"memory_mib": {"CUDA0": [9, 5, 2]}}))
        found = measured([str(stub), "--model", str(model), "--fit", "on"], short_tmp)
        assert found["CUDA0"].total == 19 * MIB
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_model_that_is_no_model_says_so(real_engine: Path, short_tmp: Path) -> None:
    """Measure a file that is no GGUF: the engine's last words are the reason."""
    broken = short_tmp / "m.gguf"
    broken.write_text("no")
    with pytest.raises(MeasureError, match="ended with code 1: "):
        measured(words(real_engine, broken), short_tmp)


def test_an_engine_that_cannot_be_run_says_so(short_tmp: Path) -> None:
    """Name an engine that is not there."""
    with pytest.raises(MeasureError, match="can't be run: No such file"):
        measured([str(short_tmp / "none")], short_tmp)


def test_an_engine_that_tells_nothing_is_ended(stub: Path, model: Path, short_tmp: Path) -> None:
    """Let an engine come to ready without a table: no figures, and it is not left behind."""
    with pytest.raises(MeasureError, match="without telling"):
        measured([str(stub), "--model", str(model)], short_tmp)


def test_the_stub_tells_what_it_is_told_to(stub: Path, model: Path, short_tmp: Path) -> None:
    """Script two devices: they come out as such."""
    (model.parent / f"{model.name}.json").write_text(json.dumps({"memory_mib": {"CUDA0": [9, 5, 2]}}))
    found = measured([str(stub), "--model", str(model), "--fit", "on"], short_tmp)
    assert found == {"CUDA0": Parts(model=10 * MIB, context=6 * MIB, compute=3 * MIB)}


def test_c190_an_engine_killed_from_outside_says_by_what(short_tmp: Path) -> None:
    """Measure with an engine that is killed by signal 9: the reason names it and its process."""
    engine = short_tmp / "engine"
    engine.write_text("#!/bin/sh\nkill -9 $$\n")
    engine.chmod(0o755)
    with pytest.raises(
        MeasureError, match=r"\(pid \d+\) was killed by signal 9, likely .* memory; it had \d+ MiB"
    ):
        measured([str(engine)], short_tmp)


def test_the_engine_dies_with_the_job(short_tmp: Path) -> None:
    """Kill the measuring process the hard way: its engine is gone, and its folder with the next job."""
    engine, note = short_tmp / "engine", short_tmp / "pid"
    engine.write_text(f"#!/bin/sh\necho $$ > {note}.part; mv {note}.part {note}\nexec sleep 60\n")
    engine.chmod(0o755)
    code = (
        "from pathlib import Path; from llamastead.measure_worker.measuring import measure\n"
        "from llamastead.measure_worker.leftovers import work_folder\n"
        f"with work_folder(Path({str(short_tmp)!r})) as folder: "
        f"measure([{str(engine)!r}], {{}}, folder, lambda: None)"
    )
    job = subprocess.Popen([sys.executable, "-c", code])
    until_blocking(lambda: note.exists() or job.poll() is not None, "the engine")
    pid = int(note.read_text())
    (left,) = (short_tmp / "w").iterdir()
    with work_folder(short_tmp) as mine:
        assert {left, mine} == set((short_tmp / "w").iterdir()), "a folder in use is left alone"
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    until_blocking(lambda: _is_zombie(pid), "the end of the engine")
    assert clean_up(short_tmp) == 1
    assert not left.exists()


def test_what_outlived_a_killed_job_is_ended_with_its_folder(short_tmp: Path) -> None:
    """Leave a folder and a process that names it, as a wrapped engine may: both go, others stay."""
    left, used = short_tmp / "w" / "left", short_tmp / "w" / "used"
    left.mkdir(parents=True)
    (left / "lock").touch()
    theirs, ours = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "XDG_CONFIG_HOME": str(folder)})
        for folder in (left, used)
    )
    try:
        assert clean_up(short_tmp) == 1
        assert theirs.wait(10) == -signal.SIGKILL
        assert not left.exists()
        assert ours.poll() is None
        assert clean_up(short_tmp) == 0
    finally:
        for process in (theirs, ours):
            process.kill()
            process.wait(10)


def _is_zombie(pid: int) -> bool:
    try:
        return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    except FileNotFoundError:
        return True


def test_what_is_not_known_is_reckoned_by_size_and_says_so(tmp_path: Path, model: Path) -> None:
    """Reckon a file whose header tells nothing: size and an allowance, marked as such."""
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(b"x" * MIB)
    reckoned = estimate(odd, read_use({}))
    assert (reckoned.source, reckoned.context) == ("file size", None)
    assert reckoned.parts.total > 512 * MIB
    tiny_model(tmp_path / "m.gguf", 2)
    exact = estimate(tmp_path / "m.gguf", read_use({"ctx-size": "256"})).parts.context
    assert exact == LAYERS * 2 * 32 * 2 * 256


async def test_a_worker_runs_only_what_its_own_supervisor_ordered(
    redis: Redis, redis_url: str, keys: Keys, short_tmp: Path
) -> None:
    """Order a command with a wrong seal: it does not run, and the outcome says why."""
    secret = read_or_make_herd_secret(short_tmp / "secret")
    witness = short_tmp / "ran"
    order = json.dumps({"commands": [["/usr/bin/touch", str(witness)]], "variables": {}})
    client = connect_sync(redis_url)
    arguments = {
        "model": "m",
        "identity": "i",
        "preset": "p",
        "order": order,
        "sealed": seal(secret, order + " "),
    }
    try:
        records = JobStore(client, keys)
        records.ask("j", {"name": MEASURE_MODEL, "queue": "measure", "arguments": json.dumps(arguments)})
        desk = Desk(client, keys, short_tmp, Attempt(records, "j", records.start("j", "w")), lambda: False)
        record = records.read("j")
        assert record is not None
        run_attempt(FUNCTIONS[MEASURE_MODEL], desk, record)
        after = records.read("j")
    finally:
        client.close()
    assert after is not None
    assert (after.state, "does not come from" in after.error) == ("failed", True)
    assert not witness.exists()
    found = await redis.hgetall(keys.measurement("i", "p"))
    assert (found["state"], found["failures"]) == ("failed", "1")
    assert "does not come from this herd's supervisor" in found["error"]


def test_c78_experts_that_stay_on_the_host_are_reckoned_there_pinned_or_mapped(
    kind: Callable[[str], Path],
) -> None:
    """Keep experts of one layer, of all, or the first layers whole on the host: those bytes are the host's,
    file pages unless mapping is off; without such options nothing is.
    """
    path = kind("experts")
    sizes = tensor_sizes(path)
    experts = [sum(s for n, s in sizes.items() if f"blk.{k}." in n and "_exps" in n) for k in range(DEEP)]
    first = sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    assert 0 < experts[0] < first
    whole = estimate(path, read_use({"ctx-size": "512"}))
    assert whole.on_host == Parts()
    for options, model in (
        ({"n-cpu-moe": "1"}, experts[0]),
        ({"cpu-moe": "true"}, sum(experts)),
        ({"n-cpu-moe": "99"}, sum(experts)),
    ):
        found = estimate(path, read_use({"ctx-size": "512", **options}))
        assert found.parts == whole.parts
        assert found.on_host == Parts(model=model, mapped=model)
        pinned = estimate(path, read_use({"ctx-size": "512", **options, "mmap": "false"}))
        assert pinned.on_host == Parts(model=model)
    # All but one of the layers, and the output, go to a GPU.
    split = estimate(path, read_use({"ctx-size": "512", "n-gpu-layers": str(DEEP)})).on_host
    assert (split.model, split.context) == (first, whole.parts.context // DEEP)
