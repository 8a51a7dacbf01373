"""Who visits: logging in, sessions and their end, forms of other sites, and what each scope may do."""

import asyncio
import os
import re
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import psycopg
import pytest

from lineshaft import Lineshaft
from lineshaft.clock import MovableClock
from lineshaft.dashboard import live
from lineshaft.duties.supervisor import all_duties
from lineshaft.server.framework import streams
from lineshaft.types import Scope
from tests.dashboard.addresses import (
    ACTIONS,
    FILES,
    PAGES,
    REDIRECTS,
    action_address,
    addresses,
    page_addresses,
)
from tests.dashboard.conftest import Serve, Served
from tests.dashboard.forms import Person
from tests.dashboard.live_stream import live_stream
from tests.dashboard.sample import Sample, fill
from tests.server.client import Reply, read_reply
from tests.server.test_peers import bare, call, needs_root

_HOUR_SEC = 3_600


async def _token(served: Served, scope: str = "operate", name: str = "ada") -> str:
    return (await served.service.tokens.create(name, scope)).token


async def _logged_in(served: Served, token: str) -> Person:
    person = Person(served)
    await person.log_in(token)
    return person


async def _is_logged_in(person: Person) -> bool:
    reply = await person.get("/tasks")
    assert reply.status in {200, 303}, reply
    if reply.status == 303:
        assert reply.headers["location"] == "/login?next=%2Ftasks"
    return reply.status == 200


async def _raw(served: Served, method: str, path: str, *, headers: dict[str, str], form: str = "") -> Reply:
    if method == "POST":
        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    reader, writer = await served.client.send(method, path, raw=form.encode(), headers=headers)
    try:
        return await read_reply(reader)
    finally:
        writer.close()


def _cookie(person: Person) -> dict[str, str]:
    return {"Cookie": "; ".join(f"{name}={value}" for name, value in person.cookies.items())}


def _count(connection: psycopg.Connection, table: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM lineshaft.{table}".encode()).fetchone()
    assert found is not None
    return int(found[0])


def _changes(connection: psycopg.Connection) -> int:
    """Events of all that was done, except creating tokens."""
    counted = connection.execute(
        "SELECT count(*) FROM lineshaft.event WHERE NOT kinds && ARRAY['token.created']"
    )
    (number,) = counted.fetchone() or (0,)
    return int(number)


def _post_forms(page: str) -> Iterator[str]:
    """Actions of the forms that change something."""
    for tag in re.findall(r"<form\b[^>]*>", page):
        if 'method="post"' in tag:
            yield re.findall(r'action="([^"]*)"', tag)[0]


# Logging in.


async def test_a_token_opens_a_session_and_leads_back_to_the_page(serve: Serve) -> None:
    async with serve(auth=True) as served:
        token = await _token(served)
        person = Person(served)
        assert (await person.get("/dags?status=failed")).headers["location"] == (
            "/login?next=%2Fdags%3Fstatus%3Dfailed"
        )
        await person.page("/login")

        wrong = await person.submit("/login", {"token": "lsk_wrong"})
        assert wrong.status == 401
        assert b"not a valid token" in wrong.body
        assert not await _is_logged_in(person)

        reply = await person.submit("/login?next=%2Fdags%3Fstatus%3Dfailed", {"token": token})
        assert (reply.status, reply.headers["location"]) == (303, "/dags?status=failed")
        page = await person.page("/tasks")
        assert "ada" in page
        assert token not in page


async def test_the_cookie_is_out_of_reach_of_scripts_and_only_over_https_behind_a_proxy(
    serve: Serve,
) -> None:
    async with serve(auth=True) as served:
        token = await _token(served)
        person = Person(served)
        await person.page("/login")
        form = urlencode({"csrf": person.csrf, "token": token})
        for proto, secure in (("http", False), ("https", True)):
            # Browsers accept this prefix only over HTTPS, for all paths and from this host itself.
            prefix = "__Host-" if secure else ""
            cookies = "; ".join(f"{prefix}{name}={value}" for name, value in person.cookies.items())
            headers = {"Cookie": cookies, "X-Forwarded-Proto": proto}
            reply = await _raw(served, "POST", "/login", headers=headers, form=form)
            assert reply.headers["set-cookie"].startswith(f"{prefix}lineshaft_session")
            cookie = reply.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=lax" in cookie
            assert "path=/" in cookie
            assert "domain" not in cookie
            assert ("secure" in cookie) is secure, proto


@needs_root
async def test_a_session_of_this_machine_is_of_no_use_to_another_account(serve: Serve) -> None:
    """Browsers send cookies to every port of a host, so another account's server can get them."""
    async with serve(auth=True) as served:
        person = await _logged_in(served, await _token(served))
        (cookie,) = _cookie(person).values()
        host = f"127.0.0.1:{served.client.port}"
        assert "lineshaft_session" in cookie
        for name in (cookie, f"__Host-{cookie}"):
            for header in ("X-Forwarded-Proto: https", "Accept: text/html"):
                stolen = await call(
                    served.client, bare("GET", "/tasks", f"Cookie: {name}", header, host=host)
                )
                assert (stolen.status, stolen.headers["location"]) == (303, "/login?next=%2Ftasks")
        again = bare("GET", "/tasks", f"Cookie: {cookie}", host=host)
        assert (await call(served.client, again, account=os.geteuid())).status == 200
        assert await _is_logged_in(person)


async def test_a_proxy_needs_a_token_even_where_none_is_needed(served: Served) -> None:
    reply = await _raw(served, "GET", "/", headers={"X-Forwarded-Proto": "https"})
    assert (reply.status, reply.headers["location"]) == (303, "/login?next=%2F")


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example",
        "/\\evil.example",
        "http://evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "/\n/evil.example",
        "evil",
        "",
    ],
)
async def test_logging_in_leads_only_to_this_server(served: Served, target: str) -> None:
    reply = await Person(served).get(f"/login?next={quote(target, safe='')}")
    assert (reply.status, reply.headers["location"]) == (303, "/")


