"""Cookies of the dashboard, the CSRF tokens derived from them, and the headers of every page."""

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import Response

from lineshaft.engine.sessions import LONGEST
from lineshaft.errors import ForbiddenError

#: Nothing from elsewhere, no inline script or style, no frame around the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MESSAGE_SEC = 60
_MAX_MESSAGE = 1_000


class Cookies:
    """The cookies of one request.

    Browsers send cookies to every port of a host, so the port is part of their names: two installations on
    one machine don't log each other out. Over HTTPS their names have the prefix with which browsers accept
    them only over HTTPS, from this host. Over HTTP another port's server can read them: a session that began
    on this machine is bound to the account of the browser (`Sessions`).
    """

    def __init__(self, request: Request) -> None:
        port = request.url.port
        suffix = "" if port is None else f"_{port}"
        self.is_secure = (
            request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower() == "https"
        )
        prefix = "__Host-" if self.is_secure else ""
        self._session_name = f"{prefix}lineshaft_session{suffix}"
        self._message_name = f"{prefix}lineshaft_message{suffix}"
        given = request.cookies.get(self._session_name, "")
        #: The browser doesn't have the secret yet.
        self.is_new = not given
        #: The session's; for a visitor without a session, only the root of the CSRF token.
        self.secret = given or secrets.token_urlsafe(32)
        self.message = unquote(request.cookies.get(self._message_name, ""))[:_MAX_MESSAGE]

    @property
    def csrf(self) -> str:
        """What every form carries. Another site can't know it, because it can't read the cookie."""
        digest = hashlib.sha256(b"lineshaft csrf\0" + self.secret.encode(errors="surrogatepass")).digest()
        return urlsafe_b64encode(digest).decode().rstrip("=")

    def check_csrf(self, given: str) -> None:
        if not hmac.compare_digest(self.csrf.encode(), given.encode(errors="surrogatepass")):
            raise ForbiddenError(
                "The form doesn't belong to this session: it may have been open since before you logged in. "
                "Nothing was changed. Go back, reload the page and try again."
            )

    def renew(self, secret: str) -> None:
        """From now on this secret counts, also for the forms of the page that answers the request."""
        self.secret, self.is_new = secret, True

    def keep(self, response: Response) -> None:
        """Give a new secret to the browser."""
        if self.is_new:
            self._set(response, self._session_name, self.secret, int(LONGEST.total_seconds()))

    def forget(self, response: Response) -> None:
        self._set(response, self._session_name, "", 0)

    def leave_message(self, response: Response, message: str) -> None:
        self._set(response, self._message_name, quote(message[:_MAX_MESSAGE]), _MESSAGE_SEC)

    def clear_message(self, response: Response) -> None:
        if self.message:
            self._set(response, self._message_name, "", 0)

    def _set(self, response: Response, name: str, value: str, seconds: int) -> None:
        response.set_cookie(
            name, value, max_age=seconds, httponly=True, samesite="lax", secure=self.is_secure, path="/"
        )
