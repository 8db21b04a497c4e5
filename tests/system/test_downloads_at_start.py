"""Downloads that a herd begins with: after a restart, by a preset, by the command line, on a small disk."""

import asyncio
import json
import signal
from pathlib import Path

from download_stand import CHAT, content, stand
from full_disk import small_disk
from herd import until

TOKEN = "hf_" + "s3cret" * 5


async def test_restarts_of_everything_resume_it() -> None:
    """C112: stop the whole herd in the middle of a file and start it again: still listed, it comes whole."""
    async with stand() as made:
        fault = made.hub.fault("/cdn/org/big", hold=1 << 20, times=1)
        assert (await made.pull("org/big:Q4_K_M")).status_code == 200
        await until(fault.held.is_set, "bytes")
        up = made.made.roles["up"]
        await up.signal(signal.SIGTERM)
        fault.release.set()
        again = made.hub.fault("/cdn/org/big", hold=2 << 20)
        await up.start()
        await made.made.ready(up, made.made.ports[0])
        await made.listed("org/big:Q4_K_M", "downloading")
        again.release.set()
        await made.listed("org/big:Q4_K_M")
        ranges = [
            r.range for r in made.hub.requests if "/big-Q4_K_M" in r.path and r.path.startswith("/cdn/")
        ]
        assert "" in ranges
        assert any(ranges)


async def test_a_preset_fetches_its_model_on_first_use(tmp_path: Path) -> None:
    """Two requests for a preset that names a repository: they wait with reason and progress, take no slot,
    and are answered; a model that the hub does not have fails them once, with its reason.
    """
    preset = tmp_path / "models.ini"
    preset.write_text(
        "[first]\nhf-repo = org/one:Q4_K_M\n[lost]\nhf-repo = org/none\n"
        "[shut]\nhf-repo = org/big\noffline = true\n"
    )
    async with stand({}, "--models-preset", str(preset), "--models-max", "1") as made:
        fault = made.hub.fault("/cdn/org/one", hold=100_000, times=1)
        asked = [made.one.post("/v1/chat/completions", json={"model": "first", **CHAT}) for _ in range(2)]
        answers = asyncio.gather(*asked)
        await until(fault.held.is_set, "bytes")
        (entry,) = (await made.one.get("/queue")).json()["queue"]
        assert (entry["model"], entry["reason"]) == ("first", "downloading")
        status = await made.coming("first")
        assert (status["value"], status["download"]["total"]) == ("downloading", len(content(1)))
        other = await made.one.post("/v1/chat/completions", json={"model": "other", **CHAT})
        assert other.status_code == 200, other.text
        fault.release.set()
        assert [answer.status_code for answer in await answers] == [200, 200]
        shut = await made.one.post("/v1/chat/completions", json={"model": "shut", **CHAT})
        assert (shut.status_code, "set to offline" in shut.text) == (503, True)
        lost = await made.one.post("/v1/chat/completions", json={"model": "lost", **CHAT})
        assert lost.status_code == 404
        assert "not on the hub" in lost.json()["error"]["message"]
        before = len(made.hub.requests)
        again = await made.one.post("/v1/chat/completions", json={"model": "lost", **CHAT})
        assert again.status_code == 404
        assert len(made.hub.requests) == before


async def test_c117_a_hub_that_never_answers_holds_up_no_cached_model(tmp_path: Path) -> None:
    """Bring a preset's model, then start the herd anew with a hub that takes requests and says nothing: the
    preset and the model of the cache load and answer, and nobody asks the hub. An order asks it, and is
    answered while that waits.
    """
    preset = tmp_path / "models.ini"
    preset.write_text("[first]\nhf-repo = org/one:Q4_K_M\n")
    async with stand({}, "--models-preset", str(preset)) as made:
        chat = {"model": "first", **CHAT}
        brought = await made.one.post("/v1/chat/completions", json=chat)
        assert brought.status_code == 200, brought.text
        up = made.made.roles["up"]
        await up.signal(signal.SIGTERM)
        silence = made.hub.fault("/", mute=True)
        before = len(made.hub.requests)
        await up.start()
        await made.made.ready(up, made.made.ports[0])
        for model in ("first", "org/one:Q4_K_M"):
            answer = await made.one.post("/v1/chat/completions", json={**chat, "model": model})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-llamastead-path"] == "cold"
        assert len(made.hub.requests) == before
        order = await made.pull("org/one:Q8_0")
        assert (order.status_code, order.json()["success"]) == (200, True)
        await until(silence.held.is_set, "the hub to be asked")  # the worker may still measure what is loaded
        again = await made.one.post("/v1/chat/completions", json=chat)
        assert again.status_code == 200, again.text


async def test_a_repository_on_the_command_line_is_fetched_and_loaded() -> None:
    """Start with -hf: its files come, and it is loaded without anybody asking."""
    async with stand({}, "-hf", "org/one:Q8_0") as made:

        async def loaded() -> bool:
            models = (await made.one.get("/models")).json()["data"]
            return any(m["status"]["value"] == "loaded" and "org/one" in m["id"] for m in models)

        await until(loaded, "the model to be loaded")
        assert len(made.hub.from_the_start("/cdn/")) == 1