# The end of sessions.


async def test_logging_out_ends_the_session_on_all_servers(
    serve: Serve, connection: psycopg.Connection
) -> None:
    async with serve(auth=True) as one, serve(auth=True) as other:
        person = await _logged_in(one, await _token(one))
        assert _count(connection, "session") == 1
        kept = _cookie(person)
        # A load balancer passes the name on by which it was called.
        through_balancer = {**kept, "Host": f"127.0.0.1:{one.client.port}"}
        assert (await _raw(other, "GET", "/tasks", headers=through_balancer)).status == 200

        await person.submit("/logout")

        assert not person.cookies
        assert _count(connection, "session") == 0
        for served in (one, other):
            assert (await _raw(served, "GET", "/tasks", headers=through_balancer)).status == 303


async def test_a_session_ends_with_its_token_and_so_does_its_open_stream(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_EVERY_SEC", 0.05)
    monkeypatch.setattr(live, "PING_EVERY_SEC", 0.05)
    async with serve(auth=True) as served:
        person = await _logged_in(served, await _token(served))
        async with asyncio.timeout(60), live_stream(served, "/", person.cookies) as stream:
            assert (await stream.event())["event"] == "page"

            await served.service.tokens.revoke("ada")

            while (event := await stream.event())["event"] == "page":
                pass
            assert event["event"] == "ended"
            with pytest.raises((EOFError, asyncio.IncompleteReadError)):
                await stream.event()
        assert not await _is_logged_in(person)


async def test_a_session_ends_after_twelve_idle_hours_and_after_seven_days(
    serve: Serve, clock: MovableClock, connection: psycopg.Connection
) -> None:
    async with serve(auth=True, clock=clock) as served:
        token = await _token(served)
        idle = await _logged_in(served, token)
        busy = await _logged_in(served, token)
        for _ in range(2):
            clock.advance(11 * _HOUR_SEC)
            assert await _is_logged_in(busy)
        assert not await _is_logged_in(idle)

        for _ in range(13):
            clock.advance(11 * _HOUR_SEC)
            assert await _is_logged_in(busy)
        clock.advance(4 * _HOUR_SEC)
        assert not await _is_logged_in(busy)

        assert _count(connection, "session") == 2
        clock.advance(12 * _HOUR_SEC)
        assert await served.service.engine.sessions.forget(1) == 1
        duties = all_duties(served.service.engine, served.service.settings)
        await next(duty for duty in duties if duty.name == "janitor").run_once()
        assert _count(connection, "session") == 0


async def test_a_name_is_enough_only_until_the_first_token_is_created(served: Served) -> None:
    person = Person(served)
    await person.page("/guards")
    await person.act("/guards/pause", {"type": "draw"})
    assert "Test Person" in await person.page("/")

    await _token(served)
    await asyncio.sleep(0.06)  # servers notice it within 50 ms

    assert not await _is_logged_in(person)
    refused = await person.submit("/guards/pause", {"type": "write"})
    assert refused.status == 401
    assert (await served.service.engine.read.attention()).paused == ["draw"]


# What a session is good for.


async def test_the_name_is_asked_once_and_the_form_is_not_lost(served: Served) -> None:
    person = Person(served)
    await person.page("/new")
    fields = {"type": "research", "title": "Find <it>", "spec": '{"a": "</textarea>"}', "your_name": ""}

    asked = await person.submit("/new", fields)

    page = asked.body.decode()
    assert asked.status == 200
    assert "Who are you?" in page
    assert 'name="title" value="Find &lt;it&gt;"' in page
    # As the browser sends it: the hidden fields and the name.
    page = await person.act("/new", {**fields, "your_name": "Grace"})
    assert "Find &lt;it&gt;" in page
    second = await person.submit("/new", {**fields, "title": "Second"})
    assert second.status == 303, "the name is known"


async def test_the_cookie_is_not_a_credential_of_the_api(serve: Serve) -> None:
    async with serve(auth=True) as served:
        person = await _logged_in(served, await _token(served, "admin"))
        for path in ("/v1/tasks", "/v1/stats", "/api/tasks", "/v1/events"):
            reply = await _raw(served, "GET", path, headers=_cookie(person))
            assert reply.status in {401, 404}, (path, reply.status)
        body = {"Content-Type": "application/json", **_cookie(person)}
        reply = await _raw(served, "POST", "/v1/tasks", headers=body, form='{"type": "research"}')
        assert reply.status == 401


async def test_forms_of_other_sites_and_sessions_change_nothing(
    serve: Serve, connection: psycopg.Connection
) -> None:
    async with serve(auth=True) as served:
        token = await _token(served)
        person, other = await _logged_in(served, token), await _logged_in(served, token)
        for csrf in ("", "wrong", other.csrf):
            assert (await person.submit("/new", {"type": "research"}, csrf=csrf)).status == 403
        form = urlencode({"csrf": person.csrf, "type": "research"})
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": f"http://127.0.0.1:{served.client.port + 1}"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Host": "evil.example"},
        ):
            reply = await _raw(served, "POST", "/new", headers={**_cookie(person), **headers}, form=form)
            assert reply.status == 403, headers
        body = {**_cookie(person), "Content-Type": "text/plain"}
        assert (await _raw(served, "POST", "/new", headers=body, form=form)).status == 422
        assert (await _raw(served, "GET", "/", headers={**_cookie(person), "Host": "evil"})).status == 403
        assert _count(connection, "task") == 0

        own = {**_cookie(person), "Origin": f"http://127.0.0.1:{served.client.port}"}
        assert (await _raw(served, "POST", "/new", headers=own, form=form)).status == 303
        assert _count(connection, "task") == 1


