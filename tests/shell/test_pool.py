"""Connections to instances against a scripted raw server: reuse, faults, counts."""

import asyncio
import random
import socket
from pathlib import Path

import pytest
from byte_path_kit import OK, Instance, Visit, answering, chunk, instance
from pool_kit import EMPTY, HEAD, ask, whole
from waiting import PATIENCE_S

from llamastead.gateway.body import Body, read_body
from llamastead.gateway.upstream import (
    AddressRefused,
    Pool,
    Pools,
    Unreachable,
    UpstreamDied,
    connection,
    pool,
)

CONNECT_S = 0.3  # enough to connect, also on a busy machine


async def test_a_kept_connection_found_closed_is_replaced_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance closes on the second request of a connection: it goes out again on a fresh one, once."""
    monkeypatch.setattr(pool, "STALE_S", 3600.0)  # a busy machine may be late to see it closed

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await visit.request()

    async with instance(path, script) as made:
        connections = Pool(made.address)
        assert [await ask(connections) for _ in range(3)] == [(200, b"ok")] * 3
        assert (made.visits, len(made.received)) == (3, 5)
        connections.close()


async def test_nothing_is_sent_twice_after_a_byte_came_back(path: Path) -> None:
    """A kept connection that breaks inside the answer's head: an error, and no second try."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await visit.request()
        await visit.send(b"HTTP/1.1 2")

    async with instance(path, script) as made:
        connections = Pool(made.address)
        await ask(connections)
        with pytest.raises(UpstreamDied) as died:
            await ask(connections)
        assert died.value.answered
        assert len(made.received) == 2


async def test_what_is_cut_is_not_sent_again(path: Path) -> None:
    """Cut a request on a kept connection, as an unload by force does: an error of that text, one try."""
    arrived = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await visit.request()
        arrived.set()
        await visit.gone()

    async with instance(path, script) as made:
        connections = Pool(made.address)
        await ask(connections)
        asked = asyncio.create_task(ask(connections))
        await arrived.wait()
        connections.cut("stopped by force")
        with pytest.raises(UpstreamDied, match="stopped by force"):
            await asked
        assert (made.visits, len(made.received)) == (1, 2)


async def test_what_an_instance_worked_on_when_it_went_is_not_begun_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept connection that ends late in a request, as when the engine dies of it: an error, one try."""
    monkeypatch.setattr(pool, "STALE_S", -1.0)

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await visit.request()

    async with instance(path, script) as made:
        connections = Pool(made.address)
        await ask(connections)
        with pytest.raises(UpstreamDied):
            await ask(connections)
        assert (made.visits, len(made.received)) == (1, 2)


async def test_a_fresh_connection_that_dies_is_an_error(path: Path) -> None:
    """No answer on a new connection: an error after one try."""

    async def script(visit: Visit) -> None:
        await visit.request()

    async with instance(path, script) as made:
        with pytest.raises(UpstreamDied):
            await ask(Pool(made.address))
        assert len(made.received) == 1


async def test_nobody_listening_is_told_apart(path: Path) -> None:
    """No socket, then a stale one: both are AddressRefused."""
    with pytest.raises(AddressRefused):
        await ask(Pool(f"unix:{path}"))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with pytest.raises(AddressRefused):
        await ask(Pool(f"unix:{path}"))


async def test_a_full_backlog_is_waited_for(path: Path) -> None:
    """More connections than the backlog takes while nobody accepts: all are served once somebody does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        listener.setblocking(False)
        connections = Pool(f"unix:{path}")
        loop = asyncio.get_running_loop()
        first = loop.create_task(ask(connections))
        others = [loop.create_task(ask(connections)) for _ in range(4)]
        accepted = []
        try:
            for _ in range(5):
                accepted.append((await loop.sock_accept(listener))[0])
                await loop.sock_recv(accepted[-1], 1000)
                await loop.sock_sendall(
                    accepted[-1], OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
                )
            assert await asyncio.gather(first, *others) == [(200, b"ok")] * 5
        finally:
            for sock in accepted:
                sock.close()


async def test_a_connection_serves_a_hundred_requests(path: Path) -> None:
    """A hundred and one requests: the last one on a second connection, before the instance would close."""
    async with instance(path, answering()) as made:
        connections = Pool(made.address)
        for _ in range(connection.MAX_REQUESTS):
            await ask(connections)
        assert (made.visits, connections.idle) == (1, 0)
        await ask(connections)
        assert made.visits == 2
        connections.close()


