"""A store on S3 or a compatible service, through obstore (the extra `s3`).

Every request is bounded in time, so a service that hangs is an error and not a wait: objects are read in
ranges and written in parts. Keys and addresses come from the usual AWS_* variables.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from lineshaft.artifacts.store import CONTENTS, ID_KEY, TEMPORARY, StoreUnavailableError
from lineshaft.errors import SettingsError

if TYPE_CHECKING:
    from obstore.store import S3Store as Client

#: A part of an object that is written; S3 wants at least 5 MiB, and allows 10,000 parts.
_PART_BYTES = 5 << 20
#: A part that is read; the next one is fetched ahead.
_READ_BYTES = 2 << 20
#: Parts of an upload that are sent at the same time, and such uploads: each part takes memory.
_PARTS_AT_ONCE, _UPLOADS_AT_ONCE = 2, 8
_REQUEST_SEC, _COPY_SEC = 30.0, 600.0
_LISTED_AT_ONCE = 1_000
_DEFAULT_REGION = "us-east-1"


class S3Store:
    has_links = True

    def __init__(
        self,
        bucket: str,
        prefix: str,
        environ: Mapping[str, str] = os.environ,
        *,
        request_sec: float = _REQUEST_SEC,
        retries: int = 2,
    ) -> None:
        self._turns = asyncio.Semaphore(_UPLOADS_AT_ONCE)
        self._place = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client = _client(bucket, prefix, environ, request_sec=request_sec, retries=retries)
        # Copying within the service takes as long as it takes, and can't be done in parts.
        copy_sec = max(_COPY_SEC, request_sec) if request_sec == _REQUEST_SEC else request_sec
        self._copier = _client(bucket, prefix, environ, request_sec=copy_sec, retries=retries)

    def describe(self) -> str:
        return self._place

    async def read_id(self) -> str | None:
        import obstore  # noqa: PLC0415 - an extra

        with self._reporting():
            try:
                found = await obstore.get_async(self._client, ID_KEY)
            except FileNotFoundError:
                return None
            return bytes(await found.bytes_async()).decode("ascii", "replace").strip()

    async def create_id(self, store_id: str) -> str:
        await self.create(ID_KEY, f"{store_id}\n".encode())
        return await self.read_id() or store_id

    async def is_empty(self) -> bool:
        return not await self._list(CONTENTS, 1)

    async def write(self, key: str, chunks: AsyncIterable[bytes]) -> None:
        import obstore  # noqa: PLC0415

        failures: list[BaseException] = []

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for chunk in chunks:
                    yield chunk
            except GeneratorExit:
                # The service has failed, and reads no more.
                raise
            except BaseException as error:
                failures.append(error)
                raise

        async with self._turns:
            with self._reporting():
                try:
                    await obstore.put_async(
                        self._client,
                        key,
                        parts(),
                        use_multipart=True,
                        chunk_size=_PART_BYTES,
                        max_concurrency=_PARTS_AT_ONCE,
                    )
                except Exception:
                    if failures:
                        # The sender's error, not one of the service.
                        raise failures[0] from None
                    raise

    async def create(self, key: str, data: bytes) -> None:
        import obstore  # noqa: PLC0415

        with self._reporting(), contextlib.suppress(obstore.exceptions.AlreadyExistsError):
            await obstore.put_async(self._client, key, data, mode="create", use_multipart=False)

    async def promote(self, key: str, to: str) -> None:
        import obstore  # noqa: PLC0415

        with self._reporting(), contextlib.suppress(obstore.exceptions.AlreadyExistsError):
            await obstore.copy_async(self._copier, key, to, overwrite=False)

    async def size(self, key: str) -> int | None:
        import obstore  # noqa: PLC0415

        with self._reporting():
            try:
                return (await obstore.head_async(self._client, key))["size"]
            except FileNotFoundError:
                return None

    async def read(self, key: str, start: int, stop: int) -> AsyncIterator[bytes]:
        # The next part is fetched while the caller handles this one.
        ahead: asyncio.Task[bytes] | None = None
        try:
            while start < stop:
                part = await (ahead or self._part(key, start, stop))
                start += len(part)
                ahead = asyncio.create_task(self._part(key, start, stop)) if start < stop else None
                yield part
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _part(self, key: str, start: int, stop: int) -> bytes:
        import obstore  # noqa: PLC0415

        with self._reporting():
            found = await obstore.get_range_async(
                self._client, key, start=start, end=min(start + _READ_BYTES, stop)
            )
        if not found:
            raise StoreUnavailableError(f"The artifact store, {self._place}, ended an object too early.")
        return bytes(found)

    async def delete(self, keys: Sequence[str]) -> None:
        import obstore  # noqa: PLC0415

        # Several in one request, which not every compatible service knows: one alone has its own.
        with self._reporting(), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._client, list(keys) if len(keys) > 1 else keys[0])

    async def old_temporary(self, age: timedelta) -> list[str]:
        before = datetime.now(UTC) - age
        found = await self._list(TEMPORARY, _LISTED_AT_ONCE)
        return [key for key, modified in found if modified < before]

    async def _list(self, prefix: str, most: int) -> list[tuple[str, datetime]]:
        import obstore  # noqa: PLC0415

        found: list[tuple[str, datetime]] = []
        with self._reporting():
            async for batch in obstore.list(self._client, prefix=prefix, chunk_size=min(most, 1_000)):
                found += [(each["path"], each["last_modified"]) for each in batch]
                if len(found) >= most:
                    break
        return found[:most]

    async def link(self, key: str, lifetime: timedelta) -> str:
        import obstore  # noqa: PLC0415

        with self._reporting():
            return await obstore.sign_async(self._client, "GET", key, lifetime)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        import obstore  # noqa: PLC0415

        try:
            yield
        except obstore.exceptions.AlreadyExistsError:
            raise
        except (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError) as error:
            raise StoreUnavailableError(
                f"The artifact store, {self._place}, refused the request{_code(error)}. Check the keys "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and what they may do in this bucket."
            ) from None
        except obstore.exceptions.BaseError as error:
            raise StoreUnavailableError(
                f"The artifact store, {self._place}, doesn't answer as expected{_code(error)}. Check that "
                "the service runs, the bucket exists and AWS_ENDPOINT_URL names the service."
            ) from None


def _client(
    bucket: str, prefix: str, environ: Mapping[str, str], *, request_sec: float, retries: int
) -> "Client":
    try:
        from obstore.store import S3Store as Client  # noqa: PLC0415 - an extra
    except ImportError:
        raise SettingsError(
            f"LINESHAFT_ARTIFACTS=s3://{bucket}/… needs the package obstore: pip install 'lineshaft[s3]'."
        ) from None
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), None)
    given: dict[str, Any] = {
        "region": environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    }
    if endpoint:
        given["endpoint"] = endpoint
    for name, variable in _KEYS.items():
        if environ.get(variable):
            given[name] = environ[variable]
    return Client(
        bucket,
        prefix=prefix or None,
        copy_if_not_exists="multipart",
        client_options={
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            "timeout": timedelta(seconds=request_sec),
            "connect_timeout": timedelta(seconds=min(5.0, request_sec)),
        },
        retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=request_sec)},
        **given,
    )


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_KEYS = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


def _code(error: Exception) -> str:
    """The service's own code, if it gave one. The rest of the text may contain addresses and signatures."""
    text = str(error)
    start, end = text.find("<Code>"), text.find("</Code>")
    if 0 <= start < end:
        return f" ({text[start + 6 : end][:100]})"
    return " (timed out)" if "timed out" in text or "TimedOut" in text else ""