# Every page and every action.


async def _sample(served: Served, token: str) -> Sample:
    async with Lineshaft(f"http://127.0.0.1:{served.client.port}", token=token) as shaft:
        return await fill(shaft)


@pytest.mark.slow("opens every page with every scope")
async def test_each_scope_sees_and_does_only_what_it_may(
    serve: Serve, connection: psycopg.Connection
) -> None:
    async with serve(auth=True) as served:
        sample = await _sample(served, await _token(served, "admin", "root"))
        before = _changes(connection)
        for scope in (Scope.READ, Scope.SUBMIT, Scope.AGENT):
            person = await _logged_in(served, await _token(served, scope, f"with {scope}"))
            for page in PAGES:
                for address in addresses(page, sample):
                    reply = await person.get(address)
                    expected = 200 if scope.includes(page.scope) else 403
                    if page.path in REDIRECTS:
                        expected = 303
                    assert reply.status == expected, (scope, address, reply.status)
                    if page.path in FILES | REDIRECTS or expected == 403:
                        continue
                    text = reply.body.decode()
                    offered = set(_post_forms(text)) - {"/logout"}
                    allowed = {action.path for action in ACTIONS if scope.includes(action.scope)}
                    assert offered <= allowed, (scope, address)
                    assert ('href="/new"' in text) is scope.includes(Scope.SUBMIT), (scope, address)
            for action in ACTIONS:
                address = action_address(action, sample)
                without = await person.submit(address, csrf="")
                assert without.status == 403, address
                if not scope.includes(action.scope):
                    refused = await person.submit(address, {"reason": "because"})
                    assert refused.status == 403, (scope, address)
                    assert f"needs a token with the scope {action.scope}" in refused.body.decode()
        assert _changes(connection) == before

        operator = await _logged_in(served, await _token(served, "operate", "op"))
        offered = {form for page in page_addresses(sample) for form in _post_forms(await operator.page(page))}
        assert len(offered) > len(ACTIONS) / 2