async def test_a_preset_repository_is_fetched_and_is_the_start(tmp_path: Path) -> None:
    """Start on a repository of presets that is not cached: its sections are the models, one of them fetched
    and loaded for the start. Start again with a hub that never answers: all is there from the cache.
    """
    presets = b"[small]\nhf-repo = org/one:Q8_0\nload-on-startup = on\n[big]\nhf-repo = org/one:Q4_K_M\n"
    async with stand({}, "-hf", "org/presets", presets=presets) as made:
        await made.listed("small", "loaded")
        names = [model["id"] for model in (await made.one.get("/models")).json()["data"]]
        assert sorted(names) == ["big", "org/one:Q8_0", "other", "small"]
        assert len(made.hub.from_the_start("/cdn/")) == 1
        assert (await made.one.get("/queue")).json()["queue"] == []
        up = made.made.roles["up"]
        await up.signal(signal.SIGTERM)
        made.hub.fault("/", mute=True)
        before = len(made.hub.requests)
        await up.start()
        await made.made.ready(up, made.made.ports[0])
        await made.listed("small", "loaded")
        assert len(made.hub.requests) == before


async def test_presets_that_cannot_be_read_are_told_and_not_fetched_again() -> None:
    """Start on a repository whose presets are broken: who asks for its name hears where, once and again."""
    async with stand({}, "-hf", "org/presets", presets=b"[small]\nfrobnicate = 1\n") as made:
        await until(lambda: made.hub.count("preset.ini"), "the presets")
        for _ in range(2):
            answer = await made.one.post("/v1/chat/completions", json={"model": "org/presets", **CHAT})
            assert answer.status_code == 500, answer.text
            assert "preset.ini:2: option 'frobnicate' not recognized" in answer.json()["error"]["message"]
        assert made.hub.count("preset.ini") == 1


async def test_c120_the_token_of_a_preset_fetches_its_model(tmp_path: Path) -> None:
    """Two presets of closed repositories, one with the token that opens it: it is fetched and answers, the
    other is told to log in; the token is in no key of Redis, no log and no event (C120, C157).
    """
    preset = tmp_path / "models.ini"
    preset.write_text(
        f"[mine]\nhf-repo = org/mine:Q8_0\nhf-token = {TOKEN}\n[theirs]\nhf-repo = org/theirs:Q8_0\n"
    )
    async with stand({}, "--models-preset", str(preset)) as made:
        for name in ("mine", "theirs"):
            made.hub.add(f"org/{name}", {f"{name}-Q8_0.gguf": content(7)})
            made.hub.gated.add(f"org/{name}")
        made.hub.token(TOKEN, "org/mine")
        answer = await made.one.post("/v1/chat/completions", json={"model": "mine", **CHAT})
        assert answer.status_code == 200, answer.text
        refused = await made.one.post("/v1/chat/completions", json={"model": "theirs", **CHAT})
        assert (refused.status_code, "is gated" in refused.text) == (401, True)
        asked = [r for r in made.hub.requests if "org/mine" in r.path and not r.path.startswith("/cdn/")]
        assert {r.authorization for r in asked} == {f"Bearer {TOKEN}"}
        assert {r.authorization for r in made.hub.requests if "org/theirs" in r.path} == {""}
        seen = "".join(role.output() for role in made.made.roles.values()) + json.dumps(made.told)
        async with made.made.redis() as redis:
            for key in await redis.keys("*"):
                if await redis.type(key) == "hash":
                    seen += json.dumps(await redis.hgetall(key))
                elif await redis.type(key) == "stream":
                    seen += json.dumps(await redis.xrange(key))
        assert TOKEN not in seen
        folder = made.made.run_dir / "hub-tokens"
        await until(lambda: not folder.exists(), "the token's file to be removed")


async def test_a_small_disk_is_told_before_it_is_full(tmp_path: Path) -> None:
    """C114: 4 MiB wanted where 3 MiB are free: refused at once with both numbers; when there is room,
    the same order works without a restart.
    """
    with small_disk(tmp_path / "small", "8m") as place:
        ballast = place / "ballast"
        ballast.write_bytes(b"x" * (5 << 20))
        async with stand({"HF_HUB_CACHE": str(place / "cache")}) as made:
            await made.at_rest()
            refused = await made.pull("org/big:Q4_K_M")
            error = refused.json()["error"]
            assert refused.status_code == 507, error
            assert (error["needed"], error["reason"]) == (4 << 20, "no_space")
            assert error["free"] < 4 << 20
            assert "needs 4.0 MiB, but" in error["message"]
            assert made.hub.count("/cdn/") == 0
            await made.gone("org/big:Q4_K_M")
            ballast.unlink()
            assert (await made.pull("org/big:Q4_K_M")).status_code == 200
            await made.listed("org/big:Q4_K_M")
