"""The dashboard of a server: who visits, what they may see and do, and how pages are answered."""

import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import structlog
from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from lineshaft.dashboard import visit as visits
from lineshaft.dashboard.cookies import HEADERS, Cookies
from lineshaft.dashboard.live import Live, PageKey, RenderedPage
from lineshaft.dashboard.navigation import banners, links
from lineshaft.dashboard.pages import AREAS
from lineshaft.dashboard.rendering import STATIC, Renderer, title_of
from lineshaft.dashboard.shared_reads import SharedReads
from lineshaft.dashboard.visit import ActionFunction, Done, PageFunction, Values, View, Visit
from lineshaft.engine.caller import Caller, calling, set_caller
from lineshaft.engine.sessions import Session
from lineshaft.errors import (
    InvalidInputError,
    LineshaftError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from lineshaft.server.framework import problems
from lineshaft.server.framework.routing import INTERNAL_ERROR, body_chunks
from lineshaft.server.service import Service
from lineshaft.types import Scope

_log = structlog.get_logger("lineshaft.http")
_SEE_OTHER = 303
_MAX_FIELDS = 2_000
#: Static files are named by their version in the address, so browsers may keep them.
_KEEP_STATIC = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}


#: Who looks at a page, until it is known.
_READER = Caller(only_reads=True)
_PAGES = [page for area in AREAS for page in area.pages]
_ACTIONS = [action for area in AREAS for action in area.actions]


