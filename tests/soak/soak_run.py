"""One run of the soak: a herd, its clients, faults by the seed, a judge, and the figures."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from herd import until
from soak_checker import Checker, biggest, sizes
from soak_faults import Faults, Injected
from soak_stage import MODELS, Stage, stage
from soak_traffic import CHAT, Traffic

SETTLE_S = 30.0


@dataclass
class Report:
    """What a run did and found."""

    seed: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    unfired: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    most_instances: int = 0
    most_booked: float = 0.0
    breaches: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report as lines for people."""
        lines = [
            f"seed {self.seed}, {self.seconds:g} s, {self.looks} looks",
            f"at most {self.most_instances} engines, {self.most_booked:.0%} of the GPU without its margin",
        ]
        lines += ["faults that struck:"] + [
            f"  {count:5} {name}" for name, count in sorted(self.faults.items())
        ]
        if self.unfired:
            lines += [f"met nobody: {dict(sorted(self.unfired.items()))}"]
        lines += ["requests:"] + [f"  {count:5} {name}" for name, count in self.outcomes.most_common()]
        lines += ["refused because:"] + [f"  {count:5} {why}" for why, count in self.refusals.most_common(12)]
        lines += [f"breaches: {len(self.breaches)}"] + [f"  {text[:1500]}" for text in self.breaches]
        return "\n".join(lines)


async def soak(
    seed: int, seconds: float, pause_s: float, clients: int, log: Path | None = None, *, tcp: bool = False
) -> Report:
    """Run the soak, with instances on TCP ports if `tcp`, and return what it found."""
    async with stage(tcp=tcp) as set_up:
        await answers(set_up)
        before = biggest(sizes(set_up))
        checker = Checker(set_up)
        traffic = Traffic(set_up, seed, clients, log or set_up.folder / "requests.jsonl")
        faults = Faults(set_up, seed, pause_s)
        checker.faults = faults.injected
        looking = asyncio.create_task(checker.run())
        asking = asyncio.create_task(traffic.run())
        striking = asyncio.create_task(faults.run())
        await asyncio.wait((looking, asking, striking), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        faults.stop.set()
        await striking
        set_up.gates.heal()
        set_up.reigns.heal()
        traffic.stop.set()
        await asking
        await set_up.all_up()
        try:
            await answers(set_up)
        except AssertionError as failure:
            checker.breaches.append(f"not all is served afterwards: {failure}")
        await checker.judge_rest(before)
        checker.stop.set()
        await looking
        report = Report(seed, seconds, looks=checker.looks, most_instances=checker.most_instances)
        report.most_booked = checker.most_booked
        if set_up.has_gpu and not checker.most_booked:
            checker.breaches.append("nothing was ever booked on the GPU")
        report.outcomes = checker.judge_outcomes(traffic.outcomes, faults.injected)
        checker.judge_journals()
        checker.judge_folders()
        report.faults = Counter(fault.name for fault in faults.injected if fault.fired)
        report.unfired = Counter(fault.name for fault in faults.injected if not fault.fired)
        report.refusals = Counter(
            f"{o.status} {o.detail[:110]}" for o in traffic.outcomes if o.result == "refused"
        )
        report.breaches = checker.breaches
        if report.breaches:
            keep(set_up, faults.injected)
        return report


async def answers(set_up: Stage) -> None:
    """Check that each model answers through each gateway, after a while."""
    for port in set_up.port_of.values():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            for model in MODELS:
                said = ""

                async def answered(model: str = model, client: httpx.AsyncClient = client) -> bool:
                    nonlocal said
                    body = {"model": model, **CHAT, "max_tokens": 2}
                    answer = await client.post("/v1/chat/completions", json=body)
                    said = answer.text
                    return answer.status_code == 200

                try:
                    await until(answered, f"{model} to answer at {port}", SETTLE_S)
                except AssertionError as failure:
                    raise AssertionError(f"{failure}: {said}") from None


def keep(set_up: Stage, injected: list[Injected]) -> None:
    """Keep the logs of all roles, and what was injected when, where a person can read them."""
    folder = Path(f"/tmp/soak-{set_up.folder.name}")
    folder.mkdir(exist_ok=True)
    for path in (
        *set_up.folder.glob("*.log"),
        *set_up.folder.glob("*.jsonl"),
        *set_up.made.run_dir.glob("logs/*"),
    ):
        with contextlib.suppress(OSError):
            (folder / path.name).write_bytes(path.read_bytes())
    for path in set_up.made.models.glob("*.journal"):
        (folder / path.name).write_bytes(path.read_bytes())
    told = [
        f"{f.began:.1f} to {f.ended:.1f} {f.name} {f.target} {'' if f.fired else '(met nobody)'}\n"
        for f in injected
    ]
    (folder / "faults.txt").write_text("".join(told))
    print(f"logs kept in {folder}")