@pytest.mark.slow("opens every page")
async def test_every_page_has_the_security_headers_and_the_stream_needs_the_scope_of_its_page(
    serve: Serve,
) -> None:
    async with serve(auth=True) as served:
        sample = await _sample(served, await _token(served, "admin", "root"))
        operator = await _logged_in(served, await _token(served, "operate", "op"))
        for address in ["/login", "/tasks/unknown", *page_addresses(sample)]:
            reply = await operator.get(address)
            if reply.status not in {404, 303}:
                assert reply.status == 200, address
            headers = reply.headers
            assert headers["cache-control"] == "no-store", address
            if reply.status == 303:
                continue
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "same-origin"

        reader = await _logged_in(served, await _token(served, "read", "reader"))
        for page in PAGES:
            if page.path in FILES | REDIRECTS:
                continue
            address = addresses(page, sample)[0]
            async with asyncio.timeout(60), live_stream(served, address, reader.cookies) as stream:
                expected = 200 if page.scope is Scope.READ else 403
                assert stream.status == expected, address
        async with live_stream(served, "/", {}) as stream:
            assert stream.status == 401
        async with live_stream(served, "//evil.example/no-page", reader.cookies) as stream:
            assert stream.status == 200  # as /
        async with live_stream(served, "/no-page", reader.cookies) as stream:
            assert stream.status == 404


async def test_an_address_with_too_many_fields_is_refused(served: Served) -> None:
    person = Person(served)
    page = await person.page("/tasks?" + "&".join(f"tag={number}" for number in range(2_001)), status=422)
    assert "The address has too many fields (at most 2,000)." in page


async def test_an_unknown_address_is_a_page_for_people_and_a_problem_for_programs(served: Served) -> None:
    html = {"Accept": "text/html,application/xhtml+xml"}

    page = await served.client.request("GET", "/no-such-page", headers=html)
    assert (page.status, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "no-such-page" in page.body.decode()
    assert (await served.client.request("GET", "/no-such-page")).code == "not_found"
    assert (await served.client.request("GET", "/v1/nothing", headers=html)).code == "not_found"


async def test_a_path_with_a_slash_too_many_leads_to_a_path_of_the_same_server(served: Served) -> None:
    host = {"Host": f"127.0.0.1:{served.client.port}"}
    for path, to in (
        ("/tasks/", "/tasks"),
        ("/tasks///", "/tasks"),
        ("/tasks/?status=READY&q=a%20b", "/tasks?status=READY&q=a%20b"),
        ("/v1/tasks/?limit=5", "/v1/tasks?limit=5"),
        ("/tasks/a%0d%0aX-Bad:%20b/", "/tasks/a%0D%0AX-Bad:%20b"),
        ("/sources/%5c%5cevil.example/", None),
        ("//evil.example/", None),
        ("//evil.example/tasks/", None),
        ("///tasks/", None),
        ("/%2F/evil.example/", None),
        ("/nowhere/", None),
    ):
        reply = await _raw(served, "GET", path, headers=host)
        if to is None:
            assert "location" not in reply.headers, (path, reply)
        else:
            assert (reply.status, reply.headers["location"]) == (307, to), path
    # The method and the body are sent again.
    assert (await _raw(served, "POST", "/v1/tasks/", headers=host)).status == 307


async def test_an_error_page_offers_to_log_in_only_if_that_helps(serve: Serve) -> None:
    async with serve() as served:
        # Without tokens there is nothing to log in with.
        page = (await Person(served).get("/tasks/unknown")).body.decode()
        assert "There is no task" in page
        assert "/login" not in page
        reader = await _logged_in(served, await _token(served, "read", "rita"))
        missing = await reader.get("/tasks/unknown")
        assert missing.status == 404
        assert "/login" not in missing.body.decode()
        assert "Log out" not in missing.body.decode()

        port = served.client.port
        headers = {**_cookie(reader), "Accept": "text/html"}
        for referer, back in (
            (f"http://127.0.0.1:{port}/tasks?q=a%22b", "/tasks?q=a%22b"),
            (f"http://127.0.0.1:{port}/sources/new", None),
            (f"http://127.0.0.1:{port}//evil.example", None),
            ("http://evil.example/tasks", None),
            ("http://[", None),
        ):
            reply = await _raw(served, "GET", "/sources/new", headers={**headers, "Referer": referer})
            page = reply.body.decode()
            assert reply.status == 403
            assert "the scope operate or higher" in page
            assert "rita</bdi> with the scope read" in page
            assert "/login" not in page
            assert ("Back to the page before" in page) == (back is not None), referer
            assert back is None or f'href="{back}"' in page
        reply = await _raw(served, "GET", "/nowhere", headers=headers)
        assert (reply.status, "/login" in reply.body.decode()) == (404, False)

        stranger = await _raw(served, "GET", "/nowhere", headers={"Accept": "text/html"})
        assert (stranger.status, 'href="/login"' in stranger.body.decode()) == (404, True)
        await reader.page("/")
        left = await reader.follow(await reader.submit("/logout"))
        assert b"Log in to Lineshaft" in left.body