class Dashboard:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._renderer = Renderer()
        self._live = Live(service.events, self._render_again, service.stopping)
        self._shared = SharedReads(service.engine)
        #: Stands for the CSRF token in what tabs share. It is random, so that no content can contain it.
        self._csrf_marker = secrets.token_hex(16)
        self._pages = [
            (page, _route("GET", page.path, self._endpoint(self._show_page, page))) for page in _PAGES
        ]

    async def close(self) -> None:
        await self._live.close()

    def routes(self) -> list[Route]:
        return [
            *(route for _, route in self._pages),
            *(_route("POST", action.path, self._endpoint(self._act, action)) for action in _ACTIONS),
            Route("/login", self._endpoint(self._login), methods=["GET", "POST"]),
            Route("/logout", self._endpoint(self._log_out), methods=["POST"]),
            Route("/live", self._endpoint(self._open_stream), methods=["GET"]),
            Route("/static/{version}/{name}", self._endpoint(_static), methods=["GET"]),
        ]

    def _endpoint(self, answer: Callable[..., Awaitable[Response]], *arguments: object) -> "_Endpoint":
        return _Endpoint(self, answer, arguments)

    # Who visits.

    async def _caller(self, request: Request, cookies: Cookies) -> tuple[Caller, str | None]:
        """The caller, and the name of who acts; None: not known yet. Raises UnauthorizedError."""
        # Nothing is changed yet.
        with calling(fails_soon=True):
            return await self._find_caller(request, cookies)

    async def _find_caller(self, request: Request, cookies: Cookies) -> tuple[Caller, str | None]:
        session = await self._session(request, cookies)
        if session is not None and session.scope is not None:
            caller = Caller(
                session.token_id,
                session.name,
                session.scope,
                session.agent_id,
                session.budget_usd,
                needs_token=self._service.needs_tokens,
            )
            return caller, session.name
        caller = await self._service.authenticate(Scope.READ, request.scope)
        if caller.token_id is not None:
            return caller, caller.name
        return caller, None if session is None else session.name

    async def _session(self, request: Request, cookies: Cookies) -> Session | None:
        if cookies.is_new:
            return None
        session = await self._service.engine.sessions.find(cookies.secret)
        if session is None or session.account is None:
            return session
        # Another port's server, which gets the cookie too, runs under another account.
        return session if session.account == await self._account(request, cookies) else None

    async def _account(self, request: Request, cookies: Cookies) -> int | None:
        """The user id that a session belongs to; None: over HTTPS, or from another machine."""
        return None if cookies.is_secure else await self._service.account(request.scope)

    async def _login(self, request: Request, cookies: Cookies) -> Response:
        """Exchange a token for a session."""
        target = _local(request.query_params.get("next", "/"))
        if request.method == "GET":
            try:
                await self._caller(request, cookies)
            except UnauthorizedError:
                return self._login_page(cookies, target)
            return _redirect(target)
        form = await self._form(request)
        cookies.check_csrf(form.get("csrf"))
        token = await self._service.tokens.find(form.get("token"))
        if token is None:
            fault = "This is not a valid token: it is unknown, or it was revoked."
            return self._login_page(cookies, target, fault)
        self._service.notice_token()
        account = await self._account(request, cookies)
        cookies.renew(await self._service.engine.sessions.begin(token=token, account=account))
        response = _redirect(target)
        cookies.keep(response)
        return response

    def _login_page(self, cookies: Cookies, target: str, fault: str | None = None) -> Response:
        context = {"csrf": cookies.csrf, "next": target, "fault": fault}
        status = 200 if fault is None else 401
        response = HTMLResponse(self._renderer.page("login.html", context), status, headers=HEADERS)
        cookies.keep(response)
        return response

    async def _log_out(self, request: Request, cookies: Cookies) -> Response:
        form = await self._form(request)
        cookies.check_csrf(form.get("csrf"))
        await self._service.engine.sessions.end(cookies.secret)
        response = _redirect("/login")
        cookies.forget(response)
        return response

    # Pages and actions.

    async def _visit(self, request: Request, cookies: Cookies, scope: Scope, **more: Any) -> Visit:
        caller, name = await self._caller(request, cookies)
        caller.check(scope)
        query = _query(request.url.query)
        about = {"shared": self._shared, "name": name, **more}
        return Visit(self._service, caller, _url(request), request.path_params, query, **about)

    async def _show_page(
        self, request: Request, cookies: Cookies, page: visits.Route[PageFunction]
    ) -> Response:
        set_caller(_READER)
        try:
            visit = await self._visit(request, cookies, page.scope)
        except UnauthorizedError:
            return _redirect(f"/login?next={quote(_url(request), safe='')}")
        return await self._show(await page.function(visit), visit, cookies)

    async def _act(
        self, request: Request, cookies: Cookies, action: visits.Route[ActionFunction]
    ) -> Response:
        form = await self._form(request)
        cookies.check_csrf(form.get("csrf"))
        visit = await self._visit(request, cookies, action.scope, form=form)
        if visit.name is None and action.changes(form):
            # No token is needed, but what is done is recorded with a name: ask for it once.
            if not form.get("your_name"):
                fields = [(name, value) for name, value in form.pairs() if name != "csrf"]
                return await self._show(View("name.html", "Who are you?", {"fields": fields}), visit, cookies)
            visit = replace(visit, name=form.get("your_name"))
            account = await self._account(request, cookies)
            cookies.renew(await self._service.engine.sessions.begin(name=visit.name, account=account))
        set_caller(replace(visit.caller, actor=visit.actor))
        result = await action.function(visit)
        self._shared.forget()
        if isinstance(result, Done):
            response = _redirect(_local(result.to))
            cookies.leave_message(response, result.message)
            cookies.keep(response)
            return response
        return await self._show(result, visit, cookies)

    async def _show(self, view: View | Response, visit: Visit, cookies: Cookies) -> Response:
        if isinstance(view, Response):
            return view
        context = await self._context(view, visit, cookies.csrf)
        context |= {"message": cookies.message, "name": visit.name, "caller": visit.caller}
        response = HTMLResponse(self._renderer.page(view.template, context), view.status, headers=HEADERS)
        cookies.clear_message(response)
        # Without a session it is only the root of the CSRF token, and gives no rights.
        cookies.keep(response)
        return response

    async def _context(self, view: View, visit: Visit, csrf: str) -> dict[str, Any]:
        attention = await self._shared.attention.get()
        return {
            "error": None,
            **view.context,
            "title": title_of(view.title),
            "is_live": bool(view.topics) or view.refresh_sec is not None,
            "csrf": csrf,
            "may": visit.may,
            "url": visit.url,
            "here": visit.url.partition("?")[0],
            "query": visit.query,
            "attention": attention,
            "links": links(attention, may_submit=visit.may(Scope.SUBMIT)),
            "banners": banners(attention),
        }

    async def _form(self, request: Request) -> Values:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/x-www-form-urlencoded":
            raise InvalidInputError("A form must be sent as application/x-www-form-urlencoded.")
        body = b"".join([chunk async for chunk in body_chunks(request.receive)])
        try:
            pairs = parse_qsl(
                body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS
            )
        except ValueError as error:
            raise InvalidInputError(f"The form can't be read: {error}. Nothing was changed.") from None
        # Browsers send line ends of text fields as CR LF.
        return Values((name, value.replace("\r\n", "\n")) for name, value in pairs)

    # Live.

    async def _open_stream(self, request: Request, cookies: Cookies) -> Response:
        # Also the tasks that it starts, which follow the feed and render the page.
        set_caller(_READER)
        caller, _ = await self._caller(request, cookies)
        key = PageKey(_local(request.query_params.get("page", "/")), caller.scope)
        page, _ = self._find(key.url)
        caller.check(page.scope)

        async def allow() -> None:
            await self._caller(request, cookies)

        # Counted before the response begins, so that one stream too many is refused.
        watching = contextlib.ExitStack()
        watching.enter_context(self._service.tail.counted(caller.token_id, (request.client or ("",))[0]))
        marker, csrf = self._csrf_marker.encode(), cookies.csrf.encode()

        async def messages() -> Any:
            with watching:
                async for message in self._live.messages(key, allow):
                    yield message.replace(marker, csrf)

        return StreamingResponse(
            messages(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _render_again(self, key: PageKey) -> RenderedPage:
        """A page as it is now, for all who have it open with this scope."""
        page, path = self._find(key.url)
        caller = Caller(scope=key.scope, only_reads=True)
        set_caller(caller)
        query = _query(urlsplit(key.url).query)
        visit = Visit(self._service, caller, key.url, path, query, shared=self._shared, is_open=True)
        view = await page.function(visit)
        if not isinstance(view, View):
            raise NotFoundError(f"{key.url} is not a page.")
        context = await self._context(view, visit, self._csrf_marker)
        context |= {"message": "", "name": None, "caller": caller}
        return RenderedPage(
            self._renderer.parts(view.template, context),
            view.topics,
            view.at_most_every_sec,
            view.refresh_sec,
        )

    def _find(self, url: str) -> tuple[visits.Route[PageFunction], dict[str, str]]:
        path = unquote(urlsplit(url).path)
        for page, route in self._pages:
            match, child = route.matches({"type": "http", "method": "GET", "path": path, "root_path": ""})
            if match is Match.FULL:
                return page, child["path_params"]
        raise NotFoundError(f"There is no page {url}.")

    # Errors.

    async def error(self, error: LineshaftError, request: Request) -> Response:
        found = problems.problem(error, request.scope.get("state", {}).get("request_id"))
        cookies = Cookies(request)
        visitor, may_log_in = None, False
        # Without the database, who visits can't be known.
        if not isinstance(error, UnavailableError):
            try:
                visitor, _ = await self._caller(request, cookies)
            except LineshaftError as refusal:
                may_log_in = isinstance(refusal, UnauthorizedError)
        context = {
            "problem": found,
            "fault": error,
            # Loading an action again would not repeat it.
            "loads_again": request.method == "GET" and isinstance(error, UnavailableError),
            "visitor": visitor,
            "may_log_in": may_log_in,
            "csrf": cookies.csrf,
            "back": _page_before(request),
        }
        page = self._renderer.page("error.html", context)
        return HTMLResponse(page, found.status, headers=HEADERS | dict(_text(problems.headers_of(error))))


class _Endpoint:
    """An ASGI application that answers with a page, whatever happens."""

    def __init__(
        self,
        dashboard: Dashboard,
        answer: Callable[..., Awaitable[Response]],
        arguments: tuple[object, ...],
    ) -> None:
        self._dashboard = dashboard
        self._answer = answer
        self._arguments = arguments

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request, Cookies(request), *self._arguments)
        except ClientDisconnect:
            return
        except LineshaftError as error:
            response = await self._dashboard.error(error, request)
        except Exception:  # noqa: BLE001 - logged with its traceback; the visitor gets the request id
            _log.exception("Unexpected error in a page", path=scope["path"])
            response = await self._dashboard.error(LineshaftError(INTERNAL_ERROR), request)
        await response(scope, receive, send)


def _route(method: str, path: str, endpoint: _Endpoint) -> Route:
    route = Route(path, endpoint, methods=[method])
    # Keys and names may contain line ends.
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route


async def _static(request: Request, _cookies: Cookies) -> Response:
    path = STATIC.get(request.path_params["name"])
    if path is None:
        raise NotFoundError(f"There is no file {request.path_params['name']!r}.")
    return FileResponse(path, headers=_KEEP_STATIC)


def _query(text: str) -> Values:
    try:
        return Values(parse_qsl(text, errors="replace", max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise InvalidInputError(f"The address has too many fields (at most {_MAX_FIELDS:,}).") from None


def _url(request: Request) -> str:
    # Names in paths may contain anything, and the server has decoded them.
    path = quote(request.scope["path"], safe="/:@!$&'()*+,;=~")
    return path + (f"?{request.url.query}" if request.url.query else "")


def _local(target: str) -> str:
    """A path of this server; anything else becomes the first page."""
    if re.match(r"/(?![/\\])", target) is None or not target.isprintable():
        return "/"
    return target


def _page_before(request: Request) -> str | None:
    """The page of this server that led here, unless it is this one or the first."""
    try:
        before = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return None
    path = _local(before.path + (f"?{before.query}" if before.query else ""))
    is_own = before.netloc == request.headers.get("host")
    return path if is_own and path not in {"/", _url(request)} else None


def _redirect(to: str) -> Response:
    return RedirectResponse(to, _SEE_OTHER, headers={"Cache-Control": "no-store"})


def _text(headers: problems.Headers) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in headers]


def wants_page(scope: AsgiScope) -> bool:
    """Whether a request for an unknown address comes from a person's browser."""
    if scope["type"] != "http" or scope["path"].startswith(("/v1/", "/api/", "/hooks/")):
        return False
    return "text/html" in Headers(scope=scope).get("accept", "")