async def test_an_unused_connection_is_closed_in_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time shortened: the instance sees the close without another request."""
    monkeypatch.setattr(pool, "IDLE_S", 0.05)
    async with instance(path, answering()) as made:
        connections = Pool(made.address)
        await ask(connections)
        assert connections.idle == 1
        await made.all_closed()
        assert connections.idle == 0


async def test_an_aged_connection_is_not_used_even_before_it_is_reaped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reaper is late: the next request still goes out on a fresh connection."""
    async with instance(path, answering()) as made:
        connections = Pool(made.address)
        await ask(connections)
        monkeypatch.setattr(pool, "IDLE_S", 0.0)
        await ask(connections)
        assert made.visits == 2
        connections.close()


async def test_a_slow_reader_holds_back_the_instance(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of 64 MiB that nobody reads: what is held stays bounded, and all of it comes in the end."""
    size, piece = 64 << 20, b"x" * 65536
    paused = asyncio.Event()
    take = connection.Connection.data_received

    def data_received(self: connection.Connection, data: bytes) -> None:
        take(self, data)
        if self._read_paused:
            paused.set()

    monkeypatch.setattr(connection.Connection, "data_received", data_received)

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            await visit.send(piece)

    async with instance(path, script) as made:
        response = await Pool(made.address).exchange(HEAD, EMPTY)
        held = response._connection
        assert held is not None
        async with asyncio.timeout(PATIENCE_S):
            await paused.wait()
        assert held._held <= 2 * connection.READ_HIGH_BYTES
        total = 0
        while data := await response.read():
            total += len(data)
            assert held._held <= 2 * connection.READ_HIGH_BYTES
        assert total == size
        response.close()


async def large_body(size: int) -> Body:
    """A body of `size` bytes, spooled."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"z" * size, "more_body": False}

    return await read_body(receive, [], size, search=False)


async def test_a_large_body_arrives_whole(path: Path) -> None:
    """Eight MiB from the spool to an instance that reads: byte for byte."""
    body = await large_body(8 << 20)
    async with instance(path, answering()) as made:
        connections = Pool(made.address)
        head = b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % body.size
        assert await whole(await connections.exchange(head, body)) == b"ok"
        assert made.received[0].body == b"z" * body.size
        assert connections.idle == 1
        connections.close()
    body.close()


async def test_a_refusal_before_the_bodys_end_is_an_answer(path: Path) -> None:
    """The instance answers 413 after the head and reads no further: the answer comes, the connection goes."""
    body = await large_body(64 << 20)

    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await visit.send(OK.replace(b"200 OK", b"413 Large"))
        await asyncio.Event().wait()

    async with instance(path, script) as made:
        connections = Pool(made.address)
        async with asyncio.timeout(PATIENCE_S):
            response = await connections.exchange(
                b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % body.size, body
            )
            assert (response.status, await whole(response)) == (413, b"ok")
        assert (connections.busy, connections.idle) == (0, 0)
    body.close()


async def test_c138_a_late_accept_and_a_later_answer_are_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that accepts and answers long after the limits of connecting and of idleness: served."""
    monkeypatch.setattr(pool, "IDLE_S", 0.01)
    late = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        asyncio.get_running_loop().call_later(2 * CONNECT_S, late.set)
        await late.wait()
        await visit.send(OK)

    async def accept_later() -> asyncio.Server:
        await asyncio.sleep(2 * CONNECT_S)  # no event tells: the point is that nobody accepts for so long
        return await asyncio.start_unix_server(made.accept, sock=listening)

    made = Instance(path, script)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        connections = Pool(made.address, CONNECT_S)
        answer, server = await asyncio.gather(ask(connections), accept_later())
        assert answer == (200, b"ok")
        connections.close()
        server.close()
        await made.all_closed()


async def test_c25_an_instance_that_hangs_holds_up_nobody_else(short_tmp: Path) -> None:
    """Fifty requests to an instance that never answers, then ten to another: those are answered at once."""

    async def mute(visit: Visit) -> None:
        await visit.gone()

    async with (
        instance(short_tmp / "a.sock", mute) as a,
        instance(short_tmp / "b.sock", answering()) as b,
    ):
        pools = Pools()
        hanging = [asyncio.create_task(ask(pools.get("a", a.address))) for _ in range(50)]
        answers = await asyncio.gather(*(ask(pools.get("b", b.address)) for _ in range(10)))
        assert answers == [(200, b"ok")] * 10
        assert pools.counts()["a"] == (50, 0)
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        assert pools.counts()["a"] == (0, 0)
        await a.all_closed()
        await pools.close()


async def test_c160_one_instance_gets_no_more_than_its_share(short_tmp: Path) -> None:
    """500 requests to an instance that never answers, of which 20 may wait: the others end at once."""

    async def mute(visit: Visit) -> None:
        await visit.gone()

    async with (
        instance(short_tmp / "a.sock", mute) as a,
        instance(short_tmp / "b.sock", answering()) as b,
    ):
        pools = Pools(most=20)
        asked = [asyncio.create_task(ask(pools.get("a", a.address))) for _ in range(500)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(task.done() for task in asked) < 480:
                await asyncio.wait([task for task in asked if not task.done()], return_when="FIRST_COMPLETED")
        problems = [task.exception() for task in asked if task.done()]
        assert all(isinstance(problem, Unreachable) for problem in problems)
        assert "most for one instance" in str(problems[0])
        assert await ask(pools.get("b", b.address)) == (200, b"ok")
        waiting = [task for task in asked if not task.done()]
        assert len(waiting) == 20
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await a.all_closed()
        await pools.close()


async def test_a_dropped_pool_lets_running_answers_end(path: Path) -> None:
    """Drop an instance with one kept and one running connection: the kept one closes, the answer goes on."""
    go_on = asyncio.Event()

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            if visit.number == 1:
                await go_on.wait()
            await visit.send(OK)

    async with instance(path, script) as made:
        pools = Pools()
        running = asyncio.create_task(ask(pools.get("i", made.address)))
        await made.arrived.wait()
        await ask(pools.get("i", made.address))
        pools.drop("i")
        assert pools.counts() == {}
        go_on.set()
        assert await running == (200, b"ok")
        await made.all_closed()


@pytest.mark.parametrize("seed", range(5))
async def test_r15_counts_match_what_is_open_after_any_mix_of_ends(path: Path, seed: int) -> None:
    """Two hundred exchanges that end well, stay unread, are cancelled or die: counts equal open sockets."""
    chance = random.Random(seed)

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            match chance.randrange(5):
                case 0:
                    return
                case 1:
                    await visit.send(OK[:-1])
                    await visit.gone()
                case 2:
                    await visit.send(OK[:-1])
                    return
                case _:
                    await visit.send(OK)

    async def one(connections: Pool) -> None:
        try:
            async with asyncio.timeout(chance.choice([0.02, 0.2])):
                response = await connections.exchange(HEAD, EMPTY)
                try:
                    while chance.random() < 0.7 and await response.read():
                        pass
                finally:
                    response.close()
        except (UpstreamDied, TimeoutError):
            pass

    async with instance(path, script) as made:
        connections = Pool(made.address)
        for _ in range(10):
            await asyncio.gather(*(one(connections) for _ in range(20)))
            assert connections.busy == 0
            async with asyncio.timeout(PATIENCE_S), made.closed:
                await made.closed.wait_for(lambda: made.open == connections.idle)
        connections.close()
        await made.all_closed()


def test_an_address_of_another_kind_is_refused() -> None:
    """An address that isn't unix:<path>: said at once."""
    with pytest.raises(ValueError, match="unix:<path>"):
        Pools().get("i", "ftp:there")


async def test_an_answer_read_ahead_outlives_its_instance(path: Path) -> None:
    """Read a long answer slowly: the instance ends before a second piece is read, and it comes whole."""
    pieces = [bytes([65 + k % 26]) * 65536 for k in range(40)]
    said = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            await visit.send(chunk(piece))
        await visit.send(chunk(b""))
        said.set()

    async with instance(path, script) as server, asyncio.timeout(PATIENCE_S):
        response = await Pool(server.address).exchange(HEAD, EMPTY)
        first = await response.read()
        response.read_ahead(8 << 20)
        await response.whole()
        await said.wait()
        await server.all_closed()
        assert first + await whole(response) == b"".join(pieces)
